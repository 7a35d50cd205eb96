"""Opening a repository: which places there are, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood.errors import ConfigError
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.store import open as open_repository
from sapwood.testing import mooncake, seaweed
from tests.moon import moon, moon_place
from tests.weed import place, weed

__all__ = ["moon", "moon_place", "place", "weed"]


def test_a_bucket(weed: seaweed.Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in weed.environment.items():
        monkeypatch.setenv(key, value)
    net = torch.nn.Linear(30, 30)
    with pytest.raises(ConfigError, match="create=True"):
        open_repository(place, create=False)
    with open_repository(place, timeout=20.0, durability="replicated") as repo:
        repo.save(net, "a@1", tags=["best"])
    with open_repository(place, create=False) as repo:
        assert torch.equal(repo.load("a@best")["weight"], net.weight)
        assert torch.equal(repo.open("a")["weight"][3:5], net.weight[3:5])
        assert repo.verify().problems == []
        repo.load("a")["weight"].zero_()
        assert torch.equal(repo.load("a")["weight"], net.weight)
    with pytest.raises(ConfigError, match="colour"):
        open_repository(place, colour="red")
    with pytest.raises(ConfigError, match="shared=False"):
        open_repository(place, shared=False)


def test_mooncake(moon: mooncake.Cluster, moon_place: str) -> None:
    weights = torch.arange(1000.0)
    with open_repository(moon_place) as repo:
        repo.save({"w": weights}, "a@1")
        with pytest.raises(ConfigError, match="'memory' at most"):
            open_repository(moon_place, durability="written")
    with open_repository(moon_place, create=False) as repo:
        assert torch.equal(repo.load("a")["w"], weights)
        assert torch.equal(repo.open("a")["w"][10:20], weights[10:20])


def test_a_shared_folder_is_known_again(tmp_path: Path) -> None:
    with open_repository(tmp_path / "m", shared=True) as repo:
        repo.save({"w": torch.ones(3)}, "a@1")
    assert not (tmp_path / "m" / "catalog.db").exists()
    for shared in (None, True):
        with open_repository(tmp_path / "m", shared=shared) as repo:
            assert isinstance(repo._backend, ObjectBackend)
            assert repo.load("a")["w"].sum() == 3
    with pytest.raises(ConfigError, match="shared=True"):
        open_repository(tmp_path / "m", shared=False)


def test_a_folder_with_a_database_is_not_shared(tmp_path: Path) -> None:
    with open_repository(tmp_path / "m") as repo:
        repo.save({"w": torch.ones(3)}, "a@1")
    with pytest.raises(ConfigError, match="shared=False, with a database"):
        open_repository(tmp_path / "m", shared=True)
    with open_repository(tmp_path / "m", shared=False) as repo:
        assert repo.load("a")["w"].sum() == 3


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("memory:", {"shared": True}),
        ("memory:", {"endpoint": "http://x"}),
        ("folder", {"endpoint": "http://x"}),
        ("s3://", {}),
        ("mooncake://", {}),
        ("mooncake://host:port/x", {}),
        ("mooncake://host/x?metrics=no", {}),
        ("mooncake://host/x?colour=red", {}),
        ("mooncake://host/../x", {}),
        ("mooncake://127.0.0.1/x", {"protocol": "pigeon"}),
        ("mooncake://127.0.0.1/x", {"segment": -1}),
        ("mooncake://127.0.0.1/x", {"colour": "red"}),
        ("ftp://host/x", {}),
    ],
)
def test_what_makes_no_sense_is_refused(where: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        open_repository(where, **options)  # type: ignore[arg-type]
    assert not Path("folder").exists()
