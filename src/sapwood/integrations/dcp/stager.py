"""Copying a state dict aside, into memory that is there already."""

from __future__ import annotations

import gc
import math
import queue
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from sapwood.buffers import Arena
from sapwood.errors import CheckpointError, ConfigError, DeadlineError, UsageError

__all__ = ["SapwoodStager"]

_ALIGNMENT = 64


class SapwoodStager(AsyncStager):
    """For ``dcp.async_save``: stages into a few arenas that are kept from save to save.

    Memory that was written before costs no page faults, which are most of what staging costs
    otherwise. An arena is used again once nothing of the save it was staged for is left.

    Args:
        buffers: how many saves may be under way at once.
        timeout: seconds to wait for one of them to end.
    """

    def __init__(self, *, buffers: int = 2, timeout: float = 600.0) -> None:
        """Memory is made when the first state dict comes, and its size is known."""
        if buffers < 1 or not 0 < timeout < math.inf:
            raise ConfigError(f"buffers={buffers}, timeout={timeout}; expected 1 or more, seconds")
        self._timeout = timeout
        # Given back from wherever the last tensor dies, which may be the garbage collector inside
        # any call: this queue, unlike a lock, allows that.
        self._free: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(None)
        self._buffers = buffers
        self._closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state dict that later steps do not change.

        Raises:
            CheckpointError: it holds tensors of a kind that cannot be staged.
            DeadlineError: earlier saves did not end in time.
        """
        if self._closed:
            raise UsageError("the stager is closed")
        sizes: list[int] = []
        _mapped(state_dict, lambda tensor: sizes.append(_room(tensor)), "state dict")
        arena = self._take(max(sum(sizes), 1))
        view = arena.bytes[:]
        # The storage of every staged tensor keeps this very array alive.
        weakref.finalize(view, self._give_back, arena).atexit = False
        memory = torch.from_numpy(view)
        at = 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal at
            start, at = at, at + _room(tensor)
            return _staged(tensor, memory[start:at])

        staged: dict[str, Any] = _mapped(state_dict, copy, "state dict")
        return staged

    def synchronize_staging(self) -> None:
        """Staging is over when ``stage`` returns."""

    def close(self) -> None:
        """Give the memory back; what is still being written keeps its own until it is done."""
        self._closed = True
        while not self._free.empty():
            arena = self._free.get_nowait()
            if arena is not None:
                arena.close()

    def _give_back(self, arena: Arena) -> None:
        if self._closed:
            arena.close()
        else:
            self._free.put(arena)

    def _take(self, nbytes: int) -> Arena:
        if self._free.empty():
            gc.collect()  # a finished save may be held by a cycle, such as an error's traceback
        try:
            arena = self._free.get(timeout=self._timeout)
        except queue.Empty:
            raise DeadlineError(
                f"{self._buffers} saves are under way, and none ended in {self._timeout:g} s; wait "
                "for the future of an earlier save, or give the stager more buffers"
            ) from None
        if arena is None or arena.nbytes < nbytes:
            if arena is not None:
                arena.close()
            try:
                arena = Arena(nbytes, label="dcp")
            except BaseException:
                self._free.put(None)  # the next save may find the memory
                raise
        return arena


def _mapped(value: Any, change: Callable[[Tensor], Any], where: str) -> Any:
    """The same structure with its tensors changed; other values as they are, containers new."""
    if isinstance(value, dict):
        return {k: _mapped(v, change, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_mapped(v, change, f"{where}[{n}]") for n, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value).__name__ == "ShardedTensor":
        raise CheckpointError(f"{where} is a ShardedTensor; SapwoodStager stages DTensor instead")
    return change(value) if isinstance(value, Tensor) else value


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        assert isinstance(local, Tensor)
        return local.detach()
    return tensor.detach()


def _room(tensor: Tensor) -> int:
    return -(-_local(tensor).numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _staged(tensor: Tensor, memory: Tensor) -> Tensor:
    local = _local(tensor)
    nbytes = local.numel() * local.element_size()
    place = memory[:nbytes].view(local.dtype).view(local.shape)
    place.copy_(local)
    if not isinstance(tensor, DTensor):
        return place
    made: Tensor = DTensor.from_local(
        place,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made
