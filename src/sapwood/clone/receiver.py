"""The clones' side: a fresh group of ranks that receives the state of a running one.

On the donors' own machine every rank gets all of it from them. Between machines it gets its share
and passes it on to the other clones, message by message as they arrive. So the state is whole soon
after the last one was sent, and a layer can be used as soon as its own tensors are there. The state
counts only when all clones have verified all of it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sapwood.clone.arrival import Arrival
from sapwood.clone.asking import ask_donors, check_model
from sapwood.clone.beside import SLOT, from_bytes, receive
from sapwood.clone.checks import size_of_digests, unpack_digests
from sapwood.clone.filed import FiledState, read_extras, read_state
from sapwood.clone.manifest import Manifest
from sapwood.clone.order import ForkedFrom, ForkOrder
from sapwood.clone.places import Places
from sapwood.clone.plan import Message
from sapwood.clone.session import Session
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, SapwoodError
from sapwood.runtime import faults
from sapwood.runtime.group import Group
from sapwood.state.apply import GivenState
from sapwood.state.catalog import Catalog
from sapwood.state.contents import Contents, collect
from sapwood.transport.base import Ends, Link, Transfer
from sapwood.transport.choose import open_link

__all__ = ["Receiver"]

log = logging.getLogger(__name__)


class Receiver:
    """One clone's part in a fork."""

    def __init__(
        self,
        order: ForkOrder,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: CloneSettings,
        check: Callable[[Manifest], None],
    ) -> None:
        """Ask, agree, and be ready to receive; returns when it is known which step will come.

        ``check`` raises if this script cannot take over what the run has.

        Raises:
            CloneError: the run refuses, has another model, or something failed on the way.
        """
        self._group, self._settings = group, settings
        self._link: Link | None = None
        self._session: Session | None = None
        self._threads: list[threading.Thread] = []
        self._among: dist.ProcessGroup | None = None
        """Of the clones, for this fork only: the messages they pass on are no others'."""
        self._extras: dict[int, Any] = {}
        self._beside: dict[int, Any] = {}
        self._told = threading.Event()
        self._checks: list[tuple[int, Tensor, Transfer]] = []
        self._closing: threading.Thread | None = None
        self._fired = threading.Event()
        self._over = False
        try:
            places = Places.of_clones(group, model, order.address.host)
            self._session = session = ask_donors(order, group, places)
            self._manifest = manifest = self._agree(session)
            self.catalog = Catalog.from_json(manifest.catalog)
            contents = collect(model, optimizer, lambda name: (0,))
            check_model(self.catalog, contents)
            check(manifest)
            self._prepare(session, manifest, contents)
            self.forked_from = self._wait_for_step(session, order)
        except BaseException as error:
            self.abandon(error)
            raise

    # -- coming together ---------------------------------------------------------------------

    def _agree(self, session: Session) -> Manifest:
        timeout = self._settings.step_timeout
        what = "waiting for the run to end a step"
        text = session.hear("manifest", what, timeout)
        return Manifest.decode(text)

    def _prepare(self, session: Session, manifest: Manifest, contents: Contents) -> None:
        self.plan = manifest.plan()
        rank = self._group.rank
        whole = not manifest.relay
        self._mine = self.plan.received_by(rank)
        self._others = [] if whole else [m for m in self.plan.messages if m.clone != rank]
        self._messages = self._mine if whole else list(self.plan.messages)
        self.arrival = Arrival(
            self.catalog,
            contents,
            self._messages,
            algorithm=manifest.algorithm,
            device=manifest.devices[manifest.donors + rank],
        )
        session.count("agreed")
        if self._group.world > 1:
            patience = timedelta(seconds=self._group.timeout)
            self._among = dist.new_group(backend="gloo", timeout=patience)
        if manifest.approach != "file":
            self._post(session, manifest)
        session.count("posted")

    def _post(self, session: Session, manifest: Manifest) -> None:
        """Post every receive, before the donors are told to send."""
        ends = Ends(
            me=manifest.donors + self._group.rank,
            donors=manifest.donors,
            hosts=manifest.hosts,
            machines=manifest.machines,
            timeout=self._settings.join_timeout,
        )
        self._link = link = open_link(
            manifest.transport, session.raw, ends, devices=manifest.devices
        )
        coming = self._post_messages(link)
        for donor in range(manifest.donors):
            size = size_of_digests(len(self.plan.sent_by(donor)), manifest.algorithm)
            marks = self.arrival.empty(size)
            self._checks.append((donor, marks, link.recv(donor, self.plan.checks_tag, marks)))
        extras = []
        for donor in self._donors_of_extras:
            slot = self.arrival.empty(SLOT)
            extras.append((donor, slot, link.recv(donor, self.plan.extras_tag, slot)))
        passed = self._post_passed()
        self._start("sapwood-clone-receive", lambda: self._receive(coming))
        self._start("sapwood-clone-extras", lambda: self._receive_extras(link, extras))
        if passed:
            self._start("sapwood-clone-relay", lambda: self._receive_passed(passed))

    def _post_messages(self, link: Link) -> list[tuple[Message, list[Tensor], Transfer]]:
        """What the donors send to this clone."""
        coming = []
        for message in self._mine:
            data = self.arrival.place_for(message, gathers=link.gathers)
            given = data if link.gathers else data[0]
            coming.append((message, data, link.recv(message.donor, message.tag, given)))
        return coming

    def _post_passed(self) -> list[tuple[Message, Tensor, Any]]:
        """What other clones pass on."""
        passed = []
        for message in self._others:
            (data,) = self.arrival.place_for(message, gathers=False)
            work = dist.irecv(data, message.clone, group=self._among, tag=message.tag)
            passed.append((message, data, work))
        return passed

    def _wait_for_step(self, session: Session, order: ForkOrder) -> ForkedFrom:
        patience = math.inf if order.waits else self._settings.step_timeout
        step = session.hear("fire", "waiting for a step to be sent", patience)
        self._fired.set()
        return ForkedFrom(run=self._manifest.run, step=int(step), overrides=order.overrides)

    def extras(self) -> tuple[Any, Any]:
        """What belongs to all, and to this rank (empty if the donors have no such rank).

        Raises:
            CloneError: the donors' step did not end in time.
        """
        for donor in self._donors_of_extras - set(self._extras):
            self._extras[donor] = self._extras_of(donor)
        return self._extras[0], self._extras.get(self._group.rank, {})

    @property
    def _donors_of_extras(self) -> set[int]:
        return {0, self._group.rank} & set(range(self._manifest.donors))

    def _extras_of(self, donor: int) -> Any:
        session = self._session
        assert session is not None
        what, timeout = f"waiting for donor {donor} to end its step", self._settings.step_timeout
        if self._link is not None:
            self.arrival.wait_while(self._told, session.check, what, timeout)
            return self._beside[donor]
        path = Path(session.hear(f"extras/{donor}", what, timeout))
        return from_bytes(read_extras(path), self._manifest.algorithm)

    # -- receiving, on threads ---------------------------------------------------------------

    def _start(self, name: str, work: Any) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except (SapwoodError, RuntimeError, OSError) as error:
            self.arrival.fail(error)
        except Exception as error:
            log.exception("unforeseen, while receiving a state")
            self.arrival.fail(error)

    def _receive(self, coming: Sequence[Any]) -> None:
        if not self._wait_for_fire():
            return
        passing: list[tuple[Any, Any]] = []  # the memory must stay until it is sent
        for message, data, transfer in coming:
            transfer.wait(self._settings.step_timeout)
            faults.point("clone.arrived", tag=message.tag)
            if self._manifest.relay and self._among is not None:
                passing += [
                    (data, dist.isend(data[0], other, group=self._among, tag=message.tag))
                    for other in range(self._group.world)
                    if other != self._group.rank
                ]
            self.arrival.arrived(message, data)
        for _, work in passing:
            work.wait(timedelta(seconds=self._settings.step_timeout))

    def _receive_extras(self, link: Link, extras: Sequence[tuple[int, Tensor, Transfer]]) -> None:
        if not self._wait_for_fire():
            return
        timeout, tag = self._settings.step_timeout, self.plan.extras_tag
        for donor, slot, transfer in extras:
            transfer.wait(timeout)
            memory = receive(slot, link, donor, tag, self.arrival.empty, timeout)
            self._beside[donor] = from_bytes(memory, self._manifest.algorithm)
        self._told.set()

    def _wait_for_fire(self) -> bool:
        """Waiting for a message has a limit, and cannot be taken up again; this can."""
        while not self._fired.wait(0.5):
            if self._over:
                return False
        return not self._over

    def _receive_passed(self, passed: Sequence[tuple[Message, Any, Any]]) -> None:
        if not self._wait_for_fire():
            return
        for message, data, work in passed:
            work.wait(timedelta(seconds=self._settings.step_timeout))
            self.arrival.arrived(message, [data])

    @property
    def streams(self) -> bool:
        """Whether tensors arrive one by one, before ``finish``."""
        return self._manifest.approach != "file"

    # -- becoming a run ----------------------------------------------------------------------

    def finish(self) -> GivenState:
        """The state, when every clone has verified all of it.

        Raises:
            CloneError: it did not arrive, was changed on its way, or another clone failed.
        """
        session = self._session
        assert session is not None
        timeout = self._settings.step_timeout
        try:
            if self._manifest.approach == "file":
                self._read_file(session)
            self.arrival.wait(self.catalog.by_key, timeout)
            for thread in self._threads:
                thread.join(timeout)
            if self._manifest.approach != "file":
                self.arrival.check(self._expected(), self._messages)
            faults.point("clone.verified")
            self._commit(session)
        except BaseException as error:
            self.abandon(error)
            raise
        common, mine = self.extras()
        # Nobody needs to wait until connections are closed.
        self._closing = threading.Thread(
            target=self._leave, name="sapwood-clone-close", daemon=True
        )
        self._closing.start()
        return GivenState(
            catalog=self.catalog,
            tensors=self.arrival.of("optimizer"),
            common=common,
            mine=mine,
        )

    def _read_file(self, session: Session) -> None:
        what, timeout = "waiting for the file", self._settings.step_timeout
        state = FiledState.from_json(session.hear("file", what, timeout))
        algorithm = self._manifest.algorithm
        read_state(state, self.catalog, self.arrival.memory, algorithm=algorithm)
        self.arrival.filled()

    def _expected(self) -> dict[int, str]:
        """The donors' checksums, by tag."""
        found: dict[int, str] = {}
        for donor, data, transfer in self._checks:
            transfer.wait(self._settings.step_timeout)
            marks = unpack_digests(data, self._manifest.algorithm)
            tags = [message.tag for message in self.plan.sent_by(donor)]
            found |= dict(zip(tags, marks, strict=True))
        return found

    def _commit(self, session: Session) -> None:
        """All begin, or none: who failed has left the group of the clones, or never comes."""
        if self._among is None:
            return
        try:
            dist.all_reduce(torch.ones(1), group=self._among)
        except RuntimeError as error:
            session.check()
            raise CloneError(f"another clone is gone, so none begins: {error}") from error

    def _leave(self) -> None:
        if self._group.rank == 0 and self._session is not None:
            try:
                self._session.say("ready", True)
            except CloneError as error:
                log.info("the donors do not hear that their clones have begun: %s", error)
        self.close()

    def abandon(self, error: BaseException) -> None:
        """Tell everybody that this fork failed, and close."""
        if self._session is not None:
            self._session.fail(f"clone {self._group.rank}: {error}")
        self.close()

    def join(self) -> None:
        """Wait until everything is closed."""
        if self._closing is not None:
            self._closing.join(10.0)

    def close(self) -> None:
        """Drop the link and the group; whoever still uses them is told."""
        self._over = True
        self._fired.set()
        if self._link is not None:
            self._link.close()
            self._link = None
        for thread in self._threads:
            thread.join(5.0)
        if self._among is not None:
            dist.destroy_process_group(self._among)
            self._among = None
        if self._session is not None:
            self._session.close()
