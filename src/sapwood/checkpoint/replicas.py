"""Seeing before a checkpoint leaves its ranks that their replicas are equal.

A checkpoint takes each byte from one rank. If a rank has diverged (bad memory, a value somebody
changed on one rank only), its shards and those of the others would be two models in one, with
correct checksums. So each rank also digests a part of another rank's shard (``witness``), and all
exchange digests before any of them hands its shard to the engine:

    <attempt>/<step>/<round>/<rank>     one digest per part of this rank's shard
                       .../count        ranks that have compared, or cannot
                       .../short        those that cannot: not captured, or the other rank is late
                       .../odd          those that found a difference; odd/1 ... say which
                       .../verdict      left by the last one to come
    and only if there is a difference:
                       .../<owner>/<part>  the digest of each piece
                       .../told/<rank>     which tensors they are

It happens on a thread of its own and through the store, without a collective: nobody can block
anybody. A rank that does not hear a verdict in time hands its shard over as not compared. Because
nothing is handed over before, a checkpoint that is known to mix replicas never has all its shards
anywhere, and needs no removing. The price is that a shard reaches the engine when the slowest rank
has captured its own, which is some milliseconds later.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sapwood.checkpoint.report import ReplicaDifference
from sapwood.checkpoint.witness import Part, Parts, Witness
from sapwood.errors import SapwoodError
from sapwood.runtime.group import Group
from sapwood.tiers.digest import FAST_ALGORITHM, fast_digest
from sapwood.tiers.record import CheckpointId

__all__ = ["Comparison", "Verdict"]

log = logging.getLogger(__name__)
_PATIENCE = 5.0
"""Seconds to wait for the slowest rank, and for the store."""
_TELLING = 3.0
"""Seconds to wait for the names of what differs."""
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05
_KEPT = 2
"""Comparisons whose keys stay for ranks that are behind."""
_AHEAD = 2
"""Steps until ranks act on a difference: by then all have heard of it, and stop at the same one."""
_ABSENT = "-"
Pair = tuple[int, int, int]
"""Who found a difference, in whose shard, and in which part of it."""
_SHOWN = 8
"""Differences that a message names."""
_NAMED = 64
"""Pieces that one rank names; a replica that diverged long ago differs in every one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks found about one checkpoint."""

    compared: bool
    """Every part was seen by two ranks, and they agree."""
    differences: tuple[ReplicaDifference, ...] = ()
    act_at: int = 0
    """The step in which all ranks act on differences."""

    @property
    def told(self) -> str:
        """What differs, for people."""
        shown = [str(one) for one in self.differences[:_SHOWN]]
        more = len(self.differences) - _SHOWN
        shown += [f"and {more} more, see ckpt.stats.differences"] if more > 0 else []
        return (
            "ranks that must have equal tensors do not: " + "; ".join(shown) + ". Either rank may "
            "be the wrong one: look for bad memory, or code that changes the model on one rank "
            "only, and go on from an earlier checkpoint (restore_latest); see check_replicas="
        )


_UNKNOWN = Verdict(False)


class Comparison:
    """One rank's part in comparing checkpoint after checkpoint; used by one thread."""

    def __init__(self, group: Group, name: str) -> None:
        """``name`` is the checkpointer's, the same on all ranks."""
        self._group = group
        self._prefix = f"ckpt/{name}/replicas"
        self._written: deque[list[str]] = deque()
        self._over = math.inf
        self._said = False

    def hurry(self, seconds: float) -> None:
        """Nobody wants to wait longer than this for what is still to come."""
        self._over = time.monotonic() + seconds

    def compare(
        self, id: CheckpointId, round: int, parts: Parts, memory: Any, witness: Witness | None
    ) -> Verdict:
        """Compare a captured shard, whose bytes are in ``memory``, with what others saw of it.

        ``round``: how often ranks have come to this step before.
        """
        base = f"{self._prefix}/{id.attempt}/{id.step}/{round}"
        mine = parts.of(self._group.rank)
        digests = {p.number: _digests(p, memory) for p in mine}
        seen = witness.digests() if witness is not None else []
        deadline = time.monotonic() + _PATIENCE
        pair: Pair | None = None
        try:
            self._clear()
            self._publish(base, [p.brief(digests[p.number]) for p in mine])
            pair = self._look(base, witness, seen, deadline)
            verdict = self._agree(base, pair, deadline)
            if not verdict["pairs"]:
                return Verdict(not verdict["short"])
            found = self._name(base, id.step, verdict["pairs"], digests, witness, seen)
            return Verdict(False, found, int(verdict["act_at"]))
        except (SapwoodError, RuntimeError, ValueError, KeyError, TypeError) as error:
            log.info("the replicas of %s are not compared by all ranks: %s", id, error)
            # What this rank has seen itself it has seen, whether or not it can tell anybody.
            return _UNKNOWN if pair is None else Verdict(False, (_difference(id.step, pair),))

    def absent(self, id: CheckpointId, round: int) -> None:
        """This rank has no shard of the checkpoint: the others need not wait for it."""
        base = f"{self._prefix}/{id.attempt}/{id.step}/{round}"
        try:
            self._clear()
            self._publish(base, [_ABSENT])
            self._arrive(base, short=True)
        except (SapwoodError, RuntimeError) as error:
            log.debug("nobody hears that %s is not captured here: %s", id, error)

    # -- one digest per part -----------------------------------------------------------------

    def _publish(self, base: str, briefs: Sequence[str]) -> None:
        keys = [f"{base}/{self._group.rank}"]
        if self._group.rank == 0:
            keys += [f"{base}/{name}" for name in ("count", "short", "odd", "verdict")]
        self._written.append(keys)
        self._group.store.set(keys[0], " ".join(briefs) or _ABSENT, timeout=_PATIENCE)

    def _look(
        self, base: str, witness: Witness | None, seen: Sequence[str] | None, deadline: float
    ) -> Pair | None:
        """Compare with the owner's digest, and count; what differs, if it does.

        Whoever has nothing to look at agrees with everybody.
        """
        odd, short = None, seen is None
        if witness is not None and seen is not None:
            part = witness.part
            told = self._await(f"{base}/{part.owner}", deadline)
            briefs = (told or _ABSENT).split()
            theirs = briefs[part.number] if part.number < len(briefs) else _ABSENT
            same_form = theirs.startswith(part.form)
            # Without the same form there are other tensors, which ``Agreement`` tells of, or
            # another digest: then nothing can be said.
            short = not same_form
            self._say_incomparable(part.owner, theirs)
            if same_form and theirs != part.brief(seen):
                odd = self._group.rank, part.owner, part.number
        if odd is not None:
            place = self._group.store.add(f"{base}/odd", 1, timeout=_PATIENCE)
            self._leave(f"{base}/odd/{place}", json.dumps(odd))
        self._arrive(base, short=short)
        return odd

    def _say_incomparable(self, owner: int, theirs: str) -> None:
        """Tell once that replicas are never compared, because packages differ."""
        kind = theirs.partition("-")[0]
        if kind in ("", FAST_ALGORITHM) or self._said:
            return
        self._said = True
        log.warning(
            "replicas cannot be compared: rank %d makes digests with %s, rank %d with %s; install "
            "the extra 'checkpoint' (xxhash) for all ranks or for none",
            self._group.rank,
            FAST_ALGORITHM,
            owner,
            kind,
        )

    def _arrive(self, base: str, *, short: bool) -> None:
        """Count this rank; the last one leaves the verdict."""
        store = self._group.store
        if short:
            store.add(f"{base}/short", 1, timeout=_PATIENCE)
        if store.add(f"{base}/count", 1, timeout=_PATIENCE) == self._group.world:
            verdict = json.dumps(self._sum_up(base))
            store.set(f"{base}/verdict", verdict, timeout=_PATIENCE)

    def _sum_up(self, base: str) -> dict[str, Any]:
        store = self._group.store
        pairs, deadline = [], time.monotonic() + _TELLING
        for place in range(1, store.add(f"{base}/odd", 0, timeout=_PATIENCE) + 1):
            told = self._await(f"{base}/odd/{place}", deadline)
            pairs += [json.loads(told)] if told else []
        short = store.add(f"{base}/short", 0, timeout=_PATIENCE)
        return {"pairs": pairs, "short": short, "act_at": self._group.step + _AHEAD}

    def _agree(self, base: str, mine: Pair | None, deadline: float) -> dict[str, Any]:
        """What all found; what was found so far, if somebody does not come in time."""
        told = self._await(f"{base}/verdict", deadline)
        if told is not None:
            found: dict[str, Any] = json.loads(told)
            return found
        known = {**self._sum_up(base), "short": self._group.world}
        if mine is not None and not known["pairs"]:
            known["pairs"] = [list(mine)]
        return known

    # -- only if they differ -----------------------------------------------------------------

    def _name(
        self,
        base: str,
        step: int,
        pairs: Sequence[Pair],
        digests: dict[int, list[str]],
        witness: Witness | None,
        seen: Sequence[str] | None,
    ) -> tuple[ReplicaDifference, ...]:
        """Find out which tensors differ; each witness tells all others."""
        rank, deadline = self._group.rank, time.monotonic() + _TELLING
        for number in {number for _, owner, number in pairs if owner == rank}:
            self._leave(f"{base}/{rank}/{number}", " ".join(digests[number]))
        for _, owner, number in [pair for pair in pairs if pair[0] == rank]:
            theirs = (self._await(f"{base}/{owner}/{number}", deadline) or "").split()
            assert witness is not None
            rows = _differing(witness.part.pieces, seen or (), theirs)
            self._leave(f"{base}/told/{rank}", json.dumps(rows))
        found: list[ReplicaDifference] = []
        deadline += _TELLING  # a witness waits for the owner before it tells
        for pair in pairs:
            told = self._await(f"{base}/told/{pair[0]}", deadline)
            rows = json.loads(told) if told else []
            found += [_difference(step, pair, *row) for row in rows] or [_difference(step, pair)]
        return tuple(found)

    def _leave(self, key: str, text: str) -> None:
        self._written[-1].append(key)
        self._group.store.set(key, text, timeout=_PATIENCE)

    # -- the store ---------------------------------------------------------------------------

    def _await(self, key: str, deadline: float) -> str | None:
        """What is written there; None if nothing is in time, or the group has failed."""
        store, pause = self._group.store, _FIRST_PAUSE
        while True:
            if store.has(key, timeout=_PATIENCE):
                return store.get(key, timeout=_PATIENCE).decode()
            if time.monotonic() > min(deadline, self._over) or self._group.failed:
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)

    def _clear(self) -> None:
        """Delete what this rank has written for comparisons that are long over."""
        while len(self._written) >= _KEPT:
            for key in self._written.popleft():
                self._group.store.delete(key, timeout=_PATIENCE)


def _digests(part: Part, memory: Any) -> list[str]:
    return [fast_digest(memory[p.at : p.at + p.nbytes]) for p in part.pieces]


def _difference(
    step: int, pair: Pair, file: str = "", name: str = "", start: int = 0, stop: int = 0
) -> ReplicaDifference:
    checker, owner, _ = pair
    return ReplicaDifference(
        step=step, ranks=(owner, checker), file=file, name=name, start=start, stop=stop
    )


def _differing(pieces: Sequence[Any], seen: Sequence[str], theirs: Sequence[str]) -> list[Any]:
    rows = [
        [p.file, p.name, p.start, p.stop]
        for p, here, there in zip(pieces, seen, theirs, strict=False)
        if here != there
    ]
    return rows[:_NAMED]
