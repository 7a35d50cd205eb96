"""The parent's end of the checkpoint benchmarks: ranks in which all contenders take their turns."""

from __future__ import annotations

import collections
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import Case, Extra, NotRun, RankGroup
from core.ranks import Wrap
from slowdisk import LimitedDisk, Unavailable

from .costs import baseline_metrics, course_metrics, save_metrics
from .equality import differences, error_in, not_installed
from .sizes import check_memory, checkpoint_bytes, model_of

MODULE = "contenders.checkpoint"
OURS = "sapwood"
DISK = "disk"
PLACES = {DISK: None, "200MB/s": 200.0, "50MB/s": 50.0}
"""Where checkpoints go: the folder for temporary files, or a disk that is limited for all."""


def remove_named(mark: str) -> None:
    """What DLRover has named after the group, and leaves behind when a rank fails."""
    for path in Path("/dev/shm").glob(f"bench-{mark}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(Path(tempfile.gettempdir(), "ckpt_sock", f"bench-{mark}"), ignore_errors=True)


class CheckpointSession:
    """One workload and number of ranks; all contenders live in the same ranks.

    A turn is one checkpoint between ordinary steps.
    """

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.extra = Extra()
        self.chosen: collections.Counter[str] = collections.Counter()
        model = model_of(case, options["workloads"])
        check_memory(checkpoint_bytes(case["ranks"], model))
        self.owned = contextlib.ExitStack()
        try:
            place, wrap = self.enter_place(PLACES[case.get("place", DISK)])
            mark = secrets.token_hex(8)
            self.owned.callback(remove_named, mark)
            self.group = RankGroup(
                MODULE,
                world=case["ranks"],
                case=case,
                options={"model": model, "place": place},
                wrap=wrap,
                mark=mark,
            )
            self.owned.callback(self.group.close)
            self.names = self.begin(names)
        except BaseException:
            self.close()
            raise

    def enter_place(self, rate: float | None) -> tuple[str, Wrap]:
        if rate is None:
            return "", lambda command: command
        try:
            disk = self.owned.enter_context(LimitedDisk(rate))
        except Unavailable as reason:
            raise NotRun(str(reason)) from reason
        self.extra.facts["disk"] = str(disk.measured)
        return str(disk.folder), disk.command

    def begin(self, names: Sequence[str]) -> list[str]:
        """Makes the contenders, warms them up and checks that what they saved comes back."""
        left = [name for name in names if not self.excluded(name, not_installed(name))]
        for name in list(left):
            answers = self.group.ask("call", function="create", contender=name)
            if self.excluded(name, error_in(answers)):
                left.remove(name)
        for name in list(left):
            answers = self.group.ask("call", function="verify", contender=name)
            if self.excluded(name, error_in(answers)):
                left.remove(name)
            else:
                self.extra.failed_checks += differences(name, answers)
        size = self.group.ask("call", function="size")[0]
        self.extra.facts["state to save"] = f"{size / 1e6:.0f} MB in each of {self.case['ranks']}"
        return left

    def excluded(self, name: str, reason: str | None) -> bool:
        if reason is None:
            return False
        if name.startswith(OURS):
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return True

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.turn(contender)
        if self.excluded(contender, error_in(answers)):
            self.names.remove(contender)
            return {}
        if contender == OURS and "mode" in answers[0]:
            self.chosen[answers[0]["mode"]] += 1
        return self.metrics(contender, answers)

    def turn(self, contender: str) -> list[Any]:
        steps = self.options["baseline_steps"]
        return self.group.ask("call", function="turn", contender=contender, baseline_steps=steps)

    def metrics(self, contender: str, answers: Sequence[Any]) -> dict[str, float]:
        if "steps" in answers[0]:
            return baseline_metrics(answers)
        return save_metrics(answers, durable=contender != "memcpy")

    def finish(self) -> Extra:
        if self.chosen:
            times = ", ".join(f"{mode} {count}" for mode, count in self.chosen.items())
            self.extra.facts["auto captured:"] = times
        return self.extra

    def close(self) -> None:
        self.owned.close()


class CourseSession(CheckpointSession):
    """A turn is a whole training: steps with checkpoints, and its end."""

    def turn(self, contender: str) -> list[Any]:
        every = self.case["every"]
        return self.group.ask(
            "call",
            function="course",
            contender=contender,
            steps=self.options["steps"][str(every)],
            every=every,
        )

    def metrics(self, contender: str, answers: Sequence[Any]) -> dict[str, float]:
        return course_metrics(answers, self.options["steps"][str(self.case["every"])])
