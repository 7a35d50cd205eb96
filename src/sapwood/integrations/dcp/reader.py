"""Reading DCP checkpoints: all of it is verified before anything of the state dict is touched."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sapwood.errors import CheckpointError, MismatchError
from sapwood.integrations.dcp import saves
from sapwood.integrations.dcp.manifest import Item, Manifest, cuts
from sapwood.regular import open_regular, read_regular
from sapwood.tiers.digest import matches

__all__ = ["SapwoodReader"]

log = logging.getLogger(__name__)


class SapwoodReader(StorageReader):
    """For ``dcp.load``: the newest save of a place whose manifest and files are there.

    Args:
        place: the writer's folder; DCP's ``checkpoint_id`` takes its place.
        save: the name of one save, such as ``dcp-00000003``, in place of the newest.
    """

    def __init__(self, place: str | os.PathLike[str], *, save: str | None = None) -> None:
        """Nothing is read yet."""
        self.place = saves.place_of(place)
        self.save = save
        self.load_id = str(uuid4())
        """Tells loads apart; ``reset`` draws another."""
        self._home: Path | None = None
        self._manifest: Manifest | None = None
        self._items: dict[Any, Item] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a folder's name."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        self.load_id = str(uuid4())
        self._home, self._manifest, self._items = None, None, {}
        if checkpoint_id:
            self.place = saves.place_of(checkpoint_id)

    # Not "kwargs": DCP would take that for leave to read another file for each rank.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata of the newest sound save; one with a damaged manifest is passed over.

        Raises:
            CheckpointError: there is no save, or none is sound.
        """
        names = [self.save] if self.save else saves.saves(self.place)
        problems = []
        for name in names:
            try:
                self._manifest = _read_manifest(self.place / name)
            except CheckpointError as error:
                log.warning("%s is passed over: %s", name, error)
                problems.append(str(error))
                continue
            self._home = self.place / name
            metadata = self._manifest.metadata
            metadata.storage_data = {item.index: item for item in self._manifest.items}
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata
        what = "; ".join(problems) or "there is no save in it"
        raise CheckpointError(f"nothing can be loaded from {self.place}: {what}")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over where everything is."""
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read and verify all that this rank will need: an error here reaches every rank in time.

        Raises:
            CheckpointError: something is damaged; the message says what.
        """
        needed = {read.storage_index: self._items[read.storage_index] for read in plan.items}
        with closing(self._opened()) as files:
            for item in needed.values():
                data = files.read(item)
                if item.dtype is None:
                    _plain_value(item, data)
        assert self._home is not None
        plan.storage_data = self._home.name
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that no two ranks load different saves.

        Raises:
            MismatchError: a save was published while the ranks were looking.
        """
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise MismatchError(
                f"ranks are about to load different saves ({', '.join(chosen)}): one was published "
                "meanwhile; load again, or name one with SapwoodReader(place, save=...)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item to where the planner wants it, verified once more on the way."""
        with closing(self._opened()) as files:
            for item, reads in self._by_item(plan.items):
                data = files.read(item)
                if item.dtype is None:
                    for read in reads:
                        planner.load_bytes(read, _fresh(_plain_value(item, data)))
                else:
                    _copy(item, _tensor(item, data), reads, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _by_item(self, reads: Iterable[ReadItem]) -> list[tuple[Item, list[ReadItem]]]:
        """So that a chunk of which several parts are wanted is read once, in order of the files."""
        grouped: dict[Any, list[ReadItem]] = {}
        for read in reads:
            grouped.setdefault(read.storage_index, []).append(read)
        rows = [(self._items[index], theirs) for index, theirs in grouped.items()]
        return sorted(rows, key=lambda row: (row[0].file, row[0].start))

    def _opened(self) -> _Files:
        assert self._home is not None
        assert self._manifest is not None
        return _Files(self._home, self._manifest.algorithm)


class _Files:
    """The data files of a save, opened as they are needed."""

    def __init__(self, home: Path, algorithm: str) -> None:
        self._home = home
        self._algorithm = algorithm
        self._fds: dict[str, int] = {}

    def read(self, item: Item) -> bytearray:
        """An item's bytes, verified."""
        data = bytearray(item.nbytes)
        memory = memoryview(data)
        try:
            if item.file not in self._fds:
                self._fds[item.file] = open_regular(self._home / item.file)
            done = 0
            while done < item.nbytes:
                count = os.preadv(self._fds[item.file], [memory[done:]], item.start + done)
                if not count:
                    raise CheckpointError(f"{self._home / item.file} is truncated")
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self._home / item.file}: {error}") from error
        for (start, stop), mark in zip(cuts(item.nbytes), item.digests, strict=True):
            if not matches(memory[start:stop], mark, self._algorithm):
                raise CheckpointError(
                    f"{self._home} is damaged: bytes {start} to {stop} of {item.index.fqn} do not "
                    f"match their checksum; {_others(self._home)}"
                )
        return data

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _read_manifest(home: Path) -> Manifest:
    path = home / saves.MANIFEST
    try:
        manifest = Manifest.decode(read_regular(path), str(path))
        for name, size in manifest.files.items():
            found = (home / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{home / name} has {found} bytes, expected {size}")
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror or error}") from error
    return manifest


def _others(home: Path) -> str:
    rest = [name for name in saves.saves(home.parent) if name != home.name]
    return f"other saves: {', '.join(rest)}" if rest else "there is no other save"


def _tensor(item: Item, data: bytearray) -> Tensor:
    dtype = item.torch_dtype()
    if not data:
        return torch.empty(item.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(item.shape)


def _copy(item: Item, tensor: Tensor, reads: Iterable[ReadItem], planner: LoadPlanner) -> None:
    for read in reads:
        assert read.type is LoadItemType.TENSOR
        part = narrow_tensor_by_index(tensor, read.storage_offsets, read.lengths)
        target = planner.resolve_tensor(read).detach()
        if target.size() != part.size():
            raise CheckpointError(
                f"{item.index.fqn}: the save has {list(part.size())}, the state dict "
                f"{list(target.size())}"
            )
        target.copy_(part)
        planner.commit_tensor(read, target)


def _plain_value(item: Item, data: bytearray) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{item.index.fqn} is not a plain value and would have to run code to be loaded; it "
            "is refused"
        ) from error


def _fresh(value: Any) -> io.BytesIO:
    """What the planner unpickles, without restrictions: bytes of our own making, not the disk's."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
