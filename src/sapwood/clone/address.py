"""Where a running job is asked for a clone, as its folder says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sapwood.errors import CloneError
from sapwood.regular import read_regular
from sapwood.runtime.host import HOST, LOOPBACK, machine_key
from sapwood.runtime.interfaces import is_loopback

__all__ = ["ADDRESS", "REMEDY", "TOKEN", "Address"]

ADDRESS, TOKEN = "address", "token"
REMEDY = (
    f"{HOST}, or host= of run.allow_clones, set to an address of its machine that others can reach"
)
"""What makes a run reachable from other machines."""
_SELF = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - compared with, not bound
"""How a machine reaches what listens on all its interfaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a run's fork listener is."""

    host: str
    port: int
    node: str
    """The machine's own name, for people."""
    token_file: str
    machine: str = ""
    """Its ``machine_key``: host names may be equal on several machines."""
    bind: str = ""
    """What it listens on there; ``host`` if empty."""

    @classmethod
    def read(cls, folder: Path) -> Address:
        """What a run's folder says.

        Raises:
            CloneError: the run takes no clones, or its folder is damaged.
        """
        path = folder / ADDRESS
        try:
            return cls(**json.loads(read_regular(path)))
        except FileNotFoundError:
            raise CloneError(
                f"the run in {folder} takes no clones: it has ended, or it did not call "
                "run.allow_clones()"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CloneError(f"{path} is damaged: {error}") from error

    def encode(self) -> str:
        """As it stands in the folder."""
        return json.dumps(asdict(self))

    def token(self) -> str:
        """The token.

        Raises:
            CloneError: it cannot be read.
        """
        try:
            return read_regular(Path(self.token_file)).decode("ascii", "replace").strip()
        except OSError as error:
            raise CloneError(
                f"cannot read the run's token in {self.token_file}: {error.strerror or error}; "
                "only the user who runs it can"
            ) from error

    @property
    def nearest(self) -> str:
        """The host to connect to from here."""
        if self.machine != machine_key():
            return self.host
        # A forwarded address need not lead back to the machine it is forwarded to.
        return _SELF.get(self.bind, self.bind or self.host)

    def check_reach(self, machines: Iterable[str] = ()) -> None:
        """Refuse what cannot work, before anybody connects; ``machines`` are the clones'.

        Raises:
            CloneError: the run listens on loopback, and a clone is on another machine.
        """
        apart = any(one != self.machine for one in machines or (machine_key(),))
        if self.machine and is_loopback(self.host) and apart:
            raise CloneError(
                f"the run takes forks from its own machine only ({self.host} of {self.node}), and "
                "this is another one, or a container with a network of its own; start the training "
                f"with {REMEDY}"
            )
