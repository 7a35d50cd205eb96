"""``sapwood store members``: the providers of a repository."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from sapwood.cli.verbs.store.place import At, Json
from sapwood.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sapwood.repository.providers.cluster_membership import Membership
    from sapwood.repository.providers.cluster_moving import Moved

__all__ = ["members_app"]

_ABOUT = """List and change the providers of a repository, and mend after one was away or lost.

`--at` names one or more of them, as sapwood://host:port. Changes need a token with the right
`admin` to all models (SAPWOOD_STORE_TOKEN, or SAPWOOD_STORE_TOKEN_FILE).

```
sapwood store members ls --at sapwood://10.0.0.5:7070
sapwood store members join p2=10.0.0.7:7070 --at sapwood://10.0.0.5:7070
sapwood store members leave p0 --at sapwood://10.0.0.6:7070
sapwood store members repair --at sapwood://10.0.0.5:7070
```
"""


def members_app() -> App:
    """The verbs of ``sapwood store members``."""
    app = App(name="members", help=_ABOUT, help_format="markdown")
    for verb in (ls, join, leave, repair):
        app.command(verb)
    return app


def ls(*, at: At = None, json: Json = False) -> int:
    """List the providers: whether each answers, and what it has.

    The exit code is 1 if one does not answer.

    Args:
        at: The repository.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import console, print_json, table
    from sapwood.cli.words import size

    with _membership(at) as membership:
        states = membership.states()
        members = membership.members
    silent = [state for state in states if state.epoch is None]
    if json:
        rows = [{**asdict(state), **asdict(state.member)} for state in states]
        for row in rows:
            del row["member"]
        about = asdict(members)
        print_json(
            {
                "epoch": about["epoch"],
                "replicas": about["replicas"],
                "placement": about["placement"],
                "moving": bool(members.before),
                "provider": rows,
            }
        )
        return int(bool(silent))
    made = table("provider", "address", "answers", "versions", "tensors", "size", right=("size",))
    for state in states:
        leaving = "" if state.member in members.members else ", leaving"
        answers = "no" if state.epoch is None else f"epoch {state.epoch}"
        made.add_row(
            state.member.name,
            state.member.address,
            answers + leaving,
            str(state.versions),
            str(state.tensors),
            size(state.nbytes),
        )
    console().print(made)
    copies = "one copy" if members.replicas == 1 else f"{members.replicas} copies"
    print(f"epoch {members.epoch}, {copies} of everything, placed by {members.placement}")
    if members.before:
        print("data is on the way to its places; `members repair` ends that if it was cut off")
    for state in silent:
        print(state.trouble)
    return int(bool(silent))


def join(provider: str, /, *, at: At = None, json: Json = False) -> int:
    """Add a provider; it is given its share of everything, and nothing else moves.

    It must be running, with an empty place and the same token. A name that is there already takes
    the new address. The exit code is 1 if something could not be brought to its place.

    ```
    sapwood store members join p2=10.0.0.7:7070 --at sapwood://10.0.0.5:7070
    ```

    Args:
        provider: Its name and address, as p2=host:port.
        at: The repository.
        json: Write JSON instead of text.
    """
    from sapwood.repository.providers.base import Member
    from sapwood.repository.providers.link import split_address

    name, sign, address = provider.partition("=")
    if not sign:
        raise ConfigError(f"{provider!r}: expected a name and an address, such as p2=host:port")
    split_address(address)
    with _membership(at) as membership:
        moved = membership.join(Member(name, address), said=_say)
    return _report(moved, f"{name} at {address} is a provider now", json=json)


def leave(
    name: str,
    /,
    *,
    lost: Annotated[bool, Parameter(negative="")] = False,
    at: At = None,
    json: Json = False,
) -> int:
    """Let a provider go; what it has is given to the others first.

    The exit code is 1 if something could not be brought to its place.

    ```
    sapwood store members leave p0 --at sapwood://10.0.0.6:7070
    sapwood store members leave p1 --lost --at sapwood://10.0.0.6:7070
    ```

    Args:
        name: The provider's.
        lost: It will never answer again; copies are made of what the others have.
        at: The repository.
        json: Write JSON instead of text.
    """
    with _membership(at) as membership:
        moved = membership.leave(name, lost=lost, said=_say)
    return _report(moved, f"{name} is no provider of this repository any more", json=json)


def repair(*, at: At = None, json: Json = False) -> int:
    """Give each provider what it should have: after one was away, or a change was cut off.

    All must answer. The exit code is 1 if something could not be brought to its place.

    Args:
        at: The repository.
        json: Write JSON instead of text.
    """
    with _membership(at) as membership:
        moved = membership.repair(said=_say)
    return _report(moved, "every provider has been looked at", json=json)


@contextmanager
def _membership(at: str | None) -> Iterator[Membership]:
    from sapwood.repository.providers.cluster_opening import SCHEME, open_cluster
    from sapwood.store.on_providers import settings_of

    place = at or os.environ.get("SAPWOOD_STORE") or ""
    if not place.startswith(SCHEME):
        raise ConfigError(f"--at is {place!r}, expected providers, as {SCHEME}host:port")
    backend, _ = open_cluster(place, settings_of())
    try:
        yield backend.membership
    finally:
        backend.close()


def _say(line: str) -> None:
    import sys

    print(f"{line} ...", file=sys.stderr)


def _report(moved: Moved, headline: str, *, json: bool) -> int:
    from sapwood.cli.output import print_json
    from sapwood.cli.words import size

    if json:
        print_json(asdict(moved))
        return int(bool(moved.problems))
    for problem in moved.problems:
        print(problem)
    print(
        f"{headline}: {moved.tensors} tensors and {moved.heads} versions copied, "
        f"{size(moved.nbytes)} sent, {moved.dropped} given up where they were"
    )
    return int(bool(moved.problems))
