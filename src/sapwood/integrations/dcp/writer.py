"""Writing DCP checkpoints such that each is there whole or not at all."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.integrations.dcp import saves
from sapwood.integrations.dcp.manifest import Item, Manifest, cuts
from sapwood.storage.files import Files, FileWriter
from sapwood.tiers.digest import digest

__all__ = ["SapwoodWriter"]

log = logging.getLogger(__name__)
_ALIGNMENT = 64


class SapwoodWriter(StorageWriter):
    """For ``dcp.save`` and ``dcp.async_save``: every save is a new folder in a place.

    Of saves that overlap, the one that ends last counts as the newest; DCP asks to wait for the
    future of one before the next is begun.

    Args:
        place: a folder that all ranks share; DCP's ``checkpoint_id`` takes its place.
        keep: how many saves to keep there, the new one included; None keeps all. Older ones go
            only once a new one is whole.
    """

    def __init__(self, place: str | os.PathLike[str], *, keep: int | None = 2) -> None:
        """Nothing is written yet."""
        if keep is not None and keep < 1:
            raise ConfigError(f"keep is {keep}, expected at least 1, or None")
        self.place = saves.place_of(place)
        self.keep = keep
        self.save_id = str(uuid4())
        """Tells saves apart; ``reset`` draws another, as it does for torch's own writer."""
        self._files = Files()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a folder's name."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins."""
        self.save_id = str(uuid4())
        if checkpoint_id:
            self.place = saves.place_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What DCP tells planners, and keeps with the save: where it is, and which one."""
        return StorageMeta(checkpoint_id=str(self.place), save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be made safe.

        Raises:
            ConfigError: ranks would publish without knowing of each other.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False lets every rank publish for itself, so a save could be "
                "half there; leave it out, or use torch's FileSystemWriter"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add: ranks need no names from each other."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to a file of its own, and see it to the device.

        Raises:
            CheckpointError: a value could not be read back without unpickling code.
            TierError: the file cannot be written.
        """
        path = self.place / saves.INCOMING / f"{secrets.token_hex(16)}.bin"
        try:
            self._files.make_folder(path.parent)
            with self._files.create(path) as writer:
                results = _write(plan.items, planner, writer)
                writer.sync()
            self._files.sync_folder(path.parent)
        except BaseException as error:
            with suppress(OSError):
                path.unlink()
            if isinstance(error, OSError) and not isinstance(error, TierError):
                raise TierError(f"cannot write {path}: {error.strerror or error}") from error
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the ranks' files together, write the manifest, and publish the save.

        Raises:
            TierError: it could not be done; what was saved before is untouched.
        """
        try:
            self._publish(metadata, results)
        except OSError as error:
            if isinstance(error, TierError):
                raise
            raise TierError(
                f"cannot publish a save in {self.place}: {error}; all ranks must see the same "
                "folder"
            ) from error

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        name = saves.claim(self.place, self._files)
        try:
            self._put_together(name, metadata, results)
        except BaseException:
            # On a full disk, what came to nothing must not take the room of the next save.
            files = [r[0].storage_data.file for r in results if r]
            saves.forget(self.place, f"{name}.partial", files)
            raise
        self._tidy()

    def _put_together(
        self, name: str, metadata: Metadata, results: list[list[WriteResult]]
    ) -> None:
        partial = self.place / f"{name}.partial"
        items: list[Item] = []
        sizes: dict[str, int] = {}
        for number, theirs in enumerate(r for r in results if r):
            source = self.place / saves.INCOMING / theirs[0].storage_data.file
            target = partial / f"rank-{number}.bin"
            self._files.publish(source, target)
            items += [dataclasses.replace(r.storage_data, file=target.name) for r in theirs]
            sizes[target.name] = target.stat().st_size
        self._files.sync_folder(partial)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        manifest = Manifest(metadata=metadata, items=tuple(items), files=sizes)
        self._files.write_whole(partial / saves.MANIFEST, manifest.encode())
        self._files.publish(partial, self.place / name)
        self._files.sync_folder(self.place)
        metadata.storage_data = {item.index: item for item in items}

    def _tidy(self) -> None:
        """Remove old saves; the new one is safe, so that this fails is no failure of it."""
        try:
            if self.keep is not None:
                for old in saves.saves(self.place)[self.keep :]:
                    saves.drop(self.place, old, self._files)
            saves.clear_leftovers(self.place)
        except OSError as error:
            log.warning("old saves in %s could not be removed: %s", self.place, error)


def _write(items: list[WriteItem], planner: SavePlanner, writer: FileWriter) -> list[WriteResult]:
    results = []
    at = 0
    for item in items:
        value = planner.resolve_data(item)
        memory, dtype, shape = _bytes_of(item, value)
        writer.write_at(at, memory)
        stored = Item(
            index=item.index,
            file=Path(writer.path).name,
            start=at,
            nbytes=memory.nbytes,
            digests=tuple(digest(memory[a:b]) for a, b in cuts(memory.nbytes)),
            dtype=dtype,
            shape=shape,
        )
        results.append(
            WriteResult(index=item.index, size_in_bytes=stored.nbytes, storage_data=stored)
        )
        at += -(-memory.nbytes // _ALIGNMENT) * _ALIGNMENT
    if items:
        writer.resize(at)
    return results


def _bytes_of(item: WriteItem, value: Any) -> tuple[memoryview, str | None, tuple[int, ...]]:
    name = item.index.fqn
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)
        _check_plain(name, value)
        return memoryview(value.getvalue()), None, ()
    assert isinstance(value, Tensor)
    if value.layout != torch.strided or value.is_meta:
        raise CheckpointError(f"{name} is {value.layout} on {value.device}, and cannot be saved")
    tensor = value.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(raw), dtype, tuple(tensor.shape)


def _check_plain(name: str, value: io.BytesIO) -> None:
    """Refuse at saving what a load would have to refuse."""
    try:
        torch.load(io.BytesIO(value.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} is neither a tensor nor a plain value, so it could only be loaded by running "
            "code from the checkpoint; save its state_dict, or numbers, text, lists and "
            "dictionaries of them"
        ) from error
