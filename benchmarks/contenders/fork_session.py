"""The parent's end of clone_fork.py: two groups that were started apart, asked at the same time."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core import Case, Extra, RankFailed, RankGroup

from .equality import differences, error_in, not_installed
from .fork_costs import OURS, fork_metrics
from .fork_meeting import Turn, host
from .fork_orders import ORDERS
from .sizes import model_of
from .spots import Spots

MODULE = "contenders.fork"
LIMIT = "loopback"
Answers = list[Any]
Arguments = dict[str, Any]


class ForkSession:
    """One workload, as many donors as clones."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.extra = Extra()
        self.turns = itertools.count()
        self.owned = contextlib.ExitStack()
        try:
            self.spots = Spots(case["machines"], case["ranks"], self.owned)
            self.host = self.spots.donors[0].address
            machines = self.spots.machines
            self.store = machines.call(0, host, self.host) if machines else host()
            if self.spots.fact:
                self.extra.facts["links"] = self.spots.fact
            self.pool = self.owned.enter_context(ThreadPoolExecutor(2))
            self.shared = self.owned.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            mark = secrets.token_hex(8)
            self.donors, self.clones = (self.start(side, mark) for side in ("donors", "clones"))
            self.names = self.begin(names)
        except BaseException:
            self.close()
            raise

    def start(self, side: str, mark: str) -> RankGroup:
        spots = getattr(self.spots, side)
        options = {
            "side": side,
            "model": model_of(self.case, self.options["workloads"]),
            "host": self.host,
            "port": self.store.port,
            "hosts": [spot.address for spot in (*self.spots.donors, *self.spots.clones)],
            "interface": spots[0].interface,
            "shared": self.shared,
        }
        world = self.case["ranks"]
        group = RankGroup(
            MODULE, world=world, case=self.case, options=options, spots=spots, mark=mark
        )
        self.owned.callback(group.close)
        return group

    def begin(self, names: Sequence[str]) -> list[str]:
        """Makes the contenders, warms them up and compares what the clones got, bit for bit."""
        left = [name for name in names if self.created(name)]
        if left:
            self.size = self.donors.ask("call", function="size")[0]
            self.extra.facts["state to clone"] = f"{self.size / 1e6:.0f} MB"
        return [name for name in left if self.checked(name)]

    def created(self, name: str) -> bool:
        if self.excluded(name, not_installed(name)):
            return False
        request = {"function": "create", "contender": name}
        donors, clones = self.ask(next(self.turns), request, request)
        return not self.excluded(name, error_in([*donors, *clones]))

    def checked(self, name: str) -> bool:
        donors, clones = self.turn(name, check=True)
        if self.excluded(name, error_in([*donors, *clones])):
            return False
        if name != LIMIT:
            both = zip(donors, clones, strict=True)
            answers = [{"live": was["live"], "loaded": now["loaded"]} for was, now in both]
            self.extra.failed_checks += differences(name, answers)
        return True

    def excluded(self, name: str, reason: str | None) -> bool:
        if reason is None:
            return False
        if name.startswith(OURS):
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return True

    def turn(self, name: str, *, check: bool = False) -> tuple[Answers, Answers]:
        number = next(self.turns)
        first = self.options["first"]
        common = {"contender": name, "number": number, "check": check, "first": first}
        steps = {"baseline_steps": self.options["baseline_steps"]}
        donate = {"function": "donate", **common, **steps}
        return self.ask(number, donate, {"function": "receive", **common})

    def ask(self, number: int, donate: Arguments, receive: Arguments) -> tuple[Answers, Answers]:
        """Asks both at once; neither waits long for one that has died."""

        def one(group: RankGroup, request: Arguments) -> Answers:
            try:
                return group.ask("call", **request)
            except RankFailed:
                Turn(self.store, number).fail("a rank has died")
                raise

        given = self.pool.submit(one, self.donors, donate)
        taken = self.pool.submit(one, self.clones, receive)
        return given.result(), taken.result()

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        donors, clones = self.turn(contender)
        if self.excluded(contender, error_in([*donors, *clones])):
            self.names.remove(contender)
            return {}
        found = fork_metrics(donors, clones, self.size)
        if not contender.startswith(OURS):
            del found["join"]  # peers are connected beforehand
        elif ORDERS[contender].gated:
            # It is ready within its first forward pass, where nobody looks at a clock.
            for key in ("readiness", "standby", "standby_passes", "alive"):
                del found[key]
        return found

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        self.owned.close()
