"""Reading the memory of another process, where the system allows it: one copy instead of two.

Linux allows it to who may trace the other: a process of the same user, unless Yama forbids that
(``kernel.yama.ptrace_scope``), which a process can lift for itself. Whether it works is found out
by trying: each side reads something only the other can know, and says what it was.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sapwood.runtime.peer import peer_process

__all__ = ["Permission", "ReadError", "Span", "probe", "read_memory", "spans_of"]

_PLACE = struct.Struct("!Q")
_SECRET_BYTES = 16
_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)
_MOST = 1024  # Linux takes no more pieces in one call

Span = tuple[int, int]
"""An address, and a number of bytes."""


class ReadError(OSError):
    """The other process's memory cannot be read."""


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class Permission:
    """While one is held, other processes of this user may read this one, whatever Yama says."""

    _lock = threading.Lock()
    _held = 0

    def __init__(self) -> None:
        """Take it."""
        with Permission._lock:
            Permission._held += 1
            if Permission._held == 1:
                _libc.prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)  # fails where there is no Yama

    def give_back(self) -> None:
        """Let it go; to be called once."""
        with Permission._lock:
            Permission._held -= 1
            if not Permission._held:
                _libc.prctl(_SET_PTRACER, 0, 0, 0, 0)


def spans_of(pieces: Sequence[npt.NDArray[np.uint8]]) -> list[Span]:
    """Where pieces of this process's memory are."""
    return [(piece.ctypes.data, piece.nbytes) for piece in pieces if piece.nbytes]


def read_memory(process: int, there: Sequence[Span], here: Sequence[Span]) -> None:
    """Copy from the memory of ``process`` to as many bytes of ours, cut however.

    Raises:
        ReadError: it is gone, forbids it, or has no such memory.
    """
    while here:
        ours, theirs = _vector(here), _vector(there)
        count = _libc.process_vm_readv(
            process, ours, len(ours), theirs, len(theirs), ctypes.c_ulong(0)
        )
        if count <= 0:
            number = ctypes.get_errno()
            raise ReadError(number, f"cannot read process {process}: {os.strerror(number)}")
        here, there = _after(here, count), _after(there, count)


def _vector(spans: Sequence[Span]) -> ctypes.Array[_Span]:
    some = [_Span(start, length) for start, length in spans[:_MOST]]
    return (_Span * len(some))(*some)


def _after(spans: Sequence[Span], count: int) -> list[Span]:
    """What is left behind ``count`` bytes."""
    left = []
    for start, length in spans:
        done = min(count, length)
        count -= done
        if done < length:
            left.append((start + done, length - done))
    return left


def probe(wire: socket.socket) -> bool:
    """Whether the process at the other end can read this one's memory; both ends call it."""
    secret = np.frombuffer(bytearray(secrets.token_bytes(_SECRET_BYTES)), np.uint8)
    wire.send(_PLACE.pack(secret.ctypes.data))
    (address,) = _PLACE.unpack(wire.recv(_PLACE.size))
    found = np.zeros(_SECRET_BYTES, np.uint8)
    try:
        read_memory(peer_process(wire)[0], [(address, len(found))], spans_of([found]))
    except ReadError:
        found[:] = 0
    wire.send(found.tobytes())
    return wire.recv(_SECRET_BYTES) == secret.tobytes()
