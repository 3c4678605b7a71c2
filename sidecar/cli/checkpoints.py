"""``ls``, ``show``, ``resume``: the checkpoints of the volume and the store."""

from __future__ import annotations

import time
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from sidecar.cli import direct
from sidecar.cli.client import Client
from sidecar.cli.options import Json, TimeoutS
from sidecar.cli.output import print_answer
from sidecar.cli.render import fields_text, resume_text
from sidecar.core.lifecycle.exit_codes import EXIT_FAILED


def ls(
    where: Annotated[Literal["local", "store"] | None, typer.Option("--where", help="only those of one place")] = None,
    as_json: Json = False,
) -> int:
    """List checkpoints on the volume and in the store."""
    return direct.list_checkpoints(where=where, as_json=as_json)


def show(checkpoint: Annotated[str, typer.Argument(help="such as checkpoint-20")], as_json: Json = False) -> int:
    """Show one checkpoint."""
    answer = Client(timeout_s=60).get(f"/v1/checkpoints/{quote(checkpoint, safe='')}")
    print_answer(answer, fields_text, as_json=as_json)
    return 0


def resume(
    checkpoint: Annotated[str, typer.Argument(help="such as checkpoint-20")] = "latest",
    timeout_s: TimeoutS = 600.0,
    as_json: Json = False,
) -> int:
    """Bring a committed checkpoint back to the volume and print its path."""
    client = Client(timeout_s=70)
    answer = client.post("/v1/resume", {"checkpoint": checkpoint, "asked_by": "person"})
    until_s = time.monotonic() + timeout_s
    while answer["state"] in ("choosing", "downloading") and time.monotonic() < until_s:
        answer = client.get(f"/v1/resume/{answer['id']}?wait_s={min(20.0, max(0.0, until_s - time.monotonic())):.3f}")
    print_answer(answer, resume_text, as_json=as_json)
    return 0 if answer["state"] == "ready" else EXIT_FAILED
