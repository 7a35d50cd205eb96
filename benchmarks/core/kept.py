"""Cases of a run that are done: a full run takes an hour, and may be cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import Case


class Kept:
    """One line for each case, in a file that goes when the run is whole."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Without ``resume`` an earlier run's cases are forgotten."""
        self._path = path
        self._done: list[dict[str, Any]] = []
        if resume and path.exists():
            # The last line may have been cut off with the run.
            lines = path.read_text().split("\n")[:-1]
            self._done = [json.loads(line) for line in lines]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(one) + "\n" for one in self._done))

    def find(self, case: Case) -> dict[str, Any] | None:
        """What was measured for a case; a case that failed is measured again."""
        found = (one for one in self._done if one["case"] == case and "samples" in one)
        return next(found, None)

    def add(self, result: dict[str, Any]) -> None:
        """Keep a case."""
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def end(self) -> None:
        """The run is whole."""
        self._path.unlink(missing_ok=True)
