"""``status``."""

from __future__ import annotations

from typing import Annotated

import typer

from sidecar.cli import direct
from sidecar.cli.options import Json


def status(watch: Annotated[bool, typer.Option("--watch", help="redraw every second")] = False, as_json: Json = False) -> int:
    """Show what is durable, what is on its way, what is at risk."""
    return direct.status(watch=watch, as_json=as_json)
