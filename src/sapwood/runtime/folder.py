"""A run on disk: ``runs/<id>/`` with run.toml, status.json and trace/.

Whatever looks at a run needs only this folder. Files are replaced whole, never half written.
"""

from __future__ import annotations

import json
import logging
import numbers
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sapwood.errors import RunFolderError
from sapwood.regular import read_regular
from sapwood.runtime.textfile import replace_text

__all__ = ["STARTED", "RunFolder", "new_run_id", "process_start"]

log = logging.getLogger(__name__)
STARTED = "sapwood.started"
"""The logger that says, once and at level INFO, which run begins and where its folder is."""
LATEST = "latest"
"""What commands call the newest run."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STATUS_EVERY = 1.0


def new_run_id() -> str:
    """Sortable by time, and hard to guess twice: ``20261116-0042-3f9a1c``."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M-") + secrets.token_hex(3)


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: with its id, unique on a host."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


class RunFolder:
    """The folder of one run; rank 0 writes run.toml and status.json, every rank its own trace."""

    def __init__(self, root: Path | str, run_id: str) -> None:
        """Name the folder; nothing is made yet."""
        if not _ID.fullmatch(run_id):
            raise RunFolderError(
                f"the run id {run_id!r} cannot be a folder name; use letters, digits, '.', '_', "
                "'-', at most 100 of them"
            )
        if run_id == LATEST:
            raise RunFolderError(
                f"a run cannot have the id {LATEST!r}: commands take it for the newest run; choose "
                "another"
            )
        self.id = run_id
        self.path = Path(root) / run_id
        self.learned: dict[str, str | None] = {}
        """What the run found out since it began; written with its status."""
        self._next_status = 0.0

    def create(self, facts: Mapping[str, Any]) -> None:
        """Make the folder and write run.toml; a run that was stopped goes on in its own.

        Raises:
            RunFolderError: the id is taken, or the folder cannot be made.
        """
        try:
            (self.path / "trace").mkdir(parents=True, exist_ok=True)
            if (self.path / "run.toml").exists():
                if not self._stopped():
                    raise RunFolderError(
                        f"{self.path} already holds a run; choose another id, or leave id= away"
                    )
                log.info("the run %s was stopped and goes on", self.id)
            replace_text(self.path / "run.toml", to_toml({"id": self.id, **facts}))
            logging.getLogger(STARTED).info("run %s in %s%s", self.id, self.path, _origin(facts))
        except OSError as error:
            raise RunFolderError(
                f"cannot write the run folder {self.path}: {error.strerror or error}; give "
                "folder= a place you may write to, or set SAPWOOD_RUN_FOLDER"
            ) from error

    def status(self, state: str, step: int, detail: str | None = None, *, now: bool = True) -> None:
        """Write status.json; with ``now=False`` at most once a second.

        ``detail`` is the error of a failed run, or why one stopped or was interrupted.

        A full disk is logged and not raised: a training does not end because it cannot say so.
        """
        clock = time.monotonic()
        if not now and clock < self._next_status:
            return
        self._next_status = clock + _STATUS_EVERY
        entry: dict[str, Any] = {"state": state, "step": step, "time": time.time()}
        entry |= {name: text for name, text in self.learned.items() if text is not None}
        if detail is not None:
            entry["detail" if state in ("stopped", "interrupted") else "error"] = detail
        try:
            replace_text(self.path / "status.json", json.dumps(entry))
        except OSError as problem:
            log.warning("cannot write %s: %s", self.path / "status.json", problem.strerror)

    def _stopped(self) -> bool:
        """Whether the run in this folder was asked to stop: a restart with its id is meant."""
        try:
            status = json.loads(read_regular(self.path / "status.json"))
            return bool(status["state"] == "stopped")
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def trace_file(self, rank: int) -> Path:
        """Where a rank's trace goes."""
        return self.path / "trace" / f"rank-{rank}.jsonl"


def _origin(facts: Mapping[str, Any]) -> str:
    """Where a fork came from, in words."""
    if not facts.get("parent"):
        return ""
    changes = " ".join(f"{path}={value}" for path, value in facts.get("overrides", {}).items())
    told = f", forked from {facts['parent']} after step {facts['parent_step']}"
    return told + (f", with {changes}" if changes else "")


def host_facts() -> dict[str, Any]:
    """Which process on which host is rank 0: lets others see whether a run still lives."""
    pid = os.getpid()
    return {"name": platform.node(), "pid": pid, "started": process_start(pid) or 0}


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Write plain values and nested tables as TOML; ``None`` is left out, as TOML has no null."""
    plain = [
        f"{_key(k)} = {_value(v)}"
        for k, v in table.items()
        if not isinstance(v, Mapping) and v is not None
    ]
    parts = ["\n".join(plain)] if plain else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{_key(key)}"
            parts.append(f"[{name}]\n" + to_toml(value, f"{name}."))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _key(key: object) -> str:
    text = str(key)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # Numbers of other libraries are numbers too, but do not write themselves as such.
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value if v is not None) + "]"
    if isinstance(value, Mapping):
        inner = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(inner) + "}"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    # JSON's own escapes are TOML's too, but TOML has no surrogates and no bare DEL.
    whole = text.encode("utf-8", "backslashreplace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
