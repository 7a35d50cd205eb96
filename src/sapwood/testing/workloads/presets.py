"""Layer by layer, what published networks look like: parameter shapes, work, and measured times.

The times are of one GPU, forward and backward, at the batch size of the publication. A network's
total is divided among its layers in proportion to their multiplications, because published tables
seldom go down to layers; a layer that is bound by memory is therefore too short here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sapwood.errors import ConfigError

__all__ = ["PRESETS", "LayerSpec", "Preset"]

Shape = tuple[int, ...]
_BYTES = 4
# Colours of an image, channels of a gene profile: the data's own, so they do not shrink.
_OF_THE_DATA = 3


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: its parameters by name, and its multiplications for one sample."""

    name: str
    shapes: dict[str, Shape]
    work: float

    def scaled(self, scale: float) -> LayerSpec:
        """The layer with about ``scale`` times the bytes and unchanged work."""
        width = math.sqrt(scale)
        shapes = {name: _shrunk(shape, width) for name, shape in self.shapes.items()}
        return LayerSpec(name=self.name, shapes=shapes, work=self.work)

    @property
    def elements(self) -> int:
        """Of all its parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A network; ``forward`` and ``backward`` are the seconds of a whole pass."""

    layers: Callable[[], Iterator[LayerSpec]]
    forward: float
    backward: float

    @property
    def nbytes(self) -> int:
        """Bytes of its float32 parameters, unscaled."""
        return _BYTES * sum(layer.elements for layer in self.layers())

    def scale_for(self, mb: float) -> float:
        """The scale that gives ``mb`` megabytes (10^6 bytes)."""
        if mb <= 0:
            raise ConfigError(f"emulated: mb={mb}, expected more than 0")
        return mb * 1e6 / self.nbytes


def _shrunk(shape: Shape, width: float) -> Shape:
    """Feature dimensions, the first two, times ``width``; kernels stay as they are."""
    return tuple(
        size if place > 1 or size <= _OF_THE_DATA else max(1, round(size * width))
        for place, size in enumerate(shape)
    )


def _conv(name: str, inside: int, outside: int, kernel: int, side: int, *, norm: bool) -> LayerSpec:
    """A convolution with ``side`` by ``side`` outputs; a norm that follows it runs with it."""
    weight = (outside, inside, kernel, kernel)
    also = {"norm_weight": (outside,), "norm_bias": (outside,)} if norm else {"bias": (outside,)}
    return LayerSpec(name=name, shapes={"weight": weight, **also}, work=math.prod(weight) * side**2)


def _dense(name: str, inside: int, outside: int, tokens: int = 1, norm: bool = False) -> LayerSpec:
    shapes: dict[str, Shape] = {"weight": (outside, inside), "bias": (outside,)}
    if norm:
        shapes |= {"norm_weight": (outside,), "norm_bias": (outside,)}
    return LayerSpec(name=name, shapes=shapes, work=inside * outside * tokens)


def _resnet(depths: tuple[int, ...]) -> Iterator[LayerSpec]:
    yield _conv("stem", 3, 64, 7, 112, norm=True)
    channels, side = 64, 56
    for stage, depth in enumerate(depths):
        middle = 64 << stage
        for block in range(depth):
            name = f"stage{stage}_block{block}"
            before, side = side, 56 >> stage
            yield _conv(f"{name}_reduce", channels, middle, 1, before, norm=True)
            yield _conv(f"{name}_spatial", middle, middle, 3, side, norm=True)
            yield _conv(f"{name}_expand", middle, 4 * middle, 1, side, norm=True)
            if block == 0:
                yield _conv(f"{name}_shortcut", channels, 4 * middle, 1, side, norm=True)
            channels = 4 * middle
    yield _dense("head", channels, 1000)


def _vgg(convolutions: tuple[int, ...]) -> Iterator[LayerSpec]:
    channels = 3
    for stage, count in enumerate(convolutions):
        outside = min(512, 64 << stage)
        for number in range(count):
            name = f"stage{stage}_conv{number}"
            yield _conv(name, channels, outside, 3, 224 >> stage, norm=False)
            channels = outside
    yield _dense("dense0", 512 * 7 * 7, 4096)
    yield _dense("dense1", 4096, 4096)
    yield _dense("head", 4096, 1000)


def _densenet() -> Iterator[LayerSpec]:
    # Here a norm stands before its convolution, so it has the channels that go in.
    yield _conv("stem", 3, 64, 7, 112, norm=True)
    channels, side = 64, 56
    for block, depth in enumerate((6, 12, 24, 16)):
        if block:
            yield _normed(f"transition{block}", channels, channels // 2, 1, side)
            channels, side = channels // 2, side // 2
        for layer in range(depth):
            yield _normed(f"block{block}_reduce{layer}", channels, 128, 1, side)
            yield _normed(f"block{block}_spatial{layer}", 128, 32, 3, side)
            channels += 32
    norm: dict[str, Shape] = {"norm_weight": (channels,), "norm_bias": (channels,)}
    yield LayerSpec(name="norm", shapes=norm, work=channels * side**2)
    yield _dense("head", channels, 1000)


def _normed(name: str, inside: int, outside: int, kernel: int, side: int) -> LayerSpec:
    weight = (outside, inside, kernel, kernel)
    shapes: dict[str, Shape] = {
        "norm_weight": (inside,),
        "norm_bias": (inside,),
        "weight": weight,
    }
    return LayerSpec(name=name, shapes=shapes, work=math.prod(weight) * side**2)


def _bert() -> Iterator[LayerSpec]:
    hidden, tokens = 1024, 128
    tables = {"words": 30522, "places": 512, "kinds": 2}
    for name, rows in tables.items():
        yield LayerSpec(name=name, shapes={"weight": (rows, hidden)}, work=float(hidden * tokens))
    norm: dict[str, Shape] = {"weight": (hidden,), "bias": (hidden,)}
    yield LayerSpec(name="norm", shapes=norm, work=float(hidden * tokens))
    for layer in range(24):
        for part in ("query", "key", "value"):
            yield _dense(f"layer{layer}_{part}", hidden, hidden, tokens)
        yield _dense(f"layer{layer}_mix", hidden, hidden, tokens, norm=True)
        yield _dense(f"layer{layer}_widen", hidden, 4 * hidden, tokens)
        yield _dense(f"layer{layer}_narrow", 4 * hidden, hidden, tokens, norm=True)
    yield _dense("pooler", hidden, hidden)


def _nt3() -> Iterator[LayerSpec]:
    length, filters = 60_483, 128
    first, second = length - 19, length - 28
    pooled = second // 10
    yield LayerSpec(
        name="conv0",
        shapes={"weight": (filters, 1, 20), "bias": (filters,)},
        work=filters * 20 * first,
    )
    yield LayerSpec(
        name="conv1",
        shapes={"weight": (filters, filters, 10), "bias": (filters,)},
        work=filters * filters * 10 * second,
    )
    yield _dense("dense0", filters * pooled, 200)
    yield _dense("dense1", 200, 20)
    yield _dense("head", 20, 2)


def _uniform() -> Iterator[LayerSpec]:
    for layer in range(25):
        yield _dense(f"layer{layer}", 1000, 1000)


# Residual and VGG networks: the widely quoted "cnn-benchmarks" tables (Torch, Pascal Titan X, cuDNN
# 5.1, 16 images of 224 x 224), of which about a third is forward. BERT-large: NVIDIA's published
# training rate of one V100 in mixed precision (28.3 sequences a second, 14 at a time). DenseNet and
# NT3 are in neither: their multiplications are done at the rate the Titan X reaches with ResNet-50
# (1.87e12 per second forward, half of it backward), for 16 images and for NT3's 20 profiles.
# "uniform" is no network: 25 layers of 4 MB that take 3 ms and 6 ms each.
PRESETS: dict[str, Preset] = {
    "resnet50": Preset(layers=lambda: _resnet((3, 4, 6, 3)), forward=0.0350, backward=0.0686),
    "resnet152": Preset(layers=lambda: _resnet((3, 8, 36, 3)), forward=0.0755, backward=0.1425),
    "vgg16": Preset(layers=lambda: _vgg((2, 2, 3, 3, 3)), forward=0.0416, backward=0.0870),
    "vgg19": Preset(layers=lambda: _vgg((2, 2, 4, 4, 4)), forward=0.0481, backward=0.0992),
    "densenet121": Preset(layers=_densenet, forward=0.0245, backward=0.0490),
    "bert-large": Preset(layers=_bert, forward=0.165, backward=0.330),
    "nt3": Preset(layers=_nt3, forward=0.109, backward=0.218),
    "uniform": Preset(layers=_uniform, forward=0.075, backward=0.150),
}
"""Every network that can be emulated."""
