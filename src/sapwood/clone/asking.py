"""The first words between clones and donors: being let in, and having the same model."""

from __future__ import annotations

import json
from typing import Any

from sapwood.clone.listener import ask
from sapwood.clone.manifest import versions
from sapwood.clone.order import ForkOrder
from sapwood.clone.places import Places
from sapwood.clone.remote import RemoteBoard
from sapwood.clone.session import Session
from sapwood.errors import CloneError
from sapwood.runtime.group import Group
from sapwood.state.catalog import Catalog, differences
from sapwood.state.contents import Contents

__all__ = ["ask_donors", "check_model"]

_ANSWER = 30.0
_SHOWN = 20


def ask_donors(order: ForkOrder, group: Group, places: Places) -> Session:
    """Rank 0 asks for all; every rank hears the answer, also a refusal.

    Raises:
        CloneError: the donors refuse, or cannot be reached.
    """
    answer: dict[str, Any] = {}
    token = ""
    if group.rank == 0:
        request = {
            "versions": versions(),
            "places": places.to_json(),
            "approach": order.approach,
            "transport": order.transport,
            "standby": order.standby,
            "at_step": order.at_step,
            "together": order.together,
        }
        try:
            order.address.check_reach(places.machines)
            answer = ask(order.address, request)
            token = order.address.token()
        except CloneError as error:
            answer = {"error": str(error)}
    answer = json.loads(group.share_text("answer to a fork", json.dumps(answer)))
    if "error" in answer:
        raise CloneError(answer["error"])
    # The file that holds the token need not be readable on every machine.
    token = group.share_secret(token)
    address = order.address
    board = RemoteBoard(address.nearest, address.port, token, timeout=_ANSWER)
    return Session(board, answer["session"], timeout=_ANSWER, owns_board=True)


def check_model(catalog: Catalog, contents: Contents) -> None:
    """Compare the donors' catalog with the fresh run's.

    Raises:
        CloneError: it is another model; all differences.
    """
    wanted = {k: e for k, e in contents.catalog.by_key.items() if k[0] == "model"}
    theirs = Catalog(tuple(e for e in catalog.entries if e.file == "model"))
    lines = [line.replace("the checkpoint", "the run") for line in differences(theirs, wanted)]
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise CloneError(
            "the run to be cloned has another model:\n  " + "\n  ".join([*lines[:_SHOWN], *more])
        )
