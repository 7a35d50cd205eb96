"""Makes docs/images/store-ui*.png: a repository with some history, looked at with chromium.

python scripts/store_screenshots.py [FOLDER]
"""

from __future__ import annotations

import io
import sqlite3
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from torch import Tensor

import sapwood.store
from sapwood.report.store import Serving
from sapwood.store import Repository

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SIZE = {"width": 1200, "height": 760}


def _network(width: int, blocks: int) -> dict[str, Tensor]:
    made = {"stem.conv.weight": torch.randn(width, 3, 7, 7) * 0.05}
    for n in range(blocks):
        for part in ("conv1", "conv2"):
            shape = (width, width, 3, 3)
            made[f"blocks.{n}.{part}.weight"] = torch.randn(shape) * (0.03 + 0.01 * n)
            made[f"blocks.{n}.{part}.norm.running_var"] = torch.rand(width) + 0.5
    made["head.weight"] = torch.randn(10, width) * 0.1
    made["head.bias"] = torch.zeros(10)
    return made


def _trained(before: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The later layers change, the earlier ones are frozen."""
    names = list(before)
    frozen = set(names[: int(len(names) * share)])
    return {
        name: value if name in frozen else value + torch.randn_like(value) * 0.004
        for name, value in before.items()
    }


def _line(repo: Repository, name: str, first: dict[str, Tensor], steps: int, **more: str) -> None:
    value, parent = first, more.get("parent")
    for n in range(1, steps + 1):
        accuracy = 0.71 + 0.03 * n - 0.002 * n * n
        version = f"step-{100 * n}"
        metrics = {"val_acc": round(accuracy, 4), "loss": round(1.6 / n, 4)}
        repo.save(value, f"{name}@{version}", parent=parent, metrics=metrics, note={"epoch": n})
        parent, value = f"{name}@{version}", _trained(value, 0.5)


def fill(repo: Repository) -> None:
    """Two trainings, forks of one of them, a search, and something that was removed."""
    torch.manual_seed(0)
    first = _network(64, 4)
    _line(repo, "resnet/base", first, 6)
    fork = _trained(repo.load("resnet/base@step-300"), 0.6)
    _line(repo, "resnet/cosine-lr", fork, 4, parent="resnet/base@step-300")
    fork = _trained(repo.load("resnet/base@step-500"), 0.8)
    _line(repo, "resnet/finetune-flowers", fork, 3, parent="resnet/base@step-500")
    repo.remove("resnet/cosine-lr@step-200")
    for n in range(1, 9):
        metrics = {"val_acc": 0.6 + 0.013 * n}
        repo.save(_network(16 + 4 * n, 2), f"search/candidate@{n}", metrics=metrics)
    repo.tag("resnet/base@step-600", "best")
    repo.tag("resnet/base@step-500", "paper-table-3")
    repo.tag("resnet/finetune-flowers@step-300", "production")
    repo.tag("resnet/finetune-flowers@step-300", "eval-2026-11-flowers102-five-crops-ema")
    repo.flush()


def age(catalog: Path) -> None:
    """As if they had been saved in the course of some weeks."""
    with sqlite3.connect(catalog) as db:
        ids = [row[0] for row in db.execute("SELECT id FROM model ORDER BY id DESC")]
        for n, id in enumerate(ids):
            older = 900 + 5400 * n * n
            db.execute("UPDATE model SET created = created - ? WHERE id = ?", (older, id))
    db.close()


def _save(page: Page, path: Path) -> None:
    """With 256 colours, which are as many as there are, nearly: a quarter of the bytes."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def take(url: str, folder: Path, theme: str, page: Page) -> None:
    """Every view once."""
    end = "" if theme == "light" else f"-{theme}"
    page.goto(url)
    page.wait_for_selector("tbody .meter >> nth=3")
    _save(page, folder / f"store-ui-list{end}.png")
    page.goto(f"{url}#/v/resnet%2Fbase%40step-500")
    page.wait_for_selector("aside, tbody tr")
    page.click("text=conv2.weight >> nth=1")
    page.wait_for_selector("svg.chart")
    page.wait_for_function("!document.body.textContent.includes('Counting')")
    _save(page, folder / f"store-ui{end}.png")
    page.click("role=tab[name=Lineage]")
    page.wait_for_selector("svg.graph")
    _save(page, folder / f"store-ui-lineage{end}.png")
    page.goto(f"{url}#/compare/resnet%2Fbase%40step-300/resnet%2Fbase%40step-600")
    page.wait_for_selector("table.differences")
    _save(page, folder / f"store-ui-compare{end}.png")


def main(folder: Path, themes: tuple[str, ...]) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as place,
        sapwood.store.open(Path(place) / "models") as repo,
        sync_playwright() as playwright,
    ):
        fill(repo)
        age(Path(place) / "models" / "catalog.db")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with Serving(repo, place="/data/models") as serving:
            for theme in themes:
                page = browser.new_page(viewport=SIZE, color_scheme=theme)  # type: ignore[arg-type]
                page.on("console", lambda message: print(message.text))
                page.on("pageerror", lambda error: print(error))
                take(serving.url, folder, theme, page)
                page.close()
        browser.close()


if __name__ == "__main__":
    elsewhere = len(sys.argv) > 1
    main(Path(sys.argv[1]) if elsewhere else IMAGES, ("light", "dark") if elsewhere else ("light",))
