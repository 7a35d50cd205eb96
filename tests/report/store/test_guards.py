"""Who is heard: this machine's own page, and nobody else."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.datastructures import Headers

from sapwood.report.store import Serving
from sapwood.report.store.guards import HEADERS, refusal

HOST = {"host": "127.0.0.1:8000"}
JSON = {"content-type": "application/json", "content-length": "2"}


def status(method: str, path: str, **headers: str) -> int | None:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    found = refusal(method, path, Headers({**HOST, **named}))
    return None if found is None else found[0]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "[::1]:80"])
def test_this_machine_is_heard_also_through_a_tunnel(host: str) -> None:
    assert status("GET", "/api/versions", host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "evil.example@127.0.0.1",
        "127.0.0.1:80:80",
        "127.0.0.1\n",
        "0.0.0.0:80",
        "10.0.0.1",
        "[::2]",
        "",
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    assert status("GET", "/", host=host) == 421
    assert status("GET", "/api/versions", host=host) == 421


def test_two_hosts_or_none_are_refused() -> None:
    for raw in ([], [(b"host", b"localhost"), (b"host", b"localhost")]):
        assert refusal("GET", "/", Headers(raw=raw)) is not None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something new"])
def test_other_pages_are_refused(site: str) -> None:
    assert status("GET", "/api/versions", sec_fetch_site=site) == 403
    assert status("GET", "/static/main.js", sec_fetch_site=site) == 403
    assert status("POST", "/api/remove", sec_fetch_site=site, **_words(JSON)) == 403


def test_origins_must_be_this_one() -> None:
    for origin in ("null", "http://127.0.0.1:8001", "https://127.0.0.1:8000", "http://evil"):
        assert status("GET", "/api/versions", origin=origin) == 403
        assert status("POST", "/api/tag", origin=origin, **_words(JSON)) == 403
    assert status("POST", "/api/tag", origin="http://127.0.0.1:8000", **_words(JSON)) is None


def test_a_link_elsewhere_may_open_the_page_but_nothing_else_may() -> None:
    opened = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert status("GET", "/", sec_fetch_dest="document", **opened) is None
    assert status("GET", "/", sec_fetch_dest="iframe", **opened) == 403
    assert status("GET", "/api/versions", sec_fetch_dest="document", **opened) == 403
    assert status("GET", "/api/versions", sec_fetch_site="none") is None
    assert status("POST", "/api/tag", sec_fetch_site="none", **_words(JSON)) == 403


def test_changes_must_be_json_of_a_known_and_small_size() -> None:
    assert status("POST", "/api/tag", content_type="text/plain", content_length="2") == 415
    assert status("POST", "/api/tag", content_type="application/json") == 411
    for length in ("-1", "x", "+1", "\xb2"):
        found = status("POST", "/api/tag", content_type="application/json", content_length=length)
        assert found == 411, length
    chunked = {"transfer_encoding": "chunked", **_words(JSON)}  # it would go before the length
    assert status("POST", "/api/tag", **chunked) == 411
    for length in ("4097", "9" * 5000):
        found = status("POST", "/api/tag", content_type="application/json", content_length=length)
        assert found == 413, length
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"):
        assert status(method, "/api/versions") == 405


def _words(headers: dict[str, str]) -> dict[str, str]:
    return {key.replace("-", "_"): value for key, value in headers.items()}


def test_every_answer_has_the_headers(client: httpx.Client) -> None:
    asked = [
        client.get("/"),
        client.get("/static/main.js"),
        client.get("/static/../app.py"),
        client.get("/static/%2e%2e%2fapp.py"),
        client.get("/nothing"),
        client.get("/api/versions"),
        client.get("/api/version", params={"ref": "none"}),
        client.get("/api/versions", params={"offset": "x"}),
        client.get("/", headers={"host": "evil.example"}),
        client.put("/api/versions"),
        client.post("/api/nothing", json={}),
    ]
    assert [answer.status_code for answer in asked] == [
        200, 200, 404, 404, 404, 200, 404, 400, 421, 405, 404,
    ]  # fmt: skip
    for answer in asked:
        for key, value in HEADERS.items():
            assert answer.headers.get_list(key) == [value], answer.url
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


def test_nothing_of_the_page_is_elsewhere(client: httpx.Client) -> None:
    page = client.get("/").text
    assert "//" not in page.replace("<!doctype html>", "")
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert "http" not in HEADERS["content-security-policy"]


def test_only_loopback_listens(serving: Serving) -> None:
    with pytest.raises(OSError), socket.create_connection((_address(), serving.port), timeout=5):
        pass


def _address() -> str:
    """An address of this machine that is not loopback, or one that nobody has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(sock.getsockname()[0])


def test_a_body_that_never_comes_holds_nobody_up(serving: Serving, client: httpx.Client) -> None:
    head = (
        b"POST /api/tag HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 4000\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", serving.port), timeout=5) as sock:
        sock.sendall(head)
        assert client.get("/api/session").status_code == 200
