"""The files a tier makes for other tools, beyond what a restore needs: headers and manifests."""

from __future__ import annotations

import os
from pathlib import Path

from sapwood.cli.verbs.ckpt.places import Place
from sapwood.errors import SapwoodError, TierError
from sapwood.regular import open_regular
from sapwood.state.catalog import Catalog, FileLayout
from sapwood.storage.files import Files
from sapwood.tiers.record import CheckpointId

__all__ = ["damaged_headers", "problem_of", "rewrite_header"]


def problem_of(place: Place, id: CheckpointId) -> str | None:
    """What is wrong with a tier's published files; None if nothing is, or it publishes none."""
    check = getattr(place.tier, "verify_files", None)
    if place.folder is not None:
        published = (place.folder / id.folder).is_dir()
        check = getattr(place.tier, "check", None) if published else None
    if check is None:
        return None
    try:
        check(id)
    except SapwoodError as error:
        return str(error)
    return None


def damaged_headers(
    place: Place, id: CheckpointId, catalog: Catalog
) -> list[tuple[Path, FileLayout]]:
    """Assembled files whose header is not what the catalog says, so that no tool can read them."""
    if place.folder is None:
        return []
    found = []
    for layout in catalog.layouts.values():
        path = place.folder / id.folder / layout.filename
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                if file.read(len(layout.header)) != layout.header:
                    found.append((path, layout))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TierError(f"cannot read {path}: {error.strerror or error}") from error
    return found


def rewrite_header(path: Path, layout: FileLayout) -> None:
    """Write the header a file must have; it follows from the catalog alone."""
    with Files().share(path) as writer:
        writer.write_at(0, layout.header)
        writer.sync()
