"""``python -m trainer_hook run -- COMMAND``: sets the environment and becomes the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_hook.boot import give_workers_the_grace_period
from trainer_hook.settings import SettingError, from_environment

INJECT = Path(__file__).resolve().parent / "inject"
EXIT_CONFIGURATION, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 2, 126, 127


def environment_for(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which every Python below activates the hook."""
    paths = [str(INJECT), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    changed = {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CKPT_HOOK": "auto"}
    give_workers_the_grace_period(changed)
    return changed


def run(command: Sequence[str]) -> int:
    """Become the command: same process, same signals. Returns only when that is not possible."""
    try:
        settings = from_environment(os.environ)
    except SettingError as error:
        return _fail(str(error), EXIT_CONFIGURATION)
    if not command:
        return _fail("nothing to run: python -m trainer_hook run -- python train.py", EXIT_CONFIGURATION)
    if not settings.dir.is_dir():
        return _fail(f"CKPT_DIR={settings.dir} is not a directory: mount the shared volume there", EXIT_CONFIGURATION)
    try:
        os.execvpe(command[0], list(command), environment_for(os.environ))  # noqa: S606 - the user's own command
    except FileNotFoundError:
        return _fail(f"{command[0]}: command not found", EXIT_NOT_FOUND)
    except OSError as error:
        return _fail(f"{command[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE)


def _fail(text: str, code: int) -> int:
    print(f"trainer_hook: {text}", file=sys.stderr)  # noqa: T201
    return code
