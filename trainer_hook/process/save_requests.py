"""Saves that the sidecar requests through ``.ckpt/request.json``, and their answers."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from trainer_hook.contract import ANSWER, REQUEST, AnswerFile, ContractError, RequestFile, encode_answer, parse_request, rfc3339
from trainer_hook.volume.publish import publish_awaited

POLL_S = 1.0


class SaveRequests:
    """One per process. A request from before its start is ignored."""

    def __init__(self, volume: Path) -> None:
        self._path = volume / REQUEST
        self._answer_path = volume / ANSWER
        self._polled_s = 0.0
        self._seen: RequestFile | None = None
        self._open: RequestFile | None = None
        self._knows_earlier = False
        """Whether ``request.json`` could be read since the start: what is read first was there before."""
        self.take()

    def poll(self) -> RequestFile | None:
        """Return a new request; ``None``: there is none, or the latest poll was less than ``POLL_S`` ago."""
        now_s = time.monotonic()
        if now_s - self._polled_s < POLL_S:
            return None
        self._polled_s = now_s
        return self.take()

    def take(self) -> RequestFile | None:
        """Return a new request now. A save that the ranks agreed on answers every request until then, whichever rank saw it."""
        try:
            request = self._read()
        except OSError:
            return None
        if not self._knows_earlier:
            self._seen, self._knows_earlier = request, True
            return None
        if request is None or (self._seen is not None and request.id == self._seen.id):
            return None
        self._seen = self._open = request
        return request

    def answer(self, name: str, *, saved: bool) -> None:
        """Answer the open request, if there is one. Errors are ignored."""
        request, self._open = self._open, None
        if request is None:
            return
        at = rfc3339(time.time())
        failed = AnswerFile(request.id, "failed", None, "the trainer could not save; its log says why", at)
        with contextlib.suppress(OSError):
            publish_awaited(
                self._answer_path, encode_answer(AnswerFile(request.id, "saved", name, None, at) if saved else failed)
            )

    def _read(self) -> RequestFile | None:
        """Return the present request. Raises ``OSError``: it cannot be read now."""
        try:
            return parse_request(self._path.read_bytes())
        except (FileNotFoundError, ContractError):
            return None
