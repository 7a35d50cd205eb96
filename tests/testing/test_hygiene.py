"""Each check of the suite's hygiene can fail, names the culprit, and spares the innocent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch

from sapwood.runtime import faults
from sapwood.testing import _proc, hygiene, ranks

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
ORPHAN = "import subprocess as s; print(s.Popen(['sleep', '300'], stdout=s.DEVNULL).pid)"


@pytest.fixture
def before(tmp_path: Path) -> hygiene.Snapshot:
    watched = tmp_path / "watched"
    watched.mkdir()
    return hygiene.Snapshot.take([watched])


def found(before: hygiene.Snapshot) -> list[str]:
    return hygiene.leftovers(before, grace=0)


def test_nothing_left_is_no_problem(before: hygiene.Snapshot) -> None:
    assert hygiene.leftovers(before) == []


def test_a_child_process_is_found(before: hygiene.Snapshot) -> None:
    with subprocess.Popen(["sleep", "300"]) as child:
        try:
            assert found(before) == [f"process {child.pid} still runs: sleep 300"]
        finally:
            child.kill()
    assert found(before) == []


def test_an_orphan_is_found_and_ended(before: hygiene.Snapshot) -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", ORPHAN]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60)
    assert found(before) == [f"process {int(made.stdout)} still runs: sleep 300"]
    hygiene.restore(before)
    assert hygiene.leftovers(before) == []


def test_a_rank_is_found_but_not_the_server_it_came_from(before: hygiene.Snapshot) -> None:
    with ranks.start(stand_still, 1) as group:
        group.wait_mark("here", 0)
        assert any(f"process {group.pids[0]} still runs" in text for text in found(before))
    assert hygiene.leftovers(before) == []


def stand_still() -> None:
    ranks.mark("here")
    threading.Event().wait(300)


def test_a_process_that_was_there_before_is_spared() -> None:
    with subprocess.Popen(["sleep", "300"]) as child:
        assert found(hygiene.Snapshot.take()) == []
        child.kill()


def test_a_listening_port_is_found(before: hygiene.Snapshot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert found(before) == [f"TCP port {server.getsockname()[1]} is still listening"]
    assert found(before) == []


def test_a_store_is_found(before: hygiene.Snapshot) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert found(before) == [f"TCP port {store.port} is still listening"]
    del store
    assert hygiene.leftovers(before) == []


def test_a_listening_unix_socket_is_found(before: hygiene.Snapshot) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("here.sock")
        server.listen()
        assert found(before) == ["Unix socket here.sock is still listening"]


def test_shared_memory_is_found(before: hygiene.Snapshot) -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        assert found(before) == [f"/dev/shm/{memory.name} is left in shared memory"]
    finally:
        memory.close()
        memory.unlink()


def test_shared_memory_of_a_stranger_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hygiene.Snapshot.take()
    memory = SharedMemory(create=True, size=16)
    try:
        # Everyone is a stranger, even we: then the entry is in use elsewhere.
        monkeypatch.setattr(_proc, "descendants", lambda pid: [])
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert hygiene.check_shared_memory(before) == []
        monkeypatch.undo()
    finally:
        memory.close()
        memory.unlink()


def test_a_file_outside_is_found_but_not_a_cache(before: hygiene.Snapshot) -> None:
    (folder,) = before.watched
    (folder / "__pycache__").mkdir()
    (folder / "runs").mkdir()
    assert found(before) == [f"{folder / 'runs'} was left behind"]


def test_a_thread_is_found_unless_it_is_a_foreign_daemon(before: hygiene.Snapshot) -> None:
    end = threading.Event()
    threads = [
        threading.Thread(target=end.wait, args=(300,), name=name, daemon=name != "forgotten")
        for name in ("lane", "forgotten", "sapwood-link")
    ]
    for thread in threads:
        thread.start()
    ours = [f"thread {name!r} still runs" for name in ("forgotten", "sapwood-link")]
    assert sorted(found(before)) == ours
    end.set()
    for thread in threads:
        thread.join(30)


def test_what_ends_within_the_grace_is_no_problem(before: hygiene.Snapshot) -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), end.wait(300)))
    thread.start()
    assert started.wait(30)
    assert len(found(before)) == 1
    threading.Timer(0.1, end.set).start()
    assert hygiene.leftovers(before, grace=30) == []


def test_an_armed_fault_is_found_and_disarmed(before: hygiene.Snapshot) -> None:
    faults.arm("test.point", "raise")
    assert found(before) == ["fault point 'test.point' is still armed"]
    hygiene.restore(before)
    assert found(before) == []


def test_a_launcher_variable_is_found_and_removed(before: hygiene.Snapshot) -> None:
    os.environ["RANK"] = "3"
    assert found(before) == ["RANK was None and is '3'"]
    hygiene.restore(before)
    assert "RANK" not in os.environ


@pytest.fixture
def torch_again() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("torch_again")
def test_every_torch_setting_is_found_and_restored(before: hygiene.Snapshot) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    told = [text.split(" was ")[0] for text in hygiene.check_torch(before)]
    hygiene.restore(before)
    assert told == [f"torch's {name}" for name in before.torch]
    assert found(before) == []


def test_each_test_has_its_own_folder(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    temporary = Path(tempfile.gettempdir())
    assert temporary == Path(os.environ["TMPDIR"])
    assert list(temporary.iterdir()) == []
    assert len(str(temporary)) < 60, "sockets below it must have names, too"


LEAKY = """
import os, subprocess, threading
from pathlib import Path

def test_one():
    os.environ["MASTER_PORT"] = "1"
    subprocess.Popen(["sleep", "300"])

def test_two():
    assert "MASTER_PORT" not in os.environ

def test_three(monkeypatch):
    monkeypatch.setenv("RANK", "1")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite with our conftest and a test that leaks."""
    tests = pytester.mkdir("tests")
    ours = (ROOT / "tests" / "conftest.py").read_text()
    (tests / "conftest.py").write_text(ours.replace("GRACE = 5.0", "GRACE = 0.2"))
    (tests / "test_leaky.py").write_text(LEAKY)
    return pytester


def test_only_leaks_fail(suite: pytest.Pytester) -> None:
    args = ["-v", "-p", "no:cacheprovider", "-W", "ignore::ResourceWarning"]
    result = suite.runpytest_subprocess(*args, "--order-seed", "7", "tests", timeout=60)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*test order: --order-seed 7*"])
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_one*", "*process * still runs: sleep 300", "*MASTER_PORT was*"]
    )


def test_the_order_follows_the_seed(suite: pytest.Pytester) -> None:
    def order(seed: int) -> list[str]:
        collect = ["--collect-only", "-q", "--order-seed", str(seed)]
        result = suite.runpytest_inprocess(*collect, "tests")
        return [line for line in result.outlines if "::" in line]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1
    assert sorted(order(1)) == sorted(order(2))


def test_processes_with_any_name_are_seen() -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'a\\xff) b'); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        seen = _proc.process(child.pid)
        assert seen is not None
        assert seen.parent == os.getpid()
        assert child.pid in [one.pid for one in _proc.descendants(os.getpid())]
    finally:
        child.communicate(b"\n", timeout=20)
