from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from sapwood.cli.failures import SentSignals, report
from sapwood.cli.launch import KEEP_FREED_MEMORY
from sapwood.cli.main import main
from sapwood.cli.rank import TRACEBACK
from sapwood.cli.script import _StartedHandler
from sapwood.cli.splitting import options_of, protect_script
from sapwood.cli.verbs import fork as fork_verb
from sapwood.cli.verbs import run as run_verb
from tests.cli.helpers import DEADLINE, alive, environment, pids_in, sapwood, start, wait_for

# Writes its process id and that of a child in another session, then waits to be ended.
SLEEPER = """
    import os, pathlib, subprocess, sys, time
    here = pathlib.Path("pids")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)
    (here / str(child.pid)).touch()
    (here / str(os.getpid())).touch()
    time.sleep(600)
"""


def script(tmp_path: Path, text: str, name: str = "script.py") -> str:
    (tmp_path / name).write_text(textwrap.dedent(text))
    return name


@pytest.fixture
def sleepers(tmp_path):
    """A running launcher with two ranks, each of which has a child of its own."""
    (tmp_path / "pids").mkdir()
    launcher = start("run", "-n", "2", script(tmp_path, SLEEPER), tmp_path=tmp_path)
    try:
        ready = tmp_path / "pids"
        wait_for(lambda: len(pids_in(ready)) == 4 or launcher.poll() is not None, "two ranks")
        assert launcher.poll() is None
        yield launcher, pids_in(tmp_path / "pids")
    finally:
        launcher.kill()
        for pid in filter(alive, pids_in(tmp_path / "pids")):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate(timeout=DEADLINE)


def test_ranks_keep_freed_memory_unless_the_user_has_set_malloc(tmp_path):
    name = script(
        tmp_path,
        """
        import os
        print({k: v for k, v in os.environ.items() if k.startswith("MALLOC_")})
        """,
    )
    assert str(KEEP_FREED_MEMORY) in sapwood("run", name, tmp_path=tmp_path).stdout
    chosen = {"MALLOC_TRIM_THRESHOLD_": "1000000"}
    assert str(chosen) in sapwood("run", name, tmp_path=tmp_path, **chosen).stdout


def test_ranks_get_their_place_and_their_own_arguments(tmp_path):
    name = script(
        tmp_path,
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv, __name__, sys.path[0])
        """,
    )
    done = sapwood("run", "-n", "2", name, "-n", "7", "--help", "--", "x", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    argv = ["script.py", "-n", "7", "--help", "--", "x"]
    expected = [f"{rank} 2 {argv} __main__ {tmp_path}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
    assert list((tmp_path / "tmp").glob("sapwood*")) == []


def test_a_module_is_found_from_the_current_folder(tmp_path):
    (tmp_path / "pack").mkdir()
    script(tmp_path, "import sys; print('module', sys.argv[1:])", "pack/train.py")
    place = {"RANK": "0", "WORLD_SIZE": "1"}
    done = sapwood("run", "-m", "pack.train", "--lr=1", tmp_path=tmp_path, **place)
    assert done.stdout == "module ['--lr=1']\n", done.stderr


def test_prefix_and_logs(tmp_path):
    name = script(tmp_path, "import os; print('hello from', os.environ['RANK'])")
    done = sapwood("run", "-n", "2", "--prefix", "--logs", "logs", name, tmp_path=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    kept = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert kept == ["hello from 0\n", "hello from 1\n"]


def test_a_failing_rank_gives_its_traceback_and_its_exit_code(tmp_path):
    name = script(
        tmp_path,
        """
        import os, time
        def inner():
            raise RuntimeError("boom")
        if os.environ["RANK"] == "1":
            inner()
        time.sleep(600)
        """,
    )
    done = sapwood("run", "-n", "2", name, tmp_path=tmp_path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("sapwood: rank 1 failed with exit code 1; its traceback is above")
    kept = Path(message.split(" and in ")[1])
    assert kept.read_text() in done.stderr
    assert "RuntimeError: boom" in kept.read_text()
    assert "runpy" not in done.stderr
    assert "sapwood/cli" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_killed_by_a_signal_is_named(tmp_path, number):
    name = script(
        tmp_path,
        f"""
        import os, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), {int(number)})
        time.sleep(600)
        """,
    )
    done = sapwood("run", "-n", "2", name, tmp_path=tmp_path)
    assert done.returncode == 128 + number
    assert f"rank 1 failed with signal {number.name}" in done.stderr
    assert "--logs" in done.stderr
    # Only a traceback that the message names is worth a folder.
    assert list((tmp_path / "tmp").glob("sapwood-run-*")) == []


def failed(tmp_path: Path, rank: int, exitcode: int, error: str | None = None) -> ProcessFailure:
    folder = tmp_path / str(rank)
    folder.mkdir()
    if error is not None:
        (folder / TRACEBACK).write_text(error)
        message = {"message": error, "extraInfo": {"timestamp": "1"}}
        report = {"message": message, "error_type": error, "time_ns": 10**9}
        (folder / "error.json").write_text(json.dumps(report))
    return ProcessFailure(
        local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(folder / "error.json")
    )


def test_a_frozen_rank_that_the_launcher_kills_is_not_the_cause(tmp_path, capsys):
    sent = SentSignals()
    sent.note(101, signal.SIGTERM)
    sent.note(101, signal.SIGKILL)
    failures = {0: failed(tmp_path, 0, 1, "PeerFailed"), 1: failed(tmp_path, 1, -signal.SIGKILL)}
    code, kept = report(failures, sent)
    assert (code, kept) == (1, tmp_path / "0" / TRACEBACK)
    before, last = capsys.readouterr().err.splitlines()
    assert "rank 1 did not end" in before
    assert last.startswith("sapwood: rank 0 failed with exit code 1")


def test_a_rank_ended_by_somebody_else_is_the_cause(tmp_path, capsys):
    sent = SentSignals()
    sent.note(100, signal.SIGTERM)  # while it was already failing
    failures = {0: failed(tmp_path, 0, 1, "PeerFailed"), 1: failed(tmp_path, 1, -signal.SIGTERM)}
    assert report(failures, sent) == (128 + signal.SIGTERM, None)
    assert "rank 1 failed with signal SIGTERM" in capsys.readouterr().err


def test_restarts_start_all_ranks_again_and_the_last_exit_code_counts(tmp_path):
    name = script(
        tmp_path,
        """
        import os, sys
        again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", again)
        sys.exit(7 if again else 3)
        """,
    )
    done = sapwood("run", "--restarts", "1", name, tmp_path=tmp_path)
    assert done.stdout == "attempt 0\nattempt 1\n"
    assert done.returncode == 7
    assert "rank 0 failed with exit code 7" in done.stderr
    assert "left no traceback" in done.stderr  # it ended itself


def test_what_a_rank_leaves_running_is_ended_with_the_run(tmp_path):
    (tmp_path / "pids").mkdir()
    name = script(tmp_path, SLEEPER.replace("time.sleep(600)\n", "", 1)[: SLEEPER.rfind("time")])
    done = sapwood("run", name, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(pids_in(tmp_path / "pids")) == 2
    assert not any(map(alive, pids_in(tmp_path / "pids")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_their_children(sleepers, tmp_path, number):
    launcher, pids = sleepers
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 128 + number
    assert number.name in errors
    assert not any(map(alive, pids))
    assert list((tmp_path / "tmp").glob("sapwood*")) == []


def test_killing_the_launcher_ends_its_ranks(sleepers, tmp_path):
    launcher, pids = sleepers
    ranks = [
        pid for pid in pids if b"sapwood.cli.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait(DEADLINE)
    wait_for(lambda: not any(map(alive, ranks)), "the ranks to end")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other launcher has started this process."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "there is no script 'missing.py' here"),
        (("",), "there is no script '' here"),
        ((".",), ". is a folder without __main__.py"),
        (("pipe",), "pipe is neither a file nor a folder"),
        (("/dev/null",), "/dev/null is neither a file nor a folder"),
        (("-m", "missing_module"), "there is no module 'missing_module' in this folder"),
        (("-n", "0", "x.py"), "a run needs at least one rank"),
        (("-n", "1000000", "x.py"), "-n is 1000000, expected at most "),
        (("--restarts", "-1", "x.py"), "--restarts is -1, expected 0 or more"),
        (("--grace", "-1", "x.py"), "--grace is -1, expected seconds, 0 or more"),
        (
            ("--logs", "x.py/logs", "x.py"),
            "--logs x.py/logs: cannot make a folder there: Not",
        ),
        (("--logs", "x.py", "x.py"), "--logs x.py: cannot make a folder there: File exists"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_one(tmp_path, arguments, message, alone, capsys):
    script(tmp_path, "raise SystemExit('started')", "x.py")
    os.mkfifo(tmp_path / "pipe")
    assert main(["run", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_no_place_for_temporary_files_is_one_line(tmp_path, alone, monkeypatch, capsys):
    name = script(tmp_path, "raise SystemExit('started')")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert main(["run", name]) == 1
    error = capsys.readouterr().err
    assert "cannot make a temporary folder: No such file or directory; set TMPDIR" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--restart", "3", "x.py"),
        ("--bogus", "x.py"),
        ("--bogus=1", "x.py"),
        ("-n", "2", "-x", "x.py"),
        ("-n", "two", "x.py"),
        ("-n", "1.5", "x.py"),
        ("--restarts", "1.5", "x.py"),
    ],
)
def test_an_option_that_is_not_ours_is_not_taken_for_the_script(tmp_path, arguments, alone, capsys):
    script(tmp_path, "raise SystemExit('started')", "x.py")
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    named = next(one for one in arguments if one not in ("-n", "2")).partition("=")[0]
    assert (named if named.startswith("-") else "-n") in error
    assert "Traceback" not in error
    assert "no script" not in error


@pytest.mark.parametrize(
    "arguments", [("--restarts", "2"), ("--logs", "logs"), ("--prefix",), ("--grace", "0")]
)
def test_what_only_the_launcher_of_the_ranks_can_do_is_refused_in_a_rank(
    tmp_path, arguments, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["run", *arguments, script(tmp_path, "print('started')")]) == 1
    told = capsys.readouterr()
    assert f"{arguments[0]} is for ranks that `sapwood run` starts itself" in told.err
    assert told.out == ""


def test_the_run_that_begins_is_shown_unless_the_script_shows_its_log(monkeypatch, capsys):
    shown = _StartedHandler()
    record = logging.LogRecord("x", logging.INFO, "", 0, "run %s in %s", ("a", "runs/a"), None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown.emit(record)
    assert capsys.readouterr().err == "sapwood: run a in runs/a\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    shown.emit(record)
    assert capsys.readouterr().err == ""


JOINED = """
    import sys
    from sapwood.runtime.launch import detect
    place = detect()
    print(place.launcher, place.rank, place.world, sys.argv)
"""


def lines_of(command: list[str], tmp_path: Path) -> list[str]:
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_under_mpirun_the_script_runs_in_the_ranks_mpirun_made(tmp_path):
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("no mpirun beside this python: pip install 'sapwood[mpi]'")
    python = [sys.executable, "-m", "sapwood.cli"]
    name = script(tmp_path, JOINED)
    lines = lines_of([mpirun, "-n", "2", *python, "run", name, "--lr", "1"], tmp_path)
    assert lines == [f"mpirun {rank} 2 ['script.py', '--lr', '1']" for rank in range(2)]


def test_under_torchrun_the_script_runs_in_the_ranks_torchrun_made(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    name = script(tmp_path, JOINED)
    lines = lines_of([*torchrun, "-m", "sapwood.cli", "run", "-n", "2", name], tmp_path)
    assert lines == [f"torchrun {rank} 2 ['script.py']" for rank in range(2)]


def test_a_count_that_contradicts_the_launcher_is_refused(tmp_path):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    name = script(tmp_path, JOINED)
    done = sapwood("run", "-n", "4", name, tmp_path=tmp_path, **place)
    assert done.returncode == 1
    assert "torchrun already started this process as rank 1 of 2" in done.stderr


def test_an_error_of_a_joined_script_is_shown_as_python_shows_it(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1"}
    name = script(tmp_path, "raise ValueError('mine')")
    done = sapwood("run", name, tmp_path=tmp_path, **place)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert "sapwood/cli" not in done.stderr


def test_every_option_is_known_to_the_splitter():
    names = {"-n", "--ranks", "--restarts", "--logs", "--grace"}
    flags = {"-m", "--module", "--prefix", "--help", "-h", "--version"}
    expected = dict.fromkeys(names, True) | dict.fromkeys(flags, False)
    assert options_of(run_verb.run) == expected
    assert options_of(fork_verb.fork)["--at-step"]
    assert not options_of(fork_verb.fork)["--standby"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("run a.py --x", "run -- a.py --x"),
        ("run -n 2 --prefix a.py -n 3", "run -n 2 --prefix -- a.py -n 3"),
        ("run -n2 a.py -n 3", "run -n2 -- a.py -n 3"),
        ("run --ranks=2 -m pack.mod -v", "run --ranks=2 -m -- pack.mod -v"),
        ("run -- a.py", "run -- a.py"),
        ("run --help", "run --help"),
        ("run --bogus a.py", "run --bogus a.py"),
        ("run", "run"),
    ],
)
def test_the_script_is_found_behind_our_options(tokens, expected):
    assert protect_script(tokens.split(), run_verb.run) == expected.split()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("fork r a.py --set x=1", "fork r -- a.py --set x=1"),
        ("fork r --set x=1 -n 2 a.py -n 3", "fork r --set x=1 -n 2 -- a.py -n 3"),
        ("fork --set x=1 r --standby -m p.q -v", "fork --set x=1 r --standby -- -m p.q -v"),
        ("fork r -- a.py", "fork r -- a.py"),
        ("fork r --go", "fork r --go"),
        ("fork r --bogus a.py", "fork r --bogus a.py"),
    ],
)
def test_the_script_of_a_fork_is_found_behind_the_run(tokens, expected):
    assert protect_script(tokens.split(), fork_verb.fork, words_before=1) == expected.split()
