"""Work items: one request to the store or one read of a file each, and their queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.upload.send.deduplicate import Known
from sidecar.upload.send.hedged_request import HedgedRequest
from sidecar.upload.send.payloads import Range

SMALL_BYTES = 1 << 20
"""Maximum size of a small file in bytes. The round trip dominates its upload time, so many are uploaded concurrently."""
LOCAL_AT_ONCE = 4
"""Maximum number of files read concurrently for a comparison."""


class Step(Enum):
    """Operation of a work item."""

    CONFIRM = auto()
    """Compare a file that was sent early with its finished version."""
    RECHECK = auto()
    """Compare one part, which arrived after the early upload was taken over."""
    COMPARE = auto()
    """Compare a file with the one of the newest committed checkpoint, and copy the object if they are equal."""
    WHOLE = auto()
    PART = auto()
    JOIN = auto()


@dataclass(slots=True)
class Upload:
    """Upload of one file."""

    file: FoundFile
    key: str
    part_bytes: int
    ranges: list[Range]
    known: Known | None = None
    begin: asyncio.Lock | None = None
    """Held while the multipart upload is created; ``None`` before the first part."""
    is_growing: bool = False
    """The trainer still writes the file: ``ranges`` are the complete parts of its beginning."""
    is_continued: bool = False
    """Parts were sent before, possibly by an earlier process, and were not compared with the file since."""
    under_way: set[int] = field(default_factory=set)
    """Numbers of the parts that are queued or in flight."""


@dataclass(slots=True, eq=False)
class WorkItem:
    """Work of one request. A small one also stands for the further small files that its thread takes."""

    upload: Upload
    step: Step
    number: int = 1
    """Number of the part, from 1."""
    at_once: int = 1
    """Number of requests in flight: a small item stands for several."""
    is_sending: bool = False
    """Bytes are left to send. Afterwards the request only waits for its answer and does not use the link."""
    on_sent: Callable[[], object] | None = None
    """Called, from a thread, after the last byte was sent."""
    hedged: HedgedRequest | None = None
    """Request of a part in flight; it may be hedged."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes that it sends."""
        return self.upload.ranges[self.number - 1][1] if self.step in (Step.WHOLE, Step.PART) else 0

    @property
    def left_bytes(self) -> int:
        """Number of bytes that it has not sent yet; of a whole file in flight: its size."""
        left = self.hedged.left_bytes if self.hedged is not None else None
        return self.size_bytes if left is None else left

    @property
    def is_small(self) -> bool:
        """Whether its duration is that of the round trip."""
        return self.step is Step.WHOLE and self.upload.file.size_bytes <= SMALL_BYTES

    @property
    def is_local(self) -> bool:
        """Whether it reads a file and sends nothing."""
        return self.step in (Step.CONFIRM, Step.RECHECK, Step.COMPARE)

    @property
    def is_large(self) -> bool:
        """Whether its duration is that of its bytes."""
        return not self.is_small and not self.is_local


class WorkItems:
    """Queued work items: local ones first, then large ones, then small ones."""

    def __init__(self) -> None:
        self._local: deque[WorkItem] = deque()
        self._large: deque[WorkItem] = deque()
        self._small: deque[WorkItem] = deque()

    def __bool__(self) -> bool:
        return bool(self._local or self._large or self._small)

    def add(self, items: Iterable[WorkItem]) -> None:
        """Append items to the queues of their kinds."""
        for item in items:
            self._of(item).append(item)

    def put_back(self, item: WorkItem) -> None:
        """Put an item that failed at the front of the queue of its kind."""
        self._of(item).appendleft(item)

    def take(self, *, local: bool, large: bool, small: bool) -> WorkItem | None:
        """Return the next item of the kinds that are allowed now; ``None``: there is none."""
        for items, allowed in ((self._local, local), (self._large, large), (self._small, small)):
            if items and allowed:
                with contextlib.suppress(IndexError):  # a thread has just taken the last small one
                    return items.popleft()
        return None

    def take_small(self) -> WorkItem | None:
        """Return the next small item; ``None``: there is none. Also called from threads."""
        with contextlib.suppress(IndexError):
            return self._small.popleft()
        return None

    def _of(self, item: WorkItem) -> deque[WorkItem]:
        if item.is_local:
            return self._local
        return self._small if item.is_small else self._large
