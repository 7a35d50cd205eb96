"""Values of a state that is not tensors: each comes back as it was, or is refused by name."""

from __future__ import annotations

import array
import enum
import logging
import math
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sapwood
from sapwood.errors import CheckpointError
from sapwood.state.plain import from_plain
from tests.checkpoint.stateful import Box, same_value
from tests.checkpoint.training import Training

STRUCT = np.dtype({"names": ["a", "b"], "formats": [">i2", ("<f8", (2,))], "itemsize": 24})


def linked() -> OrderedDict[str, Any]:
    return nn.BatchNorm1d(3).state_dict()


def bounded() -> deque[Any]:
    return deque([1, (2, 3)], maxlen=2)


KEPT: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "text": "Grüße \x00 \ud800",
    "integers": [0, -1, 2**53 + 1, -(2**63)],
    "big integers": [2**63, -(2**64), 7**10_000],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308],
    "no numbers": [math.nan, math.inf, -math.inf],
    "complex": [complex(-0.0, math.inf), 1j],
    "a long row of floats": [n / 7 for n in range(5000)] + [math.nan, -math.inf],
    "a long row of integers": list(range(-500, 500)),
    "a long row of big integers": [2**70] * 500,
    "a long mixed row": [1, 2.0] * 500,
    "bytes": b"\x00\xff",
    "many bytes": bytes(range(256)) * 100,
    "a bytearray": bytearray(b"abc"),
    "empty": [[], (), {}, set(), frozenset(), b"", "", deque(), bytearray()],
    "nested tuples": (1, ((2,), [3, (4, [5])])),
    "sets": [{1, 2, "x"}, frozenset({(1, (2, 3)), None})],
    "a bounded deque": bounded(),
    "a deque": deque([1, 2]),
    "a range": range(5, -7, -2),
    "odd keys": {1: "a", (2, ("b",)): "c", None: 0, 1.5: {b"k": 1}, 2: 2},
    "our own mark": {"$": "tensor", "v": {"$": 1, "at": 3, "nbytes": 4}},
    "a counter": Counter({3: 2, "x": 1}),
    "a default dictionary": defaultdict(list, {"a": [1], 2: []}),
    "an ordered dictionary": OrderedDict([("b", 1), ("a", 2)]),
    "a module's state": linked(),
    "paths": [Path("/a/b"), PurePosixPath("c"), PureWindowsPath("d:/e")],
    "a size": torch.Size([2, 3]),
    "dtypes of torch": [torch.bfloat16, torch.complex64],
    "devices": [torch.device("cpu"), torch.device("cuda:1")],
    "tensors": [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(1).expand(5),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    "numpy scalars": [
        np.float64(0.1),
        np.float32("nan"),
        np.float16(1.5),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.longdouble("0.1"),
        np.str_("tail\x00"),
        np.bytes_(b"tail\x00"),
        np.datetime64("2026-01-02T03:04:05", "ns"),
        np.timedelta64(7, "h"),
        np.zeros(1, STRUCT)[0],
    ],
    "numpy arrays": [
        np.array(7),
        np.array("a text"),
        np.array(["a", "long text", ""]),
        np.array([b"a", b"bc"]),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.array(5, dtype=">u2"),
        np.arange(6, dtype="<i8")[::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.empty((0, 3), "<f8"),
        np.array(["NaT", "2026"], "datetime64[D]"),
        np.array([(1, (2.0, 3.0))], STRUCT),
        np.zeros(2, "V3"),
        np.array([True, False]),
    ],
    "a large array": np.arange(10_000, dtype=">i4"),
}


def test_every_value_comes_back_as_it_was(tmp_path: Path) -> None:
    boxes = {name: Box(value) for name, value in KEPT.items()}
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", engine="sync", shared=boxes, own={"mine": Box(KEPT)}
    ) as c:
        training.step()
        c.save()
    training.close()
    again = Training(tmp_path)
    found, mine = {name: Box("lost") for name in KEPT}, Box("lost")
    with sapwood.Checkpointer(
        again.run, tmp_path / "ckpts", engine="sync", shared=found, own={"mine": mine}
    ) as c:
        c.restore_latest()
    again.close()
    differ = [name for name, value in KEPT.items() if not same_value(found[name].value, value)]
    assert differ == []
    assert same_value(mine.value, KEPT)
    found["a large array"].value += 1  # it is the user's own now
    found["a module's state"].value["running_mean"] += 1


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Mine(dict[str, int]):
    """A dictionary of the user's own."""


class Number(int):
    """A number of the user's own."""


Step = namedtuple("Step", ["reward", "done"])


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(2000):
        value = [value]
    return value


REFUSED: dict[str, Callable[[], Any]] = {
    "object": object,
    "function": lambda: math.sin,
    "lambda": lambda: lambda: 0,
    "class": lambda: Box,
    "module": lambda: nn.Linear(1, 1),
    "enum": lambda: Colour.RED,
    "IntEnum": lambda: Level.LOW,
    "StrEnum": lambda: Word.YES,
    "namedtuple": lambda: Step(1.0, False),
    "subclass of dict": Mine,
    "subclass of int": lambda: Number(3),
    "UserDict": UserDict,
    "defaultdict": lambda: defaultdict(lambda: 0),
    "Decimal": lambda: Decimal("0.1"),
    "array.array": lambda: array.array("d", [1.0]),
    "memoryview": lambda: memoryview(b"abc"),
    "slice": lambda: slice(1, 2),
    "ellipsis": lambda: ...,
    "generator": lambda: torch.Generator(),
    "numpy generator": lambda: np.random.default_rng(0),
    "random": lambda: random.Random(0),
    "array of objects": lambda: np.array([object()], object),
    "structured array of objects": lambda: np.zeros(1, [("a", "O")]),
    "numpy strings of any length": lambda: np.array(["a"], np.dtypes.StringDType()),
    "numpy matrix": lambda: np.ma.masked_array([1.0], [True]),
    "numpy class": lambda: np.float32,
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "tensor without values": lambda: torch.empty(2, device="meta"),
    "itself": itself,
    "deep": deep,
}


def test_what_would_not_come_back_is_refused_by_name_and_harms_nothing(tmp_path: Path) -> None:
    box = Box()
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", engine="sync", keep=None, own={"box": box}
    ) as c:
        for name, make in REFUSED.items():
            training.step()
            for value, where in (
                (make(), "box['value']"),
                ({"deep": [0, (make(),)]}, "box['value']['deep'][1][0]"),
            ):
                box.value = value
                with pytest.raises(CheckpointError, match=r"step \d+ is not saved") as found:
                    c.save()
                assert where in str(found.value), f"{name}: {found.value}"
        assert len(c.stats.failures) == c.stats.failures_in_a_row == 2 * len(REFUSED)
        box.value = 5
        c.save()
        assert c.stats.failures_in_a_row == 0
        box.value = None
        c.restore_latest()
        assert box.value == 5
    training.close()


def test_numbers_of_numpy_and_torch_in_every_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have ended trainings: in a parameter group, as a metric, in the optimizer's state."""
    training = Training(tmp_path, "sgd")
    group = training.optimizer.param_groups[0]
    group["lr"] = np.float64(0.1)
    group["note"] = np.array(3, ">i2")
    with (
        caplog.at_level(logging.WARNING, "sapwood"),
        sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", every=1, mode="lazy", engine="sync"
        ) as c,
    ):
        c.metrics |= {"loss": np.float32(0.5), "accuracy": torch.tensor(0.25), "rank": np.int64(3)}
        training.steps(2)
        c.wait()
        assert c.stats.saves[-1].metrics == {"loss": 0.5, "accuracy": 0.25, "rank": 3.0}
        assert c.stats.failures == []
        group["note"] = group["lr"] = None
        c.restore_latest()
        assert same_value(group["note"], np.array(3, ">i2"))
        assert type(group["lr"]) is np.float64
        c.metrics["loss"] = "none yet"  # type: ignore[assignment]
        training.step()
        assert "ckpt.metrics['loss'] is a str" in c.stats.failures[0].reason
    training.close()
    assert "ckpt.metrics['loss'] is a str" in caplog.text


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ({"$": "bytes", "v": "AP8="}, b"\x00\xff"),
        ({"$": "deque", "v": [1, 2]}, deque([1, 2])),
        ({"$": "dict", "v": [[{"$": "tuple", "v": [1]}, 2]]}, {(1,): 2}),
        (
            {"$": "tensor", "v": {"dtype": "int16", "shape": [2], "bytes": "AQACAA=="}},
            torch.tensor([1, 2], dtype=torch.int16),
        ),
        (
            {
                "$": "numpy",
                "v": {"$": "tensor", "v": {"dtype": "int16", "shape": [1], "bytes": "AQA="}},
            },
            np.array([1], np.int16),
        ),
        (7**50, 7**50),
    ],
)
def test_values_of_older_checkpoints_are_read(written: Any, value: Any) -> None:
    assert same_value(from_plain(written), value)


@pytest.mark.parametrize(
    "written",
    [
        {"$": "from the future", "v": 1},
        {"$": "tensor", "v": {"dtype": "nn", "shape": [1], "bytes": ""}},
        {"$": "tensor", "v": {"dtype": "int64", "shape": [9], "bytes": "AP8="}},
        {"$": "array", "v": {"dtype": "O", "shape": [1], "bytes": "AP8="}},
        {"$": "path", "v": ["system", "/"]},
        {"$": "tensor"},
    ],
)
def test_values_that_make_no_sense_are_refused(written: Any) -> None:
    with pytest.raises(CheckpointError):
        from_plain(written)
