"""``completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there from a private module

from sidecar.cli.output import COMPLETE, PROGRAM


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="the shell")]) -> int:
    """Print a shell's completion.

    To use it: source <(checkpoint-sidecar completion bash)
    """
    print(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE, shell=shell))
    return 0
