"""How two versions differ, tensor by tensor, a block at a time; it can be ended in between.

Tensors that are known to be equal are not read. Elements that are not numbers are counted apart:
one NaN would hide what happened to all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.report.store.elements import is_complex, values_of
from sapwood.report.store.plain import number, short
from sapwood.repository.manifest import TensorRow
from sapwood.store.stored import StoredModel

__all__ = ["Difference", "Progress", "differences", "page_of", "summary"]

KINDS = ("changed", "reshaped", "added", "removed", "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one tensor differs."""

    at: int
    """Which one of all."""
    name: str
    kind: str
    before: TensorRow | None
    after: TensorRow | None
    elements: int = 0
    """How many differ in any bit."""
    odd: int = 0
    """How many of these are NaN or infinite on either side; they count in nothing below."""
    largest: float = 0.0
    relative: float = 0.0
    """The norm of the difference, divided by that of the tensor before."""


Progress = Callable[[int, int, str], None]
"""Told bytes that were compared, of how many, and the tensor. What it raises ends the work."""


def differences(
    before: StoredModel,
    after: StoredModel,
    canonical: Mapping[int, int | None],
    progress: Progress,
) -> list[Difference]:
    """Every tensor of either, in the order of the later version, then what was removed."""
    names = [*after, *(name for name in before if name not in after)]
    rows = [(name, before.row(name), after.row(name)) for name in names]
    total = sum(_work(old, new, canonical) for _, old, new in rows)
    done = 0
    found = []
    for at, (name, old, new) in enumerate(rows):
        kind = _kind(old, new, canonical)
        progress(done, total, name)
        if kind is not None or old is None or new is None:
            kind = kind or "same"
            found.append(Difference(at=at, name=name, kind=kind, before=old, after=new))
            continue
        measure = _Measure(old.dtype)
        for mine, theirs in zip(before.blocks(old), after.blocks(new), strict=True):
            measure.add(mine, theirs)
            done += len(theirs)
            progress(done, total, name)
        found.append(measure.found(at, name, old, new))
    progress(total, total, "")
    return found


def _kind(
    old: TensorRow | None, new: TensorRow | None, canonical: Mapping[int, int | None]
) -> str | None:
    """What can be said without reading; None if bytes must be compared."""
    if old is None or new is None:
        return "added" if old is None else "removed"
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return "reshaped"
    if old.blob == new.blob:
        return "same"
    one, other = canonical.get(old.blob), canonical.get(new.blob)
    return "same" if one is not None and one == other else None


def _work(old: TensorRow | None, new: TensorRow | None, canonical: Mapping[int, int | None]) -> int:
    return new.nbytes if new is not None and _kind(old, new, canonical) is None else 0


class _Measure:
    """Sums over the blocks of one tensor."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._elements = self._odd = 0
        self._largest = 0.0
        self._distance = self._norm = 0.0

    def add(self, old: memoryview, new: memoryview) -> None:
        """One block of both."""
        one, other = values_of(old, self._dtype), values_of(new, self._dtype)
        changed = _different(old, new, len(one))
        with np.errstate(all="ignore"):  # sums may be infinite, which is said as such
            wide = np.complex128 if is_complex(self._dtype) else np.float64
            a, b = one.astype(wide), other.astype(wide)
            fine = np.isfinite(a) & np.isfinite(b)
            apart = np.abs(b[fine] - a[fine])
            self._elements += int(changed.sum())
            self._odd += int((changed & ~fine).sum())
            self._largest = max(self._largest, float(apart.max(initial=0.0)))
            self._distance += float((apart**2).sum())
            self._norm += float((np.abs(a[np.isfinite(a)]) ** 2).sum())

    def found(self, at: int, name: str, old: TensorRow, new: TensorRow) -> Difference:
        """All of it."""
        relative = 0.0
        if self._distance:
            # A norm that float64 cannot hold has no ratio; nor has one of nothing but zeros.
            measurable = self._norm and math.isfinite(self._norm)
            relative = math.sqrt(self._distance / self._norm) if measurable else math.inf
        return Difference(
            at=at,
            name=name,
            kind="changed" if self._elements else "same",
            before=old,
            after=new,
            elements=self._elements,
            odd=self._odd,
            largest=self._largest,
            relative=relative,
        )


def _different(old: memoryview, new: memoryview, elements: int) -> npt.NDArray[np.bool_]:
    """Which elements differ in any bit."""
    one, other = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if elements > len(one):  # two in a byte
        apart = one ^ other
        return np.asarray(np.stack((apart & 15, apart >> 4), -1).reshape(-1) != 0)
    one, other = one.reshape(elements, -1), other.reshape(elements, -1)
    width = one.shape[1]
    if width in (2, 4, 8):
        kind = np.dtype(f"u{width}")
        return np.asarray(one.view(kind)[:, 0] != other.view(kind)[:, 0])
    return np.asarray((one != other).any(axis=1))


def summary(found: Sequence[Difference]) -> dict[str, Any]:
    """How many of each kind."""
    kinds = dict.fromkeys(KINDS, 0)
    for one in found:
        kinds[one.kind] += 1
    return {"tensors": len(found), **kinds}


def page_of(
    found: Sequence[Difference], *, kind: str, sort: str, offset: int, limit: int
) -> dict[str, Any]:
    """A page of differences; kind "" is all that are not the same."""
    rows = [one for one in found if (one.kind == kind if kind else one.kind != "same")]
    if sort in ("relative", "largest"):
        rows.sort(key=lambda one: -float(getattr(one, sort)))
    return {
        "total": len(rows),
        "offset": offset,
        "most": number(max((r.relative for r in rows if math.isfinite(r.relative)), default=0.0)),
        "rows": [_plain(one) for one in rows[offset : offset + limit]],
    }


def _plain(one: Difference) -> dict[str, Any]:
    row = one.after or one.before
    assert row is not None
    return {
        "at": one.at,
        "name": short(one.name),
        "kind": one.kind,
        "before": _type(one.before),
        "after": _type(one.after),
        "count": math.prod(row.shape),
        "elements": one.elements,
        "odd": one.odd,
        "largest": number(one.largest),
        "relative": number(one.relative),
    }


def _type(row: TensorRow | None) -> str | None:
    if row is None:
        return None
    return short(f"{row.dtype} {' × '.join(map(str, row.shape)) or 'scalar'}", 120)  # noqa: RUF001
