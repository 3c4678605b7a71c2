"""Cancellation of store calls: the task that awaits a call in a thread ends what the call has in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import TypeVar

from sidecar.errors import Stopped

T = TypeVar("T")

_here = threading.local()


class Cancellation:
    """Requests in flight of one call, which runs in one thread. ``cancel`` is called from another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._requests: set[Future[object]] = set()

    def run(self, call: Callable[[], T]) -> T:
        """Make the call; requests that it waits for by ``result_of`` can be cancelled."""
        _here.cancellation = self
        try:
            return call()
        finally:
            _here.cancellation = None

    def cancel(self) -> None:
        """Cancel the requests in flight, and all that the call makes from now on."""
        with self._lock:
            self._cancelled = True
            requests = list(self._requests)
        for request in requests:
            request.cancel()

    @contextmanager
    def _holding(self, request: Future[T]) -> Iterator[None]:
        with self._lock:
            cancelled = self._cancelled
            self._requests.add(request)  # type: ignore[arg-type]  # only cancelled, so its type does not matter
        if cancelled:
            request.cancel()
        try:
            yield
        except CancelledError:
            if not self._cancelled:
                raise
            raise Stopped("the request was cancelled") from None
        finally:
            with self._lock:
                self._requests.discard(request)


def is_cancelled() -> bool:
    """Whether the call of this thread was cancelled: it begins no further request."""
    cancellation: Cancellation | None = getattr(_here, "cancellation", None)
    return cancellation is not None and cancellation._cancelled


def result_of(request: Future[T]) -> T:
    """Wait for a request that runs elsewhere, and return its result.

    Raises:
        Stopped: The call of this thread was cancelled.
        CancelledError: The request was cancelled by somebody else.
    """
    cancellation: Cancellation | None = getattr(_here, "cancellation", None)
    if cancellation is None:
        return request.result()
    with cancellation._holding(request):
        return request.result()
