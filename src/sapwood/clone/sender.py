"""A donor's messages on their way, on a thread of their own, straight from the tensors' memory.

What is in flight at a time is bounded, so that a donor in a hurry can copy the rest aside; what is
in flight cannot be taken back, only waited for, or given up together with the clone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sapwood.clone.plan import Message
from sapwood.errors import SapwoodError
from sapwood.events import Hold, Marker
from sapwood.state.contents import Contents, byte_view
from sapwood.tiers.digest import digest
from sapwood.transport.base import Link, Transfer

__all__ = ["Sender"]

WINDOW = 32 * 2**20
"""Bytes in flight at a time, at least one message."""


@dataclass(eq=False)
class _Bucket:
    """The messages of one bucket, and who waits for them."""

    messages: Sequence[Message]
    left: int
    aside: dict[int, Tensor] = field(default_factory=dict)
    """Copies, by tag, of what may change before it is sent."""
    begun: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    """Tags under way whose bytes are read from the tensors themselves."""
    holds: Sequence[Hold] = ()
    marker: Marker | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Sends buckets in the order in which they become ready."""

    def __init__(
        self,
        link: Link,
        messages: Sequence[Message],
        contents: Contents,
        *,
        first_clone: int,
        timeout: float,
        algorithm: str,
        on_failure: Callable[[str], None],
    ) -> None:
        """``messages`` are this donor's; ``first_clone`` is the number of clone 0 at the link.

        ``on_failure`` hears, on the sender's thread, why nothing more can be sent.
        """
        self._link = link
        self._contents = contents
        self._first_clone = first_clone
        self._timeout = timeout
        self._algorithm = algorithm
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}
        for bucket in dict.fromkeys(m.bucket for m in messages):
            mine = [m for m in messages if m.bucket == bucket]
            self._buckets[bucket] = _Bucket(mine, left=len(mine))
        self._queue: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._flight: deque[tuple[_Bucket, Message, Transfer]] = deque()
        self._in_flight = 0
        self.digests: dict[int, str] = {}
        """Checksums by tag, of what was sent."""
        self.seconds = 0.0
        """From the first message to the last."""
        self.failed = False
        self.finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sapwood-clone-send", daemon=True)
        self._thread.start()

    # -- called by whoever updates -----------------------------------------------------------

    def ready(self, bucket: int, holds: Sequence[Hold] = (), marker: Marker | None = None) -> None:
        """A bucket has its values, and keeps them until ``holds`` are released."""
        found = self._buckets.get(bucket)
        if found is None or self.failed:
            _release(holds)
            return
        found.holds, found.marker = holds, marker
        self._queue.put(found)

    def copy_aside(self, bucket: int) -> None:
        """Take the bytes now: nothing protects these tensors."""
        found = self._buckets.get(bucket)
        if found is not None:
            self._copy(found)
            self.ready(bucket)

    def complete(self) -> None:
        """No more buckets will come."""
        self._queue.put(None)

    def hurry(self, bucket: int, patience: float, *, copies: bool) -> bool:
        """An update waits for a bucket: whether it may go on, after ``patience`` seconds at most.

        With ``copies`` half of the time goes by before what is not in flight is copied aside.
        """
        found = self._buckets.get(bucket)
        if found is None or self.failed:
            return True
        if not copies:
            return found.done.wait(patience)
        deadline = time.monotonic() + patience
        if found.done.wait(patience / 2):
            return True
        self._copy(found)
        while found.live and time.monotonic() < deadline:
            found.done.wait(0.001)
        return not found.live

    def stop(self) -> None:
        """Give up; whoever waits goes on."""
        self.failed = True
        for bucket in self._buckets.values():
            _release(bucket.holds)
            bucket.done.set()
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread, whose link has been closed or is done."""
        self._thread.join(timeout)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send_all()
            self.finished.set()
        except (SapwoodError, RuntimeError, OSError) as error:
            if not self.failed:
                self._on_failure(f"sending failed: {error}")
        finally:
            self._flight.clear()

    def _send_all(self) -> None:
        start = 0.0
        while (bucket := self._next()) is not None:
            start = start or time.perf_counter()
            if bucket.marker is not None:
                bucket.marker.wait()
            for message in bucket.messages:
                if self.failed:
                    return
                self._send(bucket, message)
            if not bucket.messages:
                self._settled(bucket)
        while self._flight:
            self._settle()
        self.seconds = time.perf_counter() - start if start else 0.0

    def _next(self) -> _Bucket | None:
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                if not self._flight:
                    return self._queue.get()
                self._settle()

    def _send(self, bucket: _Bucket, message: Message) -> None:
        with self._lock:
            bucket.begun.add(message.tag)
            data = bucket.aside.get(message.tag)
            if data is None:
                data = self._data(message)
                bucket.live.add(message.tag)
        self.digests[message.tag] = digest(data.numpy(), self._algorithm)
        while self._flight and self._in_flight + message.nbytes > WINDOW:
            self._settle()
        transfer = self._link.send(self._first_clone + message.clone, message.tag, data)
        self._flight.append((bucket, message, transfer))
        self._in_flight += message.nbytes

    def _settle(self) -> None:
        bucket, message, transfer = self._flight[0]
        transfer.wait(self._timeout)
        self._flight.popleft()
        self._in_flight -= message.nbytes
        bucket.left -= 1
        bucket.live.discard(message.tag)
        bucket.aside.pop(message.tag, None)
        if not bucket.left:
            self._settled(bucket)

    def _settled(self, bucket: _Bucket) -> None:
        _release(bucket.holds)
        bucket.done.set()

    # -- bytes -------------------------------------------------------------------------------

    def _copy(self, bucket: _Bucket) -> None:
        with self._lock:
            for message in bucket.messages:
                if message.tag not in bucket.begun:
                    bucket.aside.setdefault(message.tag, self._data(message).clone())

    def _data(self, message: Message) -> Tensor:
        """The message's bytes: where they lie, or packed; on the CPU."""
        views = []
        for part in message.parts:
            tensor = self._contents.tensors[part.key]
            view = byte_view(tensor)
            if view is None:
                view = byte_view(tensor.contiguous())
                assert view is not None
            views.append(view[part.start : part.stop])
        data = views[0] if len(views) == 1 else torch.cat(views)
        return data if data.device.type == "cpu" else data.cpu()


def _release(holds: Sequence[Hold]) -> None:
    for hold in holds:
        hold.release()
