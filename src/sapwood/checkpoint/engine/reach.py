"""Finding the engine of a node, or starting it: by the lowest rank, and by any if that one fails.

Only one engine can have the name, so it does no harm when several ranks start one: the others end
at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.checkpoint.engine.address import Address
from sapwood.checkpoint.engine.launch import launch
from sapwood.checkpoint.engine.link import Link, Refused, connect
from sapwood.errors import CheckpointError

__all__ = ["Reach"]

log = logging.getLogger(__name__)
_TIMEOUT = 60.0
_REFUSALS = 2.0
_PAUSE = 0.02


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How a rank gets to the engine of its node."""

    address: Address
    token: str
    """Of the engine this group starts; ``address`` knows that of an older one."""
    linger: float
    log: Path | None
    first: bool
    """Whether this is the lowest rank of its node."""

    def find(self, hello: Mapping[str, Any]) -> Link | None:
        """Connect to an engine that is there.

        Raises:
            CheckpointError: it does not want this rank, or does not answer.
        """
        older = self.address.read_token()
        tokens = [self.token] if older in (None, self.token) else [self.token, str(older)]
        group = hashlib.blake2b(self.token.encode(), digest_size=8).hexdigest()
        return connect(self.address, tokens, {**hello, "group": group, "linger": self.linger})

    def find_or_start(self, hello: Mapping[str, Any], *, courtesy: float) -> Link:
        """Connect; if there is none, start one (other than the lowest rank ``courtesy`` s later).

        Raises:
            CheckpointError: there is none, and none could be started.
        """
        begin = time.monotonic()
        launches = 0 if self.first else courtesy
        while True:
            waited = time.monotonic() - begin
            try:
                link = self.find(hello)
                if link is not None:
                    return link
            except Refused:
                # The file with its token may be on its way.
                if waited > _REFUSALS:
                    raise
            else:
                if waited > _TIMEOUT:
                    raise CheckpointError(f"no engine could be reached in {_TIMEOUT:g} s")
                if waited >= launches:
                    log.info("starting the checkpoint engine of this node")
                    launch(self.address, self.token, linger=self.linger, log=self.log)
                    launches = waited + 1.0
            time.sleep(_PAUSE)
