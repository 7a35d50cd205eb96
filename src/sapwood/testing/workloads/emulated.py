"""An emulated device: real parameters and gradients, computed in a given time without a core.

On a GPU the processor is idle while layers compute; a CPU model on a few busy cores leaves nothing
idle, so neither overlap nor its cost can be seen there. Here a layer's forward and backward *wait*.
Only these use the processor, inside the time of the layer they belong to:

- a product of a batch with the first values of a layer's first parameter (at most 16 by 16), so
  that there is a loss that falls and gradients that depend on the weights and on the batch;
- one pass that writes each gradient: true values for those first elements, fixed noise times their
  mean for all others. The noise is a tile that stays in the cache, so a gradient costs its bytes
  once in memory traffic.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sapwood.errors import ConfigError
from sapwood.testing.workloads.base import Classes, Workload, generator
from sapwood.testing.workloads.presets import PRESETS, LayerSpec

__all__ = ["Device", "emulated"]

_FEATURES = 16
_CLASSES = 10
_TILE = 1 << 14
# How far a host may be behind a device and cost it nothing: about what a launch queue holds.
_LAUNCH_AHEAD = 1e-3
# How strongly all layers together change the signal; 16 lets Adam learn in a few dozen steps.
_STRENGTH = 16.0


def emulated(
    *,
    preset: str = "resnet50",
    scale: float = 1.0,
    mb: float | None = None,
    speed: float = 1.0,
    batch_size: int = 16,
    seed: int = 0,
) -> Workload:
    """A network of ``presets.PRESETS``, with its own times and sizes.

    Args:
        preset: Which network; "uniform" is 25 equal layers.
        scale: Times the bytes, by shrinking each feature dimension to its root. Layers keep their
            times, names and number.
        mb: The bytes instead, in megabytes (10^6) of parameters.
        speed: How many times faster than published; ``math.inf`` does not wait at all.
        batch_size: Samples per rank and step. It does not change the times.
        seed: Fixes weights and data.
    """
    chosen = PRESETS.get(preset)
    if chosen is None:
        raise ConfigError(
            f"emulated: no preset is called {preset!r}; there are {', '.join(PRESETS)}"
        )
    if mb is not None and scale != 1.0:
        raise ConfigError(f"emulated: mb={mb} and scale={scale} both say the size; give one")
    factor = scale if mb is None else chosen.scale_for(mb)
    if not factor > 0 or not speed > 0:
        raise ConfigError(f"emulated: scale={scale} and speed={speed}, expected more than 0")
    seconds = (chosen.forward / speed, chosen.backward / speed)

    def build() -> nn.Module:
        return Emulated([layer.scaled(factor) for layer in chosen.layers()], *seconds)

    data = Classes(classes=_CLASSES, shape=(_FEATURES,), coarse=(_FEATURES,))
    return Workload(name="emulated", build=build, data=data, batch_size=batch_size, seed=seed)


class Device:
    """The clock of one emulated device: when the kernel launched last ends.

    A kernel begins where the last one ended, not when its launch was seen to, so late wake-ups do
    not add up and a pass takes the sum of its layers. A host that stays away for longer than the
    queue holds (a hook that blocks) does delay the device, as it does on a GPU.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._end = 0.0
        # By how much the host is late through no fault of its own: it was woken late.
        self._overslept = 0.0

    def begin(self) -> None:
        """A forward pass begins: whatever it had to wait for is over only now."""
        self._end = max(self._end, self._clock())
        self._overslept = 0.0

    def launch(self, seconds: float) -> float:
        """Queue a kernel; when it ends."""
        earliest = self._clock() - self._overslept - _LAUNCH_AHEAD
        self._end = max(self._end, earliest) + seconds
        return self._end

    def wait(self, end: float) -> None:
        """Sleep until then; other threads have the interpreter meanwhile."""
        late = self._clock() - end
        if late >= 0:
            self._overslept = min(self._overslept, late)
            return
        while late < 0:
            self._sleep(-late)
            late = self._clock() - end
        self._overslept = late


class Emulated(nn.Module):
    """Layers one after the other on one device; the first features of the last are the classes."""

    def __init__(self, layers: list[LayerSpec], forward: float, backward: float) -> None:
        super().__init__()
        self.device = Device()
        work = sum(layer.work for layer in layers)
        gain = _STRENGTH / len(layers)
        self.layers = nn.ModuleDict()
        for layer in layers:
            share = layer.work / work
            times = (forward * share, backward * share)
            self.layers[layer.name] = Layer(self.device, layer, times, gain)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch."""
        self.device.begin()
        for layer in self.layers.values():
            x = layer(x)
        return x[:, :_CLASSES]


class Layer(nn.Module):
    """One kernel forward and one backward, with parameters of any number and shape."""

    def __init__(
        self, device: Device, spec: LayerSpec, seconds: tuple[float, float], gain: float
    ) -> None:
        super().__init__()
        self.device, self.gain, self.memory = device, gain, _Memory()
        self.forward_seconds, self.backward_seconds = seconds
        for name, shape in spec.shapes.items():
            weight = torch.empty(shape)
            self.register_parameter(name, nn.Parameter(weight.normal_(std=0.02)))

    def forward(self, x: Tensor) -> Tensor:
        """A batch of signals, changed by the first values of the first parameter."""
        # Not parameters(): a generator over all modules takes longer than the rest of a layer.
        weights = self._parameters.values()
        result: Tensor = _Kernel.apply(x, self, *weights)  # type: ignore[no-untyped-call]
        return result


class _Kernel(torch.autograd.Function):
    """y = x + gain * x @ the corner of the first parameter, in the time the layer has for it.

    Few and cheap operations, because each runs on a cache that has gone cold while waiting.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *weights: Tensor) -> Tensor:
        end = layer.device.launch(layer.forward_seconds)
        ctx.layer = layer
        ctx.save_for_backward(x, *weights)
        y = _mixed(x, _corner(weights[0], x.dtype).t(), layer.gain)
        layer.device.wait(end)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        layer: Layer = ctx.layer
        end = layer.device.launch(layer.backward_seconds)
        x, *weights = ctx.saved_tensors
        corner = _corner(weights[0], x.dtype)
        side = len(corner)
        true = torch.mm(above[:, :side].t(), x[:, :side]).mul_(layer.gain)
        gradients = _gradients(layer.memory, weights, ctx.needs_input_grad[2:], true)
        below = _mixed(above, corner, layer.gain) if ctx.needs_input_grad[0] else None
        layer.device.wait(end)
        return (below, None, *gradients)


def _corner(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a parameter that take part in computing: the first in memory, as a square.

    Not by ``detach()``: an engine takes that for a read behind autograd's back, which this is not.
    """
    side = min(_FEATURES, math.isqrt(weight.numel()))
    return weight.as_strided((side, side), (side, 1)).to(dtype)


def _mixed(x: Tensor, matrix: Tensor, gain: float) -> Tensor:
    side = len(matrix)
    if side == x.shape[1]:
        return torch.addmm(x, x, matrix, alpha=gain)
    y = x.clone()
    y[:, :side].addmm_(x[:, :side], matrix, alpha=gain)
    return y


def _gradients(
    memory: _Memory, weights: list[Tensor], needed: tuple[bool, ...], true: Tensor
) -> list[Tensor | None]:
    """The gradients of a layer; only the corner of the first parameter has true ones."""
    strength = true.mean()
    found: list[Tensor | None] = []
    for place, (weight, wanted) in enumerate(zip(weights, needed, strict=True)):
        if not wanted:
            found.append(None)
        elif place == 0 or weight.numel() > _TILE:
            found.append(memory.block(place, weight).fill(strength, None if place else true))
        else:
            found.append(_little_noise(weight.dtype, weight.shape) * strength)
    return found


class _Memory:
    """Memory for the gradients of a layer, used again when nobody holds the last one.

    Devices have allocators that do so. malloc gives large blocks back to the kernel, and faulting
    in the pages of 100 MB takes 50 ms of a core, several times what writing them takes.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()  # a copied model has gradients of its own

    def block(self, place: int, weight: Tensor) -> _Block:
        """A block for the gradient of ``weight`` that nobody uses."""
        kept = self._blocks.get(place)
        if kept is None or not kept.fits(weight) or not kept.free():
            kept = self._blocks[place] = _Block(weight)
            kept.made()
        return kept


class _Block:
    """The memory of one gradient, and the views of it that are written."""

    def __init__(self, weight: Tensor) -> None:
        self._whole = torch.empty_like(weight)  # with the strides of the weight
        flat = self._whole.as_strided((weight.numel(),), (1,))
        rows, rest = divmod(weight.numel(), _TILE)
        tile = _noise(weight.dtype)
        self._parts = [
            (tile.expand(rows, -1), flat[: rows * _TILE].view(rows, _TILE)),
            (tile[:rest], flat[rows * _TILE :]),
        ]
        self._corner = _corner(self._whole, weight.dtype)
        self._alone: int | None = None

    def made(self) -> None:
        """Count what we hold ourselves; not while it is made, when there are more."""
        self._alone = _holders(self._whole)

    def fits(self, weight: Tensor) -> bool:
        """Whether it is a gradient of such a parameter; models can change their dtype."""
        whole = self._whole
        return whole.dtype == weight.dtype and whole.stride() == weight.stride()

    def free(self) -> bool:
        """Whether nobody has the last gradient any more, or a view of it."""
        return self._alone is not None and _holders(self._whole) == self._alone

    def fill(self, strength: Tensor, corner: Tensor | None) -> Tensor:
        """Noise times ``strength`` in one pass, and the corner's own values."""
        for noise, part in self._parts:
            if len(part):
                torch.mul(noise, strength, out=part)
        if corner is not None:
            self._corner.copy_(corner)
        # Another tensor object, so that autograd takes it as the gradient without a copy.
        return self._whole.detach()


def _holders(tensor: Tensor) -> int | None:
    """How many tensors share its memory; None, and so never used again, if torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(tensor.untyped_storage()._cdata))


@functools.cache
def _noise(dtype: torch.dtype) -> Tensor:
    return torch.randn(_TILE, generator=generator(0)).to(dtype)


@functools.cache
def _little_noise(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return _noise(dtype)[: shape.numel()].view(shape)
