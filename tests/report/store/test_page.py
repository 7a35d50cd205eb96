"""What the server answers about versions: facts, tensors, lineage, sharing, differences."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
import torch

from sapwood.report.store import Serving
from sapwood.report.store.lineage import around
from sapwood.report.store.sharing import Sharing
from sapwood.report.store.versions import Versions
from sapwood.store import Repository


def ask(client: httpx.Client, what: str, **query: Any) -> Any:
    answer = client.get(f"/api/{what}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(client: httpx.Client, ref: str) -> dict[str, int | None]:
    """How many others have each tensor, once that is known."""
    deadline = time.monotonic() + 30
    while True:
        found = ask(client, "tensors", ref=ref)
        if found["share"] is not None and not found["sharing"]["open"]:
            return {row["name"]: row["others"] for row in found["rows"]}
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_version_and_its_tensors(family: Repository, client: httpx.Client) -> None:
    found = ask(client, "version", ref="a@best")
    assert (found["ref"], found["parent"]["ref"]) == ("a@2", "a@1")
    assert [child["ref"] for child in found["children"]] == ["b@1"]
    assert found["metrics"] == [["acc", 0.9]]
    assert json.loads(ask(client, "version", ref="a@1")["note"]) == {"epoch": 1}
    assert isinstance(found["id"], str)  # a number would be rounded
    assert counted(client, "a@2") == {"conv.weight": 2, "conv.bias": 1}
    rows = ask(client, "tensors", ref="b", sort="bytes", filter="conv")["rows"]
    assert [(row["name"], row["shape"]) for row in rows] == [
        ("conv.weight", [8, 4, 3, 3]), ("conv.bias", [8]),
    ]  # fmt: skip


def test_what_is_shared_follows_saves_and_removals(
    family: Repository, client: httpx.Client
) -> None:
    assert counted(client, "a@1")["conv.weight"] == 2
    family.save(family.load("a@1"), "copy")  # equal to it, and found to be so later
    family.remove("b@1")
    family.flush()
    deadline = time.monotonic() + 30
    while counted(client, "a@1") != {"conv.weight": 2, "conv.bias": 1}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ask(client, "versions", filter="copy")["rows"][0]["share"] == 1.0


def test_equal_tensors_inside_one_version_are_not_others(
    repo: Repository, client: httpx.Client
) -> None:
    one = torch.ones(5)
    tied = {"a": one, "b": one, "equal": torch.ones(5), "empty": torch.ones(0)}
    repo.save(tied, "m")
    repo.flush()
    assert counted(client, "m") == {"a": 0, "b": 0, "equal": 0, "empty": None}
    rows = ask(client, "tensors", ref="m")["rows"]
    assert [row["tied"] for row in rows] == [None, "a", None, None]


def test_a_place_that_cannot_say_what_is_equal(
    family: Repository, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "canonical", lambda blobs: None)
    deadline = time.monotonic() + 20
    while (found := ask(client, "versions"))["sharing"]["supported"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {row["share"] for row in found["rows"]} == {None}
    answer = client.get("/api/compare", params={"before": "a@1", "after": "a@2"})
    assert json.loads(answer.text.splitlines()[-1])["found"]["changed"] == 1


def test_names_that_no_address_can_hold(repo: Repository, client: httpx.Client) -> None:
    names = ["<img src=x onerror=alert(1)>", "a b/c?d#e&f", "ü" * 500, "%2e%2e/\\\"'"]
    repo.save({name: torch.ones(2) * n for n, name in enumerate(names)}, "odd")
    rows = ask(client, "tensors", ref="odd")["rows"]
    assert rows[0]["name"] == names[0]
    assert len(rows[2]["name"]) == 300
    for row in rows:
        assert ask(client, "histogram", ref="odd", at=row["at"])["count"] == 2
    assert client.get("/api/histogram", params={"ref": "odd", "at": 4}).status_code == 404


def test_an_empty_tensor_has_an_empty_histogram(repo: Repository, client: httpx.Client) -> None:
    repo.save({"e": torch.ones(0, 3)}, "m")
    assert ask(client, "histogram", ref="m", at=0)["count"] == 0


def test_lineage_has_forks_and_what_was_removed(family: Repository) -> None:
    family.save({"y": torch.ones(1)}, "fork", parent="a@1")
    family.remove("a@2")
    found = around(family, family.info("b@1"))
    nodes = {node["ref"]: node for node in found["nodes"]}
    ids = {node["id"]: node["ref"] for node in found["nodes"]}
    parents = {ref: ids.get(node["parent"] or "") for ref, node in nodes.items()}
    assert parents == {"a@1": None, "a@2": "a@1", "b@1": "a@2", "fork@1": "a@1"}
    assert [ref for ref, node in nodes.items() if node["removed"] is not None] == ["a@2"]
    assert not found["truncated"]


def test_of_a_long_lineage_the_nearest_are_shown(repo: Repository) -> None:
    for n in range(12):
        repo.save({"x": torch.ones(1)}, "m", parent=f"m@{n}" if n else None)
    found = around(repo, repo.info("m@6"), limit=5)
    assert [node["ref"] for node in found["nodes"]] == ["m@8", "m@7", "m@6", "m@5", "m@4"]
    assert found["truncated"]
    assert found["nodes"][-1]["more_above"]


def test_differences_come_in_lines_and_then_in_pages(
    family: Repository, client: httpx.Client
) -> None:
    ends = {"before": "a@1", "after": "b@1"}
    assert client.get("/api/differences", params=ends).status_code == 410
    lines = [json.loads(text) for text in client.get("/api/compare", params=ends).text.splitlines()]
    assert lines[-1]["found"] == {
        "tensors": 3, "changed": 1, "reshaped": 0, "added": 1, "removed": 0, "same": 1,
    }  # fmt: skip
    page = ask(client, "differences", **ends, sort="relative")
    assert [(row["name"], row["kind"]) for row in page["rows"]] == [
        ("conv.bias", "changed"), ("head", "added"),
    ]  # fmt: skip
    assert ask(client, "differences", **ends, kind="same")["total"] == 1
    answer = client.get("/api/differences", params={**ends, "kind": "odd"})
    assert answer.status_code == 400
    # A name that was given anew stands for another version, whose differences are others.
    family.remove("a@1")
    family.save({"z": torch.ones(1)}, "a@1")
    assert client.get("/api/differences", params=ends).status_code == 410


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("version?ref=nothing", 404, "no model 'nothing'"),
        ("version?ref=a@7", 404, "no version or tag '7'"),
        ("version?ref=../etc", 400, "is no name"),
        ("version", 400, "is no name"),
        ("histogram?ref=a@1&at=-1", 400, "expected a number"),
        ("tensors?ref=a@1&offset=x", 400, "expected a number"),
        ("compare?before=a@1&after=none", 404, "none"),
        ("versions?filter=acc>x", 400, "is no number"),
    ],
)
def test_what_is_wrong_is_said(
    path: str, status: int, says: str, family: Repository, client: httpx.Client
) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_a_fault_of_the_server_tells_no_secrets(
    family: Repository, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(reference: str) -> Any:
        raise RuntimeError("/home/somebody/secret")

    monkeypatch.setattr(family, "open", broken)
    answer = client.get("/api/version", params={"ref": "a@1"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "RuntimeError; see the server's log"}
    assert answer.headers["content-security-policy"]


def test_damage_is_named(
    family: Repository, client: httpx.Client, serving: Serving, tmp_path: Any
) -> None:
    for pack in (tmp_path / "models" / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    answer = client.get("/api/histogram", params={"ref": "a@1", "at": 0})
    assert answer.status_code == 500
    assert "pack is missing" in answer.json()["error"]
    lines = client.get("/api/compare", params={"before": "a@1", "after": "a@2"}).text.splitlines()
    assert "pack is missing" in json.loads(lines[-1])["error"]


def test_what_is_counted_ends_with_its_owner(family: Repository) -> None:
    sharing = Sharing(family, Versions(family))
    sharing.wake()
    sharing.close()
    sharing.close()
    assert not sharing.wake().complete or sharing.counted.versions == 4
