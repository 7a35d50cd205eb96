"""Finds a model's graph, in the best way that works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sapwood.errors import ConfigError, GraphError
from sapwood.state.graph.borrow import ALONE, check_model
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.model import Graph, Source
from sapwood.state.graph.sample import Sample, as_sample
from sapwood.state.graph.traced import trace_graph
from sapwood.state.graph.walks import exported_graph, symbolic_graph, tree_graph
from sapwood.state.tensors import unwrap

__all__ = ["find_graph", "own_sample"]

_log = logging.getLogger(__name__)


def find_graph(
    model: nn.Module,
    sample: Any = None,
    *,
    exported: Any = None,
    allow: Sequence[Source] = tuple(Source),
    hasher: Hasher | None = None,
) -> Graph:
    """The architecture graph of a model; the model, its state and random numbers stay as they are.

    ``sample`` is what a forward gets: a tensor, a tuple (positional), a mapping (by name), or
    ``Sample(...)``; without one, the model's own ``example_input_array`` or ``dummy_inputs`` is
    taken if it has it. Only shapes matter, unless the forward looks at values. ``exported`` is an
    ``ExportedProgram`` of the model. ``allow`` restricts the ways that may be taken.

    Ids of graphs that were found in different ways are never equal: the graph says its ``source``,
    and in ``reason`` why it is no better one.

    Raises:
        ConfigError: the sample does not fit the model, or the program is another model's.
        GraphError: none of the allowed ways works, or the model has no shapes yet.
    """
    with ALONE:
        return _find(unwrap(model), sample, exported, allow, hasher or Hasher())


def _find(
    inner: nn.Module, sample: Any, exported: Any, allow: Sequence[Source], hasher: Hasher
) -> Graph:
    check_model(inner)
    called = _checked(inner, sample)
    failed: list[str] = []
    for source, way in _ways(inner, called, exported, hasher, failed):
        if source not in allow:
            failed.append(f"{source.name.lower()}: not allowed")
            continue
        try:
            found: Graph = way()
        except ConfigError:
            raise
        except Exception as error:  # a user's forward may raise anything
            _log.debug("no graph from %s", source.name.lower(), exc_info=True)
            failed.append(f"{source.name.lower()}: {type(error).__name__}: {_short(error)}")
            continue
        found = replace(found, reason="; ".join(failed))
        _say(inner, found)
        return found
    raise GraphError(
        f"no graph of {type(inner).__name__} can be found: {'; '.join(failed)}; give a sample its "
        "forward accepts, or an ExportedProgram"
    )


def _checked(model: nn.Module, sample: Any) -> Sample | None:
    """The sample as arguments, or the model's own; None if there is none.

    Raises:
        ConfigError: the model's forward does not take it.
    """
    if sample is None:
        return own_sample(model)
    called = as_sample(sample)
    called.check(model)
    return called


def _ways(
    model: nn.Module, sample: Sample | None, exported: Any, hasher: Hasher, failed: list[str]
) -> Any:
    steps: list[tuple[Source, Callable[[], Graph]]] = []
    if sample is None:
        failed.append("traced: no sample was given")
    else:
        steps.append((Source.TRACED, lambda: trace_graph(model, sample, hasher, meta=True)))
        steps.append((Source.TRACED, lambda: trace_graph(model, sample, hasher, meta=False)))
    if exported is not None:
        steps.append((Source.EXPORTED, lambda: exported_graph(model, exported, hasher)))
    steps.append((Source.SYMBOLIC, lambda: symbolic_graph(model, hasher)))
    steps.append((Source.TREE, lambda: tree_graph(model, hasher)))
    return steps


def own_sample(model: nn.Module) -> Sample | None:
    """The sample a model brings: Lightning's and Hugging Face's conventions."""
    for name in ("example_input_array", "dummy_inputs"):
        try:
            own = getattr(model, name, None)
        except Exception:  # a property of the user's class
            _log.debug("%s.%s failed", type(model).__name__, name, exc_info=True)
            continue
        if own is None or callable(own):
            continue
        sample = as_sample(own)
        try:
            sample.check(model)
        except ConfigError as error:
            _log.debug("%s is not taken as a sample: %s", name, error)
            continue
        return sample
    return None


def _short(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return line if len(line) <= 200 else line[:197] + "..."


def _say(model: nn.Module, graph: Graph) -> None:
    kind = type(model).__name__
    if graph.approximate:
        _log.warning(
            "graph of %s: only the module tree's order (%s); ids match models with equal names "
            "alone. Give a sample for a better one",
            kind,
            graph.reason,
        )
    elif graph.reads_values:
        _log.warning(
            "graph of %s: its forward looks at values, so ids of later layers cover their names "
            "(%s)",
            kind,
            graph.reason,
        )
    else:
        _log.info("graph of %s: %s (%s)", kind, graph.source.name.lower(), graph.reason or "first")
