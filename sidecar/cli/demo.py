"""``demo``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sidecar.cli.options import Json
from sidecar.errors import ConfigurationError


def demo(
    store: Annotated[Literal["s3", "file"], typer.Option("--store", help="an S3 server in memory, or a folder")] = "s3",
    script: Annotated[Path, typer.Option("--script", metavar="FILE", help="what trains")] = Path("examples/train_hf.py"),
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="emptied first")] = Path(".demo"),
    as_json: Json = False,
) -> int:
    """A training run loses pod and volume, and resumes exactly."""
    scenario = Path("examples/demo/__main__.py")
    if not scenario.is_file():
        raise ConfigurationError("examples/demo is not here: run 'make demo' in the repository")
    told = ["--store", store, "--script", str(script), "--folder", str(folder), *(["--json"] if as_json else [])]
    return subprocess.call([sys.executable, "-m", "examples.demo", *told])
