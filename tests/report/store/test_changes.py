"""Changes from the page: only with the token, and only of the version that was shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from sapwood.report.store import Serving
from sapwood.store import Repository
from tests.report.store.conftest import TOKEN

WITH = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def readonly(family: Repository) -> Iterator[httpx.Client]:
    with (
        Serving(family, place="models") as running,
        httpx.Client(base_url=running.url, timeout=20, trust_env=False) as client,
    ):
        yield client


def shown(client: httpx.Client, ref: str) -> dict[str, Any]:
    found = client.get("/api/version", params={"ref": ref}).json()
    return {"ref": found["ref"], "id": found["id"]}


def versions(repo: Repository) -> list[str]:
    return [str(record.reference) for record in repo.models()]


def test_tags_move_and_go(family: Repository, client: httpx.Client) -> None:
    one = shown(client, "a@1")
    answer = client.post("/api/tag", json={**one, "tag": "best"}, headers=WITH)
    assert answer.status_code == 200
    assert family.info("a@best").version == "1"
    answer = client.post("/api/untag", json={"name": "a", "tag": "best"}, headers=WITH)
    assert answer.status_code == 200
    assert family.info("a@1").tags == ()
    rows = client.get("/api/versions", params={"filter": "name:a"}).json()["rows"]
    assert [row["tags"] for row in rows] == [[], []]  # at once, not some seconds later


def test_a_version_is_removed_only_if_it_is_named(family: Repository, client: httpx.Client) -> None:
    one = shown(client, "a@1")
    for confirm in ("a@2", "a", "", None, 1):
        answer = client.post("/api/remove", json={**one, "confirm": confirm}, headers=WITH)
        assert answer.status_code == 400
    assert "a@1" in versions(family)
    answer = client.post("/api/remove", json={**one, "confirm": "a@1"}, headers=WITH)
    assert answer.status_code == 200
    assert "a@1" not in versions(family)
    answer = client.post("/api/remove", json={**one, "confirm": "a@1"}, headers=WITH)
    assert answer.status_code == 404


def test_what_was_saved_anew_under_the_name_is_not_removed(
    family: Repository, client: httpx.Client
) -> None:
    one = shown(client, "a@1")
    family.remove("a@1")
    family.save({"new": torch.ones(1)}, "a@1")
    for what, more in (("remove", {"confirm": "a@1"}), ("tag", {"tag": "x"})):
        answer = client.post(f"/api/{what}", json={**one, **more}, headers=WITH)
        assert answer.status_code == 409
        assert "saved anew" in answer.json()["error"]
    assert family.info("a@1").tags == ()


@pytest.mark.parametrize("ref", ["a", "a@best"])
def test_names_that_may_move_are_no_names_of_versions(
    ref: str, family: Repository, client: httpx.Client
) -> None:
    one = {**shown(client, ref), "ref": ref, "confirm": ref}
    answer = client.post("/api/remove", json=one, headers=WITH)
    assert answer.status_code == 400
    assert "expected a@2" in answer.json()["error"]


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        TOKEN,
        "Basic eDp4",
    ],
)
def test_without_the_token_nothing_changes(
    authorization: str | None, family: Repository, client: httpx.Client
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    one = shown(client, "a@1")
    changes: dict[str, dict[str, str]] = {
        "remove": {"confirm": "a@1"},
        "tag": {"tag": "x"},
        "untag": {"name": "a", "tag": "best"},
    }
    for what, more in changes.items():
        answer = client.post(f"/api/{what}", json={**one, **more}, headers=headers)
        assert answer.status_code == 403
        assert "token" in answer.json()["error"]
    assert len(versions(family)) == 4
    assert family.info("a@2").tags == ("best",)
    assert client.get("/api/session", headers=headers).json()["unlocked"] is False


def test_two_tokens_are_none(family: Repository, client: httpx.Client) -> None:
    headers = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
    answer = client.post("/api/untag", json={"name": "a", "tag": "best"}, headers=headers)
    assert answer.status_code == 403


def test_a_server_without_a_token_takes_none(family: Repository, readonly: httpx.Client) -> None:
    one = {**shown(readonly, "a@1"), "confirm": "a@1"}
    for headers in (WITH, {}, {"authorization": "Bearer None"}):
        answer = readonly.post("/api/remove", json=one, headers=headers)
        assert answer.status_code == 403
        assert "read-only" in answer.json()["error"]
    assert readonly.get("/api/session", headers=WITH).json()["writable"] is False
    assert len(versions(family)) == 4


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 4000])
def test_a_body_that_is_no_object_is_refused(body: bytes, client: httpx.Client) -> None:
    headers = {**WITH, "content-type": "application/json"}
    for what in ("tag", "untag", "remove"):
        answer = client.post(f"/api/{what}", content=body, headers=headers)
        assert answer.status_code == 400
        assert "JSON object" in answer.json()["error"]


def test_names_are_checked_as_everywhere(family: Repository, client: httpx.Client) -> None:
    one = shown(client, "a@1")
    for tag in ("<img>", "../x", "", "x" * 101, "a b"):
        answer = client.post("/api/tag", json={**one, "tag": tag}, headers=WITH)
        assert answer.status_code == 400
    answer = client.post("/api/tag", json={**one, "tag": "2"}, headers=WITH)
    assert answer.status_code == 409  # there is a version of that name
    answer = client.post("/api/untag", json={"name": "a", "tag": "none"}, headers=WITH)
    assert answer.status_code == 404


def test_a_change_by_a_link_is_none(family: Repository, client: httpx.Client) -> None:
    for what in ("tag", "untag", "remove"):
        assert client.get(f"/api/{what}", headers=WITH).status_code == 405
