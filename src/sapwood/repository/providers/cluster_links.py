"""The providers of a cluster as its client has them: connected when needed, asked side by side."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sapwood.errors import SapwoodError, StoreError, Unreachable
from sapwood.repository.providers.base import Member, Members, Provider, StaleMembers

__all__ = ["Answers", "Connect", "Link", "Links", "all_of", "all_silent", "unreachable"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Connect = Callable[[Member, Callable[[], int]], Provider]
"""Makes the client of one provider; the callable gives the epoch that its requests carry."""
_AT_ONCE = 8
"""Requests to one provider. Each has threads of its own: one that hangs holds up no other."""
_DOWN_SECONDS = 5.0
"""So long a provider that did not answer is passed over, where others have what it has."""
_CHANGES = 8
"""So often the list may change during one call."""


@dataclass
class Answers(Generic[T]):
    """What several providers answered to one question."""

    got: dict[Member, T] = field(default_factory=dict)
    silent: dict[Member, Unreachable] = field(default_factory=dict)
    """Those that did not answer."""


class Link:
    """One provider: its client, its threads, and since when it has not answered."""

    def __init__(self, member: Member, connect: Connect, epoch: Callable[[], int]) -> None:
        """Nothing is connected yet."""
        self.member = member
        self._connect, self._epoch = connect, epoch
        self._lock = threading.Lock()
        self._provider: Provider | None = None
        self._closed = False
        self._down_until = 0.0
        self._threads = ThreadPoolExecutor(_AT_ONCE, f"sapwood-{member.name}")

    @property
    def down(self) -> bool:
        """Whether it did not answer a moment ago."""
        return time.monotonic() < self._down_until

    def forgive(self) -> None:
        """Ask it again, whatever it did."""
        self._down_until = 0.0

    def call(self, ask: Callable[[Provider], T]) -> T:
        """Ask it, in this thread.

        Raises:
            Unreachable: it does not answer; names it.
        """
        try:
            answer = ask(self._client())
        except Unreachable as error:
            self.mark_down()
            raise unreachable(self.member, str(error)) from error
        self._down_until = 0.0
        return answer

    def mark_down(self) -> None:
        """It did not answer."""
        if not self._down_until:
            log.warning("provider %s at %s does not answer", self.member.name, self.member.address)
        self._down_until = time.monotonic() + _DOWN_SECONDS

    def begin(self, ask: Callable[[Provider], T]) -> Future[T]:
        """Ask it, in a thread of its own."""
        try:
            return self._threads.submit(self.call, ask)
        except RuntimeError as error:  # closed meanwhile
            raise StoreError("the repository was closed; open it again") from error

    def close(self) -> None:
        """End its client, which wakes whoever waits for it, and its threads."""
        with self._lock:
            self._closed = True
            provider, self._provider = self._provider, None
        if provider is not None:
            provider.close()
        self._threads.shutdown(cancel_futures=True)

    def _client(self) -> Provider:
        with self._lock:
            if self._closed:
                raise StoreError("the repository was closed; open it again")
            if self._provider is None:
                self._provider = self._connect(self.member, self._epoch)
            return self._provider


class Links:
    """All providers of a cluster, and the list that the client goes by. Thread- and fork-safe.

    Owns the clients and threads; a forked process makes its own.
    """

    def __init__(self, members: Members, connect: Connect) -> None:
        """Begin with a list; a newer one is adopted when a provider answers with it."""
        self._members, self._connect = members, connect
        self._closed = False
        self._parents: list[dict[Member, Link]] = []
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._links: dict[Member, Link] = {}

    @property
    def members(self) -> Members:
        """The list that the client goes by now."""
        return self._members

    def link(self, member: Member) -> Link:
        """One provider."""
        if self._pid != os.getpid():
            # Threads do not survive a fork, and connections are the parent's: kept, never used,
            # for closing them here would end them there.
            self._parents.append(self._links)
            self._begin()
        with self._lock:
            if self._closed:
                raise StoreError("the repository was closed; open it again")
            if member not in self._links:
                self._links[member] = Link(member, self._connect, lambda: self._members.epoch)
            return self._links[member]

    def adopt(self, members: Members) -> bool:
        """Go by another list from now on, if it is newer."""
        with self._lock:
            if members.epoch <= self._members.epoch:
                return False
            if not members.members or members.replicas < 1:
                raise StoreError(f"a list of providers of epoch {members.epoch} names none")
            log.info("the list of providers is of epoch %d now", members.epoch)
            self._members = members
        return True

    def current(self, call: Callable[[Members], T]) -> T:
        """Call with the list, and again as long as it was changed meanwhile.

        Another thread's request may have brought a newer one: what was done by the old list is
        done again, though no provider has said that it is wrong. Also again where nobody answered
        of those that were not passed over.
        """
        forgiven = False
        for _ in range(_CHANGES):
            members = self._members
            try:
                answer = call(members)
            except StaleMembers as error:
                self._correct(error.members)
            except Unreachable:
                passed = [link for link in list(self._links.values()) if link.down]
                if self._members is members and (forgiven or members.replicas == 1 or not passed):
                    raise
                forgiven = True
                for link in passed:
                    link.forgive()
            except SapwoodError:
                if self._members is members:
                    raise
            else:
                if self._members is members:
                    return answer
        raise StoreError(f"the list of providers has changed {_CHANGES} times in one call")

    def _correct(self, members: Members) -> None:
        if not self.adopt(members) and members.epoch < self._members.epoch:
            raise StoreError(
                f"a provider goes by a list of epoch {members.epoch}, all others by "
                f"{self._members.epoch}: run `sapwood store members repair` with a token of an "
                "administrator"
            )

    # -- asking ------------------------------------------------------------------------------

    def each(
        self,
        calls: Mapping[Member, Callable[[Provider], T]],
        *,
        seconds: float | None = None,
    ) -> Answers[T]:
        """Ask several providers at once.

        Without ``seconds`` it returns when all have answered or failed, so that nobody touches
        buffers any more. One that did not answer a moment ago is passed over if there are replicas.

        Raises:
            StoreError: what a provider answered.
            StorageError: likewise.
        """
        answers: Answers[T] = Answers()
        links = {}
        for member in calls:
            link = self.link(member)
            if link.down and self._members.replicas > 1:
                answers.silent[member] = unreachable(member, "it did not a moment ago")
            else:
                links[member] = link
        if len(links) == 1 and seconds is None:
            ((member, link),) = links.items()
            try:
                answers.got[member] = link.call(calls[member])
            except Unreachable as error:
                answers.silent[member] = error
            return answers
        self._gather({link: link.begin(calls[m]) for m, link in links.items()}, seconds, answers)
        return answers

    def _gather(
        self, futures: Mapping[Link, Future[T]], seconds: float | None, answers: Answers[T]
    ) -> None:
        _, late = wait(futures.values(), seconds)
        failures: list[BaseException] = []
        for link, future in futures.items():
            if future in late:
                future.cancel()
                link.mark_down()
                answers.silent[link.member] = unreachable(
                    link.member, f"nothing was heard for {seconds:g} s"
                )
                continue
            error = future.exception()
            if error is None:
                answers.got[link.member] = future.result()
            elif isinstance(error, Unreachable):
                answers.silent[link.member] = error
            else:
                failures.append(error)
        if failures:
            raise next((e for e in failures if isinstance(e, StaleMembers)), failures[0])

    def everyone(self, ask: Callable[[Provider], T], seconds: float | None) -> Answers[T]:
        """Ask all that may have something; enough must answer that nothing can be missing.

        Raises:
            Unreachable: as many do not answer as have copies of the same.
        """
        members = self._members
        answers = self.each(dict.fromkeys(all_of(members), ask), seconds=seconds)
        if len(answers.silent) >= members.replicas:
            raise all_silent(answers.silent.values())
        return answers

    def require(self, members: Iterable[Member], why: str) -> None:
        """See that these answer.

        Raises:
            Unreachable: one does not; ``why`` it is needed.
        """
        asked = self.each(dict.fromkeys(members, lambda provider: provider.members()))
        if asked.silent:
            raise Unreachable(f"{why}: {all_silent(asked.silent.values())}")

    def quietly(
        self, calls: Mapping[Member, Callable[[Provider], Any]], *, insist: bool = False
    ) -> None:
        """Ask for what may as well fail, such as clearing away.

        ``insist``: also those that did not answer a moment ago.
        """
        for member, call in calls.items():
            try:
                link = self.link(member)
                if insist or not link.down or self._members.replicas == 1:
                    link.call(call)
            except SapwoodError as error:
                log.debug("not cleared away: %s", error)

    def close(self) -> None:
        """End all clients and threads. Calling it again does nothing."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._closed = True
            links, self._links = self._links, {}
        for link in links.values():
            link.close()


def all_of(members: Members) -> Sequence[Member]:
    """All that may have something: those of the list, and while data moves, of the one before."""
    return list(dict.fromkeys((*members.members, *members.before)))


def unreachable(member: Member, why: str) -> Unreachable:
    """The error of a provider that does not answer; names it once."""
    name = f"provider {member.name} at {member.address}"
    return Unreachable(why if name in why else f"{name} does not answer: {why}")


def all_silent(errors: Iterable[Unreachable]) -> Unreachable:
    """The error of several that do not answer."""
    return Unreachable("; ".join(map(str, errors)))
