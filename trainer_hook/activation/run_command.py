"""``python -m trainer_hook run -- COMMAND``: sets the environment and executes the command."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_hook.activation.boot import RUN_PID, SHUTDOWN_TIMEOUT, give_workers_the_grace_period
from trainer_hook.process.log import warn
from trainer_hook.process.settings import SettingError, Settings, from_environment
from trainer_hook.volume.publish import is_there

LAUNCHER_KILL_S = 30.0
INJECT = Path(__file__).resolve().parent / "inject"
EXIT_CONFIGURATION, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 2, 126, 127


def environment_for(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that activates the hook in every Python process of the command."""
    paths = [str(INJECT), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    changed = {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CKPT_HOOK": "auto", RUN_PID: str(os.getpid())}
    give_workers_the_grace_period(changed)
    return changed


def shutdown_warning(environ: Mapping[str, str], settings: Settings, *, reads_variable: bool | None) -> str | None:
    """Return why torchrun may kill the ranks before the grace period is over; ``None``: it does not.

    ``reads_variable``: whether the installed torch reads ``SHUTDOWN_TIMEOUT``; ``None``: there is no torch.
    """
    given, grace_s = environ.get(SHUTDOWN_TIMEOUT), settings.grace_seconds
    if reads_variable is False and grace_s > LAUNCHER_KILL_S:
        return (
            f"torchrun of this torch kills the ranks {LAUNCHER_KILL_S:.0f} s after SIGTERM, not "
            f"CKPT_GRACE_SECONDS={grace_s:g}: a just-in-time save must be finished by then; "
            "torch 2.12 and later wait for the whole grace period"
        )
    if reads_variable and given and given.isdigit() and int(given) < grace_s:
        return f"{SHUTDOWN_TIMEOUT}={given} is shorter than CKPT_GRACE_SECONDS={grace_s:g}: torchrun kills the ranks that early"
    return None


def torch_reads_variable() -> bool | None:
    """Whether the installed torch reads ``SHUTDOWN_TIMEOUT``; ``None``: there is no torch. It is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    launcher = Path(found.origin).parent / "distributed/launcher/api.py"
    try:
        return SHUTDOWN_TIMEOUT in launcher.read_text(errors="replace")
    except OSError:
        return None


def run(command: Sequence[str]) -> int:
    """Execute the command in this process. Returns an exit code only if that fails."""
    try:
        settings = from_environment(os.environ)
    except SettingError as error:
        return _fail(str(error), EXIT_CONFIGURATION)
    if not command:
        return _fail("nothing to run: python -m trainer_hook run -- python train.py", EXIT_CONFIGURATION)
    if not is_there(settings.dir):
        is_set = bool(os.environ.get("CKPT_DIR", "").strip())
        where, or_set = ("", "") if is_set else (" (the default)", ", or set CKPT_DIR")
        no_volume = f"CKPT_DIR={settings.dir}{where} is not a directory: mount the shared volume there{or_set}"
        return _fail(no_volume, EXIT_CONFIGURATION)
    if _is_torchrun(command) and (said := shutdown_warning(os.environ, settings, reads_variable=torch_reads_variable())):
        warn(said)
    if said := deepspeed_warning(command, settings):
        warn(said)
    try:
        os.execvpe(command[0], list(command), environment_for(os.environ))  # noqa: S606 - the user's own command
    except FileNotFoundError:
        return _fail(f"{command[0]}: command not found", EXIT_NOT_FOUND)
    except OSError as error:
        return _fail(f"{command[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE)


def deepspeed_warning(command: Sequence[str], settings: Settings) -> str | None:
    """Return why DeepSpeed's launcher may kill the ranks before the grace period is over; ``None``: it does not."""
    if "deepspeed" not in _names(command) or settings.grace_seconds <= LAUNCHER_KILL_S:
        return None
    return (
        f"deepspeed kills the ranks {LAUNCHER_KILL_S:.0f} s after SIGTERM, not CKPT_GRACE_SECONDS={settings.grace_seconds:g}: "
        "a just-in-time save must be finished by then; torchrun, which can start the same script, waits longer"
    )


def _is_torchrun(command: Sequence[str]) -> bool:
    names = {"torchrun", "accelerate", "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
    return bool(names & _names(command))


def _names(command: Sequence[str]) -> set[str]:
    return {Path(command[0]).name, *(command[n + 1] for n, word in enumerate(command[:-1]) if word == "-m")}


def _fail(text: str, code: int) -> int:
    print(f"trainer_hook: {text}", file=sys.stderr)  # noqa: T201
    return code
