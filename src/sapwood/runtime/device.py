"""The stream that background updates run on; on the CPU there is none and nothing to order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Lane"]


class StreamMarker:
    """A point in a stream."""

    def __init__(self, module: Any, event: Any, device: torch.device) -> None:
        """``module`` is torch.cuda or its like; ``event`` was recorded there."""
        self._module = module
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Make the calling thread's current stream on the lane's device wait for this point."""
        self._module.current_stream(self._device).wait_event(self._event)


class Lane:
    """Orders work of a background thread against the training thread's stream."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream on ``device`` if it has streams."""
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        if device.type == "cpu":
            return
        module: Any = torch.get_device_module(device)
        if hasattr(module, "Stream"):
            self._module = module
            self._stream = module.Stream(device=device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the block's kernels on this lane."""
        if self._stream is None:
            yield
            return
        with self._module.stream(self._stream):
            yield

    def mark(self) -> StreamMarker | None:
        """The point this lane has reached; None where there are no streams."""
        if self._stream is None:
            return None
        event = self._module.Event()
        event.record(self._stream)
        return StreamMarker(self._module, event, self._device)

    def follow(self) -> None:
        """Make this lane wait for everything on the calling thread's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))

    def join(self) -> None:
        """Make the current stream wait for everything on this lane."""
        marker = self.mark()
        if marker is not None:
            marker.wait()
