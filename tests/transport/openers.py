"""Openers that only tests need; at the top of a module, so that processes can import them."""

from __future__ import annotations

from sapwood.runtime.stores import PrefixStore, Store
from sapwood.transport._control import meet
from sapwood.transport._meet import Deadline
from sapwood.transport._pump import PumpLink
from sapwood.transport.base import Ends
from sapwood.transport.device import StagedLink
from sapwood.transport.gloo import open_gloo
from sapwood.transport.memory import open_memory
from sapwood.transport.nccl import OrderedLink


def open_staged(store: Store, ends: Ends) -> StagedLink:
    """CPU tensors take the way of a GPU's."""
    return StagedLink(open_memory(store, ends))


def open_slots(store: Store, ends: Ends) -> PumpLink:
    """Shared memory, but no process reads another's."""
    return open_memory(store, ends, reads=False)


def open_ordered(store: Store, ends: Ends) -> OrderedLink:
    """gloo in the place of NCCL: messages are matched by their order only."""
    gloo = open_gloo(PrefixStore("group", store), ends)
    control = meet("ordered", store, ends, "", Deadline(ends.timeout))
    return OrderedLink("ordered", gloo._group, control, gloo.close)
