"""The suite's own rules: a test has its own folder, leaves nothing behind, runs in any order."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from sapwood.testing import hygiene

GRACE = 15.0  # a process that ends may wait for the disk, which others keep busy
ROOT = Path(__file__).resolve().parent.parent
# A file is run by one process. These take longest, so they begin first: whichever came last would
# keep one process busy while the others have nothing left to do.
LONGEST = (
    "tests/cli/test_cli_fork.py",
    "tests/parity/test_cases.py",
    "tests/cli/test_cli_stop.py",
    "tests/parity/test_parity.py",
    "tests/checkpoint/test_fault_matrix.py",
    "tests/benchmarks/test_clone.py",
    "tests/checkpoint/test_closing.py",
    "tests/cli/test_cli_run.py",
    "tests/benchmarks/test_checkpoint.py",
    "tests/benchmarks/test_sync.py",
    "tests/checkpoint/test_one_rank.py",
    "tests/cli/test_cli_example.py",
)

# A deadline per example would make a test depend on how busy the machine is.
hypothesis.settings.register_profile("sapwood", deadline=None, print_blob=True)
hypothesis.settings.load_profile("sapwood")


# A shell's background job ignores Ctrl-C, and so would everything the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed",
        type=int,
        # In the environment, so that processes which run a part of the tests know the same.
        default=int(os.environ.setdefault("PYTEST_ORDER_SEED", str(random.randrange(2**24)))),
        help="shuffle the tests by this seed (default: another one each time, shown in the header)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"test order: --order-seed {config.getoption('--order-seed')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle modules, and tests inside each, so that module fixtures are still made only once.

    Only where a test run in several processes begins is not left to chance: see ``LONGEST``.
    """
    chance = random.Random(config.getoption("--order-seed"))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    groups = list(modules.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    if "PYTEST_XDIST_WORKER" in os.environ:
        first = [modules[name] for name in LONGEST if name in modules]
        groups = first + [group for group in groups if group not in first]
    items[:] = [item for group in groups for item in group]


@pytest.fixture(scope="session")
def session_tmp(rank_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of the whole run; a test that writes here has left its own.

    The fork server comes first: its socket needs a short path, which this folder has not.
    """
    folder = tmp_path_factory.mktemp("session")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    """Start the fork server of the ranks before the first test, and end it after the last."""
    import torch

    from sapwood.testing import ranks

    # Small tensors on busy cores: more threads would only wait for each other.
    torch.set_num_threads(1)
    hygiene.adopt_orphans()
    ranks.warm()
    yield
    ranks.stop_server()


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """Where each test has its temporary files: sockets below it need a short path."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, short_tmp: Path, session_tmp: Path) -> Iterator[hygiene.Snapshot]:
    """Run the test in its own folder, and fail it for whatever it leaves behind."""
    before = hygiene.Snapshot.take([ROOT, session_tmp])
    inner = Path(tempfile.mkdtemp(prefix="", dir=short_tmp))
    # Not the fixture of that name: that one would undo the test's own patches after these checks.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("TMPDIR", str(inner))
        patch.setattr(tempfile, "tempdir", None)
        yield before
    problems = hygiene.leftovers(before, GRACE)
    shutil.rmtree(inner, ignore_errors=True)
    if problems:
        hygiene.restore(before)
        pytest.fail("the test left something behind:\n  " + "\n  ".join(problems), pytrace=False)
