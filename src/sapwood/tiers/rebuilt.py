"""A shard rebuilt from any k of its fragments, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.codec import Bytes, Codec, Scheme
from sapwood.tiers.digest import digest, matches
from sapwood.tiers.fragments import Fragment, FragmentRecord
from sapwood.tiers.keeper import Keeper
from sapwood.tiers.record import Range, ShardRecord

__all__ = ["Held", "ParityShard"]


@dataclass(frozen=True)
class Held:
    """A fragment and who has it."""

    fragment: Fragment
    node: str
    keeper: Keeper

    def __str__(self) -> str:
        """As messages name it."""
        return f"fragment {self.fragment.index} on node {self.node}"


class ParityShard:
    """A shard rebuilt block by block from fragments. Fulfils ``StoredShard``.

    A fragment that is damaged in one block is passed over for that block; one whose node is gone,
    for all. Reading fails only when fewer than k are left.
    """

    def __init__(
        self,
        held: Iterable[Held],
        codec_for: Callable[[Scheme, str, int], Codec],
        notes: Iterable[str] = (),
    ) -> None:
        """``held`` are fragments of one shard and one mark; data fragments are preferred.

        ``notes`` say why others were not found, for the message if these are too few.

        Raises:
            CheckpointError: fewer than k of them have a record that can be read.
        """
        self._held = sorted(held, key=lambda h: h.fragment.index)
        self._scheme = self._held[0].fragment.scheme
        self._notes = tuple(notes)
        self._records: dict[Held, FragmentRecord] = {}
        self._lost: dict[Held, str] = {}
        self._block_number, self._block_data = -1, np.empty(0, np.uint8)
        self._content = self._read_records()
        first = next(iter(self._records.values()))
        self._codec = codec_for(self._scheme, first.code, first.block)
        self._blocks = self._codec.blocks(first.nbytes)
        self.record = ShardRecord.decode(self._content, f"the record of {self._what}")

    @property
    def _what(self) -> str:
        first = self._held[0].fragment
        return f"shard {first.rank} of {first.id}"

    def read_into(self, part: Range, out: Any) -> None:
        """Rebuild the blocks a range lies in."""
        memory = np.frombuffer(memoryview(out).cast("B"), np.uint8)
        at, stop = part.at, part.at + part.nbytes
        while at < stop:
            number, offset = divmod(at, self._codec.block)
            block = self._block(number)
            count = min(len(block) - offset, stop - at)
            if count <= 0:
                raise CheckpointError(f"{self._what} ends before byte {stop}")
            begin = at - part.at
            memory[begin : begin + count] = block[offset : offset + count]
            at += count

    def close(self) -> None:
        """Forget the last block; connections are the keepers'."""
        self._block_number, self._block_data = -1, np.empty(0, np.uint8)

    def remake(self, targets: Mapping[int, Keeper]) -> None:
        """Write fragments anew, by index, to those who are to keep them.

        Raises:
            CheckpointError: too few fragments are sound.
            TierError: a keeper cannot take one.
        """
        first = self._held[0].fragment
        nbytes = self._codec.fragment_bytes(self.record.nbytes)
        digests: dict[int, list[str]] = {index: [] for index in targets}
        with ExitStack() as stack:
            sinks = {
                index: stack.enter_context(
                    closing(keeper.put(replace(first, index=index).blob, nbytes))
                )
                for index, keeper in targets.items()
            }
            for number in range(len(self._blocks)):
                for index, part in self._coded(number, targets).items():
                    digests[index].append(digest(part))
                    sinks[index].write(part)
            for index, sink in sinks.items():
                sink.seal(self._described(index, digests[index]).encode(self._content))
            for sink in sinks.values():
                sink.wait()

    def check_all(self) -> dict[Held, str]:
        """Read every fragment, and say what is wrong with those that are not sound."""
        bad: dict[Held, str] = {}
        for held in self._held:
            if held not in self._records and held not in self._lost:
                self._load(held)
        for number, (start, stop) in enumerate(self._blocks):
            left = [h for h in self._records if h not in bad and h not in self._lost]
            size = self._codec.fragment_bytes(stop - start)
            for held in left:
                self._fetch([held], number, size, {}, bad)
        return {**self._lost, **bad}

    def _coded(self, number: int, wanted: Iterable[int]) -> dict[int, Bytes]:
        """Some fragments of a block, made from its data."""
        data = self._block(number)
        size = self._codec.fragment_bytes(len(data))
        parts = [np.empty(size, np.uint8) for _ in range(self._scheme.total)]
        self._codec.encode(data, parts)
        return {index: parts[index] for index in wanted}

    def _described(self, index: int, digests: Sequence[str]) -> FragmentRecord:
        return FragmentRecord(
            code=self._codec.code,
            block=self._codec.block,
            nbytes=self.record.nbytes,
            index=index,
            digests=tuple(digests),
        )

    # -- records -----------------------------------------------------------------------------

    def _read_records(self) -> bytes:
        """Records of k fragments; the shard's own record."""
        content = b""
        for held in self._held:
            if len({h.fragment.index for h in self._records}) == self._scheme.k:
                break
            content = self._load(held) or content
        if len({h.fragment.index for h in self._records}) < self._scheme.k:
            raise self._too_few({})
        return content

    def _load(self, held: Held) -> bytes | None:
        """Read a fragment's record; None, and it is lost, if that cannot be done."""
        try:
            record, shard = FragmentRecord.decode(held.keeper.record(held.fragment.blob), str(held))
            if record.index != held.fragment.index or digest(shard) != held.fragment.mark:
                raise CheckpointError(f"the record of {held} is of something else")
            if any(record.coding != other.coding for other in self._records.values()):
                raise CheckpointError(f"{held} was coded in another way than the others")
        except (CheckpointError, TierError) as error:
            self._lost[held] = str(error)
            return None
        self._records[held] = record
        return shard

    # -- blocks ------------------------------------------------------------------------------

    def _block(self, number: int) -> Bytes:
        if number != self._block_number:
            if number >= len(self._blocks):
                raise CheckpointError(f"{self._what} has {len(self._blocks)} blocks")
            start, stop = self._blocks[number]
            data = np.empty(stop - start, np.uint8)
            self._codec.decode(
                self._collect(number, self._codec.fragment_bytes(stop - start)), data
            )
            self._block_number, self._block_data = number, data
        return self._block_data

    def _collect(self, number: int, nbytes: int) -> Mapping[int, Bytes]:
        """This block's part of k fragments, verified."""
        got: dict[int, Bytes] = {}
        bad: dict[Held, str] = {}
        while len(got) < self._scheme.k:
            chosen = self._choose(self._scheme.k - len(got), got, bad)
            self._fetch(chosen, number, nbytes, got, bad)
        return got

    def _choose(
        self, count: int, got: Mapping[int, Bytes], bad: Mapping[Held, str]
    ) -> Sequence[Held]:
        """Fragments to try next; at least as many as are needed."""
        chosen: dict[int, Held] = {}
        for held in self._held:
            index = held.fragment.index
            if index in got or index in chosen or held in bad or held in self._lost:
                continue
            if held in self._records or self._load(held) is not None:
                chosen[index] = held
            if len(chosen) == count:
                return list(chosen.values())
        raise self._too_few(bad)

    def _fetch(
        self,
        chosen: Sequence[Held],
        number: int,
        nbytes: int,
        got: dict[int, Bytes],
        bad: dict[Held, str],
    ) -> None:
        """Ask all of them, then wait for each; what fails is noted in ``bad`` or is lost."""
        start = number * self._codec.block_fragment
        asked = []
        for held in chosen:
            try:
                asked.append((held, held.keeper.ask(held.fragment.blob, start, nbytes)))
            except TierError as error:
                self._lost[held] = str(error)
        try:
            for held, pending in asked:
                memory = np.empty(nbytes, np.uint8)
                record = self._records[held]
                try:
                    pending.into(memory)
                    if not matches(memory, record.digests[number], record.algorithm):
                        raise CheckpointError(f"{held} is damaged in block {number}")
                except CheckpointError as error:
                    bad[held] = str(error)
                except TierError as error:
                    self._lost[held] = str(error)
                else:
                    got[held.fragment.index] = memory
        finally:
            for _, pending in asked:
                pending.close()

    def _too_few(self, bad: Mapping[Held, str]) -> CheckpointError:
        k, total = self._scheme.k, self._scheme.total
        there = {h.fragment.index for h in self._held if h not in bad and h not in self._lost}
        absent = sorted(set(range(total)) - {h.fragment.index for h in self._held})
        reasons = [f"{held}: {why}" for held, why in {**self._lost, **bad}.items()]
        reasons += [f"fragments {absent} were not found"] if absent else []
        reasons += self._notes
        return CheckpointError(
            f"{self._what} cannot be rebuilt: {len(there)} of its {total} fragments can be read, "
            f"{k} are needed; " + "; ".join(reasons)
        )
