"""What a run's checkpoints are called where they are versions of a model repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.repository.folder import check_folder
from sapwood.repository.names import check_name
from sapwood.runtime.handle import RunHandle
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["as_versions", "fork_of"]


def fork_of(place: str, run: str) -> str:
    """Where a fork's checkpoints go, given where its parent's are: a folder, or a model's name."""
    return f"{place}/forks/{run}"


def as_versions(specs: Sequence[TierSpec], run: RunHandle, nodes: NodeMap) -> tuple[TierSpec, ...]:
    """The tiers, those that are repositories with what the run's versions are called.

    Raises:
        ConfigError: the run cannot save to such a repository.
    """
    return tuple(_named(spec, run, nodes) if spec.kind == "store" else spec for spec in specs)


def _named(spec: TierSpec, run: RunHandle, nodes: NodeMap) -> TierSpec:
    if len(nodes.nodes) > 1:
        raise ConfigError(
            f"tier store: {spec.place} is a folder, which one machine may write to, but the ranks "
            f"are on {len(nodes.nodes)} nodes ({', '.join(nodes.nodes)}); use external or s3"
        )
    check_folder(Path(spec.place), create=True)
    parent = run.forked_from
    name, series = spec.name, spec.series
    if parent is not None and name:  # without a name the place tells a fork from its parent
        name, series = fork_of(name, run.id), fork_of(series, run.id)
    check_name(name or run.id)
    forked = "" if parent is None else f"{parent.run}@{parent.step}"
    return replace(spec, name=name, series=series, forked=forked)
