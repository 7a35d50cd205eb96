"""The client's cache of graphs: nothing is traced or hashed twice.

Three levels. A model that was seen, and is proven to be unchanged, has its graph and its encoding.
A layer that was seen, in whatever model, has its id: a child hashes its new layers only. Bytes that
were decoded have their graph. Each is keyed by all that the result follows from.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.state.graph.borrow import ALONE
from sapwood.state.graph.codec import decode_graph
from sapwood.state.graph.find import find_graph, own_sample
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.model import Graph, Source
from sapwood.state.graph.sample import Sample, as_sample
from sapwood.state.graph.snapshot import Snapshot, Unknowable
from sapwood.state.tensors import unwrap

__all__ = ["GraphCache"]

_MODELS, _SAMPLES, _DECODED = 8, 4, 256


class _Known:
    """What is known of one model object."""

    def __init__(self, model: nn.Module, forget: Any) -> None:
        self.model = weakref.ref(model, forget)
        self.snapshot = Snapshot(model)
        self.graphs: OrderedDict[Hashable, Graph] = OrderedDict()


class GraphCache:
    """Graphs of models, of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        """Start empty."""
        self.hasher = Hasher()
        """Ids of layers; ``hasher.computed`` counts what was hashed and not looked up."""
        self.hits = 0
        """How many graphs were there already."""
        self.misses = 0
        """How many had to be found."""
        self._models: OrderedDict[int, _Known] = OrderedDict()
        self._decoded: OrderedDict[Hashable, Graph] = OrderedDict()
        self._lock = ALONE  # what is compared must be the model, not another thread's stand-ins

    def find(
        self,
        model: nn.Module,
        sample: Any = None,
        *,
        exported: Any = None,
        allow: Sequence[Source] = tuple(Source),
    ) -> Graph:
        """As ``find_graph``; ``graph.encoded`` is kept with it.

        A graph is found again when anything it follows from has changed: a module, a tensor's
        shape or dtype, a name, an attribute, a class's code, the shapes of the sample. Not seen are
        globals and closures that a forward looks at: ``forget`` the model after such a change.

        Raises:
            ConfigError, GraphError: as ``find_graph``.
        """
        with self._lock:
            inner = _unwrapped(model)
            called = own_sample(inner) if sample is None else as_sample(sample)
            key = _key(called, exported, tuple(allow))
            known = self._known(inner)
            if key is not None and known is not None and key in known.graphs:
                self.hits += 1
                self._models.move_to_end(id(inner))
                known.graphs.move_to_end(key)
                return known.graphs[key]
            self.misses += 1
            graph = find_graph(inner, called, exported=exported, allow=allow, hasher=self.hasher)
            if key is not None and not graph.reads_values:  # else another batch has another graph
                self._keep(inner, known, key, graph)
            return graph

    def decode(self, topology: bytes, configs: Sequence[bytes], labels: bytes | None) -> Graph:
        """As ``decode_graph``.

        Raises:
            GraphError: as ``decode_graph``.
        """
        key = (topology, tuple(configs), labels)
        with self._lock:
            if key not in self._decoded:
                found = decode_graph(topology, configs, labels, hasher=self.hasher)
                _bounded(self._decoded, _DECODED)[key] = found
            self._decoded.move_to_end(key)
            return self._decoded[key]

    def forget(self, model: nn.Module) -> None:
        """Find the graph of a model anew at the next call."""
        with self._lock:
            self._models.pop(id(_unwrapped(model)), None)

    def _known(self, model: nn.Module) -> _Known | None:
        known = self._models.get(id(model))
        if known is None or known.model() is not model:
            return None
        if known.snapshot.holds(model):
            return known
        del self._models[id(model)]
        return None

    def _keep(self, model: nn.Module, known: _Known | None, key: Hashable, graph: Graph) -> None:
        if known is None:
            number = id(model)
            try:
                known = _Known(model, lambda ref: self._died(number, ref))
            except Unknowable:
                return
            _bounded(self._models, _MODELS)[number] = known
        _bounded(known.graphs, _SAMPLES)[key] = graph

    def _died(self, number: int, ref: Any) -> None:
        # No lock: a collection may run this at any point of a thread that holds it.
        known = self._models.get(number)
        if known is not None and known.model is ref:
            self._models.pop(number, None)


def _bounded(kept: OrderedDict[Any, Any], most: int) -> OrderedDict[Any, Any]:
    while len(kept) >= most:
        kept.popitem(last=False)
    return kept


def _unwrapped(model: nn.Module) -> nn.Module:
    # ``unwrap`` lists the children, of which there may be a thousand.
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    return unwrap(model) if wrapped or "_orig_mod" in model._modules else model


class _NoKeyError(Exception):
    """Something that cannot be compared with what another call gets."""


def _key(sample: Sample | None, exported: Any, allow: tuple[Source, ...]) -> Hashable:
    try:
        called = None if sample is None else (_part(sample.args), _part(sample.kwargs))
    except _NoKeyError:
        return None
    return called, exported, allow, torch.is_autocast_enabled("cpu"), torch.get_default_dtype()


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype, value.layout, value.requires_grad
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_part, value))
    if isinstance(value, Mapping):
        return type(value), tuple((k, _part(v)) for k, v in value.items())
    raise _NoKeyError
