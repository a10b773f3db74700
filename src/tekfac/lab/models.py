"""The networks of the lab by name: the paper's two, He's residual networks, a small CNN, an MLP; or the user's.

The paper's networks are read as in docs/mathematics.md, section 8: biases in every layer, batch norm without
parameters of its own (so that every parameter belongs to a layer that is preconditioned), Glorot's uniform
initialisation, and TensorFlow's way of padding before a stride.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.common.checks import nearest, require_keywords
from tekfac.common.user_code import find_function

GIVEN = ("channels", "classes", "size")
"""What a network is told about the data, if it asks: channels and edge of the images, number of classes."""

Maker = Callable[..., nn.Module]


def build(name: str, *, options: Mapping[str, Any] | None = None, **given: int | None) -> nn.Module:
    """A network by its name, or by `package.module:function` or `file.py:function` of the user's.

    A function of the user's gets those of GIVEN that are given (not as None) and that its signature names, and
    the options as keywords.

    Raises:
        ValueError: for an unknown name, or a network that needs one of GIVEN that is not given.
        TypeError: for an option that the network does not have.
    """
    maker = find_function(name, "model") if ":" in name else MODELS.get(name)
    if maker is None:
        raise ValueError(f"Unknown model: {name!r}.{nearest(name, MODELS)} Or give module:function.")
    parameters = inspect.signature(maker).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    options = options or {}
    if not takes_any:
        require_keywords(f"Model {name}", options, [n for n in parameters if n not in GIVEN])
    asked = [n for n in GIVEN if n in parameters]
    known = {n: value for n in asked if (value := given.get(n)) is not None}
    missing = [n for n in asked if n not in known and parameters[n].default is inspect.Parameter.empty]
    if missing:
        raise ValueError(
            f"Model {name} asks for {', '.join(missing)}. Add {' '.join(f'--{n} N' for n in missing)}."
        )
    if name in MODELS:
        for option, value in options.items():
            _require_like(option, value, parameters[option].default)
        return maker(**known, **options)
    try:
        model = maker(**known, **options)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"Model {name} failed with {type(error).__name__}: {error}. It is called with those of "
            f"{', '.join(GIVEN)} that its signature names, and --model-option KEY=VALUE as keywords."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"Model {name} returned a {type(model).__name__}. Expected an nn.Module.")
    return model


def require_fit(model: nn.Module, name: str, *, channels: int, classes: int, size: int) -> None:
    """Raise ValueError unless a network takes such images and has an output for every class."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"Model {name} has no parameters to train.")
    images = torch.zeros(2, channels, size, size)
    was_training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(images)
    except Exception as error:
        raise ValueError(
            f"Model {name} failed on images of shape {list(images.shape)} with {type(error).__name__}: {error}"
        ) from error
    model.train(was_training)
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != [2, classes]:
        raise ValueError(
            f"Model {name} returned {shape} for images of shape {list(images.shape)}. Expected {[2, classes]}: "
            "a number for each image and class."
        )


def _require_like(option: str, value: Any, default: Any) -> None:
    """Raise ValueError unless a network's option is a positive number, whole if its default is."""
    whole = isinstance(default, int)
    if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or not value > 0:
        kind = "a whole number, at least 1" if whole else "a positive number"
        raise ValueError(f"Invalid {option} of the model: {value!r}. Expected {kind}.")


def mlp(channels: int, classes: int, size: int, width: int = 128) -> nn.Module:
    """Two hidden layers, the second half as wide as the first."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * size * size, width),
        nn.ReLU(),
        nn.Linear(width, width // 2),
        nn.ReLU(),
        nn.Linear(width // 2, classes),
    )


def cnn(channels: int, classes: int, size: int, width: int = 16) -> nn.Module:
    """Three convolutions with batch norm, two fully connected layers."""
    pooled = 2 if size < 16 else 4
    return nn.Sequential(
        *_convolution(channels, width),
        *_convolution(width, 2 * width, stride=2),
        *_convolution(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(pooled),
        nn.Flatten(),
        nn.Linear(4 * width * pooled**2, 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, classes),
    )


def vgg16(channels: int, classes: int, size: int, width: int = 64, norm_momentum: float = 0.01) -> nn.Module:
    """VGG16 with batch norm and one fully connected layer; a width of 64 is the paper's.

    Images of 32 pixels are halved after each of the five stages; smaller ones are not after the first stages.
    """
    layers: list[nn.Module] = []
    before, halvings = channels, min(5, size.bit_length() - 1)
    stages = ((2, width), (2, 2 * width), (3, 4 * width), (3, 8 * width), (3, 8 * width))
    for index, (count, channels_out) in enumerate(stages):
        for _ in range(count):
            layers += _convolution(before, channels_out, _norm)
            before = channels_out
        if index >= 5 - halvings:
            layers.append(nn.MaxPool2d(2))
            size //= 2
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * size * size, classes))
    return _as_in_the_paper(model, norm_momentum)


def resnet20(
    channels: int, classes: int, width: int = 64, depth: int = 20, norm_momentum: float = 0.01
) -> nn.Module:
    """The residual network of the paper: 64-128-256 channels, projections where their number changes."""
    stem = _convolution(channels, width, _norm)
    return _as_in_the_paper(_residual(stem, ProjectedResidual, width, depth, classes), norm_momentum)


def resnet20_he(channels: int, classes: int, width: int = 16, depth: int = 20) -> nn.Module:
    """The residual network of He et al. (2016) for CIFAR: 16-32-64 channels, shortcuts without parameters."""
    return _residual(_convolution(channels, width, bias=False), Residual, width, depth, classes)


MODELS: dict[str, Maker] = {
    "cnn": cnn,
    "mlp": mlp,
    "vgg16": vgg16,
    "resnet20": resnet20,
    "resnet20-he": resnet20_he,
}


class Residual(nn.Module):
    """Two 3 x 3 convolutions around which the input is carried; where sizes halve, every second pixel of it."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.more_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels_in, H, W] -> [N, channels, H / stride, W / stride]."""
        carried = x[:, :, :: self.stride, :: self.stride]
        before = self.more_channels // 2
        carried = F.pad(carried, (0, 0, 0, 0, before, self.more_channels - before))
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + carried)


class ProjectedResidual(nn.Module):
    """Two 3 x 3 convolutions and, where sizes change, a 1 x 1 convolution with batch norm for the shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1 if stride == 1 else 0)
        self.norm1 = _norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = _norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != channels_in:
            projection = nn.Conv2d(channels_in, channels, 1, stride=stride)
            self.shortcut = nn.Sequential(projection, _norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels_in, H, W] -> [N, channels, ceil(H / stride), ceil(W / stride)]."""
        before = x if self.conv1.stride == (1, 1) else _pad_as_tensorflow(x)
        out = F.relu(self.norm1(self.conv1(before)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def _pad_as_tensorflow(x: Tensor) -> Tensor:
    """Zeros for a 3 x 3 window of stride 2: below and to the right where the edge is even, else all around."""
    rows, columns = ((0, 1) if edge % 2 == 0 else (1, 1) for edge in x.shape[-2:])
    return F.pad(x, (*columns, *rows))


def _convolution(
    channels_in: int, channels: int, norm: Maker = nn.BatchNorm2d, **options: Any
) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, **options)
    return [convolution, norm(channels), nn.ReLU(inplace=True)]


def _norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm as in the paper's code base, without scale and shift."""
    return nn.BatchNorm2d(channels, eps=1e-3, affine=False)


def _as_in_the_paper(model: nn.Module, norm_momentum: float) -> nn.Module:
    """Weights by Glorot's uniform rule, biases zero; batch norm with this weight of the latest batch."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = norm_momentum
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model


def _residual(stem: list[nn.Module], block: Maker, width: int, depth: int, classes: int) -> nn.Module:
    """Three stages of equally many blocks; the second and third begin with a stride and double the channels."""
    blocks, remainder = divmod(depth - 2, 6)
    if remainder or blocks < 1:
        raise ValueError(f"Invalid depth: {depth}. Expected 6n + 2: 8, 14, 20, 32, 44, 56, 110.")
    stages, before = list[nn.Module](), width
    for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for index in range(blocks):
            stages.append(block(before, channels, stride if index == 0 else 1))
            before = channels
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))
    return nn.Sequential(*stem, *stages, *head)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)
