"""Workloads whose bytes are in dense layers: few, huge gradients."""

from __future__ import annotations

import math

from torch import Tensor, nn

from sapwood.errors import ConfigError
from sapwood.testing.workloads.base import Classes, Workload

__all__ = ["mlp", "nt3"]

_FLOAT = 4
_POOL = 10
_KERNELS = (20, 10)
_HIDDEN = (200, 20)


def nt3(
    *, mb: float = 8.0, filters: int = 128, dropout: float = 0.0, batch_size: int = 4, seed: int = 0
) -> Workload:
    """The shape of CANDLE's NT3: two 1-D convolutions, then a dense layer with nearly all bytes.

    Args:
        mb: Megabytes (10^6 bytes) of parameters, reached by the length of the gene profile. The
            original has a profile of 60,483 values, which is about 620.
        filters: Of each convolution; 128 in the original. Fewer make it cheap to compute.
        dropout: 0.1 in the original; 0 here, so that runs can be compared bit for bit.
        batch_size: Samples per rank and step.
        seed: Fixes weights and data.
    """
    pooled = _pooled(mb, filters)
    length = pooled * _POOL + sum(_KERNELS) - len(_KERNELS)

    def build() -> nn.Module:
        return _Nt3(pooled, filters, dropout)

    data = Classes(classes=2, shape=(1, length), coarse=(1, 8))
    return Workload(name="nt3", build=build, data=data, batch_size=batch_size, seed=seed)


def _pooled(mb: float, filters: int) -> int:
    """The length after pooling that brings the model nearest to ``mb``."""
    first, second = _HIDDEN
    fixed = filters * (_KERNELS[0] + 1) + filters * (filters * _KERNELS[1] + 1)
    fixed += first + second * (first + 1) + 2 * (second + 1)
    pooled = round((mb * 1e6 / _FLOAT - fixed) / (filters * first))
    if pooled < 1:
        least = (fixed + filters * first) * _FLOAT / 1e6
        raise ConfigError(f"nt3: mb={mb} with filters={filters}; the least is {least:.2f}")
    return pooled


class _Nt3(nn.Sequential):
    def __init__(self, pooled: int, filters: int, dropout: float) -> None:
        first, second = _HIDDEN
        super().__init__(
            nn.Conv1d(1, filters, _KERNELS[0]),
            nn.ReLU(),
            nn.Conv1d(filters, filters, _KERNELS[1]),
            nn.ReLU(),
            nn.MaxPool1d(_POOL),
            nn.Flatten(),
            nn.Linear(filters * pooled, first),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(second, 2),
        )


def mlp(
    *, layers: int = 4, layer_bytes: int = 16_640, batch_size: int = 16, seed: int = 0
) -> Workload:
    """``layers`` square dense layers, each as near as can be to ``layer_bytes`` (weight and bias).

    16,640 bytes are a layer of 64 by 64. The first 10 outputs are the classes.
    """
    width = round((math.sqrt(1 + 4 * layer_bytes / _FLOAT) - 1) / 2)
    if width < 2 or layers < 1:
        raise ConfigError(f"mlp: layers={layers}, layer_bytes={layer_bytes}; least is 1 and 24")

    def build() -> nn.Module:
        return _Mlp(layers, width)

    data = Classes(classes=min(10, width), shape=(width,), coarse=(width,))
    return Workload(name="mlp", build=build, data=data, batch_size=batch_size, seed=seed)


class _Mlp(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            # So that the signal keeps its size through any number of layers.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x).relu()
        result: Tensor = last(x)
        return result
