"""Models a repository is asked to keep: synthetic ones of many sizes, and shapes of real ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Model", "build", "nbytes_of"]

MB = 10**6
SPREAD = 0.3
SHARES = (25, 50, 75, 100)
Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Model:
    """Tensors by name, and which of them a partial load reads, by percent of the bytes."""

    tensors: dict[str, Tensor]
    parts: Mapping[int, list[str]]

    def refresh(self) -> None:
        """Other bytes in every tensor: no save can find what an earlier one has left."""
        for tensor in self.tensors.values():
            tensor.view(torch.int32).add_(0x01000193)


def build(case: Mapping[str, object]) -> Model:
    """The model of a case; ``mb`` and ``layers`` are the size of synthetic ones."""
    kind = str(case["model"])
    if kind == "vgg19":
        shapes = vgg19()
        parts = {15: [name for name, _ in shapes if name.startswith("conv")], 100: names(shapes)}
    elif kind == "bert":
        shapes = bert_with_head()
        parts = {35: [name for name, _ in shapes if name.startswith("bert")], 100: names(shapes)}
    else:
        shapes = synthetic(int(str(case["mb"])) * MB, int(str(case["layers"])), kind)
        parts = {share: spread_out(shapes, share) for share in SHARES}
    return Model({name: filled(shape, at) for at, (name, shape) in enumerate(shapes)}, parts)


def names(shapes: Shapes) -> list[str]:
    return [name for name, _ in shapes]


def filled(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def nbytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def synthetic(nbytes: int, layers: int, kind: str) -> Shapes:
    """Dense layers without bias; ``varied`` ones differ by up to 30 percent."""
    sizes = [1.0] * layers
    if kind == "varied":
        chooser = random.Random(layers)
        sizes = [chooser.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(layers)]
    unit = nbytes / 4 / sum(sizes)
    return [(f"layer{at:04d}.weight", (max(1, round(unit * s)),)) for at, s in enumerate(sizes)]


def spread_out(shapes: Shapes, share: int) -> list[str]:
    """Layers evenly over the model, such as every fourth."""
    count = max(1, len(shapes) * share // 100)
    return [shapes[at * len(shapes) // count][0] for at in range(count)]


def vgg19() -> Shapes:
    """549 MB; the convolutions that are read back are 15 percent."""
    shapes: Shapes = []
    before, plan = 3, [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    for at, width in enumerate(plan):
        shapes += [(f"conv{at}.weight", (width, before, 3, 3)), (f"conv{at}.bias", (width,))]
        before = width
    for at, (wide, high) in enumerate([(512 * 49, 4096), (4096, 4096), (4096, 1000)]):
        shapes += [(f"dense{at}.weight", (high, wide)), (f"dense{at}.bias", (high,))]
    return shapes


def bert_with_head() -> Shapes:
    """BERT-large and a classifier of large dense layers, 3 GB together; BERT is read back."""
    hidden, inner = 1024, 4096
    shapes: Shapes = [("bert.words", (30522, hidden)), ("bert.positions", (512, hidden))]
    for at in range(24):
        begin = f"bert.layer{at}"
        for name in ("query", "key", "value", "output"):
            shapes += [
                (f"{begin}.{name}.weight", (hidden, hidden)),
                (f"{begin}.{name}.bias", (hidden,)),
            ]
        shapes += [(f"{begin}.up.weight", (inner, hidden)), (f"{begin}.up.bias", (inner,))]
        shapes += [(f"{begin}.down.weight", (hidden, inner)), (f"{begin}.down.bias", (hidden,))]
        shapes += [
            (f"{begin}.norm{n}.{kind}", (hidden,)) for n in (1, 2) for kind in ("weight", "bias")
        ]
    wide = 8192
    shapes.append(("head0.weight", (wide, hidden)))
    left = 3 * 10**9 - 4 * sum(torch.Size(shape).numel() for _, shape in shapes)
    shapes += [(f"head{at + 1}.weight", (left // (4 * 6 * wide), wide)) for at in range(6)]
    return shapes
