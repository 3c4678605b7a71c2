"""The commands that run without typer: those that Kubernetes starts, and what a base install can answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from sidecar import __version__
from sidecar.cli.client import Client, Refused, Unreachable
from sidecar.cli.output import PROGRAM, print_answer, redraw
from trainer_hook.contract import LOCK


def run() -> int:
    """Run the sidecar."""
    from sidecar.cli.run import run as run_daemon

    return run_daemon()


STARTS_S = 1.5
"""How long a probe waits for a sidecar that does not answer yet."""
_AGAIN_S = 0.03


def probe(*, ready: bool = False) -> int:
    """Ask for health, or for readiness. Returns 0; anything else is raised by the client.

    The kubelet probes once a second, first when the container starts: that probe waits until the sidecar answers, because the
    trainer does not start before.
    """
    client, end_s = Client(timeout_s=4), time.monotonic() + STARTS_S
    while True:
        try:
            client.get("/readyz" if ready else "/healthz")["status"]  # raises for another program's answer
        except Unreachable:
            if time.monotonic() > end_s:
                raise
            time.sleep(_AGAIN_S)
        else:
            return 0


_LOOK_S = 0.1
"""Interval of the looks of ``probe_until``."""


def probe_until(wait_s: float, *, ready: bool = False) -> int:
    """Ask for health, or for readiness, until it is given. Returns 0.

    Raises:
        Unreachable: The sidecar has ended, or ``wait_s`` are over.
    """
    from sidecar.core.format.readable import seconds_text
    from sidecar.core.lifecycle.start_wait import Wait, wait_for_start
    from sidecar.volume.lock import is_held

    client, until_s, alive_at_s = Client(timeout_s=4), time.monotonic() + wait_s, None
    while True:
        try:
            client.get("/readyz" if ready else "/healthz")["status"]
        except Refused as error:
            why, alive_at_s = str(error), time.monotonic()
        except Unreachable as error:
            why = str(error)
            if is_held(client.folder / LOCK):
                alive_at_s = time.monotonic()
        else:
            return 0
        match wait_for_start(now_s=time.monotonic(), until_s=until_s, alive_at_s=alive_at_s):
            case Wait.ENDED:
                raise Unreachable("the sidecar has ended; its log says why")
            case Wait.OVER:
                raise Unreachable(f"not {'ready' if ready else 'healthy'} after {seconds_text(wait_s)}: {why}")
        time.sleep(_LOOK_S)


def drain(*, as_json: bool = False) -> int:
    """Give a termination notice."""
    from sidecar.core.format.readable import seconds_text

    answer = Client(timeout_s=3).post("/v1/drain?source=prestop")
    return print_answer(answer, lambda a: f"{a['phase']}; {seconds_text(a['deadline_in_s'])} left", as_json=as_json)


def version() -> int:
    """Print the version."""
    return print_answer(__version__, lambda number: f"{PROGRAM} {number}", as_json=False)


def status(*, watch: bool = False, as_json: bool = False) -> int:
    """Print the status once, or every second."""
    from sidecar.cli.render import status_text

    if not watch:
        return print_answer(Client().get("/v1/status"), status_text, as_json=as_json)
    is_redrawn = sys.stdout.isatty() and not as_json
    while True:
        answer = Client().get("/v1/status")
        if is_redrawn:
            redraw(status_text(answer))
        else:
            print_answer(answer, status_text, as_json=as_json)
        time.sleep(1)


def list_checkpoints(*, where: str | None = None, as_json: bool = False) -> int:
    """Print the checkpoints of the volume, of the store, or of both."""
    from sidecar.cli.render import checkpoints_text

    path = f"/v1/checkpoints?where={where}" if where else "/v1/checkpoints"
    return print_answer(Client(timeout_s=60).get(path), checkpoints_text, as_json=as_json)


DIRECT: Mapping[tuple[str, ...], Callable[[], int]] = {
    ("--version",): version,
    ("run",): run,
    ("probe",): probe,
    ("probe", "--ready"): partial(probe, ready=True),
    ("drain",): drain,
    ("drain", "--json"): partial(drain, as_json=True),
    ("status",): status,
    ("status", "--json"): partial(status, as_json=True),
    ("ls",): list_checkpoints,
    ("ls", "--json"): partial(list_checkpoints, as_json=True),
}
"""By their exact arguments; every other spelling is parsed by typer and does the same."""
