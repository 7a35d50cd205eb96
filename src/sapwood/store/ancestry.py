"""Finding the stored model that a new architecture has most in common with, and taking it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sapwood.errors import GraphError, StoreError
from sapwood.repository.architecture import parts_of
from sapwood.repository.base import Backend, Kin, ModelRecord
from sapwood.repository.manifest import nbytes_of
from sapwood.state.graph import Graph, GraphCache, LayerTensor, Match, TensorPair, match_graphs

__all__ = ["Ancestor", "Ancestry", "Transfer", "pairs_by_name"]

_LOOKED_AT = 8
"""Candidates whose graphs are compared in full; the index has put the best one first."""


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A stored version, and what a model has in common with it."""

    record: ModelRecord
    match: Match
    nbytes: int
    """Bytes of the tensors in common."""
    layers: int
    """Layers in common, also those without tensors."""
    share: float
    """The part of the new model's bytes that the ancestor has."""

    def __str__(self) -> str:
        """As a person would say it."""
        return f"{self.record.reference}: {self.layers} layers, {self.share:.0%} of the bytes"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What was copied into a model."""

    ancestor: Ancestor
    copied: tuple[str, ...]
    """Names of tensors that have the ancestor's values now."""
    left: tuple[str, ...] = field(default=())
    """Names of those in common that have another dtype, and were left as they are."""


class Ancestry:
    """Ancestor queries on one repository, with the graphs of models it has seen."""

    def __init__(self, backend: Backend) -> None:
        """``backend`` stays the caller's to close."""
        self._backend = backend
        self.graphs = GraphCache()

    def graph_of(self, record: ModelRecord) -> Graph | None:
        """The graph of a stored version; None if it was saved without one.

        Raises:
            StoreError: it is damaged.
        """
        _, manifest = self._backend.manifest(record.reference)
        if not manifest.graph:
            return None
        topology, digests, labels = parts_of(manifest.graph)
        try:
            return self.graphs.decode(topology, self._backend.configs(digests), labels)
        except GraphError as error:
            raise StoreError(f"the graph of {record.reference} cannot be read: {error}") from error

    def best(
        self, model: nn.Module, sample: Any, *, by: str | None, lower: bool, pattern: str
    ) -> Ancestor | None:
        """The version with most bytes in common; of several, the best by a metric, then the newest.

        Raises:
            GraphError: the model has no graph.
        """
        graph = self.graphs.find(model, sample)
        found = [
            ancestor
            for kin in self._backend.kin(graph.ids, pattern, _LOOKED_AT, by, lower)
            if (ancestor := self._compared(kin, graph)) is not None
        ]
        best = max((ancestor.nbytes for ancestor in found), default=-1)
        # The index counts layers by their ids; what must be left out is known only now.
        return next((ancestor for ancestor in found if ancestor.nbytes == best), None)

    def compared(self, record: ModelRecord, model: nn.Module, sample: Any) -> Ancestor:
        """What a model has in common with one version.

        Raises:
            StoreError: that version has no graph, or nothing in common with the model.
        """
        graph = self.graphs.find(model, sample)
        old = self.graph_of(record)
        if old is None:
            raise StoreError(
                f"{record.reference} was saved without its architecture (as a state dict?): load "
                "it with load(), by names"
            )
        return _ancestor(record, match_graphs(old, graph))

    def _compared(self, kin: Kin, graph: Graph) -> Ancestor | None:
        old = self.graph_of(kin.record)
        if old is None or old.source is not graph.source:
            return None
        found = _ancestor(kin.record, match_graphs(old, graph))
        return found if found.layers else None


def _ancestor(record: ModelRecord, match: Match) -> Ancestor:
    mine = sum(_nbytes(tensor) for layer in match.new.layers for tensor in layer.tensors)
    common = sum(_nbytes(pair.new) for pair in match.tensors)
    return Ancestor(
        record=record,
        match=match,
        nbytes=common,
        layers=len(match.layers),
        share=common / mine if mine else 0.0,
    )


def _nbytes(tensor: LayerTensor) -> int:
    return nbytes_of(tensor.dtype or "float32", tensor.shape)


def pairs_by_name(pairs: Sequence[TensorPair]) -> dict[str, str]:
    """The stored name for each name of the new model."""
    return {pair.new.names[0]: pair.old.names[0] for pair in pairs}
