"""``plan``: what a run will need, before it starts. One module a command or two."""

from __future__ import annotations

import typer

from sidecar.cli.plan_cost import cost
from sidecar.cli.plan_storage import storage
from sidecar.cli.plan_time import grace, interval

plan = typer.Typer(
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Calculate storage, save interval, grace period or cost.",
)
for _command in (storage, interval, grace, cost):
    plan.command()(_command)
