"""The local API of a running sidecar, called as its own schema says, and with bodies that are no JSON.

No call may have a status from 500 on, but for documented ones with a problem document, and each answer conforms to the schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case

from tests.process.sidecar_process import Sidecar, sidecar, write_checkpoint

STREAMS = frozenset({"/v1/events", "/v1/live"})
"""They do not end by themselves."""
ENDS_THE_SIDECAR = "/v1/drain"
WAIT_S = 0.05
"""Replaces longer waits that a call asks for."""
BATCH = 50
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
PROBLEM = "application/problem+json"


@contextmanager
def running() -> Iterator[Sidecar]:
    """Run a sidecar with one durable checkpoint."""
    with TemporaryDirectory(prefix="fuzz-api-") as name:
        folder = Path(name)
        with sidecar(folder / "volume", {"CKPT_STORE": f"file://{folder / 'store'}"}) as started:
            started.ready()
            write_checkpoint(started.volume, "checkpoint-5", {"m": b"x"})
            started.committed("checkpoint-5")
            yield started


def calls(base_url: str) -> st.SearchStrategy[Case]:
    """Return calls of all operations, with parameters and bodies that fit the schema, and some that do not."""
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    wanted = [each for each in found if each.path not in {*STREAMS, ENDS_THE_SIDECAR}]
    return st.one_of([each.as_strategy(generation_mode=mode) for each in wanted for mode in MODES])


PATHS = ("/v1/resume", "/v1/flush", "/v1/save", "/v1/bandwidth", "/v1/room")
BODIES = (b"[" * 5000, b'{"bytes":' * 2000, b'{"bytes":1e999}', b'{"\\ud800": 1}', b'{"limit": "\\ud800"}', b"\xff", b"NaN")
KINDS = ("application/json", "application/json; charset=utf-16", "text/plain", "application/x-www-form-urlencoded")
raw_bodies = st.tuples(st.sampled_from(PATHS), st.binary(max_size=200) | st.sampled_from(BODIES), st.sampled_from(KINDS))


def check_call(case: Case, base_url: str) -> None:
    """Make a call of the schema, and check its answer."""
    _shorten(case)
    response = case.call(base_url=base_url, timeout=30, headers={"X-Checkpoint-Sidecar": "fuzz"})
    case.validate_response(response, excluded_checks=[schemathesis.checks.not_a_server_error, *_about_requests()])
    check_status(response)


def check_body(path: str, body: bytes, kind: str, base_url: str) -> None:
    """Post any bytes."""
    headers = {"Content-Type": kind, "X-Checkpoint-Sidecar": "fuzz"}
    check_status(requests.post(f"{base_url}{path}", data=body, headers=headers, timeout=30))


def check_status(response: Any) -> None:
    """Check that an error is a problem document, and that none is the server's own."""
    if response.status_code >= 400:
        kind = response.headers["content-type"]
        kind = kind[0] if isinstance(kind, list) else kind
        assert response.status_code in range(400, 500) or response.status_code in (503, 504), response.status_code
        assert kind.startswith(PROBLEM), f"{response.status_code} {kind}"
        assert len(response.json()["detail"]) > 10


def _about_requests() -> list[Any]:
    """Checks of what is accepted: undocumented methods and headers, and bodies that are stricter than the schema says."""
    names = ("negative_data_rejection", "positive_data_acceptance", "missing_required_header", "unsupported_method")
    return [getattr(schemathesis.checks, name) for name in names if hasattr(schemathesis.checks, name)]


def _shorten(case: Case) -> None:
    if case.query and "wait_s" in case.query and isinstance(case.query["wait_s"], int | float):
        case.query["wait_s"] = min(case.query["wait_s"], WAIT_S)
    for name in [name for name in case.headers or () if name.lower() == "authorization"]:
        del case.headers[name]  # a wrong token is refused before anything else is read
    if isinstance(case.body, dict) and isinstance(case.body.get("timeout_s"), int | float):
        case.body["timeout_s"] = min(case.body["timeout_s"], WAIT_S)


def drawn(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], *, examples: int, first: int) -> None:
    """Draw examples and check each. Raises what a check raises, for the smallest example."""

    phases, health = [Phase.generate, Phase.shrink], list(HealthCheck)

    @seed(first)
    @settings(max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=health)
    @given(strategy)
    def each(value: Any) -> None:
        check(value)

    each()


def run(seconds: float, *, seed: int) -> tuple[int, str]:
    """Call a sidecar for some seconds; return the number of calls and the finding, empty if there is none."""
    count = 0

    def counted(check: Callable[[Any], None]) -> Callable[[Any], None]:
        def counting(value: Any) -> None:
            nonlocal count
            count += 1
            check(value)

        return counting

    with running() as started:
        base_url = f"http://127.0.0.1:{started.port}"
        strategy, until_s = calls(base_url), time.monotonic() + seconds
        while time.monotonic() < until_s:
            seed += 1
            try:
                drawn(strategy, counted(lambda case: check_call(case, base_url)), examples=BATCH, first=seed)
                drawn(raw_bodies, counted(lambda sent: check_body(*sent, base_url)), examples=BATCH // 5, first=seed)
            except (Exception, BaseExceptionGroup) as error:
                return count, f"FINDING with seed {seed}: {' '.join(str(error).split())[:1500]}"
        if tracebacks := started.log().count("Traceback"):
            return count, f"FINDING {tracebacks} tracebacks in the log of the sidecar"
    return count, ""
