"""``flush``, ``save``, ``limit``: what a person asks of the running sidecar."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from sidecar.cli.client import Client, Refused
from sidecar.cli.options import Json, TimeoutS
from sidecar.cli.output import fail, print_answer
from sidecar.cli.render import save_text
from sidecar.core.lifecycle.exit_codes import EXIT_GIVEN_UP


def flush(timeout_s: TimeoutS = 30.0, as_json: Json = False) -> int:
    """Wait until all that is finished is durable; exit code 3 when it is not in time."""
    client = Client(timeout_s=timeout_s + 10)
    try:
        answer = client.post("/v1/flush", {"timeout_s": timeout_s})
    except Refused as error:
        if error.status != 504:
            raise
        print_answer(error.problem, lambda _: "", as_json=as_json)
        return fail(f" flush: {error}", EXIT_GIVEN_UP)
    print_answer(answer, lambda a: f"durable: {', '.join(a['durable']) or 'nothing yet'}", as_json=as_json)
    return 0


def save(
    stop: Annotated[bool, typer.Option("--stop", help="and to end")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="return at once")] = False,
    timeout_s: TimeoutS = 600.0,
    as_json: Json = False,
) -> int:
    """Ask the trainer to save now, and wait until that is durable; exit code 3 when it is not in time."""
    client, said = Client(timeout_s=30), ""
    until_s = time.monotonic() + (0 if no_wait else timeout_s)
    answer = client.post("/v1/save", {"stop": stop})
    while answer["state"] in ("asked", "saved") and (left_s := until_s - time.monotonic()) > 0:
        answer = client.get(f"/v1/save/{answer['id']}?wait_s={min(2.0, left_s):.3f}")
        if answer["state"] != "durable" and save_text(answer) != said:
            said = save_text(answer)
            print(f"checkpoint-sidecar save: {said}", file=sys.stderr, flush=True)
    print_answer(answer, save_text, as_json=as_json)
    return 0 if no_wait or answer["state"] == "durable" else EXIT_GIVEN_UP


def limit(rate: Annotated[str, typer.Argument(help="such as 200MB/s, or none")], as_json: Json = False) -> int:
    """Change the bandwidth limit of the running sidecar at once."""
    answer = Client().post("/v1/bandwidth", {"limit": None if rate == "none" else rate})
    text = f"limit of all uploads, bytes per second: {answer['limit_bytes_per_s'] or 'none'}"
    print_answer(answer, lambda _: text, as_json=as_json)
    return 0
