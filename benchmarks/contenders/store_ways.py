"""Ways to keep models and give tensors back: what every contender of a store benchmark can do."""

from __future__ import annotations

import io
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .files import sync_path, sync_tree, tree_bytes

__all__ = ["PAGE", "WAYS", "Files", "Memcpy", "Way", "bytes_view", "touch"]

PAGE = 4096
Tensors = Mapping[str, Tensor]


def bytes_view(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def touch(tensor: Tensor) -> int:
    """Read a byte of every page, as a first use does."""
    return int(bytes_view(tensor)[::PAGE].sum())


class Way(ABC):
    """One way of keeping models; ``folder`` is its own and is removed by whoever made it."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.folder, self.durability = folder, durability
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def save(self, name: str, tensors: Tensors) -> None: ...

    @abstractmethod
    def load(self, name: str, out: Tensors) -> None:
        """Fill tensors with those of the same name: all of a model, or some."""

    def attach(self, name: str, names: Sequence[str]) -> int | None:
        """Touch tensors once without copying them; None where that cannot be done."""
        return None

    @abstractmethod
    def remove(self, name: str) -> None: ...

    def settle(self) -> None:
        """Untimed: end what a save left for later, so that it disturbs nobody else."""
        return

    def stored(self) -> int:
        return tree_bytes(self.folder)

    def forget(self) -> None:
        """Take this way's files out of the page cache."""
        os.sync()
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        return


class Files(Way):
    """One file, or one folder, for each model; synced where that is asked for."""

    suffix = ""

    def path(self, name: str) -> Path:
        return self.folder / (name + self.suffix)

    def save(self, name: str, tensors: Tensors) -> None:
        self.write(self.path(name), tensors)
        if self.durability == "synced":
            sync_tree(self.path(name)) if self.path(name).is_dir() else sync_path(self.path(name))
            sync_path(self.folder)

    @abstractmethod
    def write(self, path: Path, tensors: Tensors) -> None: ...

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class TorchSave(Files):
    suffix = ".pt"

    def write(self, path: Path, tensors: Tensors) -> None:
        torch.save(dict(tensors), path)

    def load(self, name: str, out: Tensors) -> None:
        # Mapped, so that a partial load reads what it asks for.
        loaded = torch.load(self.path(name), mmap=True, weights_only=True)
        for key, target in out.items():
            target.copy_(loaded[key])

    def attach(self, name: str, names: Sequence[str]) -> int:
        loaded = torch.load(self.path(name), mmap=True, weights_only=True)
        return sum(touch(loaded[key]) for key in names)


class Safetensors(Files):
    """Through ``safe_open``, which maps the file."""

    suffix = ".safetensors"

    def write(self, path: Path, tensors: Tensors) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), path)

    def load(self, name: str, out: Tensors) -> None:
        from safetensors import safe_open

        with safe_open(self.path(name), "pt") as file:
            for key, target in out.items():
                target.copy_(file.get_tensor(key))

    def attach(self, name: str, names: Sequence[str]) -> int:
        from safetensors import safe_open

        with safe_open(self.path(name), "pt") as file:
            return sum(touch(file.get_tensor(key)) for key in names)


class SafetensorsRead(Safetensors):
    """Read with system calls straight into the targets, as loaders on network file systems do."""

    def load(self, name: str, out: Tensors) -> None:
        with self.path(name).open("rb", buffering=0) as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            for key, target in out.items():
                begin, _ = header[key]["data_offsets"]
                os.preadv(file.fileno(), [memoryview(bytes_view(target))], 8 + size + begin)

    def attach(self, name: str, names: Sequence[str]) -> None:
        return None


class Hdf5(Files):
    suffix = ".h5"

    def write(self, path: Path, tensors: Tensors) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for key, tensor in tensors.items():
                file.create_dataset(key, data=tensor.numpy())

    def load(self, name: str, out: Tensors) -> None:
        import h5py

        with h5py.File(self.path(name), "r") as file:
            for key, target in out.items():
                file[key].read_direct(target.numpy())


class Dcp(Files):
    """torch.distributed.checkpoint, as one process uses it."""

    def write(self, path: Path, tensors: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, sync_files=self.durability == "synced")
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

    def load(self, name: str, out: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(out), checkpoint_id=self.path(name), no_dist=True)


class FastSafetensors(Safetensors):
    """fastsafetensors reads the files of safetensors; without a GPU into memory of its own."""

    def load(self, name: str, out: Tensors) -> None:
        from fastsafetensors import fastsafe_open

        with fastsafe_open([str(self.path(name))], nogds=True, device="cpu") as file:
            for key, target in out.items():
                target.copy_(file.get_tensor(key))

    def attach(self, name: str, names: Sequence[str]) -> None:
        return None


class Tensorizer(Files):
    suffix = ".tensors"

    def write(self, path: Path, tensors: Tensors) -> None:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(path))
        serializer.write_state_dict(dict(tensors))
        serializer.close()

    def load(self, name: str, out: Tensors) -> None:
        from tensorizer import TensorDeserializer

        wanted = set(out)
        with TensorDeserializer(
            str(self.path(name)), device="cpu", filter_func=wanted.__contains__
        ) as file:
            for key, target in out.items():
                target.copy_(file[key])


class WholeModel(Way):
    """A stand-in for FlameStore: its architecture as JSON and all bytes in one value, in memory.

    Here the memory is this process's own, so nothing is sent: a lower bound of what it takes.
    """

    def __init__(self, folder: Path, durability: str) -> None:
        super().__init__(folder, durability)
        self.kept: dict[str, tuple[str, bytes]] = {}

    def save(self, name: str, tensors: Tensors) -> None:
        graph = {key: list(tensor.shape) for key, tensor in tensors.items()}
        whole = io.BytesIO()
        for tensor in tensors.values():
            whole.write(memoryview(bytes_view(tensor)))
        self.kept[name] = json.dumps(graph), whole.getvalue()

    def load(self, name: str, out: Tensors) -> None:
        graph, whole = self.kept[name]
        arrived, at = bytearray(whole), 0  # the whole model comes, whatever is asked for
        for key, shape in json.loads(graph).items():
            size = 4 * torch.Size(shape).numel()
            if key in out:
                bytes_view(out[key])[:] = np.frombuffer(arrived, np.uint8, size, at)
            at += size

    def remove(self, name: str) -> None:
        self.kept.pop(name, None)

    def stored(self) -> int:
        return sum(len(whole) for _, whole in self.kept.values())


class Memcpy(Way):
    """The limit: the same bytes copied into memory that is there already, tensor by tensor."""

    def __init__(self, folder: Path, durability: str, slab: Tensors) -> None:
        """``slab`` is where a save copies to; a load copies from what was saved last."""
        super().__init__(folder, durability)
        self.slab, self.saved = slab, slab

    def save(self, name: str, tensors: Tensors) -> None:
        self.saved = tensors
        for key, tensor in tensors.items():
            self.slab[key].copy_(tensor)

    def load(self, name: str, out: Tensors) -> None:
        for key, target in out.items():
            target.copy_(self.saved[key])

    def attach(self, name: str, names: Sequence[str]) -> int:
        return sum(touch(self.saved[key]) for key in names)

    def remove(self, name: str) -> None:
        return

    def stored(self) -> int:
        return sum(tensor.nbytes for tensor in self.slab.values())


WAYS: dict[str, type[Way]] = {
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "safetensors read": SafetensorsRead,
    "hdf5": Hdf5,
    "dcp": Dcp,
    "fastsafetensors": FastSafetensors,
    "tensorizer": Tensorizer,
    "whole model": WholeModel,
}
