"""What the paper reports: its numbers, and the settings it names. Nothing here was measured by us."""

from __future__ import annotations

ACCURACY = {
    "svhn": {
        "vgg16": ("94.98 ± 0.09", "95.80 ± 0.11", "95.87 ± 0.13", "95.75 ± 0.21", "95.93 ± 0.16"),
        "resnet20": ("95.78 ± 0.15", "95.93 ± 0.12", "95.16 ± 0.07", "96.20 ± 0.39", "96.45 ± 0.14"),
    },
    "cifar10": {
        "vgg16": ("91.19 ± 0.15", "92.21 ± 0.14", "92.67 ± 0.22", "92.83 ± 0.13", "93.35 ± 0.17"),
        "resnet20": ("92.79 ± 0.14", "93.22 ± 0.18", "92.66 ± 0.17", "94.38 ± 0.04", "94.56 ± 0.12"),
    },
    "cifar100": {
        "vgg16": ("67.29 ± 0.28", "69.47 ± 0.25", "70.41 ± 0.26", "70.82 ± 0.12", "71.37 ± 0.18"),
        "resnet20": ("72.94 ± 0.11", "73.70 ± 0.18", "73.98 ± 0.21", "76.73 ± 0.18", "77.04 ± 0.15"),
    },
}
"""Table "tabacc": final test accuracy in percent, by data and model, of the optimizers below."""

OPTIMIZERS = ("sgdm", "adam", "ekfac", "tkfac", "tekfac")

VARTHETA = {
    1e-4: "76.81 ± 0.28",
    1e-3: "76.65 ± 0.12",
    1e-2: "77.04 ± 0.15",
    1e-1: "76.71 ± 0.17",
    1.0: "76.03 ± 0.26",
    10.0: "74.74 ± 0.11",
    100.0: "73.68 ± 0.09",
}
"""Table "parameter": accuracy on CIFAR-100 with ResNet20 and a learning rate of 0.001, by vartheta."""

LEARNING_RATE = {1e-4: "76.38 ± 0.15", 1e-3: "77.04 ± 0.15", 1e-2: "76.08 ± 0.14", 1e-1: "72.47 ± 0.23"}
"""Table "rate": the same by learning rate, with vartheta = 0.01."""

EPOCHS = {"svhn": 40, "cifar10": 100, "cifar100": 100}
DECAY_EVERY = {"svhn": 20, "cifar10": 40, "cifar100": 40}
BATCH_SIZE = 128
SEEDS = 3

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
DAMPINGS = (1e-8, 1e-6, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TRACE_FLOORS = tuple(VARTHETA)


def accuracies() -> dict[tuple[str, str, str], str]:
    """The table of accuracies by (data, model, optimizer)."""
    return {
        (data, model, optimizer): value
        for data, by_model in ACCURACY.items()
        for model, values in by_model.items()
        for optimizer, value in zip(OPTIMIZERS, values, strict=True)
    }
