"""Fragments of a shard: their names and their records."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from sapwood.errors import CheckpointError, ConfigError
from sapwood.tiers.codec import Scheme
from sapwood.tiers.digest import DEFAULT_ALGORITHM, seal_json, unseal
from sapwood.tiers.keeper import Blob
from sapwood.tiers.record import CheckpointId

__all__ = ["AREA", "Fragment", "FragmentRecord"]

AREA = "parity"
FORMAT = "sapwood-fragment/1"
_NAME = re.compile(r"shard-(\d+)\.(\d+)\+(\d+)\.(\d+)\.([0-9a-f]{16})")


@dataclass(frozen=True, order=True)
class Fragment:
    """Which fragment of which shard."""

    id: CheckpointId
    rank: int
    scheme: Scheme
    mark: str
    """The checksum of the shard's record: fragments with different ones do not go together."""
    index: int

    @property
    def blob(self) -> Blob:
        """Its name at a keeper."""
        name = f"shard-{self.rank}.{self.scheme}.{self.index}.{self.mark}"
        return Blob(AREA, self.id.folder, name)

    @classmethod
    def parse(cls, blob: Blob) -> Fragment | None:
        """The fragment behind a blob's name; None for any other name."""
        found, id = _NAME.fullmatch(blob.name), CheckpointId.parse(blob.group)
        if found is None or id is None:
            return None
        try:
            scheme = Scheme(int(found[2]), int(found[3]))
        except ConfigError:
            return None
        return cls(id, int(found[1]), scheme, found[5], int(found[4]))


@dataclass(frozen=True, kw_only=True)
class FragmentRecord:
    """How a fragment was made, and its checksums."""

    code: str
    block: int
    nbytes: int
    """Bytes of the whole shard."""
    index: int
    digests: tuple[str, ...]
    """Of this fragment of each block."""
    algorithm: str = DEFAULT_ALGORITHM

    @property
    def coding(self) -> tuple[str, int, int]:
        """What the fragments of one shard must have in common."""
        return self.code, self.block, self.nbytes

    def encode(self, shard: bytes) -> bytes:
        """One JSON object, with the record of the shard, as it is, for a text in it."""
        fields = {"format": FORMAT, **asdict(self), "shard": shard.decode()}
        return seal_json(json.dumps(fields, separators=(",", ":")).encode(), self.algorithm)

    @classmethod
    def decode(cls, content: bytes, what: str) -> tuple[FragmentRecord, bytes]:
        """The reverse of ``encode``: the fragment's record, and the shard's as it was given.

        Raises:
            CheckpointError: it is damaged.
        """
        body, shard = _parted(content, what)
        try:
            fields = json.loads(body)
            if fields.pop("format") != FORMAT:
                raise ValueError("its format is another")
            shard = fields.pop("shard").encode() if shard is None else shard
            return cls(**{**fields, "digests": tuple(fields["digests"])}), shard
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the record of {what} is none: {error!r}") from error


def _parted(content: bytes, what: str) -> tuple[bytes, bytes | None]:
    """What is known of the fragment, and the shard's record where that stands behind it.

    Earlier versions wrote a line of JSON, a line with its checksum, and then the shard's record.
    """
    body, line, rest = content.partition(b"\n")
    if not line:
        return unseal(content, f"the record of {what}"), None
    mark, _, shard = rest.partition(b"\n")
    return unseal(body + b"\n" + mark, f"the record of {what}"), shard
