"""Run a function on N real ranks: separate processes, with the environment torchrun gives.

    def work(scale: int) -> int:
        return scale * ranks.rank()

    assert ranks.spawn(work, 3, 10) == [0, 10, 20]

The function must be importable (defined at the top of a module). For tests that do something *to* a
rank, ``start`` gives the running group:

    with ranks.start(work, 3) as group:
        group.wait_mark("trained", rank=1, timeout=30)
        group.kill(1, signal.SIGKILL)
        outcomes = group.wait(timeout=30)

Ranks come from multiprocessing's fork server with torch loaded, so that each starts in a fraction
of a second. Nothing a rank started outlives its group, but for what detaches itself to do so (the
checkpoint engine of a node): a test that has one sees it end, or ``hygiene`` finds it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal

from sapwood.errors import ConfigError, LaunchError
from sapwood.testing._group import Group
from sapwood.testing._meeting import Meeting, Store, inherited_env
from sapwood.testing._member import Member
from sapwood.testing._rank import Order, main, mark
from sapwood.testing.outcome import Outcome, failure

__all__ = ["Group", "Outcome", "mark", "rank", "spawn", "start", "stop_server", "warm", "world"]

Env = Mapping[str, str] | Callable[[int], Mapping[str, str]]
StartMethod = Literal["forkserver", "spawn"]

# The first optimizer a process makes imports torch._dynamo, which takes about as long as torch.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "sapwood.testing._rank")
# Test modules import these; a rank that has to load them again would wait for it.
_ALSO_PRELOADED_IF_LOADED = ("pytest", "hypothesis", "numpy")
_PRELOADED_LAST = "sapwood.testing._preloaded"


def rank() -> int:
    """The number of this rank."""
    return _from_environment("RANK")


def world() -> int:
    """How many ranks this rank's group has."""
    return _from_environment("WORLD_SIZE")


def spawn(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    env: Env | None = None,
    start: StartMethod | None = None,
    store: Store = "parent",
    threads: int = 1,
    init: bool = False,
    cwd: str | Path | None = None,
    machines: Sequence[int] | None = None,
    gbit: float | None = None,
    expect_errors: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world`` ranks; return what each returned, in rank order.

    Args:
        fn: A function at the top of an importable module.
        world: How many ranks.
        *args: Given to ``fn``, as is ``**kwargs``.
        timeout: Seconds for all of it. Then the stacks of every thread of every unfinished rank are
            collected, all are killed, and the error holds the stacks.
        env: More environment variables, or a function from rank to them.
        start: How processes are started: ``forkserver`` (the default) or ``spawn``.
        store: Who hosts the rendezvous store. ``parent``: this process, as torchrun's agent does,
            so there is no race for a port and the store outlives every rank. ``rank0``: rank 0.
        threads: What each rank gives ``torch.set_num_threads``.
        init: Whether to initialise a gloo process group around ``fn``.
        cwd: The folder ranks run in; the current one by default.
        machines: How many ranks each of several machines has, in order of ranks: ``[2, 1]`` runs
            ranks 0 and 1 on one and rank 2 on another. Machines are network namespaces (see
            ``sapwood.testing.machines``), which need root; without it ``Unavailable`` is raised.
        gbit: The rate of each machine's link in Gbit/s; not limited by default.
        expect_errors: Return a list of ``Outcome`` and do not raise when a rank fails.
        **kwargs: Given to ``fn``.

    Raises:
        RankError: A rank raised, died, left, was not done in time, or left processes behind.
    """
    options = _Options(env, start, store, threads, init, cwd, machines, gbit)
    with _prepare(world, (fn, args, kwargs), options) as group:
        outcomes = group.wait(timeout)
        if expect_errors:
            return outcomes
        error = failure(outcomes) or group.left_behind()
    if error is not None:
        raise error
    return [one.value for one in outcomes]


def start(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    env: Env | None = None,
    start: StartMethod | None = None,
    store: Store = "parent",
    threads: int = 1,
    init: bool = False,
    cwd: str | Path | None = None,
    machines: Sequence[int] | None = None,
    gbit: float | None = None,
    **kwargs: Any,
) -> Group:
    """Like ``spawn``, but give the running group: use it in a ``with`` block, which ends it."""
    options = _Options(env, start, store, threads, init, cwd, machines, gbit)
    return _prepare(world, (fn, args, kwargs), options)


def warm() -> None:
    """Start the fork server now, in the background, rather than with the first rank."""
    also = [name for name in _ALSO_PRELOADED_IF_LOADED if name in sys.modules]
    multiprocessing.forkserver.set_forkserver_preload([*_PRELOADED, *also, _PRELOADED_LAST])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:
        folder = tempfile.gettempdir()
        raise LaunchError(
            f"cannot start the fork server with its socket below TMPDIR={folder!r}: {error}; "
            "a socket's path has at most 107 characters, so choose a shorter TMPDIR"
        ) from error


def stop_server() -> None:
    """End the fork server, if there is one; the next group starts another."""
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if server is None or pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    server._stop()


@dataclass(frozen=True)
class _Options:
    env: Env | None
    start: StartMethod | None
    store: Store
    threads: int
    init: bool
    cwd: str | Path | None
    machines: Sequence[int] | None
    gbit: float | None

    def env_of(self, number: int) -> Mapping[str, str]:
        return self.env(number) if callable(self.env) else self.env or {}


def _prepare(world: int, call: tuple[Any, ...], options: _Options) -> Group:
    _check(world, options.store)
    pickled = pickle.dumps(call)
    folder = str(options.cwd if options.cwd is not None else Path.cwd())
    context = _context(options.start)
    meeting = Meeting(world, options.store, options.machines, options.gbit)

    def launch(number: int) -> Member:
        order = Order(
            call=pickled,
            env={**inherited_env(), **meeting.env(number), **options.env_of(number)},
            cwd=folder,
            threads=options.threads,
            init=options.init,
            namespace=meeting.namespace(number),
        )
        return _launch(context, number, order)

    return Group(world, launch, meeting.close)


def _launch(context: BaseContext, number: int, order: Order) -> Member:
    reports, reports_there = context.Pipe(duplex=False)
    stacks, stacks_there = context.Pipe(duplex=False)
    process = context.Process(  # type: ignore[attr-defined]
        target=main, args=(order, reports_there, stacks_there), name=f"rank-{number}"
    )
    try:
        process.start()
    finally:
        reports_there.close()
        stacks_there.close()
    return Member(number, process, reports, stacks)


def _context(start: StartMethod | None) -> BaseContext:
    if start in (None, "forkserver"):
        warm()
    return multiprocessing.get_context(start or "forkserver")


def _check(world: int, store: str) -> None:
    if world < 1:
        raise ConfigError(f"world={world}, but a group has at least one rank")
    if store not in ("parent", "rank0"):
        raise ConfigError(f"store={store!r}, but it is 'parent' or 'rank0'")


def _from_environment(name: str) -> int:
    value = os.environ.get(name)
    if value is None:
        raise LaunchError(f"{name} is not set: this process is not a rank; start it with spawn()")
    return int(value)
