"""Where the ranks of ``sapwood run`` meet: a store of torch's that only this machine reaches.

torch's own ways to meet are for several nodes, and open the store on every interface; it asks
nobody who they are. Here there is one node, so there is nothing to negotiate.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from sapwood.runtime.stores import PrefixStore, TCPStore

__all__ = ["BACKEND", "register"]

BACKEND = "sapwood-local"
_HOST = "127.0.0.1"


class LocalMeeting(RendezvousHandler):
    """One node, which is always complete; a new round for each restart of the ranks."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        """Host the store; it ends with this object."""
        self._run_id = run_id
        listener = socket.create_server((_HOST, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        self._place = RendezvousStoreInfo(_HOST, port)
        self._round = 0
        self._closed = False

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """This node, with keys that no earlier round has written."""
        if self._closed:
            raise RendezvousClosedError
        self._round += 1
        store = PrefixStore(f"meeting/{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, self._place)

    def is_closed(self) -> bool:
        """Whether no round will follow."""
        return self._closed

    def set_closed(self) -> None:
        """No round shall follow."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else ever comes."""
        return 0

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing but the store, which ends with this object."""
        self._closed = True
        return True


def register() -> None:
    """Make torch's launcher know it; calling it again does nothing."""

    def make(parameters: RendezvousParameters) -> Any:
        return LocalMeeting(parameters.run_id)

    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, make)
