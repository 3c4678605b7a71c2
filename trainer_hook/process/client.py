"""Client of the sidecar's local HTTP API."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer_hook.contract import TOKEN, checkpoint_name
from trainer_hook.process.answers import (
    RUNNING,
    ResumeResult,
    durable,
    missing,
    progress_text,
    required,
    resume_progress,
    resume_result,
    steps_before,
    texts,
)
from trainer_hook.process.progress_bar import Bar

T = TypeVar("T")

ABSENT_AFTER_S = 30.0
"""A sidecar that refuses connections for this long is absent."""
ABSENT_STILL_AFTER_S = 1.0
"""The same after it was found absent: a script may call ``train()`` many times."""
TOLD_AFTER_S = 3.0
"""A sidecar that refuses connections for this long is told to be waited for."""
_RETRY_S = 0.5
_NO_TOKEN = "none"  # noqa: S105 - the name of its absence
"""Said where no sidecar has started on the volume: one that answers on the port is that of another volume."""
_WAITS_FOR_EARLIER = "waiting for the sidecar: an earlier pod's still uses the volume, or CKPT_API_PORT is not its port"
_GATEWAY_TIMEOUT = 504
_UNPROCESSABLE = 422
_SERVICE_UNAVAILABLE = 503
_PAGE = 20
"""Checkpoints of the store asked for at once: the newest is nearly always usable."""


class SidecarAbsent(Exception):
    """The sidecar does not answer."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Outcome of a flush."""

    missing: tuple[dict[str, Any], ...] = ()
    """``checkpoint``, ``state`` and ``reason`` of each checkpoint that is not durable, or never will be."""
    durable: tuple[str, ...] = ()
    """If nothing is missing: the checkpoints of the volume that are in the store."""


class Client:
    """One connection per call. ``flush``, ``make_room`` and ``degraded`` raise ``OSError`` without a valid answer."""

    def __init__(self, url: str, volume: Path) -> None:
        self._url = url
        self._volume = volume
        self._token_path = volume / TOKEN
        self._patience_s: float | None = None

    def resume(
        self,
        checkpoint: str,
        *,
        train_call: int | None,
        timeout_s: float,
        tell: Callable[[str], None],
        bar: Bar | None = None,
        share: dict[str, Any] | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
        is_wanted: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> ResumeResult:
        """Request a checkpoint and wait until it is on the volume.

        ``checkpoint``: ``latest`` or a name. ``train_call``: only checkpoints of this call; ``None``: any. ``timeout_s``:
        longest wait. ``bar`` draws the progress; where it cannot, ``tell`` is called with a line every five seconds.
        ``share``: ``world_size`` and ``ranks`` of this node; ``None``: the files of all ranks are needed.
        ``is_awaited``: whether a sidecar that does not answer is about to start. ``is_wanted``: whether to go on waiting, by
        the request's progress; if not, the result has no checkpoint, and is known.

        Raises ``SidecarAbsent``: no answer within ``ABSENT_AFTER_S``, or within ``timeout_s`` while it is awaited.
        """
        until_s = time.monotonic() + timeout_s
        body: dict[str, Any] = {"checkpoint": checkpoint} | ({} if train_call is None else {"train_call": train_call})
        body |= {} if share is None else {"share": share}
        ask = functools.partial(self._ask_to_resume, body, until_s=until_s, tell=tell, is_awaited=is_awaited)
        progress = ask()
        reported_s = time.monotonic()
        while progress["state"] in RUNNING and time.monotonic() < until_s:
            if not is_wanted(progress):
                progress = {"state": "none"}
                break
            drawn = bar is not None and bar(progress)
            if not drawn and time.monotonic() - reported_s > 5:
                reported_s = time.monotonic()
                tell(progress_text(progress))
            try:
                wait_s = 0.5 if bar else 2
                path = f"/v1/resume/{progress['id']}" if progress.get("id") else "/v1/resume"  # an older sidecar has no ids
                answer = self._call("GET", f"{path}?wait_s={wait_s}", None, timeout_s=10)
                progress = resume_progress(_expect_success(*answer))
            except OSError:  # the sidecar restarts, without this request; it continues the download
                time.sleep(_RETRY_S)
                progress = ask()
        if bar is not None:
            bar.close()
        return resume_result(progress)

    def flush(self, *, timeout_s: float) -> FlushResult:
        """Wait until all finished checkpoints are durable, or the time is over."""
        status, answer = self._call("POST", "/v1/flush", {"timeout_s": timeout_s}, timeout_s=timeout_s + 10)
        if status == _GATEWAY_TIMEOUT:
            return FlushResult(missing=tuple(missing(answer)))
        return FlushResult(durable=tuple(durable(_expect_success(status, answer))))

    def make_room(self, wanted_bytes: int, *, timeout_s: float) -> list[str]:
        """Have durable checkpoints deleted from the volume until this much is free. Returns their names."""
        answer = _expect_success(*self._call("POST", "/v1/room", {"bytes": wanted_bytes}, timeout_s=timeout_s))
        return texts(required(answer, "deleted"), "deleted")

    def degraded(self) -> str | None:
        """Return why the store cannot be used at present; ``None``: it can."""
        state = required(_expect_success(*self._call("GET", "/v1/status", None, timeout_s=10)), "degraded")
        return str(state.get("degraded_reason")) if state.get("degraded") else None

    def older_checkpoints(
        self,
        than_step: int,
        *,
        timeout_s: float,
        tell: Callable[[str], None],
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Yield committed checkpoints before a step, newest first; arguments and absence as of ``resume``.

        A store that cannot be reached now is waited for until ``timeout_s``.
        """
        until_s, is_store_away = time.monotonic() + timeout_s, False

        def ask() -> list[int]:
            nonlocal is_store_away
            is_store_away = False
            path = f"/v1/checkpoints?where=store&before_step={than_step}&limit={_PAGE}"
            status, content = self._call("GET", path, None, timeout_s=60)
            is_store_away = status == _SERVICE_UNAVAILABLE
            return steps_before(_expect_success(status, content), than_step)

        while True:
            older = self._patiently(ask, until_s=until_s, tell=tell, is_awaited=lambda: is_store_away or is_awaited())
            yield from map(checkpoint_name, older)
            if len(older) < _PAGE:
                return
            than_step = older[-1]

    def _ask_to_resume(
        self, body: dict[str, Any], *, until_s: float, tell: Callable[[str], None], is_awaited: Callable[[], bool]
    ) -> Any:
        origin = {"asked_by": "trainer"}

        def ask() -> Any:
            status, content = self._call("POST", "/v1/resume", body | origin, timeout_s=10)
            if status == _UNPROCESSABLE and origin:  # an older sidecar, without this field
                origin.clear()
                status, content = self._call("POST", "/v1/resume", body, timeout_s=10)
            return resume_progress(_expect_success(status, content))

        return self._patiently(ask, until_s=until_s, tell=tell, is_awaited=is_awaited, still=_WAITS_FOR_EARLIER)

    def _patiently(
        self,
        ask: Callable[[], T],
        *,
        until_s: float,
        tell: Callable[[str], None],
        is_awaited: Callable[[], bool],
        still: str | None = None,
    ) -> T:
        """Return the answer to a question that is asked again after each error: the sidecar may be starting again.

        ``still``: told when an absent sidecar is awaited. Raises ``SidecarAbsent`` as ``resume``.
        """
        began_s = time.monotonic()
        patience_s = ABSENT_AFTER_S if self._patience_s is None else self._patience_s
        told_after_s = TOLD_AFTER_S
        while True:
            try:
                answer = ask()
                self._patience_s = None
                return answer
            except OSError as error:
                silent_s = time.monotonic() - began_s
                if time.monotonic() > until_s or (silent_s > patience_s and not is_awaited()):
                    self._patience_s = ABSENT_STILL_AFTER_S
                    raise SidecarAbsent(f"no sidecar of this volume answers at {self._url} ({error})") from None
                if silent_s > told_after_s:
                    waiting = f"waiting for the sidecar at {self._url} ({error})"
                    tell(still if silent_s > patience_s and still is not None else waiting)
                    told_after_s = patience_s if silent_s <= patience_s else float("inf")
                # Time for which this process was stopped does not count: the sidecar of its pod was stopped with it.
                began_s += _stopped_s(_RETRY_S)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float) -> tuple[int, Any]:
        import http.client
        import urllib.error
        import urllib.request

        request = urllib.request.Request(f"{self._url}{path}", method=method)  # noqa: S310 - http or https, checked at start
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
            request.add_header("x-checkpoint-sidecar", "hook")  # a header that no web page can send unasked
        if (token := self._token()) is not None:
            request.add_header("authorization", f"Bearer {token}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                with contextlib.suppress(ValueError, RecursionError, http.client.HTTPException):  # the status counts alone
                    content = json.loads(error.read())
                    return error.code, content if isinstance(content, dict) else {}
                return error.code, {}
        except (ValueError, RecursionError, http.client.HTTPException) as error:
            raise OSError(f"not an answer of the sidecar: {error!r}") from None

    def _token(self) -> str | None:
        """Return the volume's token, which the sidecar of another volume refuses; ``None``: it cannot be read.

        Raises ``OSError``: the volume is gone. The sidecar's answer would speak of another volume.
        """
        try:
            return self._token_path.read_text("ascii").strip()
        except FileNotFoundError:
            if not self._volume.is_dir():
                raise OSError(f"the volume {self._volume} is not there any more") from None
            return _NO_TOKEN
        except (OSError, ValueError):
            return None


def _stopped_s(pause_s: float) -> float:
    """Sleep, and return the seconds that it took longer: the process or its machine was stopped meanwhile."""
    began_s = time.monotonic()
    time.sleep(pause_s)
    return max(0.0, time.monotonic() - began_s - pause_s)


def _expect_success(status: int, answer: Any) -> Any:
    if not 200 <= status < 300 or not isinstance(answer, dict):
        detail = answer.get("detail") if isinstance(answer, dict) else None
        raise OSError(detail or f"the sidecar answered HTTP {status}")
    return answer
