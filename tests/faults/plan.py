"""What goes wrong, and when: explicit rules, or dice that fall the same way for the same seed."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.faults.wire import Request


class Kind(StrEnum):
    """One way in which a request goes wrong."""

    ERROR_500 = "500"
    SLOW_DOWN = "503"
    SLOW_DOWN_EARLY = "503-before-the-body"
    TOO_MANY = "429"
    BARE_404 = "bare-404"
    """A load balancer's own page: no error document of S3."""
    BARE_502 = "bare-502"
    ERROR_IN_200 = "200-with-an-error"
    """As S3 answers CompleteMultipartUpload when it fails after it sent the status line."""
    RESET_BEFORE = "reset-before"
    LATENCY = "latency"
    LOST_ANSWER = "lost-answer"
    """The store did what was asked; the connection is closed instead of the answer."""
    CLOSED_AFTER = "closed-after-the-answer"
    """The answer says that the connection stays, and then it does not."""
    RESET_UPLOAD = "reset-in-upload"
    STALL_UPLOAD = "stall-in-upload"
    STALL_UPLOAD_CLOSE = "stall-in-upload-then-close"
    CORRUPT_UPLOAD = "corrupt-upload"
    RESET_DOWNLOAD = "reset-in-download"
    STALL_DOWNLOAD = "stall-in-download"
    STALL_DOWNLOAD_CLOSE = "stall-in-download-then-close"
    TRUNCATED = "truncated-download"
    CORRUPT_DOWNLOAD = "corrupt-download"
    SILENT_CONNECTION = "silent-connection"
    """It is accepted, and nothing is read. Of connections alone, as the next one."""
    SILENT_WHEN_KEPT = "silent-when-kept"
    """Its first request goes well."""
    SILENT_REQUEST = "silent-request"
    """Nothing is read beyond the head."""
    SILENT_UPLOAD = "silent-upload"
    SILENT_ANSWER = "silent-answer"
    """The store carries out the request and sends no answer."""
    SILENT_DOWNLOAD = "silent-download"


IN_ANY_REQUEST = (
    Kind.ERROR_500,
    Kind.SLOW_DOWN,
    Kind.SLOW_DOWN_EARLY,
    Kind.RESET_BEFORE,
    Kind.LATENCY,
    Kind.LOST_ANSWER,
    Kind.CLOSED_AFTER,
)
SILENCES = tuple(kind for kind in Kind if kind.startswith("silent-"))
"""From some point on, the connection stays open and nothing moves any more, for ever."""
IN_UPLOADS = (Kind.RESET_UPLOAD, Kind.STALL_UPLOAD, Kind.STALL_UPLOAD_CLOSE)
IN_DOWNLOADS = (Kind.RESET_DOWNLOAD, Kind.STALL_DOWNLOAD, Kind.STALL_DOWNLOAD_CLOSE, Kind.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to go wrong, ``at`` which fraction of the body, and for how long where it takes time."""

    kind: Kind
    at: float = 0.5
    seconds: float = 1.0
    on_cut: Callable[[], object] = lambda: None
    """Called before a connection is ended."""


Plan = Callable[[Request], Fault | None]


def nothing(_: Request) -> Fault | None:
    """All goes well."""
    return None


@dataclass
class Rule:
    """Harm the first ``times`` requests that match, after ``after`` of them went well. None matches everything."""

    fault: Fault
    operation: str | None = None
    key: str = ""
    """Regular expression, searched for."""
    part: int | None = None
    times: int = 1
    after: int = 0
    done: int = field(default=0, init=False)

    def matches(self, request: Request) -> bool:
        return (
            self.operation in (None, request.operation)
            and self.part in (None, request.part)
            and re.search(self.key, request.key) is not None
        )


class Rules:
    """The first rule that has harm left and matches decides."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fault | None:
        with self._lock:
            for rule in self._rules:
                if rule.done < rule.times and rule.matches(request):
                    if rule.after:
                        rule.after -= 1
                        return None
                    rule.done += 1
                    return rule.fault
        return None

    def unused(self) -> list[Rule]:
        """Rules that did no harm yet: a test that ends with some has tested less than it says."""
        return [rule for rule in self._rules if not rule.done]


class Dice:
    """Harms a share of all requests at random.

    What befalls a request depends on the seed, its operation, its object and how often that was asked for, and not on the
    order in which threads come. No request is harmed more than ``in_a_row`` times one after the other.
    """

    def __init__(self, seed: int, *, share: float, kinds: Sequence[Kind], seconds: float = 0.5, in_a_row: int = 2) -> None:
        self._seed, self._share, self._kinds = seed, share, kinds
        self._seconds, self._in_a_row = seconds, in_a_row
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self.harmed: Counter[Kind] = Counter()

    def __call__(self, request: Request) -> Fault | None:
        # Without bucket and prefix, which differ from run to run.
        name = f"{request.operation} {request.key.partition('/')[2]} {request.part} {request.get('range')}"
        with self._lock:
            self._asked[name] += 1
            dice = random.Random(f"{self._seed} {name} {self._asked[name]}")
            kinds = [kind for kind in self._kinds if _suits(kind, request)]
            if not kinds or self._row[name] >= self._in_a_row or dice.random() >= self._share:
                self._row[name] = 0
                return None
            self._row[name] += 1
            kind = dice.choice(kinds)
            self.harmed[kind] += 1
            return Fault(kind, at=dice.random(), seconds=self._seconds)


def _suits(kind: Kind, request: Request) -> bool:
    if kind is Kind.ERROR_IN_200:
        return request.operation == "CompleteMultipartUpload"
    if "upload" in kind:
        return bool(request.length)
    if "download" in kind:
        return request.method == "GET"
    return True
