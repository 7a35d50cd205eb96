"""From the name of a policy to the engine that reads that way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from sapwood.data import memory
from sapwood.data.engines.base import Engine, Job
from sapwood.data.engines.chunked import Chunked
from sapwood.data.engines.cursor import Cursor
from sapwood.data.engines.direct import Direct
from sapwood.data.engines.mapped import Mapped
from sapwood.data.engines.ring import Cache, Ring
from sapwood.data.engines.speculative import Speculative
from sapwood.data.order.spec import OrderSpec
from sapwood.data.provenance import Provenance
from sapwood.errors import ConfigError

if TYPE_CHECKING:
    from sapwood.data.stagger import Gate

__all__ = ["POLICIES", "SHARED", "Policy", "choose"]

_log = logging.getLogger(__name__)

Policy = Literal["auto", "lmdb", "lmm", "lmm-dm", "dio", "prov", "coal", "stag"]
SHARED = ("lmm", "lmm-dm")
"""These are about one process of a host that reads for the others."""
POLICIES: tuple[str, ...] = get_args(Policy)

_RESIDENT = 0.98
_SLOW = 2**30
"""A disk that gives fewer bytes for each second of waiting is slower than memory."""
_SCATTERED_THREADS = 8
"""Reads of single records are bound by the disk's latency, so that many are in flight."""


def choose(
    policy: str,
    job: Job,
    spec: OrderSpec,
    *,
    provenance: Provenance | None = None,
    gate: Callable[[], Gate] | None = None,
) -> tuple[Engine, bool]:
    """The engine of a policy, and whether it stays the best one after this epoch.

    ``gate`` makes what ``stag`` waits at.

    Raises:
        ConfigError: there is no such policy, or it cannot read this database.
        DataError: the database cannot be mapped.
    """
    if policy == "auto":
        return _auto(job, spec)
    if policy in ("lmdb", "lmm"):
        return Cursor(job, steps=spec.shuffle == "none"), True
    if policy == "lmm-dm":
        return Speculative(job, steps=spec.shuffle == "none"), True
    if policy == "dio":
        return Direct(job), True
    if policy == "prov":
        if provenance is None:
            raise ConfigError("policy='prov' needs provenance=Provenance(...): how it was written")
        return Direct(job, provenance.checked(job.index)), True
    if policy == "coal":
        return Chunked(job, Ring(job)), True
    if policy == "stag":
        if gate is None:
            raise ConfigError("policy='stag' needs stagger=Stagger(store=...): where ranks meet")
        return Chunked(job, Ring(job), gate()), True
    raise ConfigError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")


def _auto(job: Job, spec: OrderSpec) -> tuple[Engine, bool]:
    """Gather from memory what is there; read the rest in large pieces."""
    # Half: the training needs memory too, and a file that only just fits drives itself out.
    fits = job.source.size <= memory.available() // 2
    if fits and job.source.resident() >= _RESIDENT:
        return Mapped(job), True
    # Reading past the page cache is faster than to fill it, and takes less of the processors. It
    # has to be filled where records come from everywhere, and where the training waits for the
    # disk: then for the epochs after this one.
    if fits and (spec.shuffle == "global" or job.recorder.pace() < _SLOW):
        _log.debug("%s: read into the page cache", job.source.path)
        return Chunked(job, Cache(job)), False
    if spec.shuffle == "global":
        return Direct(job, threads=_SCATTERED_THREADS), True
    return Chunked(job, Ring(job)), not fits
