"""The residual networks of He et al. (2016) for CIFAR: 6n + 2 layers, shortcuts without parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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


def resnet(depth: int = 20, classes: int = 10) -> nn.Module:
    """He's network of depth 20, 32, 44, 56 or 110."""
    blocks, remainder = divmod(depth - 2, 6)
    if remainder or blocks < 1:
        raise ValueError(f"Invalid depth: {depth}. Expected 6n + 2: 20, 32, 44, 56, 110.")
    stages: list[nn.Module] = []
    channels = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(blocks):
            stages.append(Residual(channels, width, stride if index == 0 else 1))
            channels = width
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
