"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON; an error, too")]
TimeoutS = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="how long to wait, in seconds")]
