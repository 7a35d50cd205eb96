"""Who belongs to a cluster: adding a provider, letting one go, and mending after one was lost.

A change is a list with a larger epoch. It is taken by one provider after the other, always in the
same order, so that of two changes at once one fails at the first. While data moves, the list says
where it was before, and clients look there as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sapwood.errors import ConfigError, SapwoodError, StoreError
from sapwood.repository.providers.base import Member, Members, Provider
from sapwood.repository.providers.cluster_links import Links, all_of, all_silent
from sapwood.repository.providers.cluster_moving import Moved, move

__all__ = ["MemberState", "Membership"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PAGE = 1000
Said = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """One provider, as it answers now."""

    member: Member
    epoch: int | None
    """Of the list it goes by; None if it does not answer."""
    versions: int = 0
    tensors: int = 0
    nbytes: int = 0
    """Of the tensors of all versions; equal ones lie there once."""
    trouble: str = ""
    """Why there is no answer."""


class Membership:
    """Changes of the list of providers; the token must be an administrator's."""

    def __init__(self, links: Links) -> None:
        """``links`` stay the caller's to close."""
        self._links = links

    @property
    def members(self) -> Members:
        """The list that this client goes by."""
        return self._links.members

    def states(self) -> list[MemberState]:
        """All providers, those that are on their way out at the end."""
        self._newest()
        return [self._state(member) for member in all_of(self._links.members)]

    def join(self, member: Member, *, said: Said) -> Moved:
        """Add a provider, and give it its share. A known name takes a new address.

        Raises:
            ConfigError: it cannot be a member.
            Unreachable: a provider does not answer; all of them must.
        """
        if not _NAME.fullmatch(member.name):
            raise ConfigError(f"{member.name!r} is no name of a provider; expected letters, digits")
        members = self._settled(f"adding {member.name}")
        if member in members.members:
            return self.repair(said=said)
        known = [one for one in members.members if one.name == member.name]
        epoch = self._fit_to_join(member, known)
        before = () if known else members.members
        listed = (*(one for one in members.members if one not in known), member)
        self._require([one for one in members.members if one not in known])
        self._spread(
            replace(
                members,
                epoch=max(members.epoch, epoch) + 1,
                members=tuple(sorted(listed)),
                before=before,
            )
        )
        return self._move(said)

    def leave(self, name: str, *, lost: bool, said: Said) -> Moved:
        """Let a provider go; what it has goes to the others first.

        ``lost``: it will never answer again; copies are made of what others have.

        Raises:
            ConfigError: there is no such provider, or too few would be left.
            Unreachable: a provider does not answer.
        """
        members = self._settled(f"removing {name}", without=name if lost else None)
        gone = [member for member in members.members if member.name == name]
        left = tuple(member for member in members.members if member.name != name)
        if not gone:
            names = ", ".join(member.name for member in members.members)
            raise ConfigError(f"there is no provider {name!r}; there are {names}")
        if not left or (len(left) < members.replicas and not lost):
            raise ConfigError(
                f"without {name} there would be {len(left)} providers for {members.replicas} "
                "copies of everything; add another one first"
            )
        if lost and self._answers(gone[0]):
            raise ConfigError(f"{name} answers; let it go without --lost, so that nothing is lost")
        self._require(left if lost else members.members)
        # Of a change that was cut off, the list before it still says where things are.
        before = members.before or members.members
        if lost:
            before = tuple(member for member in before if member.name != name)
        self._spread(replace(members, epoch=members.epoch + 1, members=left, before=before))
        moved = self._move(said)
        if lost and members.replicas == 1:
            moved.problems.append(
                f"versions whose heads were at {name} only are lost: there was one copy of each"
            )
        if len(left) < members.replicas:
            moved.problems.append(
                f"{len(left)} providers cannot keep {members.replicas} copies; add another one"
            )
        return moved

    def repair(self, *, said: Said) -> Moved:
        """Give each provider what it should have: after it was away, or after a change was cut off.

        Raises:
            Unreachable: a provider does not answer; all of them must.
        """
        members = self._newest()
        self._require(all_of(members))
        answers = self._links.each(dict.fromkeys(all_of(members), _list_of))
        if any(found != members for found in answers.got.values()):
            self._spread(replace(members, epoch=members.epoch + 1))
        return self._move(said)

    # -- inside ------------------------------------------------------------------------------

    def _move(self, said: Said) -> Moved:
        members = self._links.members
        moved = move(self._links, members, tuple(all_of(members)), said=said)
        if members.before:
            self._spread(replace(members, epoch=members.epoch + 1, before=()))
        return moved

    def _newest(self) -> Members:
        """The newest list that any provider has."""
        while True:
            members = self._links.members
            answers = self._links.each(dict.fromkeys(all_of(members), _list_of))
            if not answers.got:
                raise all_silent(answers.silent.values())
            newest = max(answers.got.values(), key=lambda found: found.epoch)
            if not self._links.adopt(newest):
                return self._links.members

    def _settled(self, what: str, without: str | None = None) -> Members:
        members = self._newest()
        if members.before and without is None:
            raise StoreError(
                f"{what}: another change is under way, or was cut off; wait for it, or end it with "
                "`sapwood store members repair`"
            )
        return members

    def _require(self, members: Sequence[Member]) -> None:
        for member in members:
            self._links.link(member).forgive()
        self._links.require(members, "the list of providers is changed at all of them")

    def _fit_to_join(self, member: Member, known: list[Member]) -> int:
        """Its epoch; by its own list it must be alone and empty, or have been a member."""
        answers = self._links.each({member: _list_of})
        if member in answers.silent:
            raise answers.silent[member]
        own = answers.got[member]
        names = [one.name for one in own.members]
        if len(names) == 1 and names[0] != member.name:
            raise ConfigError(
                f"the provider at {member.address} calls itself {names[0]!r}; add it as "
                f"{names[0]}={member.address}"
            )
        state = self._state(member)
        if not known and (state.versions or state.tensors):
            raise ConfigError(
                f"the provider at {member.address} has {state.versions} versions and "
                f"{state.tensors} tensors of its own; add one with an empty place"
            )
        return own.epoch

    def _spread(self, members: Members) -> None:
        """Let everybody take a list, those first who had the one before."""
        old = self._links.members
        targets = sorted(
            set(all_of(old)) | set(all_of(members)),
            key=lambda member: (member not in old.members, member),
        )
        for member in targets:
            if member not in all_of(members) and not self._answers(member):
                continue  # it was lost, or has another address now
            answers = self._links.each({member: lambda provider: _take(provider, members)})
            if member in answers.silent:
                raise answers.silent[member]
            if answers.got[member] != members:
                raise StoreError(
                    f"{member.name} has taken another change of the list of providers at the same "
                    "time; look at `sapwood store members ls`, then try again"
                )
        self._links.adopt(members)

    def _answers(self, member: Member) -> bool:
        return bool(self._links.each({member: _list_of}).got)

    def _state(self, member: Member) -> MemberState:
        try:
            answers = self._links.each({member: _counts})
            if member in answers.silent:
                raise answers.silent[member]
        except SapwoodError as error:
            return MemberState(member=member, epoch=None, trouble=str(error))
        epoch, versions, tensors, nbytes = answers.got[member]
        return MemberState(
            member=member, epoch=epoch, versions=versions, tensors=tensors, nbytes=nbytes
        )


def _list_of(provider: Provider) -> Members:
    return provider.members()


def _take(provider: Provider, members: Members) -> Members:
    provider.take_members(members)
    return provider.members()


def _counts(provider: Provider) -> tuple[int, int, int, int]:
    epoch, versions = provider.members().epoch, len(provider.models("*"))
    tensors = nbytes = after = 0
    while page := provider.parts(after, _PAGE):
        tensors += sum(len(part.keys) for part in page)
        nbytes += sum(part.nbytes for part in page)
        after = max(part.version.id for part in page)
    return epoch, versions, tensors, nbytes
