"""What a donor has beside tensors, of any size, as messages of sizes that both sides know.

The first message has ``SLOT`` bytes and begins with the size of all; only if that is more do others
follow. Both sides cut the rest in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import CloneError
from sapwood.state.packed import Packed, unpack
from sapwood.tiers.digest import digest, matches
from sapwood.transport.base import Link, Transfer

__all__ = ["SLOT", "from_bytes", "receive", "send", "to_bytes"]

SLOT = 256 * 1024
CHUNK = 8 * 2**20
"""Of what does not fit into the slot: so much is in flight, and on a GPU, at a time."""
_SIZE, _MARK = 8, 32
_HEAD = _SIZE + _MARK
_ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]


def to_bytes(packed: Packed, algorithm: str) -> Bytes:
    """The size of all, a checksum of the rest, the size of the JSON, the JSON, and the region."""
    text = json.dumps(packed.extras).encode()
    begin = _region_at(len(text))
    memory = fresh_memory(begin + packed.nbytes)
    memory[:begin] = 0
    _put(memory, 0, len(memory).to_bytes(_SIZE, "big"))
    _put(memory, _HEAD, len(text).to_bytes(_SIZE, "big"))
    _put(memory, _HEAD + _SIZE, text)
    packed.write(lambda at, data: _put(memory, at, data), begin)
    _put(memory, _SIZE, digest(memory[_HEAD:], algorithm).encode())
    return memory


def from_bytes(memory: Bytes, algorithm: str) -> dict[str, Any]:
    """The reverse of ``to_bytes``.

    Raises:
        CloneError: the bytes were changed on their way.
    """
    mark = bytes(memory[_SIZE:_HEAD]).rstrip(b"\0").decode("ascii", "replace")
    if len(memory) < _HEAD + _SIZE or not matches(memory[_HEAD:], mark, algorithm):
        raise CloneError("what the run has beside tensors was changed on its way")
    size = int.from_bytes(bytes(memory[_HEAD : _HEAD + _SIZE]), "big")
    text = bytes(memory[_HEAD + _SIZE : _HEAD + _SIZE + size])
    return unpack(json.loads(text), memory[_region_at(size) :])


def send(
    memory: Bytes, link: Link, ends: list[int], tag: int, device: str, timeout: float
) -> list[Transfer]:
    """Send bytes to some clones, as messages from ``tag`` on; those still under way at the end.

    Raises:
        TransportError: a clone does not take them.
    """
    slot = np.zeros(SLOT, np.uint8)
    first = memory[:SLOT]
    slot[: len(first)] = first
    under_way = _send(slot, link, ends, tag, device)
    for number, (start, stop) in enumerate(_cuts(len(memory)), tag + 1):
        sent = _send(memory[start:stop], link, ends, number, device)
        for transfer in under_way:
            transfer.wait(timeout)
        under_way = sent
    return under_way


def _send(data: Bytes, link: Link, ends: list[int], tag: int, device: str) -> list[Transfer]:
    there = torch.from_numpy(data).to(device)
    return [link.send(end, tag, there) for end in ends]


def receive(
    slot: Tensor, link: Link, donor: int, tag: int, empty: Callable[[int], Tensor], timeout: float
) -> Bytes:
    """The bytes of which ``slot`` has arrived as message ``tag``; ``empty`` gives memory for more.

    Raises:
        TransportError: the donor is gone.
    """
    first = slot.cpu().numpy()
    memory = fresh_memory(int.from_bytes(bytes(first[:_SIZE]), "big"))
    memory[:SLOT] = first[: len(memory)]
    for number, (start, stop) in enumerate(_cuts(len(memory)), tag + 1):
        chunk = empty(stop - start)
        link.recv(donor, number, chunk).wait(timeout)
        memory[start:stop] = chunk.cpu().numpy()
    return memory


def _cuts(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(SLOT, nbytes, CHUNK):
        yield start, min(start + CHUNK, nbytes)


def _region_at(text: int) -> int:
    return -(-(_HEAD + _SIZE + text) // _ALIGNMENT) * _ALIGNMENT


def _put(memory: Bytes, at: int, data: Any) -> None:
    found = np.frombuffer(data, np.uint8)
    memory[at : at + len(found)] = found
