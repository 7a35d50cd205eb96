"""Looking whether everything a repository of objects promises is there and right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from sapwood.errors import NotFound, SapwoodError
from sapwood.repository.base import NOTHING, BlobPart
from sapwood.repository.objects.blobs import Blobs
from sapwood.repository.objects.head import Head
from sapwood.repository.objects.journal import Journal
from sapwood.repository.objects.layout import LARGEST
from sapwood.repository.objects.view import View
from sapwood.repository.verifying import Verified
from sapwood.storage import Keeper

__all__ = ["verify"]

_BLOCK = 16 * 2**20


def verify(
    keeper: Keeper, journal: Journal, view: View, *, said: Callable[[str], None]
) -> Verified:
    """Read every log, every head, and every run of bytes once."""
    found, blobs = Verified(), Blobs()
    found_blobs: dict[int, None] = {}
    for name, keys in journal.logs().items():
        try:
            journal.take(name, keys)
        except SapwoodError as error:
            found.problems.append(f"{name}: {error}")
    for id in sorted(view.live()):
        record = view.record(id)
        found.models += 1
        try:
            content = keeper.get(view.saved[id].head, limit=LARGEST)
            head = Head.decode(content, view.saved[id].head)
        except SapwoodError as error:
            if _is_there(journal, view, id):
                found.problems.append(f"{record.reference}: {error}")
            continue
        names = {number: name for name, number in reversed(head.manifest.names)}
        for number, at in enumerate(head.manifest.blobs):
            if at != NOTHING:
                user = (id, f"{record.reference} {names.get(number, number)}")
                found_blobs[blobs.number(head.rows[at], user, apart=True)] = None
    for blob in found_blobs:
        said(f"reading {blobs.who(blob)}")
        found.blobs += 1
        found.nbytes += blobs[blob].row.nbytes
        problem = _problem(keeper, blobs, blob)
        if problem and any(_is_there(journal, view, user) for user, _ in blobs[blob].users):
            found.problems.append(problem)
    return found


def _problem(keeper: Keeper, blobs: Blobs, blob: int) -> str | None:
    row, digest = blobs[blob].row, hashlib.sha256()
    memory = memoryview(bytearray(min(row.nbytes, _BLOCK)))
    try:
        for start in range(0, row.nbytes, _BLOCK):
            block = memory[: min(_BLOCK, row.nbytes - start)]
            blobs.read(keeper, [BlobPart(blob, start, block)], check=False)
            digest.update(block)
    except NotFound as error:
        return f"{blobs.who(blob)}: {error}; a pack is missing"
    except SapwoodError as error:
        return str(error)
    if digest.digest() == row.digest:
        return None
    pack, start = blobs[blob].spots[0]
    return (
        f"{blobs.who(blob)}: bytes {start} to {start + row.nbytes} of {pack} are not what was "
        "written: they do not match their digest"
    )


def _is_there(journal: Journal, view: View, id: int) -> bool:
    """Whether a version is there still: what others remove meanwhile is no problem."""
    try:
        journal.sync(view.saved[id].name)
    except SapwoodError:
        return True
    return view.is_live(id)
