"""What a training with checkpoints, peers and forks answers to somebody who knows no token."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from sapwood.channel.handshake import PROTOCOL
from tests.cli.helpers import environment

MARK = "SAPWOOD_TEST_MARK"
SCRIPT = """
import json, os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
os.environ["SAPWOOD_NODE"] = f"node{rank}"  # so that there are partners
import torch
import sapwood
from sapwood.runtime.bounded import BoundedStore

written = []
real_set, real_compare = BoundedStore.set, BoundedStore.compare_set
def spy_set(self, key, text):
    written.append(text)
    return real_set(self, key, text)
def spy_compare(self, key, expected, text, **more):
    written.append(text)
    return real_compare(self, key, expected, text, **more)
BoundedStore.set, BoundedStore.compare_set = spy_set, spy_compare

home = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
run = sapwood.Run(model, torch.optim.AdamW(model.parameters()), folder=home / "runs")
tiers = ("memory", f"local:{home}/local{rank}", f"partner:{home}/partner{rank}")
ckpt = sapwood.Checkpointer(run, home / "ckpts", every=2, tiers=tiers)
run.allow_clones()
while True:
    run.model(torch.randn(4, 64)).sum().backward()
    run.step()
    if run.step_count == 6:
        ckpt.wait()
        (home / f"written{rank}").write_text(json.dumps(written))
        (home / f"ready{rank}").touch()
    if any(fork.ready for fork in run.forks):
        (home / "standing").touch()
    time.sleep(0.02)
    stop = run.group.share_text("stop", str((home / "stop").exists()))
    if stop == "True":
        break
ckpt.close()
run.close()
"""


@contextmanager
def training(home: Path) -> Iterator[None]:
    script = home / "train.py"
    script.write_text(SCRIPT)
    env = {**environment(home), MARK: str(home)}
    command = [sys.executable, "-m", "sapwood.cli", "run", "-n", "2", str(script), str(home)]
    log = (home / "log").open("w")
    with log, subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 90
            while not all((home / f"ready{rank}").exists() for rank in range(2)):
                assert process.poll() is None, (home / "log").read_text()
                assert time.monotonic() < deadline, (home / "log").read_text()
                time.sleep(0.05)
            yield
        finally:
            (home / "stop").touch()
            process.wait(60)
    assert process.returncode == 0, (home / "log").read_text()


@contextmanager
def standing_by(home: Path) -> Iterator[None]:
    """Clones that have met the training, and wait for its step."""
    (folder,) = (home / "runs").iterdir()
    options = ["--at-step", "1000000", "--transport", "gloo", "-n", "2"]
    script = [str(home / "train.py"), str(home / "clone")]
    command = [sys.executable, "-m", "sapwood.cli", "fork", str(folder), *options, "--", *script]
    env = {**environment(home), MARK: str(home)}
    log = (home / "log-of-clones").open("w")
    with log, subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while not (home / "standing").exists():
                assert process.poll() is None, (home / "log-of-clones").read_text()
                assert time.monotonic() < deadline, (home / "log-of-clones").read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(60)


def processes(home: Path) -> list[int]:
    """Every process of the training: launcher, ranks, engines."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if f"{MARK}={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _inodes(pid: int) -> set[str]:
    """The sockets of a process."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    return inodes


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens for TCP connections."""
    inodes = _inodes(pid)
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in inodes:
                continue
            host, port = fields[1].split(":")
            raw = bytes.fromhex(host)
            words = [raw[n : n + 4][::-1] for n in range(0, len(raw), 4)]
            found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def abstract(pid: int) -> set[str]:
    """Names of the system's own space at which a process listens."""
    inodes = _inodes(pid)
    found = set()
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split()
        if int(flags, 16) & 0x10000 and inode in inodes and name and name[0].startswith("@"):
            found.add(name[0])
    return found


NOBODY = """
import os, socket, sys
os.setuid(65534)
for name in sys.argv[1:]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
            sock = socket.socket(socket.AF_UNIX, kind)
            sock.settimeout(2.0)
            sock.connect(chr(0) + name[1:])
            print("connected", name)
            sock.send(os.urandom(64))
            print("heard", sock.recv(4096))
        except OSError:
            pass
"""


def heard_by_nobody(names: set[str]) -> list[str]:
    """What another user of this machine is told at these names."""
    done = subprocess.run(
        [sys.executable, "-c", NOBODY, *names], capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    assert done.stdout.count("connected") == len(names)
    told = [line for line in done.stdout.splitlines() if line.startswith("heard")]
    return [line for line in told if line != "heard b''"]


def meetings(pids: list[int]) -> set[tuple[str, int]]:
    """Where ranks were told to meet."""
    found = set()
    for pid in pids:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        known = dict(word.split("=", 1) for word in words if "=" in word)
        if "MASTER_PORT" in known:
            found.add((known["MASTER_ADDR"], int(known["MASTER_PORT"])))
    return found


def open_to_others(home: Path, pids: list[int]) -> str:
    """All that other users of this machine can read about a training."""
    texts = [
        path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o004
    ]
    for pid in pids:  # of environ they cannot, but whatever is started inherits it
        texts += [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    return b"\n".join(texts).decode("ascii", "replace")


def said_to_a_stranger(place: tuple[str, int], words: bytes) -> bytes:
    with closing(socket.create_connection(place, timeout=5.0)) as sock:
        sock.settimeout(0.5)
        said = b""
        with suppress(OSError):
            if words:
                sock.sendall(words)
            while len(said) < 4096 and (more := sock.recv(4096)):
                said += more
        return said


def said_to_strangers(places: set[tuple[str, int]], words: bytes) -> dict[tuple[str, int], bytes]:
    with ThreadPoolExecutor(len(places)) as pool:
        return dict(
            zip(places, pool.map(lambda p: said_to_a_stranger(p, words), places), strict=False)
        )


def is_hello(said: bytes) -> bool:
    (length,) = struct.unpack("!I", said[:4])
    return set(json.loads(said[4 : 4 + length])) == {"protocol", "nonce"} and PROTOCOL in str(said)


CLIENT = """
import sys, threading, time
from datetime import timedelta
from sapwood.runtime.stores import TCPStore
found = []
def look(host, port):
    # A client of torch's store may wait for ever for the answer of something that is none.
    soon = timedelta(seconds=2)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=soon)
    store.set("a stranger's", "word")
    if store.get("a stranger's") == b"word":
        found.append(f"{host}:{port}")
places = [place.rsplit(":", 1) for place in sys.argv[1:]]
threads = [threading.Thread(target=look, args=(h, int(p)), daemon=True) for h, p in places]
for thread in threads:
    thread.start()
end = time.monotonic() + 10.0
for thread in threads:
    thread.join(max(end - time.monotonic(), 0.0))
print(" ".join(found), flush=True)
import os
os._exit(0)
"""


def stores_among(places: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Where torch's own store answers."""
    words = [f"{host}:{port}" for host, port in places]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *words], capture_output=True, text=True, timeout=60
    )
    found = (word.rsplit(":", 1) for word in done.stdout.split())
    return {(host, int(port)) for host, port in found}


@pytest.mark.timeout(300)
def test_nobody_is_answered_without_the_token(tmp_path: Path) -> None:
    with training(tmp_path), standing_by(tmp_path):
        pids = processes(tmp_path)
        stores = meetings(pids)
        assert len(stores) == 2  # of the training, and of its clones
        found = set().union(*(listening(pid) for pid in pids))
        assert stores < found
        hellos = said_to_strangers(found, b"")
        ours = {place for place, said in hellos.items() if said}
        # The forks' listener and two peer servers; gloo's own listeners say nothing.
        assert len(ours) == 3
        assert all(is_hello(hellos[place]) for place in ours)
        assert {host for host, _ in ours | stores} == {"127.0.0.1"}
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, os.urandom(256)):
            for place, said in said_to_strangers(found - stores, words).items():
                if place in ours:
                    size = 4 + struct.unpack("!I", said[:4])[0] if said else 0
                    assert b"error" in said[size:] or not said[size:]
                else:
                    assert not said
        assert stores_among(found) == stores
        engines = set().union(*(abstract(pid) for pid in pids))
        assert len(engines) == 2
        assert all(name.startswith("@sapwood-engine-") for name in engines)
        if os.getuid() == 0:  # only root can become another user
            assert not heard_by_nobody(engines)
        # torch's own store asks nobody who they are, so nothing secret may pass through it.
        secrets = [path.read_text() for path in (tmp_path / "runs").glob("*/token")]
        secrets += [path.read_text() for path in tmp_path.glob("local*/.engine-*")]
        assert len(secrets) == 3
        written = "\n".join(str((tmp_path / f"written{rank}").read_text()) for rank in range(2))
        assert "node0" in written  # it is what was meant to be looked at
        shown = open_to_others(tmp_path, pids)
        assert "SAPWOOD_FORK" in shown
        assert not [secret for secret in secrets if secret in written + shown]


@pytest.mark.parametrize("silent", [16, 100])
def test_silent_connections_do_not_keep_a_fork_out(tmp_path: Path, silent: int) -> None:
    from sapwood.clone.address import Address
    from sapwood.clone.listener import ask
    from tests.clone.forking import donors, home_of, stop

    with donors(tmp_path, 1) as group:
        address = Address.read(home_of(tmp_path))
        crowd = [
            socket.create_connection((address.nearest, address.port), timeout=5)
            for _ in range(silent)
        ]
        assert ask(address, {"op": "go"}) == {"started": 0}
        for one in crowd:
            one.close()
        stop(tmp_path, group)
