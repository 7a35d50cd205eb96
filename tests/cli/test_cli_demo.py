from __future__ import annotations

import re

from tests.cli.helpers import sapwood


def test_the_demo_plays_every_scene_and_leaves_nothing(tmp_path):
    done = sapwood("demo", "--steps", "8", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert [f"{n}. " in text for n in range(1, 8)] == [True] * 7
    first, last = text.split("loss ")[1].split("  ")[0].split(" -> ")
    assert float(last) < float(first)
    assert "rank 1 main" in text
    assert "TensorUpdated events on rank 0" in text
    # Which of the two was durable when the ranks were killed, the load of the machine decides.
    restored = re.search(r"started again: the step restored is ([24]),", text)
    assert restored is not None, text
    begun = int(restored[1]) + 1
    assert f"the losses of steps {begun} to 8 are equal, bit for bit, to those of scene 1" in text
    assert "the fork went its own way after step" in text
    assert text.count("are equal, bit for bit, to those of scene 1") == 2
    assert list((tmp_path / "tmp").glob("sapwood*")) == []


def test_the_demo_says_what_is_wrong_with_its_arguments(tmp_path):
    done = sapwood("demo", "--steps", "1", tmp_path=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "sapwood: --steps is 1; the demo needs at least 2 to show one of them\n"
