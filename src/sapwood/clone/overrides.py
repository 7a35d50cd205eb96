"""What shall be different in a fork: a value of the optimizer, or whatever the script asks for.

optimizer.lr        in every parameter group, and in what schedulers take for the first value
optimizer.1.lr      in one group
anything else       is the script's: ``run.override("data.seed", 0)``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sapwood.errors import ConfigError

__all__ = ["apply_overrides"]

Group = dict[str, Any]


def apply_overrides(
    overrides: Mapping[str, Any], groups: Sequence[Group], schedulers: Iterable[Any]
) -> None:
    """Change what belongs to the optimizer.

    Raises:
        ConfigError: a path leads nowhere; what there is.
    """
    for path, value in overrides.items():
        first, *rest = path.split(".")
        if first != "optimizer":
            continue
        chosen = list(enumerate(groups))
        if len(rest) == 2 and rest[0].isdecimal():
            chosen = [(n, g) for n, g in chosen if n == int(rest[0])]
            rest = rest[1:]
        if len(rest) != 1 or not chosen:
            raise ConfigError(f"{path} leads nowhere; there are {len(groups)} parameter groups")
        for number, group in chosen:
            _set(path, group, rest[0], value)
            if rest[0] == "lr":
                _rebase(schedulers, number, value)


def _set(path: str, group: Group, name: str, value: Any) -> None:
    if name not in group or name == "params":
        known = ", ".join(sorted(k for k in group if k != "params"))
        raise ConfigError(f"{path} leads nowhere; the optimizer's groups have {known}")
    old = group[name]
    group[name] = tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


def _rebase(schedulers: Iterable[Any], number: int, value: Any) -> None:
    """A scheduler goes on from the new value, by its own rule."""
    for scheduler in schedulers:
        base = getattr(scheduler, "base_lrs", None)
        if isinstance(base, list) and number < len(base):
            base[number] = value
