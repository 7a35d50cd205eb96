"""The places of a provider in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

import sapwood.store
from sapwood.errors import ConfigError, NoRoom
from sapwood.repository.providers.base import Member, Members
from sapwood.repository.providers.local import open_provider
from tests.repository.providers.models import load, put, quiet, save, tensor


def test_a_folder_is_opened_again(tmp_path: Path) -> None:
    members = Members(epoch=3, members=(Member("p0", "h:1"),))
    first = open_provider(tmp_path / "p", members=members)
    save(first, "a", "1", [tensor(1, 5000)])
    with pytest.raises(ConfigError, match="in use by another provider"):
        open_provider(tmp_path / "p")
    first.close()
    first.close()
    again = open_provider(tmp_path / "p", members=Members(epoch=2, members=()))
    assert load(again, "a@1") == [tensor(1, 5000)]
    assert again.members() == members
    assert again.verify(said=quiet).problems == []
    again.close()


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    sapwood.store.open(tmp_path / "embedded").close()
    with pytest.raises(ConfigError, match="embedded repository"):
        open_provider(tmp_path / "embedded")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        open_provider(tmp_path / "other")
    open_provider(tmp_path / "mine").close()
    with pytest.raises(ConfigError, match="something else"):
        sapwood.store.open(tmp_path / "mine")


def test_memory_has_a_limit() -> None:
    provider = open_provider("memory:", memory=10_000)
    version = provider.reserve("a", "1")
    assert put(provider, version, [tensor(1, 6000)]) == []
    with pytest.raises(NoRoom):
        put(provider, version, [tensor(2, 6000)])
    provider.drop_part(version)
    provider.gc(quiet=0.0, said=quiet)
    assert put(provider, version, [tensor(2, 6000)]) == []
    provider.close()


def test_damage_is_found(tmp_path: Path) -> None:
    provider = open_provider(tmp_path / "p")
    save(provider, "a", "1", [tensor(1, 5000)])
    provider.flush()
    (pack,) = (p for p in (tmp_path / "p" / "parts" / "packs").rglob("*") if p.is_file())
    pack.chmod(0o600)
    pack.write_bytes(b"?" + pack.read_bytes()[1:])
    (problem,) = provider.verify(said=quiet).problems
    assert problem.startswith("a@1.")
    provider.close()
