"""``run``, ``probe``, ``drain``, ``status``: the commands of ``direct``, with all of their options."""

from __future__ import annotations

from typing import Annotated

import typer

from sidecar.cli import direct
from sidecar.cli.options import Json, WaitS


def run() -> int:
    """Run the sidecar; settings come from the environment."""
    return direct.run()


def probe(
    ready: Annotated[bool, typer.Option("--ready", help="also ask whether the store is reachable")] = False,
    wait_s: WaitS = None,
) -> int:
    """Health probe for exec: exit code 0 or 1.

    With --wait it returns once that is so, and ends with 1 when the sidecar has ended or the time is over.
    """
    return direct.probe(ready=ready) if wait_s is None else direct.probe_until(wait_s, ready=ready)


def drain(as_json: Json = False) -> int:
    """Give a termination notice; for preStop, returns at once."""
    return direct.drain(as_json=as_json)


def status(watch: Annotated[bool, typer.Option("--watch", help="redraw every second")] = False, as_json: Json = False) -> int:
    """Show what is durable, what is on its way, what is at risk."""
    return direct.status(watch=watch, as_json=as_json)
