"""``install-hook``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sidecar.cli.options import Json
from sidecar.cli.output import fail, print_answer
from sidecar.core.lifecycle.exit_codes import EXIT_FAILED
from sidecar.volume.hook_install import NotInstalled, install


def install_hook(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="such as a folder on the shared volume")], as_json: Json = False
) -> int:
    """Copy the trainer's side into a folder, for PYTHONPATH."""
    try:
        done = install(folder.absolute())
    except NotInstalled as error:
        return fail(f" install-hook: {error}", EXIT_FAILED, as_json=as_json)
    answer = {"folder": str(done.folder), "version": done.version, "is_new": done.is_new}
    text = f"{done.folder}: {done.version}{'' if done.is_new else ', as before'}; PYTHONPATH={done.folder} CKPT_HOOK=auto"
    return print_answer(answer, lambda _: text, as_json=as_json)
