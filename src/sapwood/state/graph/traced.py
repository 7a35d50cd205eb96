"""The first way to find a graph: one forward, watched operation by operation.

A call of a leaf module is a layer: what its operations read from outside is its input. Elsewhere,
an operation that mixes activations with a module's tensor is a use of that module, whose child it
may well be (``F.linear(x, self.out_proj.weight)``). Everything else hands origins on.

On the meta device nothing is computed, and nothing can depend on values. Where a forward needs
values, it runs on copies of the model and the sample; from the first value it looks at, ids cover
names: which expert is the first one to run then depends on the batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.state.graph.borrow import borrow, quiet_random
from sapwood.state.graph.builder import GraphBuilder, Origin
from sapwood.state.graph.configure import describe_module, find_owners, is_leaf, parts_of_leaves
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.marks import Mark, Marks, tensors_in
from sapwood.state.graph.model import Config, Graph, Source
from sapwood.state.graph.modes import FunctionMode, OperationMode
from sapwood.state.graph.sample import Sample
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["Tracer", "trace_graph"]


@dataclass(eq=False, slots=True)
class Frame:
    """A layer that is being called."""

    config: Config
    owner: int | None = None
    name: str = ""
    trusted: bool = True
    """Values it looks at steer nothing outside of it: it is torch's own."""
    function: bool = False
    start: int = 0
    origin: Origin = field(default_factory=Origin)
    touched: dict[Origin, None] = field(default_factory=dict)
    weights: dict[int, None] = field(default_factory=dict)
    """Tensors of other modules that it reads."""
    reads: bool = False


def trace_graph(model: nn.Module, sample: Sample, hasher: Hasher, *, meta: bool) -> Graph:
    """Watch one forward; the model is not changed.

    Raises:
        GraphError: the model cannot be run this way.
        Exception: whatever its forward raises.
    """
    try:
        tracer = Tracer(model, meta=meta, grad=False)
        tracer.run(sample)
    except RuntimeError as error:
        # A forward that differentiates (forces from energies) cannot run without gradients.
        if "grad" not in str(error):
            raise
        tracer = Tracer(model, meta=meta, grad=True)
        tracer.run(sample)
    return tracer.builder.finish(Source.TRACED, "", hasher)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the fused encoder layer, one operation with the weights of six modules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Tracer:
    """The state of one watched forward."""

    def __init__(self, model: nn.Module, *, meta: bool, grad: bool) -> None:
        """``grad`` runs the forward with gradients enabled."""
        self._root = unwrap(model)
        self._meta, self._grad = meta, grad
        owners, self._index = find_owners(self._root)
        self.builder = GraphBuilder(owners)
        self._names = {id(m): clean_name(n) for n, m in self._root.named_modules()}
        self._parts = parts_of_leaves(self._root)
        self._holders: dict[int, list[int]] = {}
        for n, owner in enumerate(owners):
            for slot in owner.slots:
                self._holders.setdefault(slot.tensor, []).append(n)
        self._frames: list[Frame] = []
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, sample: Sample) -> None:
        """Call the model; what it did is in the builder."""
        with ExitStack() as around:
            around.enter_context(quiet_random())
            around.enter_context(_plain_attention())
            borrowed = borrow(self._root, meta=self._meta, wrap=self._wrap)
            self.marks = Marks(around.enter_context(borrowed), self.builder)
            for original in self._holders:
                self.marks.weight(original)
            self.marks.views(self._holders)
            self._places = sample.places(self._root)
            inputs = sample.map(self._input)
            # Not inference mode, which hands composite operations over whole, with the reads of
            # values inside of them.
            around.enter_context(torch.set_grad_enabled(self._grad))
            if "torch._dynamo" in sys.modules:
                around.enter_context(torch.compiler.set_stance("force_eager"))
            if self._meta:
                around.enter_context(torch.device("meta"))
            around.enter_context(FunctionMode(self))
            around.enter_context(OperationMode(self))
            self._root(*inputs.args, **inputs.kwargs)

    def _input(self, value: Tensor) -> Tensor:
        if id(value) not in self._given:
            if self._meta:
                made = torch.empty_like(value, device="meta", requires_grad=False)
            else:
                made = value.detach().clone()
            made.requires_grad_(value.requires_grad and self._grad)
            # Tokens and masks are not activations: that a mask was passed does not change ids.
            place = self._places.get(id(value), "")
            real = value.is_floating_point() or value.is_complex()
            self.marks.set(made, Mark(origin=Origin(place=place) if real else None, values=True))
            self._given[id(value)] = (value, made)
        return self._given[id(value)][1]

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        if not is_leaf(module) or id(module) in self._parts:
            return None
        owner = self._index.get(id(module))
        config = describe_module(module) if owner is None else self.builder.owners[owner].config
        trusted = type(module).__module__.startswith("torch.nn.")
        name = self._names.get(id(module), "")

        @wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            frame = Frame(config, owner, name, trusted)
            return self.layer(frame, forward, args, kwargs)

        return called

    def layer(self, frame: Frame, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer and make its vertex."""
        frame.start = self.marks.clock
        self._frames.append(frame)
        try:
            out = call(*args, **kwargs)
        finally:
            self._frames.pop()
        return self._close(frame, _in_order(call, args, kwargs), out)

    def function(self, config: Config, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a layer that is a function."""
        return self.layer(Frame(config, function=True), call, args, kwargs)

    def _close(self, frame: Frame, given: Sequence[Any], out: Any) -> Any:
        results = list(tensors_in(out))
        for tensor in results:
            mark = self.marks.get(tensor)
            if mark is not None and mark.origin is not None and mark.origin is not frame.origin:
                frame.touched[mark.origin] = None  # handed through: ``Identity``
        if frame.reads and not frame.trusted:
            self.builder.reads_values = True
        inputs = self._inputs_of(frame, given)
        if frame.owner is None and not inputs and (frame.weights or frame.function):
            for tensor in results:  # a weight computed from weights, or a constant
                self.marks.set(tensor, Mark(weights=tuple(frame.weights), values=True))
            return out
        for weight in frame.weights:
            owner = self.owner_of(weight, frame)
            vertex = self.builder.used(owner)
            inputs.append(Origin((self.builder.owner(owner, []) if vertex is None else vertex,)))
        if frame.owner is None:
            vertex = self.builder.plain(frame.config, inputs, frame.name)
        else:
            vertex = self.builder.owner(frame.owner, inputs)
        frame.origin.vertices = (vertex,)
        return self._results(frame, out)

    def _inputs_of(self, frame: Frame, given: Sequence[Any]) -> list[Origin]:
        """What a layer read: its arguments in order, then what it took from elsewhere."""
        marks = [self.marks.get(tensor) for one in given for tensor in tensors_in(one)]
        named = dict.fromkeys(
            m.origin for m in marks if m is not None and m.origin in frame.touched
        )
        rest = [origin for origin in frame.touched if origin not in named]
        rest.sort(key=self.builder.elements)  # not in order of kernels, which devices differ in
        found: list[Origin] = []
        for origin in (*named, *rest):
            # A result of a layer that is not finished: the inner one reads what the outer one did.
            outer = next((f for f in self._frames if f.origin is origin), None)
            found += [origin] if outer is None else outer.touched
        return [o for o in dict.fromkeys(found) if o is not None]

    def _results(self, frame: Frame, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self._result(frame, out)
        if type(out) in (tuple, list):
            return type(out)(self._results(frame, one) for one in out)
        for tensor in tensors_in(out):
            self.marks.set(tensor, Mark(origin=frame.origin, values=True))
        return out

    def _result(self, frame: Frame, out: Tensor) -> Tensor:
        mark = self.marks.get(out)
        if mark is not None and mark.clock <= frame.start and out.layout is torch.strided:
            # Dropout in evaluation returns its input, which others read as the layer's input.
            out = out.view_as(out)
        self.marks.set(out, Mark(origin=frame.origin, values=True))
        return out

    def owner_of(self, weight: int, frame: Frame | None) -> int:
        """Which of the modules that hold a tensor uses it now."""
        holders = self._holders[weight]
        if frame is not None and frame.owner in holders:
            return frame.owner
        return next((h for h in holders if self.builder.used(h) is not None), holders[0])

    @property
    def frame(self) -> Frame | None:
        """The layer that is being called, the innermost one."""
        return self._frames[-1] if self._frames else None

    def read(self) -> None:
        """The forward looks at values."""
        if self.frame is None:
            self.builder.reads_values = True
        else:
            self.frame.reads = True

    def combine(self, marks: Iterable[Mark]) -> Mark:
        """The mark of what an operation makes from tensors with these marks."""
        marks = list(marks)
        values = any(m.values for m in marks)
        weights = tuple(dict.fromkeys(w for m in marks for w in m.weights))
        origins = [m.origin for m in marks if m.origin is not None]
        frame = self.frame
        if frame is not None:
            frame.touched.update((o, None) for o in origins if o is not frame.origin)
            for weight in weights:
                if self.owner_of(weight, frame) != frame.owner:
                    frame.weights[weight] = None
            return Mark(origin=frame.origin if origins or weights else None, values=values)
        origin = self.builder.union(origins)
        if origin is None or not weights:
            return Mark(origin=origin, weights=weights, values=values)
        owners = dict.fromkeys(self.owner_of(weight, None) for weight in weights)
        uses = [Origin((self.builder.owner(owner, [origin]),)) for owner in owners]
        return Mark(origin=self.builder.union(uses), values=values)


def _in_order(call: Callable[..., Any], args: Any, kwargs: Any) -> Sequence[Any]:
    """Arguments in the order of the signature, however they were passed."""
    if not kwargs:
        return tuple(args)
    try:
        bound = inspect.signature(call).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return (*args, *(kwargs[name] for name in sorted(kwargs)))
    return tuple(bound.arguments.values())
