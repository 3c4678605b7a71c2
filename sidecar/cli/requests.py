"""``flush``, ``save``, ``limit``: what a person asks of the running sidecar."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Annotated

import typer

from sidecar.cli import progress
from sidecar.cli.client import Client, Refused, Unreachable
from sidecar.cli.estimate import parsed_bytes
from sidecar.cli.options import FlushTimeoutS, Json, TimeoutS
from sidecar.cli.output import fail, print_answer, say
from sidecar.cli.render import save_text
from sidecar.core.format.readable import rate_text
from sidecar.core.lifecycle.exit_codes import EXIT_GIVEN_UP

PROGRESS_S = 1.0
"""Interval in seconds at which the progress of a flush is shown."""


def flush(timeout_s: FlushTimeoutS = 30.0, as_json: Json = False) -> int:
    """Wait until all finished checkpoints are durable.

    Exit code 3: they are not in time.
    """
    try:
        with progress.shown("flush") as on_progress, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(Client(timeout_s=timeout_s + 10).post, "/v1/flush", {"timeout_s": timeout_s})
            while not wait((asked,), timeout=PROGRESS_S).done:
                _show_queue(on_progress)
            answer = asked.result()
    except Refused as error:
        if error.status != 504:
            raise
        print_answer(error.problem, lambda _: "", as_json=as_json)
        return fail(f" flush: {error}", EXIT_GIVEN_UP)
    return print_answer(answer, lambda a: f"durable: {', '.join(a['durable']) or 'nothing yet'}", as_json=as_json)


def _show_queue(on_progress: progress.OnProgress) -> None:
    with suppress(Unreachable, Refused):  # the flush itself says what is wrong
        queue = Client().get("/v1/status")["queue"]
        if queue:
            sent, size = (sum(each[name] for each in queue) for name in ("sent_bytes", "size_bytes"))
            on_progress("uploading", sent, size)


def save(
    stop: Annotated[bool, typer.Option("--stop", help="then end the training")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="return at once")] = False,
    timeout_s: TimeoutS = 600.0,
    as_json: Json = False,
) -> int:
    """Make the trainer save now, and wait until that is durable.

    Exit code 3: it is not in time.
    """
    client, said = Client(timeout_s=30), ""
    until_s = time.monotonic() + (0 if no_wait else timeout_s)
    answer = client.post("/v1/save", {"stop": stop})
    while answer["state"] in ("asked", "saved") and (left_s := until_s - time.monotonic()) > 0:
        answer = client.get(f"/v1/save/{answer['id']}?wait_s={min(2.0, left_s):.3f}")
        if answer["state"] != "durable" and save_text(answer) != said:
            said = save_text(answer)
            say(said, "save")
    print_answer(answer, save_text, as_json=as_json)
    return 0 if no_wait or answer["state"] == "durable" else EXIT_GIVEN_UP


def limit(rate: Annotated[str, typer.Argument(metavar="RATE", help="such as 200MB/s, or none")], as_json: Json = False) -> int:
    """Change the bandwidth limit of the running sidecar at once."""
    wanted = None if rate == "none" else parsed_bytes("RATE", rate)
    answer = Client().post("/v1/bandwidth", {"limit": wanted})
    per_s = answer["limit_bytes_per_s"]
    text = f"uploads: at most {rate_text(per_s)}" if per_s else "uploads: no limit"
    return print_answer(answer, lambda _: text, as_json=as_json)
