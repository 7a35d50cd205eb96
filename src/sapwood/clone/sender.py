"""A donor's messages on their way, on a thread of their own, straight from the tensors' memory.

What is in flight at a time is bounded, so that a donor in a hurry can copy the rest aside; what is
in flight cannot be taken back, only waited for, or given up together with the clone.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sapwood.clone.checks import pack_digests
from sapwood.clone.plan import ClonePlan, Message
from sapwood.errors import SapwoodError
from sapwood.events import Hold, Marker
from sapwood.state.contents import Contents, ordered_bytes
from sapwood.tiers.digest import digest_of_row
from sapwood.transport.base import Link, Transfer

__all__ = ["Sender"]

log = logging.getLogger(__name__)
WINDOW = 32 * 2**20
"""Bytes in flight at a time, at least one message."""


@dataclass(eq=False)
class _Parcel:
    """The same bytes for one clone or several."""

    messages: Sequence[Message]
    aside: list[Tensor] | None = None
    """A copy of what may change before it is sent."""
    begun: bool = False
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.messages[0].nbytes


@dataclass(eq=False)
class _Bucket:
    """The parcels of one bucket, and who waits for them."""

    parcels: Sequence[_Parcel]
    left: int
    live: set[_Parcel] = field(default_factory=set)
    """Those under way whose bytes are read from the tensors themselves."""
    holds: Sequence[Hold] = ()
    marker: Marker | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Sends buckets in the order in which they become ready."""

    def __init__(
        self,
        link: Link,
        plan: ClonePlan,
        donor: int,
        contents: Contents,
        *,
        timeout: float,
        algorithm: str,
        device: str,
        on_failure: Callable[[str], None],
    ) -> None:
        """Be ready to send ``donor``'s part of a plan.

        ``device`` is where the link takes tensors from; ``on_failure`` hears, on the sender's
        thread, why nothing more can be sent.
        """
        self._link = link
        self._contents = contents
        self._plan = plan
        self._messages = plan.sent_by(donor)
        self._timeout = timeout
        self._algorithm = algorithm
        self._device = torch.device(device)
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}
        for number, some in itertools.groupby(self._messages, key=lambda m: m.bucket):
            parcels = [_Parcel(list(same)) for _, same in itertools.groupby(some, _content)]
            self._buckets[number] = _Bucket(parcels, left=len(parcels))
        self._queue: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._flight: deque[tuple[_Bucket, _Parcel]] = deque()
        self._in_flight = 0
        self._digests: dict[int, str] = {}
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

    def follow(self, contents: Contents) -> None:
        """Take what was not updated in this step from these tensors."""
        self._contents = contents

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
        except Exception as error:
            # Whatever it is: with nobody told, the fork would never end.
            if not self.failed:
                if not isinstance(error, (SapwoodError, RuntimeError, OSError)):
                    log.exception("unforeseen, while sending a state")
                self._on_failure(f"sending failed: {str(error) or type(error).__name__}")
        finally:
            self._flight.clear()

    def _send_all(self) -> None:
        start = 0.0
        while (bucket := self._next()) is not None:
            start = start or time.perf_counter()
            if bucket.marker is not None:
                bucket.marker.wait()
            for parcel in bucket.parcels:
                if self.failed:
                    return
                self._send(bucket, parcel)
        if self.failed:  # stopped, and not complete
            return
        checks = self._send_checks()
        while self._flight:
            self._settle()
        for transfer in checks:
            transfer.wait(self._timeout)
        self.seconds = time.perf_counter() - start if start else 0.0

    def _next(self) -> _Bucket | None:
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                if not self._flight:
                    return self._queue.get()
                self._settle()

    def _send(self, bucket: _Bucket, parcel: _Parcel) -> None:
        while self._flight and self._in_flight + parcel.nbytes > WINDOW:
            self._settle()
        with self._lock:
            parcel.begun = True
            data = parcel.aside
            if data is None:
                data = self._data(parcel)
                bucket.live.add(parcel)
        for message in parcel.messages:
            to = self._plan.donors + message.clone
            given = data if self._link.gathers else data[0]
            parcel.transfers.append(self._link.send(to, message.tag, given))
        self._flight.append((bucket, parcel))
        self._in_flight += parcel.nbytes
        pieces = [one.cpu().numpy() for one in data]
        mark = digest_of_row(pieces, self._algorithm)  # while it is under way
        self._digests.update({message.tag: mark for message in parcel.messages})

    def _send_checks(self) -> list[Transfer]:
        """Tell every clone what must have arrived, whoever brings it."""
        marks = pack_digests([self._digests[m.tag] for m in self._messages]).to(self._device)
        ends = range(self._plan.donors, self._plan.donors + self._plan.clones)
        return [self._link.send(end, self._plan.checks_tag, marks) for end in ends]

    def _settle(self) -> None:
        bucket, parcel = self._flight[0]
        for transfer in parcel.transfers:
            transfer.wait(self._timeout)
        self._flight.popleft()
        self._in_flight -= parcel.nbytes
        bucket.left -= 1
        bucket.live.discard(parcel)
        parcel.aside = None
        if not bucket.left:
            _release(bucket.holds)
            bucket.done.set()

    # -- bytes -------------------------------------------------------------------------------

    def _copy(self, bucket: _Bucket) -> None:
        with self._lock:
            for parcel in bucket.parcels:
                if not parcel.begun and parcel.aside is None:
                    parcel.aside = [one.clone() for one in self._data(parcel)]

    def _data(self, parcel: _Parcel) -> list[Tensor]:
        """The parcel's bytes: where they lie, or, if the link cannot gather them, packed."""
        views = []
        for part in parcel.messages[0].parts:
            tensor = self._contents.tensors[part.key]
            view = ordered_bytes(tensor)
            views.append(view[part.start : part.stop])
        if len(views) > 1 and not self._link.gathers:
            views = [torch.cat(views)]
        return [view.to(self._device) for view in views]


def _content(message: Message) -> object:
    return message.parts


def _release(holds: Sequence[Hold]) -> None:
    for hold in holds:
        hold.release()
