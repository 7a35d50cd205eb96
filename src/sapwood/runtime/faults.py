"""Named points in production code where a test can make something go wrong.

Code that wants to be tested for failure says ``faults.point("sync.before_update", bucket=3)``. As
long as nothing is armed, that is one check of one name. A test arms a point with ``arm`` (or, more
comfortably, with ``sapwood.testing.faults.inject``); a process started from outside is armed with

    SAPWOOD_FAULTS="sync.before_update:kill@3[rank=1];run.step:sleep:0.5@*"

which reads: rank 1 kills itself the third time it comes to ``sync.before_update``, and every rank
sleeps half a second each time it comes to ``run.step``.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.errors import ConfigError

__all__ = [
    "ENV",
    "Action",
    "Fault",
    "InjectedError",
    "arm",
    "armed",
    "disarm",
    "disarm_all",
    "parse",
    "point",
]

ENV = "SAPWOOD_FAULTS"
"""The environment variable that arms points in a process started from outside."""

Facts = Mapping[str, Any]
Action = str | Callable[..., object]
"""raise, kill, stop, sleep:seconds, exit:code, or a callable that is given the facts."""


class InjectedError(RuntimeError):
    """What an armed point raises.

    It is not a ``SapwoodError`` on purpose: it stands for a failure nobody foresaw, so no handler
    of ours may take it for one of our own.
    """


@dataclass(eq=False)
class Fault:
    """One armed point: what to do, at which passage, and which passages count."""

    name: str
    action: Callable[[Facts], object]
    at: int | None
    when: Callable[[Facts], bool] | None
    seen: int = 0

    def due(self, facts: Facts) -> bool:
        """Count this passage; say whether it is the one to act on."""
        if self.when is not None and not self.when(facts):
            return False
        self.seen += 1
        return self.at is None or self.seen == self.at


# The environment is read at the first passage, not at import: importing has no side effect, and a
# process forked from a warm server gets its environment after its imports.
_active = True
_env_read = False
_faults: dict[str, list[Fault]] = {}
_lock = threading.Lock()


def point(name: str, **facts: Any) -> None:
    """Pass a named point; nothing happens unless a test has armed it."""
    if _active:
        _pass(name, facts)


def arm(
    name: str, action: Action, *, at: int | None = 1, when: Callable[..., bool] | None = None
) -> Fault:
    """Make the point ``name`` act at its ``at``-th passage (None: at every passage).

    ``when`` is called with the facts of a passage as keyword arguments; passages for which it says
    False neither act nor count.
    """
    if at is not None and at < 1:
        raise ConfigError(f"fault {name!r}: at={at}, but passages are counted from 1")
    test = None if when is None else _on_facts(when)
    fault = Fault(name, _action(name, action), at, test)
    _add(fault)
    return fault


def disarm(fault: Fault) -> None:
    """Take one fault away again; it is no error if it is already gone."""
    global _active
    with _lock:
        there = _faults.get(fault.name, [])
        if fault in there:
            there.remove(fault)
        if not there:
            _faults.pop(fault.name, None)
        _active = bool(_faults) or not _env_read


def disarm_all() -> None:
    """Disarm every point, also those armed by the environment."""
    global _active, _env_read
    with _lock:
        _faults.clear()
        _env_read = True
        _active = False


def armed() -> tuple[str, ...]:
    """The names of the points armed now, sorted."""
    return tuple(sorted(_faults))


def parse(text: str) -> list[Fault]:
    """Read the value of ``SAPWOOD_FAULTS``: ``name:action@n[fact=value,...]``, joined by ``;``."""
    return [_parse_one(entry.strip()) for entry in text.split(";") if entry.strip()]


_ENTRY = re.compile(
    r"(?P<name>[^:\[\]@]+):(?P<action>[^@\[\]]+)(@(?P<at>\d+|\*))?(\[(?P<facts>[^\]]*)\])?"
)


def _parse_one(entry: str) -> Fault:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigError(f"{ENV}: cannot read {entry!r}; expected name:action@n[fact=value,...]")
    name, at = match["name"], match["at"] or "1"
    if at == "0":
        raise ConfigError(f"{ENV}: {entry!r} says @0, but passages are counted from 1")
    wanted = dict(pair.split("=", 1) for pair in (match["facts"] or "").split(",") if "=" in pair)
    when = _facts_equal(wanted) if wanted else None
    return Fault(name, _action(name, match["action"]), None if at == "*" else int(at), when)


def _facts_equal(wanted: Mapping[str, str]) -> Callable[[Facts], bool]:
    def test(facts: Facts) -> bool:
        # A point rarely repeats its rank among its facts, but a test nearly always means one rank.
        known = {"rank": os.environ.get("RANK", ""), **facts}
        return all(str(known.get(key)) == value for key, value in wanted.items())

    return test


def _on_facts(function: Callable[..., Any]) -> Callable[[Facts], Any]:
    return lambda facts: function(**facts)


def _add(fault: Fault) -> None:
    global _active
    with _lock:
        _faults.setdefault(fault.name, []).append(fault)
        _active = True


def _pass(name: str, facts: Facts) -> None:
    if not _env_read:
        _arm_from_environment()
    with _lock:
        due = [fault for fault in _faults.get(name, ()) if fault.due(facts)]
    for fault in due:
        fault.action(facts)


def _arm_from_environment() -> None:
    global _active, _env_read
    faults = parse(os.environ.get(ENV, ""))
    with _lock:
        if not _env_read:
            for fault in faults:
                _faults.setdefault(fault.name, []).append(fault)
            _env_read = True
            _active = bool(_faults)


def _action(name: str, action: Action) -> Callable[[Facts], object]:
    if callable(action):
        return _on_facts(action)
    verb, _, argument = action.partition(":")
    try:
        return _VERBS[verb](name, argument)
    except (KeyError, ValueError):
        raise ConfigError(
            f"fault {name!r}: action {action!r} is not one of raise, kill, stop, sleep:seconds, "
            "exit:code (or, with arm, a callable)"
        ) from None


def _raise(name: str, _: str) -> Callable[[Facts], object]:
    def act(facts: Facts) -> object:
        raise InjectedError(
            f"injected at {name} ({', '.join(f'{k}={v}' for k, v in facts.items())})"
        )

    return act


def _signal(number: signal.Signals) -> Callable[[str, str], Callable[[Facts], object]]:
    return lambda _name, _argument: lambda _facts: os.kill(os.getpid(), number)


def _sleep(_: str, argument: str) -> Callable[[Facts], object]:
    seconds = float(argument)
    return lambda _facts: time.sleep(seconds)


def _exit(_: str, argument: str) -> Callable[[Facts], object]:
    code = int(argument)
    return lambda _facts: os._exit(code)


_VERBS: dict[str, Callable[[str, str], Callable[[Facts], object]]] = {
    "raise": _raise,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "sleep": _sleep,
    "exit": _exit,
}
