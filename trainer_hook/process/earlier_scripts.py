"""Scripts that trained before this one in the same container, as in ``python sft.py && python dpo.py``.

Each has checkpoints of its own, as each ``train()`` call of one script has: calls and steps are counted on. A later container
begins to count anew, as its scripts run in the same order.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_hook.contract import BOOT_ID, LEASES, encode_json
from trainer_hook.process.log import info
from trainer_hook.volume.publish import publish
from trainer_hook.volume.retry import retried

_FILE = f"{LEASES}/scripts.json"


@dataclass(frozen=True, slots=True)
class Ended:
    """A script whose last ``train()`` call ended by itself."""

    script: str = ""
    calls: int = 0
    """Calls of ``train()`` of all scripts up to its end."""
    steps: int = 0
    """Steps of all scripts up to its end."""
    attempt: str = ""


def last_ended(volume: Path) -> Ended:
    """Return the script that ended before this one began; an empty one: this is the first, or unknown."""
    script, container = _this_script(), _container()
    return [Ended(), *_up_to(script, _read(volume, container))][-1] if script and container else Ended()


def record(volume: Path, *, calls: int, steps: int, attempt: str) -> None:
    """Record that a ``train()`` call of this script has ended."""
    script, container = _this_script(), _container()
    if script and container:
        scripts = [*_up_to(script, _read(volume, container)), Ended(script, calls, steps, attempt)]
        content = encode_json({"container": container, "scripts": [asdict(each) for each in scripts]})
        try:
            retried(functools.partial(publish, volume / _FILE, content))
        except OSError as error:
            info(f"{volume / _FILE} cannot be written ({error}): a next script here takes this one's checkpoints for its own")


def _up_to(script: str, ended: list[Ended]) -> list[Ended]:
    names = [each.script for each in ended]
    return ended[: names.index(script)] if script in names else ended


def _read(volume: Path, container: str) -> list[Ended]:
    try:
        content = json.loads(retried((volume / _FILE).read_bytes))
        if content["container"] != container:
            return []
        return [Ended(str(e["script"]), int(e["calls"]), int(e["steps"]), str(e["attempt"])) for e in content["scripts"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return []


def _this_script() -> str | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.realpath(file) if file else None


def _container() -> str | None:
    """Return an id of this container, or of this machine and its job: its boot and the start of its first process."""
    try:
        boot = Path(BOOT_ID).read_text().strip()
        started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{boot} {started} {os.environ.get('SLURM_JOB_ID', '')}"
