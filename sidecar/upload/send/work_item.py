"""What one request, or one look at a file, is for; and which of them comes next."""

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
"""Requests up to this size cost time for their round trip, not for their bytes: many may run at once."""
LOCAL_AT_ONCE = 4
"""Files that are read to be compared."""


class Step(Enum):
    """What is done with a piece."""

    CONFIRM = auto()
    """Compare a file that was sent early with what it is now."""
    RECHECK = auto()
    """The same with one part, which arrived after the checkpoint was taken over."""
    COMPARE = auto()
    """Compare a file with the one of the newest committed checkpoint, and copy that if they are the same."""
    WHOLE = auto()
    PART = auto()
    JOIN = auto()


@dataclass(slots=True)
class Upload:
    """One file on its way."""

    file: FoundFile
    key: str
    part_bytes: int
    ranges: list[Range]
    known: Known | None = None
    begin: asyncio.Lock | None = None
    """Of files in parts, while one of them begins the upload."""
    is_growing: bool = False
    """More is being written: these are only the whole parts in its beginning."""
    is_continued: bool = False
    """Parts were sent of it before, perhaps in another life, and nobody has looked since whether they are its beginning."""
    under_way: set[int] = field(default_factory=set)
    """Numbers of the parts that are queued or carried, also by what sent it early."""


@dataclass(slots=True, eq=False)
class WorkItem:
    """What one request carries; a small one stands for those that one thread carries after it, too."""

    upload: Upload
    step: Step
    number: int = 1
    """Of the part, from 1 on."""
    at_once: int = 1
    """Requests that it has under way: a small one stands for several."""
    is_leaving: bool = False
    """Its bytes are on their way out; with what only waits for its answer the link has nothing to do."""
    on_left: Callable[[], object] = lambda: None
    """Told, from a thread, when the last byte has left."""
    hedged: HedgedRequest | None = None
    """Of a part that is carried: it may be tried a second time."""

    @property
    def size_bytes(self) -> int:
        """What is sent of it."""
        return self.upload.ranges[self.number - 1][1] if self.step in (Step.WHOLE, Step.PART) else 0

    @property
    def is_small(self) -> bool:
        """Whether the round trip is what it costs."""
        return self.step is Step.WHOLE and self.upload.file.size_bytes <= SMALL_BYTES

    @property
    def is_local(self) -> bool:
        """Whether it reads, and sends nothing or nothing yet."""
        return self.step in (Step.CONFIRM, Step.RECHECK, Step.COMPARE)

    @property
    def is_large(self) -> bool:
        """Whether its bytes are what it costs."""
        return not self.is_small and not self.is_local


class WorkItems:
    """Those that nobody carries yet. What is read comes first, what is large next, then what is small."""

    def __init__(self) -> None:
        self._local: deque[WorkItem] = deque()
        self._large: deque[WorkItem] = deque()
        self._small: deque[WorkItem] = deque()

    def __bool__(self) -> bool:
        return bool(self._local or self._large or self._small)

    def add(self, items: Iterable[WorkItem]) -> None:
        """Put them behind others of their sort."""
        for item in items:
            self._of(item).append(item)

    def put_back(self, item: WorkItem) -> None:
        """It could not be carried: it is the next of its sort."""
        self._of(item).appendleft(item)

    def take(self, *, local: bool, large: bool, small: bool) -> WorkItem | None:
        """Return the next of those sorts that are allowed now; ``None`` if there is none."""
        for items, allowed in ((self._local, local), (self._large, large), (self._small, small)):
            if items and allowed:
                return items.popleft()
        return None

    def take_small(self) -> WorkItem | None:
        """Return the next small one, also from a thread."""
        with contextlib.suppress(IndexError):
            return self._small.popleft()
        return None

    def _of(self, item: WorkItem) -> deque[WorkItem]:
        if item.is_local:
            return self._local
        return self._small if item.is_small else self._large
