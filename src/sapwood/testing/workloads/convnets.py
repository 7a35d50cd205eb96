"""Image classifiers with the true layer shapes of the papers: many gradients of mixed sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sapwood.errors import ConfigError
from sapwood.testing.workloads.base import Classes, Workload

__all__ = ["densenet121", "resnet50", "resnet152"]

_EXPANSION = 4
_GROWTH = 32


def resnet50(
    *,
    width: float = 1.0,
    image: int = 224,
    classes: int = 1000,
    batch_size: int = 4,
    seed: int = 0,
) -> Workload:
    """ResNet-50: 25,557,032 parameters at ``width`` 1 and 1000 classes.

    Args:
        width: Scales the channels of every layer.
        image: Height and width of the input, at least 32.
        classes: How many classes.
        batch_size: Images per rank and step.
        seed: Fixes weights and data.
    """
    depths = (3, 4, 6, 3)
    return _images(
        "resnet50", lambda: _ResNet(depths, width, classes), image, classes, batch_size, seed
    )


def resnet152(
    *,
    width: float = 1.0,
    image: int = 224,
    classes: int = 1000,
    batch_size: int = 4,
    seed: int = 0,
) -> Workload:
    """ResNet-152: 60,192,808 parameters at ``width`` 1; options as for ``resnet50``."""
    depths = (3, 8, 36, 3)
    return _images(
        "resnet152", lambda: _ResNet(depths, width, classes), image, classes, batch_size, seed
    )


def densenet121(
    *,
    width: float = 1.0,
    image: int = 224,
    classes: int = 1000,
    batch_size: int = 4,
    seed: int = 0,
) -> Workload:
    """DenseNet-121: 7,978,856 parameters at ``width`` 1; options as for ``resnet50``."""
    depths = (6, 12, 24, 16)
    return _images(
        "densenet121", lambda: _DenseNet(depths, width, classes), image, classes, batch_size, seed
    )


def _images(
    name: str,
    build: Callable[[], nn.Module],
    image: int,
    classes: int,
    batch_size: int,
    seed: int,
) -> Workload:
    if image < 32:
        raise ConfigError(f"{name}: image={image}, but five halvings need at least 32")
    data = Classes(classes=classes, shape=(3, image, image), coarse=(3, 4, 4))
    return Workload(name=name, build=build, data=data, batch_size=batch_size, seed=seed)


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _conv(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)


def _stem(channels: int) -> list[nn.Module]:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return [_conv(3, channels, 7, stride=2), nn.BatchNorm2d(channels), nn.ReLU(), pool]


def _head(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, middle: int, stride: int) -> None:
        super().__init__()
        outside = middle * _EXPANSION
        self.reduce, self.norm1 = _conv(inside, middle, 1), nn.BatchNorm2d(middle)
        self.spatial, self.norm2 = _conv(middle, middle, 3, stride), nn.BatchNorm2d(middle)
        self.expand, self.norm3 = _conv(middle, outside, 1), nn.BatchNorm2d(outside)
        # A block that starts as the identity lets 152 layers learn within a few dozen steps.
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                _conv(inside, outside, 1, stride), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.reduce(x)).relu()
        y = self.norm2(self.spatial(y)).relu()
        result: Tensor = (self.norm3(self.expand(y)) + self.shortcut(x)).relu()
        return result


class _ResNet(nn.Sequential):
    def __init__(self, depths: Sequence[int], width: float, classes: int) -> None:
        channels = _scaled(64, width)
        parts = _stem(channels)
        for stage, depth in enumerate(depths):
            middle = _scaled(64 << stage, width)
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                parts.append(_Bottleneck(channels, middle, stride))
                channels = middle * _EXPANSION
        super().__init__(*parts, *_head(channels, classes))


class _DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        middle = growth * 4
        self.norm1, self.reduce = nn.BatchNorm2d(inside), _conv(inside, middle, 1)
        self.norm2, self.spatial = nn.BatchNorm2d(middle), _conv(middle, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(self.norm1(x).relu())
        return torch.cat([x, self.spatial(self.norm2(y).relu())], 1)


def _transition(inside: int, outside: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(inside), nn.ReLU(), _conv(inside, outside, 1), nn.AvgPool2d(2)]


class _DenseNet(nn.Sequential):
    def __init__(self, depths: Sequence[int], width: float, classes: int) -> None:
        growth = _scaled(_GROWTH, width)
        channels = 2 * growth
        parts = _stem(channels)
        for block, depth in enumerate(depths):
            if block > 0:
                parts += _transition(channels, channels // 2)
                channels //= 2
            parts += [_DenseLayer(channels + layer * growth, growth) for layer in range(depth)]
            channels += depth * growth
        parts += [nn.BatchNorm2d(channels), nn.ReLU()]
        super().__init__(*parts, *_head(channels, classes))
