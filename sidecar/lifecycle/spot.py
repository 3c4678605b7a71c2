"""Polls the cloud's metadata service for spot interruption notices. Outside of clouds the cost is negligible."""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from sidecar.catalog.events import Events
from sidecar.core.lifecycle.spot import SpotNotice, aws_action, aws_rebalance, azure_preempt, gcp_preempted
from sidecar.lifecycle.save_requests import SaveRequests
from sidecar.lifecycle.termination import Termination

log = structlog.get_logger()

LINK_LOCAL = "http://169.254.169.254"
"""Address of the metadata service in all three clouds; ``CKPT_SPOT_ENDPOINT`` overrides it."""
TIMEOUT_S = 2.0
BACKOFFS_S = (5.0, 15.0, 60.0)
"""Seconds until the next poll of a service that does not answer, by consecutive failures."""
MOST_BYTES = 1 << 20
_GONE = 404
_UNAUTHORIZED = 401
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class PollResult:
    """Result of one poll."""

    notice: SpotNotice | None = None
    hint: str | None = None
    """Rebalance recommendation with its time; it is only logged. ``None``: there is none."""


class Cloud(Protocol):
    """One metadata service. Blocking."""

    poll_s: float

    def poll(self) -> PollResult:
        """Poll once.

        Raises:
            OSError: No answer, or not one of this service.
        """
        ...


class Aws:
    """AWS: EC2 instance metadata, IMDSv2."""

    poll_s = 5.0
    _TOKEN_S = 21_600

    def __init__(self, endpoint: str) -> None:
        self._url = f"{endpoint}/latest"
        self._token: tuple[str, float] | None = None

    def poll(self) -> PollResult:
        """Poll the interruption notice and the rebalance recommendation; each is 404 until it is given."""
        action = self._get("meta-data/spot/instance-action")
        rebalance = self._get("meta-data/events/recommendations/rebalance")
        notice = aws_action(action, now_s=time.time()) if action else None
        return PollResult(notice, aws_rebalance(rebalance) if rebalance else None)

    def _get(self, path: str) -> bytes | None:
        status, raw = _ask(f"{self._url}/{path}", {"X-aws-ec2-metadata-token": self._fresh_token()})
        if status == _UNAUTHORIZED:  # the token expired, for example during a suspension
            self._token = None
            status, raw = _ask(f"{self._url}/{path}", {"X-aws-ec2-metadata-token": self._fresh_token()})
        return _found(status, raw)

    def _fresh_token(self) -> str:
        now_s = time.monotonic()
        if self._token is None or now_s > self._token[1]:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_S)}
            status, raw = _ask(f"{self._url}/api/token", asked, method="PUT")
            if status != 200:
                raise OSError(f"no token: HTTP {status}")
            self._token = raw.decode("ascii", "replace"), now_s + self._TOKEN_S / 2
        return self._token[0]


class Gcp:
    """Google Cloud: metadata server of Compute Engine. Each request waits there until the answer changes (long poll)."""

    poll_s = 0.5
    _WAIT_S = 60

    def __init__(self, endpoint: str) -> None:
        self._url = f"{endpoint}/computeMetadata/v1/instance/preempted"
        self._etag: str | None = None

    def poll(self) -> PollResult:
        """Poll whether the instance is being preempted."""
        wait = f"?wait_for_change=true&timeout_sec={self._WAIT_S}&last_etag={self._etag}" if self._etag else ""
        request = urllib.request.Request(f"{self._url}{wait}", headers={"Metadata-Flavor": "Google"})  # noqa: S310 - see settings
        with _opener.open(request, timeout=TIMEOUT_S + (self._WAIT_S if wait else 0)) as answer:
            self._etag = answer.headers.get("ETag")
            return PollResult(gcp_preempted(answer.read(MOST_BYTES)))


class Azure:
    """Azure: Scheduled Events."""

    poll_s = 2.0
    _EVENTS, _NAME = "scheduledevents?api-version=2020-07-01", "instance/compute/name?api-version=2021-02-01&format=text"

    def __init__(self, endpoint: str) -> None:
        self._url = f"{endpoint}/metadata"
        self._machine: str | None = None

    def poll(self) -> PollResult:
        """Poll the events of this machine."""
        if self._machine is None:
            self._machine = (self._get(self._NAME) or b"").decode("utf-8", "replace").strip()
        return PollResult(azure_preempt(self._get(self._EVENTS) or b"", machine=self._machine, now_s=time.time()))

    def _get(self, path: str) -> bytes | None:
        return _found(*_ask(f"{self._url}/{path}", {"Metadata": "true"}))


CLOUDS: dict[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class SpotWatch:
    """Polls a metadata service, and reports each notice and each recommendation once."""

    def __init__(
        self, kind: str, endpoint: str | None, *, termination: Termination, save_requests: SaveRequests, events: Events
    ) -> None:
        """Poll ``CLOUDS[kind]``. ``endpoint``: its URL; ``None``: ``LINK_LOCAL``."""
        self._kind = kind
        self._cloud = CLOUDS[kind]((endpoint or LINK_LOCAL).rstrip("/"))
        self._termination = termination
        self._save_requests = save_requests
        self._events = events
        self._reported: set[str] = set()
        self._failures = 0

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            wait_s = await self._poll()
            await asyncio.sleep(wait_s)

    async def _poll(self) -> float:
        try:
            result = await asyncio.to_thread(self._cloud.poll)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._failures += 1
            if self._failures == 1:  # logged once: most machines are not spot instances
                log.info("spot_metadata_unavailable", cloud=self._kind, error=str(error))
            return BACKOFFS_S[min(self._failures, len(BACKOFFS_S)) - 1]
        self._failures = 0
        if result.hint is not None and result.hint not in self._reported:
            self._reported.add(result.hint)
            self._on_recommendation(result.hint)
        if result.notice is not None and result.notice.identity not in self._reported:
            self._reported.add(result.notice.identity)
            self._termination.notice("spot", ends_in_s=result.notice.ends_in_s)
        return self._cloud.poll_s

    def _on_recommendation(self, given_at: str) -> None:
        """Save now: training goes on until there is a notice."""
        self._events.happened("spot_rebalance_recommended", level="warning", given_at=given_at)
        self._save_requests.ask_running_trainer()


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - http or https, see settings
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def _found(status: int, raw: bytes) -> bytes | None:
    if status not in (200, _GONE):
        raise OSError(f"HTTP {status}")
    return raw if status == 200 else None
