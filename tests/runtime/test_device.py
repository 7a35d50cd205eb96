"""A lane does nothing on the CPU, and orders streams where there are some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.runtime.device import Lane


class FakeDevice:
    """Stands for torch.cuda: writes down every call that orders streams."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.made = 0

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's own name
        self.calls.append(("stream made", str(device)))
        return SimpleNamespace(name="lane")

    def Event(self) -> Any:  # noqa: N802
        self.made += 1
        event = SimpleNamespace(name=f"event {self.made}")
        event.record = lambda stream: self.calls.append(("record", event.name, stream.name))
        return event

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(("enter", stream.name))
        yield
        self.calls.append(("leave", stream.name))

    def current_stream(self, device: torch.device) -> Any:
        def wait_event(event: Any) -> None:
            self.calls.append(("wait", f"current of {device}", event.name))

        return SimpleNamespace(name=f"current of {device}", wait_event=wait_event)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    module = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_on_the_cpu_there_is_nothing_to_order(fake: FakeDevice) -> None:
    lane = Lane(torch.device("cpu"))
    with lane.active():
        pass
    assert lane.mark() is None
    lane.join()
    assert fake.calls == []


def test_streams_are_ordered_on_the_lanes_own_device(fake: FakeDevice) -> None:
    lane = Lane(torch.device("cuda:1"))
    with lane.active():
        fake.calls.append(("kernel",))
        marker = lane.mark()
    assert marker is not None
    marker.wait()
    lane.join()
    assert fake.calls == [
        ("stream made", "cuda:1"),
        ("enter", "lane"),
        ("kernel",),
        ("record", "event 1", "lane"),
        ("leave", "lane"),
        ("wait", "current of cuda:1", "event 1"),
        ("record", "event 2", "lane"),
        ("wait", "current of cuda:1", "event 2"),
    ]


def test_the_lane_follows_the_stream_gradients_are_made_on(fake: FakeDevice) -> None:
    lane = Lane(torch.device("cuda:1"))
    lane._stream.wait_stream = lambda stream: fake.calls.append(("lane waits", stream.name))
    lane.follow()
    assert fake.calls[-1] == ("lane waits", "current of cuda:1")


def test_a_device_without_streams_is_like_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    lane = Lane(torch.device("mps"))
    with lane.active():
        pass
    assert lane.mark() is None
    lane.join()
