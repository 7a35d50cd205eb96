"""Mooncake's client: one per process and cluster, because each has threads and memory of its own.

A call waits some seconds for a master that does not answer, and then gives a code.
"""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.errors import ConfigError, NoRoom, StorageError, Unreachable, UsageError
from sapwood.runtime.heartbeat import beat
from sapwood.storage.mooncake.place import MooncakePlace

__all__ = [
    "ABSENT",
    "BEYOND",
    "NOT_READY",
    "OVERTAKEN",
    "TAKEN",
    "Client",
    "Row",
    "check_process",
    "dismissed",
    "failure",
    "hired",
]

NO_ROOM, BEYOND, NOT_READY, ABSENT, TAKEN = -200, -600, -703, -704, -705
OVERTAKEN = -601
"""Another client has begun to put the same object in between."""
_LEASED, _TRANSFER, _RPC = -706, -800, -900
_LOCAL_BUFFER = 4 * 2**20
Row = tuple[int, int, int]
"""Bytes of an object: where in it, where in the buffer, how many."""

_lock = threading.Lock()
_clients: dict[tuple[int, str, str, str, str, int], Client] = {}


class Client:
    """One connection to a cluster. Made by ``hired``; ends with its last user."""

    def __init__(self, place: MooncakePlace) -> None:
        """Connect.

        Raises:
            ConfigError: Mooncake is not installed, or not for this machine.
            Unreachable: the master does not answer.
        """
        place.check_master()
        self.users = 0
        self.pid = os.getpid()
        self._place = place
        store, self._config_type = _imported()
        self._store: Any = store()
        failed = self._store.setup(
            place.local,
            "P2PHANDSHAKE",
            place.segment,
            _LOCAL_BUFFER,
            place.protocol,
            place.device,
            place.master,
        )
        if failed:
            raise Unreachable(
                f"Mooncake's client does not start with {place} (code {failed}): protocol "
                f"{place.protocol!r} on {place.local!r}"
            )

    # -- calls -------------------------------------------------------------------------------

    def put(self, key: str, data: npt.NDArray[np.uint8], *, replace: bool) -> int:
        """Put a buffer; 0 also where there was an object already, which stays then."""
        config = self._config_type()
        config.replica_num = self._place.replicas
        config.with_hard_pin = True  # it is no cache: what does not fit is refused
        with _Registered(self._store, data):
            put = self._store.upsert_from if replace else self._store.put_from
            return int(put(key, data.ctypes.data, data.nbytes, config))

    def size(self, key: str) -> int:
        """Bytes of an object, or a code."""
        return int(self._store.get_size(key))

    def read(
        self, rows: Sequence[tuple[str, Sequence[Row]]], out: npt.NDArray[np.uint8]
    ) -> list[list[int]]:
        """Ranges of many objects in one request; bytes read of each range, or codes."""
        beat()
        with _Registered(self._store, out):
            found: list[list[list[int]]] = self._store.get_into_ranges(
                [out.ctypes.data],
                [[key for key, _ in rows]],
                [[[row[1] for row in some] for _, some in rows]],
                [[[row[0] for row in some] for _, some in rows]],
                [[[row[2] for row in some] for _, some in rows]],
            )
        return found[0]

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Codes; also of objects that somebody is reading."""
        return list(self._store.batch_remove(list(keys), True))

    def all_keys(self) -> list[str]:
        """Every key on the master.

        Raises:
            Unreachable: its HTTP server does not answer.
        """
        beat()
        host, port = self._place.host, self._place.metrics
        connection = http.client.HTTPConnection(host, port, timeout=self._place.timeout)
        try:
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise Unreachable(f"{host}:{port} gives status {answer.status}, and no list")
            return answer.read().decode().splitlines()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, Unreachable):
                raise
            raise Unreachable(
                f"{host}:{port}, which lists keys, does not answer: {error}"
            ) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Disconnect; memory that this process gave to the cluster goes with what is in it."""
        self._store.close()


class _Registered:
    """Memory that Mooncake may move bytes from and to, for the length of a block."""

    def __init__(self, store: Any, data: npt.NDArray[np.uint8]) -> None:
        self._store, self._data = store, data

    def __enter__(self) -> None:
        code = self._store.register_buffer(self._data.ctypes.data, self._data.nbytes)
        if code:
            raise StorageError(
                f"Mooncake cannot register {self._data.nbytes} bytes of memory (code {code}); "
                "with RDMA, raise the limit of locked memory (ulimit -l)"
            )

    def __exit__(self, *exception: object) -> None:
        self._store.unregister_buffer(self._data.ctypes.data)


def hired(place: MooncakePlace) -> Client:
    """The client of this process for a cluster; give it back with ``dismissed``."""
    key = _key(place)
    with _lock:
        if key not in _clients:
            _clients[key] = Client(place)
        _clients[key].users += 1
        return _clients[key]


def dismissed(place: MooncakePlace, client: Client) -> None:
    """One user less; the last one closes it."""
    if client.pid != os.getpid():
        return  # the parent's
    with _lock:
        client.users -= 1
        if not client.users:
            del _clients[_key(place)]
            client.close()


def _key(place: MooncakePlace) -> tuple[int, str, str, str, str, int]:
    return (
        os.getpid(),
        place.local,
        place.master,
        place.protocol,
        place.device,
        place.segment,
    )


def failure(place: MooncakePlace, doing: str, code: int) -> StorageError:
    """The error for a code."""
    what = f"cannot {doing} on {place}"
    if code == NO_ROOM:
        return NoRoom(
            f"{what}: no client gives as much memory to the cluster; remove something, or start "
            "one with more (segment=)"
        )
    if code == _RPC:
        return Unreachable(f"{what}: the master does not answer")
    if code == _TRANSFER:
        return Unreachable(f"{what}: the client whose memory holds it does not answer")
    if code == _LEASED:
        return StorageError(f"{what}: it is in use")
    return StorageError(f"{what}: Mooncake gives code {code}")


def _imported() -> tuple[Any, Any]:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        raise ConfigError(
            f"keeping bytes in Mooncake cannot begin: {error}; pip install 'sapwood[mooncake]', "
            "and the system's libibverbs1, libnuma1 and libcurl4 (Debian's names)"
        ) from error
    return MooncakeDistributedStore, ReplicateConfig


def check_process(client: Client, place: MooncakePlace) -> None:
    """Refuse to use a client that was made before a fork.

    Raises:
        UsageError: it was.
    """
    if client.pid != os.getpid():
        raise UsageError(
            f"{place} was opened before this process was forked, and Mooncake's threads do not "
            "come along: open it in the new process, or start that by spawn"
        )
