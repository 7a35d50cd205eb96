"""Several forks of one run at once, which all begin with the state of the same step."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sapwood.cli.process import ending_in_order
from sapwood.cli.verbs.run import check_ranks, most_ranks
from sapwood.clone.address import Address
from sapwood.clone.listener import ask
from sapwood.clone.order import ENV, ForkOrder
from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.launch import detect

__all__ = ["start_variants"]

_POLL = 0.1
_PATIENCE = 600.0


def start_variants(orders: Sequence[ForkOrder], words: Sequence[str], ranks: int | None) -> int:
    """Start a group of ranks for each order, and wait for all; the exit code of the first to fail.

    Raises:
        ConfigError: that is more than this machine can be meant to run, or another launcher has
            started this process already.
    """
    count = check_ranks(ranks)
    _check(len(orders), count)
    together = (secrets.token_hex(8), len(orders))
    command = [sys.executable, "-m", "sapwood.cli", "run", "-n", str(count), *words]
    started: list[subprocess.Popen[bytes]] = []
    with ending_in_order():
        try:
            for order in orders:
                text = replace(order, together=together).encode()
                started.append(subprocess.Popen(command, env={**os.environ, ENV: text}))
            return _wait(started, orders[0].address, together)
        except KeyboardInterrupt:
            # As the terminal does, if it is one: a launcher takes the same signal twice for once.
            _end(started, signal.SIGINT)
            raise
        finally:
            _end(started, signal.SIGTERM)


def _check(forks: int, ranks: int) -> None:
    most = most_ranks()
    if forks * ranks > most:
        raise ConfigError(
            f"--vary makes {forks} forks of {ranks} ranks, expected at most {most} ranks in all on "
            "this machine; vary less at a time"
        )
    launcher = detect().launcher
    if launcher != "none":
        raise ConfigError(
            f"--vary starts several groups of ranks, but {launcher} made this process a rank of "
            f"one; start each fork with {launcher}, with --set and --at-step"
        )


def _wait(
    started: Sequence[subprocess.Popen[bytes]], address: Address, together: tuple[str, int]
) -> int:
    first = 0
    left = list(started)
    while left:
        for process in [one for one in left if one.poll() is not None]:
            left.remove(process)
            if process.returncode and not first:
                first = process.returncode if process.returncode > 0 else 128 - process.returncode
                _tell(address, together, first)
        time.sleep(_POLL if left else 0.0)
    return first


def _tell(address: Address, together: tuple[str, int], code: int) -> None:
    """Else the others would wait for a fork that does not come; once all have begun, nothing."""
    why = f"one of {together[1]} forks ended with exit code {code}"
    with suppress(CloneError):  # the run has ended, and the forks know it
        ask(address, {"op": "give up", "together": together, "why": why})


def _end(started: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(number)
    for process in started:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
