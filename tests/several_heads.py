"""A model with several predictions, their losses, and their Fisher by the oracle: what tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import normal

N = 7

Losses = dict[str, Callable[[Tensor], Tensor]]


class Heads(nn.Module):
    """A trunk (or one for each) and heads of three, two and four outputs, in a dict."""

    def __init__(self, names: tuple[str, ...], *, shared: bool) -> None:
        super().__init__()
        sizes = {"cls": 3, "yes": 2, "box": 4}
        self.shared = shared
        self.trunks = nn.ModuleDict({name: nn.Linear(5, 4) for name in (("all",) if shared else names)})
        self.heads = nn.ModuleDict({name: nn.Linear(4, sizes[name]) for name in names})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        common = torch.tanh(self.trunks["all"](x)) if self.shared else None
        return {
            name: head(torch.tanh(self.trunks[name](x)) if common is None else common)
            for name, head in self.heads.items()
        }


CLASSES, ANSWERS, BOXES = torch.arange(N) % 3, normal(N, 2, seed=3) > 0, normal(N, 4, seed=4)

LOSSES: Losses = {
    "cls": lambda z: F.cross_entropy(z, CLASSES),
    "yes": lambda z: F.binary_cross_entropy_with_logits(z, ANSWERS.double()),
    "box": lambda z: F.mse_loss(z, BOXES),
}

TERMS = {"cls": N, "yes": 2 * N, "box": 4 * N}
KINDS = {"cls": "categorical", "yes": "bernoulli", "box": "gaussian"}


def column(name: str, k: int) -> Callable[[Tensor], Tensor]:
    """What has the k-th column of a prediction's Fisher as its gradient."""
    if name == "cls":
        return lambda z: oracle.softmax_column(k)(z, z)
    if name == "yes":
        return lambda z: (z[0, k].detach().sigmoid() * (-z[0, k].detach()).sigmoid()).sqrt() * z[0, k]
    return lambda z: z[0, k] * 2**0.5


def exact_samples(model: nn.Module, inputs: Tensor, layer: str, weights: Mapping[str, float]) -> oracle.Samples:
    """Every column of every prediction that leads to a layer as a sample: their mean is F."""
    outputs = model(inputs[:1])
    parts = []
    leading = [name for name in outputs if name in layer or "all" in layer]
    count = sum(outputs[name].numel() for name in leading)
    for name in leading:
        for k in range(outputs[name].numel()):
            scale = (count * weights[name] * N / TERMS[name]) ** 0.5
            of_column = column(name, k)
            samples = oracle.per_sample(
                model, lambda out, _, n=name, c=of_column, s=scale: s * c(out[n]), inputs, inputs, layer
            )
            parts.append(samples)
    gradients, a, u = (torch.cat(own) for own in zip(*parts, strict=True))
    return oracle.Samples(gradients, a, u)


def empirical_samples(
    model: nn.Module, inputs: Tensor, layer: str, weights: Mapping[str, float]
) -> oracle.Samples:
    """The gradient of all losses of each sample; M is that of the loss with the most terms, of boxes."""

    def loss(out: dict[str, Tensor], index: Tensor) -> Tensor:
        n = int(index[0, 0])
        own = {
            "cls": F.cross_entropy(out["cls"], CLASSES[n : n + 1]),
            "yes": F.binary_cross_entropy_with_logits(out["yes"], ANSWERS[n : n + 1].double()),
            "box": F.mse_loss(out["box"], BOXES[n : n + 1]),
        }
        return torch.stack([weights[name] * own[name] for name in own]).sum()

    found = oracle.per_sample(model, loss, inputs, torch.arange(N)[:, None], layer)
    scale = (TERMS["box"] / N) ** 0.5
    return oracle.Samples(scale * found.gradients, found.a, scale * found.u)


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def exact_block(model: nn.Module, inputs: Mapping[str, Tensor], layer: str) -> Tensor:
    """The sum over predictions of the Fisher of each, over inputs of its own, as a matrix."""
    blocks = []
    for name in (name for name in inputs if name in layer or "all" in layer):
        own = inputs[name]
        for k in range(model(own[:1])[name].numel()):
            scale, of_column = (N / TERMS[name]) ** 0.5, column(name, k)
            samples = oracle.per_sample(
                model, lambda out, _, n=name, c=of_column, s=scale: s * c(out[n]), own, own, layer
            )
            blocks.append(oracle.exact_fisher(samples.gradients[:, 0]))
    return torch.stack(blocks).sum(0)
