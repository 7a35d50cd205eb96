"""``sapwood data`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.helpers import sapwood
from tests.data.databases import numbered, plain


def test_index_inspect_verify(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(50, lambda n: 100 * n))
    facts = json.loads(sapwood("data", "inspect", "a.mdb", "--json", tmp_path=tmp_path).stdout)
    assert (facts["records"], facts["longest"], facts["named"]) == (50, 4900, {})
    made = sapwood("data", "index", "a.mdb", tmp_path=tmp_path)
    assert "50 records" in made.stdout
    assert (tmp_path / "a.mdb.sapwood-index").exists()
    sound = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert sound.returncode == 0
    assert "fits the database" in sound.stdout
    plain(path, [(b"one", b"more")])
    stale = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert stale.returncode == 1
    assert "another state" in stale.stderr


def test_damage_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.mdb").write_bytes(b"no database" * 100)
    failed = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.startswith("sapwood: a.mdb: page 0: expected LMDB's mark")
    assert failed.stderr.count("\n") == 1
