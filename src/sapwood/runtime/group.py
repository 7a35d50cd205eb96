"""The ranks that train one model, and waiting for them without ever hanging."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sapwood.errors import DeadlineError, LaunchError, MismatchError, PeerFailed, SapwoodError
from sapwood.runtime.bounded import BoundedStore
from sapwood.runtime.failure import FailureBoard
from sapwood.runtime.host import Hosts
from sapwood.runtime.launch import Launch, detect
from sapwood.runtime.links import Links
from sapwood.runtime.rendezvous import host_of, meet
from sapwood.runtime.stores import HashStore, PrefixStore, Store

__all__ = ["Group", "Pending"]

T = TypeVar("T")
_POLL = 1.0
# How long a rank whose connection broke looks for the reason the failed rank may be writing.
_GRACE = 1.0
# How long rank 0 keeps the store open for ranks that end later.
_FAREWELL = 30.0
_SECRET_BYTES = 256

_made = 0


class Pending:
    """A collective under way."""

    def __init__(self, group: Group, work: dist.Work | None, what: str) -> None:
        """``what`` names the collective in errors."""
        self._group = group
        self._work = work
        self._what = what

    def wait(self) -> None:
        """Wait for the result; a peer's failure is raised here, never waited out.

        Raises:
            PeerFailed: a peer failed, died, left, or was silent for the group's timeout.
        """
        if self._work is None:
            return
        if self._group.device.type != "cpu":
            # An accelerator's work orders the current stream; its own watchdog sees dead peers.
            self._work.wait()
            return
        deadline = time.monotonic() + self._group.timeout
        while True:
            # Asked before the wait: work that ends well just after it is not work that failed.
            ended = self._work.is_completed()
            try:
                self._work.wait(timedelta(seconds=_POLL))
                return
            except RuntimeError as error:
                if ended:
                    raise self._group.explain(self._what, error) from error
                self._group.check_peers(self._what)
                if time.monotonic() > deadline:
                    raise self._group.silent(self._what) from error


class Group:
    """The ranks that train one model together; a group of one needs no process group at all."""

    def __init__(
        self, launch: Launch, device: torch.device, store: Store, *, timeout: float
    ) -> None:
        """Use ``Group.join``."""
        self.launch = launch
        self.rank = launch.rank
        self.world = launch.world
        self.device = device
        self.timeout = timeout
        self.store = BoundedStore(store, timeout, ranks=launch.world)
        self.board = FailureBoard(self.store, launch.rank)
        self.meeting = host_of(store)
        """The host where the ranks met; empty for a store without a network."""
        self.hosts: Hosts | None = None
        """Where each rank is reached; see ``host.find_hosts``."""
        self.process_group: dist.ProcessGroup | None = None
        self._owns_world = False
        self._subgroups: list[dist.ProcessGroup] = []
        self._links = Links()
        self._verdict: PeerFailed | None = None
        self._rounds = 0
        self._key = secrets.token_bytes(32)
        self.step = 0
        """The step this rank is in: whoever left earlier is missed."""

    @classmethod
    def join(cls, device: torch.device, *, timeout: float) -> Group:
        """Find the group from torch.distributed if it is initialised, else from the launcher."""
        global _made
        _made += 1
        started = not dist.is_initialized()
        launch = detect() if started else _launch_of_world()
        if started and launch.world == 1:
            alone = cls(launch, device, HashStore(), timeout=timeout)
            alone.board.watch_uncaught()
            return alone
        # What an earlier group, or an earlier attempt of the launcher, wrote must not be read.
        prefix = f"sapwood/{launch.job}/{_made}"
        if started:
            _init_world(launch, PrefixStore(prefix, meet(launch, timeout)), device, timeout)
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        group = cls(launch, device, store, timeout=timeout)
        group._owns_world = started
        try:
            # Its own communicator, so that what users send on theirs cannot come between.
            group.process_group = group._links.during(
                lambda: dist.new_group(timeout=timedelta(seconds=timeout))
            )
        except RuntimeError as error:
            problem = group.explain("forming the group", error)
            group.close()
            raise problem from error
        try:
            group._key = bytes.fromhex(group.share_secret(group._key.hex()))
        except BaseException:
            group.close()
            raise
        group.board.watch_uncaught()
        return group

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A communicator of some ranks; all ranks must ask for it, in the same order."""
        try:
            made: dist.ProcessGroup = self._links.during(
                lambda: dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
            )
        except RuntimeError as error:
            raise self.explain(f"connecting ranks {list(ranks)}", error) from error
        if self.rank not in ranks:
            return None
        self._subgroups.append(made)
        return made

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> Pending:
        """Reduce ``tensor`` in place, in the background, over all ranks or a ``subgroup``."""
        if self.process_group is None:
            return Pending(self, None, what)
        try:
            work = dist.all_reduce(tensor, op=op, group=group or self.process_group, async_op=True)
        except RuntimeError as error:
            raise self.explain(what, error) from error
        return Pending(self, work, what)

    def broadcast(self, tensor: Tensor, what: str, *, source: int = 0) -> Pending:
        """Give every rank one rank's ``tensor``, in place, in the background."""
        if self.process_group is None:
            return Pending(self, None, what)
        try:
            work = dist.broadcast(tensor, src=source, group=self.process_group, async_op=True)
        except RuntimeError as error:
            raise self.explain(what, error) from error
        return Pending(self, work, what)

    def share_text(self, key: str, text: str) -> str:
        """Rank 0's ``text``, on every rank."""
        if self.world == 1:
            return text
        self._rounds += 1
        place, what = f"text-{self._rounds}", f"waiting for rank 0's {key}"
        if self.rank == 0:
            self._ask(what, lambda: self.store.set(place, text))
        return self._get(place, what).decode()

    def secret(self, purpose: str) -> str:
        """A secret of this group's ranks, a different one for each purpose; nothing is sent."""
        return hmac.new(self._key, purpose.encode(), "sha256").hexdigest()[:32]

    def share_secret(self, text: str) -> str:
        """Rank 0's ``text``, on every rank, by the connections among the ranks.

        torch's store asks nobody who they are: whoever reaches its port reads all of it. It is a
        collective, so no other may be under way.
        """
        if self.world == 1:
            return text
        encoded = text.encode()
        if len(encoded) >= _SECRET_BYTES:
            raise ValueError(f"a secret of {len(encoded)} bytes, at most {_SECRET_BYTES - 1}")
        padded = list(encoded.ljust(_SECRET_BYTES, b"\0"))
        data = torch.tensor(padded, dtype=torch.uint8, device=self.device)
        self.broadcast(data, "sharing a secret").wait()
        return bytes(data.cpu().numpy()).rstrip(b"\0").decode()

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank, on every rank; through rank 0, so that it scales."""
        if self.world == 1:
            return [text]
        self._rounds += 1
        place, what = f"gather-{self._rounds}", f"gathering every rank's {key}"
        if self.rank == 0:
            others = [self._get(f"{place}/{r}", what).decode() for r in range(1, self.world)]
            texts = [text, *others]
            self._ask(what, lambda: self.store.set(f"{place}/all", json.dumps(texts)))
            return texts
        self._ask(what, lambda: self.store.set(f"{place}/{self.rank}", text))
        found: list[str] = json.loads(self._get(f"{place}/all", what))
        return found

    def check_same(self, what: str, lines: Sequence[str]) -> None:
        """Raise on every rank, naming the first difference, unless all ranks pass equal lines.

        Raises:
            MismatchError: some rank's lines differ from rank 0's.
        """
        text = json.dumps(list(lines))
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        odd = self.compare_with_rank0(f"comparing the {what}", digest, text)
        if not odd:
            return
        first = min(rank for rank in odd if rank)
        where = _first_difference(json.loads(odd[0]), json.loads(odd[first]), first)
        ranks = f"rank {first}" if len(odd) == 2 else f"{len(odd) - 1} ranks"
        raise MismatchError(
            f"rank 0 and {ranks} do not have the same {what}. First difference: {where}. Build the "
            "same on every rank, for instance from the same arguments and before anything that "
            "depends on the rank"
        )

    def compare_with_rank0(self, what: str, brief: str, whole: str) -> dict[int, str]:
        """Who differs from rank 0: empty if nobody, else rank 0's and the others' ``whole`` texts.

        It goes through the store, not through collectives, so that a rank that does something else
        meanwhile causes a timeout and not a message of an unexpected size.
        """
        if self.world == 1:
            return {}
        self._rounds += 1
        key = f"round-{self._rounds}"
        if self.rank == 0:
            self._ask(what, lambda: self.store.set(f"{key}/whole", whole))
            self._ask(what, lambda: self.store.set(f"{key}/brief", brief))
        elif self._get(f"{key}/brief", what).decode() != brief:
            entry = json.dumps([self.rank, whole])
            place = self._add(f"{key}/odd", 1, what)
            self._ask(what, lambda: self.store.set(f"{key}/odd/{place}", entry))
        if self._add(f"{key}/arrived", 1, what) == self.world:
            self._ask(what, lambda: self.store.set(f"{key}/all", "1"))
        self._get(f"{key}/all", what)
        count = self._add(f"{key}/odd", 0, what)
        if not count:
            return {}
        entries = [json.loads(self._get(f"{key}/odd/{n}", what)) for n in range(1, count + 1)]
        return {0: self._get(f"{key}/whole", what).decode(), **dict(entries)}

    def _ask(self, what: str, act: Callable[[], T]) -> T:
        """Do something with the store; that it is gone, or silent, is a peer's failure."""
        try:
            return act()
        except DeadlineError as error:
            raise self.silent(what) from error
        except RuntimeError as error:
            raise self.explain(what, error) from error

    def _add(self, key: str, amount: int, what: str) -> int:
        return self._ask(what, lambda: self.store.add(key, amount))

    def _get(self, key: str, what: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        while not self._ask(what, lambda: self.store.wait(key, _POLL)):
            self.check_peers(what)
            if time.monotonic() > deadline:
                raise self.silent(what)
        return self._ask(what, lambda: self.store.get(key))

    def check_peers(self, what: str) -> None:
        """Raise if a peer has left word of its failure."""
        failure = self.board.read(self.step)
        if failure is not None:
            self.board.pass_on(failure)
            raise self._conclude(f"while {what}: {failure}", failure.rank)

    def explain(self, what: str, error: Exception) -> SapwoodError:
        """The error to raise for a collective that broke: the peer's own words if it left any."""
        if self._verdict is not None:
            return self._verdict
        late = "timed out" in str(error).lower()
        # Whoever gives up first says so at once, before the connections it closes break others.
        deadline = time.monotonic() + (0.0 if late else _GRACE)
        while True:
            failure = self.board.read(self.step)
            if failure is not None:
                self.board.pass_on(failure)
                return self._conclude(f"while {what}: {failure}", failure.rank)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if late:
            return self.silent(what)
        first_line = str(error).partition("\n")[0]
        message = f"lost another rank while {what}: it died or was killed ({first_line})"
        self.board.post(message, own=False)
        return self._conclude(message)

    def silent(self, what: str) -> PeerFailed:
        """The error for a peer that said nothing for the whole timeout."""
        message = (
            f"another rank has not answered for {self.timeout:g} s while {what}; it is stopped, "
            "stuck, or took another way through the program (raise timeout= if it is only slow)"
        )
        self.board.post(message, own=False)
        return self._conclude(message)

    @property
    def failed(self) -> bool:
        """Whether this rank has seen the group fail: the others do nothing for it any more."""
        return self._verdict is not None

    def _conclude(self, message: str, rank: int | None = None) -> PeerFailed:
        """Settle on one verdict: whatever breaks after the first failure has the same reason."""
        if self._verdict is None:
            self._verdict = PeerFailed(message, rank=rank)
        return self._verdict

    def leave(self, step: int) -> None:
        """This rank has done its part; rank 0, which may host the store, lets the others finish."""
        self.board.leave(step)
        if self.world == 1:
            return
        try:
            if self.store.add("left-count", 1, timeout=_FAREWELL) == self.world:
                self.store.set("all-left", "1")
            if self.rank == 0:
                self._see_off()
        except (RuntimeError, DeadlineError):  # the others are gone, or the launcher is
            return

    def _see_off(self) -> None:
        deadline = time.monotonic() + min(self.timeout, _FAREWELL)
        while time.monotonic() < deadline and not self.store.wait("all-left", _POLL):
            if self.board.read(self.step) is not None:
                deadline = min(deadline, time.monotonic() + _GRACE)

    def close(self) -> None:
        """Leave; the process group is ended only if this object began it."""
        self.board.unwatch()
        if self.rank == 0 and self.world > 1 and self.board.posted:
            # The store may end with this process, and with it the word we left for the others.
            self.board.linger(self.world, _GRACE)
        if self._verdict is not None or self.board.posted:
            self._links.cut()
        self.store.close()
        if dist.is_initialized() and not self._owns_world:
            for made in self._subgroups:
                dist.destroy_process_group(made)
        self._subgroups = []
        if dist.is_initialized() and (self._owns_world or self.process_group is not None):
            dist.destroy_process_group(None if self._owns_world else self.process_group)
        self.process_group = None
        self._owns_world = False


def _launch_of_world() -> Launch:
    try:
        known = detect()
    except LaunchError:  # whoever initialised torch.distributed did not need the launcher
        known = Launch(launcher="none")
    if known.world == dist.get_world_size() and known.rank == dist.get_rank():
        return known
    return Launch(launcher="none", rank=dist.get_rank(), world=dist.get_world_size())


def _init_world(launch: Launch, store: Store, device: torch.device, timeout: float) -> None:
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {launch.rank} of {launch.world} met the others but could not connect to all of "
            f"them ({str(error).partition(chr(10))[0]}); look for a rank that ended early, and see "
            "that ranks can reach each other (GLOO_SOCKET_IFNAME chooses the network)"
        ) from error


def _first_difference(here: list[str], there: list[str], rank: int) -> str:
    for mine, theirs in zip_longest(here, there):
        if mine != theirs:
            return f"rank 0 has {_shown(mine)}, rank {rank} has {_shown(theirs)}"
    return "none"  # unreachable: the digests differed


def _shown(line: str | None) -> str:
    return "nothing more" if line is None else f"[{line}]"
