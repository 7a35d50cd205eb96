"""The page in a real browser: what is seen, by mouse and by keys, and what a browser refuses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sapwood.report.store import Serving
from sapwood.store import Repository
from tests.report.store.conftest import TOKEN
from tests.report.store.test_versions import record

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
    # What else would be processes of its own, which come and go while tests look for leftovers.
    "--in-process-gpu",
    "--enable-features=NetworkServiceInProcess2",
]
EVIL = "<img src=x onerror=alert(1)>"
LONG = "a-very-long-tag-" + "x" * 80


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        # Starts what serves storage, and keeps it: it would end with the last page that used it.
        kept = opened.new_page()
        kept.route("http://kept.example/", lambda route: route.fulfill(body="kept"))
        kept.goto("http://kept.example/")
        kept.evaluate("sessionStorage.setItem('kept', '1'); localStorage.setItem('kept', '1')")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: playwright.Browser, serving: Serving) -> Iterator[playwright.Page]:
    """A page that fails the test for errors, dialogs, and requests to anywhere else."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    opened.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    opened.on("dialog", lambda dialog: (wrong.append("dialog"), dialog.dismiss()))
    opened.on(
        "request",
        lambda asked: asked.url.startswith(serving.url) or wrong.append(f"asked {asked.url}"),
    )
    yield opened
    context.close()
    assert wrong == []


def expect(locator: playwright.Locator) -> playwright.LocatorAssertions:
    return playwright.expect(locator)


def refs(page: playwright.Page) -> list[str]:
    return page.locator("tbody a.ref").all_text_contents()


def test_a_model_is_found_and_opened_by_keys(
    family: Repository, serving: Serving, page: playwright.Page
) -> None:
    page.goto(serving.url)
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("text=being counted")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("acc>0.1")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="acc").click()
    expect(page.locator("tbody a.ref")).to_have_text(["a@2", "a@1"])
    expect(page.locator("th[aria-sort=descending]")).to_have_text("↓acc")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("a@1")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("svg.chart rect.bin")).to_have_count(64)
    expect(page.locator(".numbers")).to_contain_text("elements288")
    page.locator("svg.chart").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output")).to_contain_text("…")
    page.keyboard.press("Escape")
    expect(page.locator("aside")).to_be_hidden()
    expect(page.locator("tbody tr").first).to_contain_text("2")  # in b@1 and a@2, too
    page.go_back()
    assert "acc%3E0.1" in page.url
    expect(page.locator("tbody tr")).to_have_count(2)


def test_two_versions_are_chosen_and_compared(
    family: Repository, serving: Serving, page: playwright.Page
) -> None:
    page.goto(f"{serving.url}#/?sort=name&order=asc")
    expect(page.locator("tbody tr")).to_have_count(4)
    for key in "jxjjx":
        page.keyboard.press(key)
    expect(page.locator(".choice")).to_contain_text("a@1 → b@1")
    page.keyboard.press("c")
    expect(page.locator("h1")).to_have_text("a@1 → b@1")
    expect(page.locator(".chips")).to_have_text("1 changed1 added1 same")
    expect(page.locator("td.wide")).to_have_text(["conv.bias", "head"])
    page.locator(".chip.same").click()
    expect(page.locator("td.wide")).to_have_text(["conv.weight"])


def test_a_comparison_shows_how_far_it_is_and_can_be_left(
    repo: Repository, serving: Serving, page: playwright.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from sapwood.store.stored import StoredModel

    blocks, read = StoredModel.blocks, []

    def slow(self: StoredModel, row: object) -> Iterator[memoryview]:
        for block in blocks(self, row):  # type: ignore[arg-type]
            read.append(len(block))
            time.sleep(0.1)
            yield block

    monkeypatch.setattr(StoredModel, "blocks", slow)
    repo.save({"t": torch.zeros(20_000_000)}, "m@1")
    repo.save({"t": torch.ones(20_000_000)}, "m@2", parent="m@1")
    page.goto(f"{serving.url}#/v/m%402")
    page.get_by_text("Compare with parent").click()
    expect(page.locator("main")).to_contain_text("of 80.0 MB")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("main")).to_contain_text("Cancelled.")
    page.wait_for_timeout(600)
    before = len(read)
    page.wait_for_timeout(600)
    assert len(read) == before


def test_what_others_named_is_shown_as_text(
    repo: Repository, serving: Serving, page: playwright.Page
) -> None:
    metrics = {EVIL: 1.0}
    repo.save({EVIL: torch.ones(3)}, "m@1", metrics=metrics, note={EVIL: EVIL})
    repo.save({f"{EVIL}2": torch.ones(3)}, "m@2", parent="m@1")
    page.goto(serving.url)
    expect(page.locator("th.metric")).to_have_text(EVIL)
    page.goto(f"{serving.url}#/v/m%401")
    expect(page.locator(".fact.metric dt")).to_have_text(EVIL)
    page.locator("tbody button").click()
    expect(page.locator("aside h2")).to_have_text(EVIL)
    page.get_by_role("tab", name="Note").click()
    expect(page.locator("pre")).to_contain_text(EVIL)
    page.goto(f"{serving.url}#/compare/m%401/m%402")
    expect(page.locator("td.wide").first).to_contain_text(EVIL)
    page.goto(f"{serving.url}#/v/{EVIL}")
    expect(page.locator(".failure")).to_contain_text("is no name")
    assert page.locator("main img").count() == 0


def test_the_browser_itself_refuses_scripts_and_frames(
    repo: Repository, serving: Serving, browser: playwright.Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(serving.url)
    assert page.evaluate("""() => {
        const script = document.createElement('script');
        try { script.textContent = 'window.ran = 1'; } catch { return 'refused'; }
        document.body.append(script);
        return window.ran ?? 'refused';
    }""") == "refused"  # fmt: skip
    made = "try { document.body.innerHTML = '<b>x</b>'; return 'set'; } catch { return 'refused'; }"
    assert page.evaluate(f"() => {{ {made} }}") == "refused"
    asked = "() => fetch('http://127.0.0.1:1/').then(() => 'sent', (error) => error.name)"
    assert page.evaluate(asked) == "TypeError"
    context.close()


def test_other_pages_can_neither_read_nor_change(
    family: Repository, serving: Serving, browser: playwright.Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    # A name of somebody else's that points to this machine:
    answer = page.goto(f"http://evil.example:{serving.port}/api/versions")
    assert answer is not None
    assert answer.status == 421
    # A page of somebody else's:
    page.route("http://other.example/", lambda route: route.fulfill(body="<p>hello", status=200))
    page.goto("http://other.example/")
    statuses: list[int] = []
    page.on("response", lambda one: statuses.append(one.status) if "/api/" in one.url else None)
    asked = "(url) => fetch(url, {mode: 'no-cors'}).then(() => 'sent', () => 'refused')"
    page.evaluate(asked, f"{serving.url}api/versions")
    posted = f"""() => {{
        const form = document.createElement('form');
        Object.assign(form, {{method: 'post', enctype: 'text/plain'}});
        form.action = '{serving.url}api/remove';
        document.body.append(form);
        form.submit();
    }}"""
    with page.expect_navigation():
        page.evaluate(posted)
    assert "error" in page.content()
    assert set(statuses) == {403}
    assert len(family.models()) == 4
    context.close()


def test_changes_need_the_token_and_removal_the_name(
    family: Repository, serving: Serving, page: playwright.Page
) -> None:
    page.goto(f"{serving.url}#/v/a%401")
    expect(page.locator("h1")).to_have_text("a@1")
    assert page.get_by_role("button", name="Remove…").count() == 0
    page.get_by_role("button", name="Read-only").click()
    page.get_by_label("Token").fill("not the token at all")
    page.keyboard.press("Enter")
    expect(page.locator(".problem")).to_contain_text("not the token")
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Tag…").click()
    page.get_by_label("Tag", exact=True).fill("first")
    page.keyboard.press("Enter")
    expect(page.locator(".head .tag")).to_contain_text("first")
    assert family.info("a@first").version == "1"
    page.get_by_role("button", name="Remove tag first").click()
    page.locator("dialog").get_by_role("button", name="Remove tag").click()
    expect(page.locator(".head .tag")).to_have_count(0)
    page.get_by_role("button", name="Remove…").click()
    remove = page.locator("dialog").get_by_role("button", name="Remove", exact=True)
    page.locator("dialog input").fill("a@2")
    expect(remove).to_be_disabled()
    page.locator("dialog input").fill("a@1")
    remove.click()
    expect(page.locator("tbody tr")).to_have_count(3)
    assert "a@1" not in refs(page)
    assert [str(one.reference) for one in family.models("a")] == ["a@2"]


def test_lineage_shows_forks_tags_and_what_was_removed(
    family: Repository, serving: Serving, page: playwright.Page, tmp_path: Path
) -> None:
    family.save({"y": torch.ones(1)}, "fork", parent="a@1", tags=[LONG, f"{LONG}2"])
    family.remove("a@2")
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"{serving.url}#/v/b%401?tab=lineage")
    expect(page.locator(".lineage li")).to_have_count(4)
    expect(page.locator("svg.graph path.edge")).to_have_count(3)
    expect(page.locator(".lineage li.gone")).to_contain_text("a@2removed")
    boxes = [one.bounding_box() for one in page.locator(".first, .second").all()]
    lines = sorted((box["y"], box["y"] + box["height"]) for box in boxes if box)
    assert all(upper[1] <= lower[0] + 1 for upper, lower in pairwise(lines))
    tag = page.locator(".lineage .tag").first.bounding_box()
    assert tag is not None
    assert tag["x"] + tag["width"] <= 360
    page.locator(".lineage li", has_text="fork").locator("a.ref").click()
    expect(page.locator("h1")).to_have_text("fork@1")


def test_narrow_and_dark(family: Repository, serving: Serving, page: playwright.Page) -> None:
    family.tag("a@1", LONG)
    page.set_viewport_size({"width": 340, "height": 600})
    for address in ("", "#/v/a%401", "#/v/a%401?tab=lineage", "#/compare/a%401/a%402"):
        page.goto(f"{serving.url}{address}")
        page.locator("main table, main ol").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 340, address
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != light


def test_ten_thousand_versions_are_turned_over_page_by_page(
    repo: Repository, serving: Serving, page: playwright.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [record(n, f"model{n % 7}") for n in range(10_000)]
    monkeypatch.setattr(repo, "models", lambda: many)
    monkeypatch.setattr(repo, "canonical", lambda blobs: None)
    sizes: list[int] = []
    page.on("response", lambda one: sizes.append(len(one.body())) if "/api/" in one.url else None)
    page.goto(serving.url)
    expect(page.locator(".range")).to_have_text("1–100 of 10,000")  # noqa: RUF001
    page.keyboard.press("]")
    expect(page.locator(".range")).to_have_text("101–200 of 10,000")  # noqa: RUF001
    assert refs(page)[0] == "model1@9899"
    page.get_by_role("button", name="Models", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(7)
    expect(page.locator("tbody tr").first).to_contain_text("1,42")
    expect(page.locator(".foot")).to_contain_text("cannot say")
    assert max(sizes) < 100_000


def test_an_empty_repository_and_a_server_that_is_gone(
    repo: Repository, serving: Serving, page: playwright.Page
) -> None:
    page.goto(serving.url)
    expect(page.locator("main")).to_contain_text("This repository is empty.")
    serving.close()
    page.get_by_role("button", name="Models", exact=True).click()
    expect(page.locator(".failure")).to_contain_text("does not answer")
