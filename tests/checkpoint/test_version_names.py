"""What versions are called, and which trainings keep apart in one repository."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.checkpoint.engine.address import find_address
from sapwood.checkpoint.settings import tier_specs
from sapwood.checkpoint.versions import as_versions
from sapwood.errors import ConfigError, SapwoodError
from sapwood.tiers.spec import NodeMap, TierSpec

ONE = NodeMap(node="a", rank_nodes=("a", "a"))
TWO = NodeMap(node="a", rank_nodes=("a", "b"))


def run(id: str = "run7", parent: Any = None) -> Any:
    return SimpleNamespace(id=id, forked_from=parent)


def spec(place: Path, tier: str, **facts: Any) -> TierSpec:
    (found,) = as_versions(tier_specs(place, [tier]), run(**facts), ONE)
    return found


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_place_tells_trainings_apart_wherever_it_is_named_from(tmp_path: Path) -> None:
    by_place = spec(Path("ckpts"), "store://models/")
    assert by_place.place == str(tmp_path / "models")
    assert by_place.series == str(tmp_path / "ckpts")
    assert by_place == spec(tmp_path / "ckpts", f"store://{tmp_path}/models")
    assert by_place.series != spec(Path("other"), "store://models").series
    assert by_place.series == spec(Path("x"), "store://models?place=ckpts").series
    s3 = tier_specs("s3://bucket/run7", ["s3", "store://models"])[1]
    assert s3.series == "s3://bucket/run7"


def test_a_name_tells_them_apart_wherever_they_are() -> None:
    one, other = (spec(Path(place), "store://models?name=nt3/x") for place in ("a", "b"))
    assert one == other
    assert one.name == "nt3/x"


def test_a_fork_never_takes_its_parents_for_its_own() -> None:
    parent = SimpleNamespace(run="run6", step=40)
    plain = spec(Path("ckpts/forks/run7"), "store://models", parent=parent)
    assert (plain.name, plain.forked) == ("", "run6@40")
    named = spec(Path("ckpts"), "store://models?name=nt3/x", parent=parent)
    assert named.name == "nt3/x/forks/run7"
    assert named.series != spec(Path("ckpts"), "store://models?name=nt3/x").series


def test_trainings_that_share_a_repository_have_engines_of_their_own() -> None:
    tiers = ("store://models", "store://models?name=a", "store://models?name=b")
    places = [(Path("ckpts"), tier) for tier in tiers] + [(Path("other"), tiers[0])]
    names = {find_address([spec(place, tier)], ONE).name for place, tier in places}
    assert len(names) == 4


def test_several_nodes_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"the ranks are on 2 nodes \(a, b\); use external or s3"):
        as_versions(tier_specs("ckpts", ["store://models"]), run(), TWO)
    (other,) = as_versions(tier_specs("ckpts", ["external"]), run(), TWO)
    assert other.kind == "external"


@pytest.mark.parametrize(
    "tier", ["store://models?name=", "store://models?", "store://models?a=b", "store://?name=x"]
)
def test_what_is_written_wrongly_is_refused(tier: str) -> None:
    with pytest.raises(SapwoodError, match="tier store"):
        TierSpec.parse(tier)


def test_names_that_cannot_be_are_refused_at_the_start() -> None:
    with pytest.raises(SapwoodError, match="is no name of a model"):
        TierSpec.parse("store://models?name=.shards/x")
    with pytest.raises(SapwoodError, match="is no name of a model"):
        spec(
            Path("ckpts"),
            "store://models?name=" + "n" * 190,
            parent=SimpleNamespace(run="a", step=1),
        )
