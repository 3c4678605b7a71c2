"""How long a save stops training: the hook's blocking saves, its saves beside training, and torch's own asynchronous ones.

    python -m benchmarks.stall [--gb 0.5,2] [--rounds 3] [--saves 4] [--folder DIR] [--json FILE]

``held`` is the time for which the training thread is kept from training, per save: in the save itself, and later where the
optimizer's step waits for the rest of the copy. ``lost`` is the additional time of the steps from one save to the next, over
the fastest half of steps, so it includes the slowdown by writing beside training: if training uses all cores, it cannot be
less than the work of writing. The first save of each run is left out, and reported separately.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import some_of
from benchmarks.results import write
from benchmarks.transfer import ROOT

BLOCKING, OURS = "blocking", "ours"
MODES = (BLOCKING, OURS, "dcp-thread", "dcp-process")
WHAT = {
    BLOCKING: "the hook, saves block",
    OURS: "the hook, CKPT_ASYNC=1",
    "dcp-thread": "DCP async_save, thread",
    "dcp-process": "DCP async_save, process",
}


@dataclass(frozen=True)
class StallRun:
    """Times of one training process, in seconds per save."""

    mode: str
    first_held_s: float
    held_s: list[float]
    lost_s: list[float]
    step_s: float
    state_bytes: int
    device: str
    early: int
    """Number of saves that waited for the save before them: saves were too close for this disk."""
    digests: dict[str, str]
    """SHA-256 of the files of the last checkpoint."""


class CannotRun(Exception):
    """A mode did not run to its end."""


def run(mode: str, size_gb: float, options: argparse.Namespace) -> StallRun:
    """Train in a process of its own, with an empty volume. Raises ``CannotRun``."""
    every = options.every or (250 if options.is_cuda else 6)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="stall-") as folder:
        volume = Path(folder, "volume")
        volume.mkdir()
        told = [mode, str(size_gb), str(options.saves), str(every), folder]
        command = [sys.executable, "-m", "benchmarks.stall_trainer", *told]
        settings = {
            "CKPT_DIR": str(volume),
            "CKPT_SAVE_STEPS": str(every),
            "CKPT_SAVE_TOTAL_LIMIT": "1",
            "CKPT_RESUME_TIMEOUT_S": "1",
            "CKPT_ASYNC": "1" if mode == OURS else "0",
            "HF_HUB_OFFLINE": "1",
        }
        hook = [] if mode.startswith("dcp") else [sys.executable, "-m", "trainer_hook", "run", "--"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
        environ = inherited | settings | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([*hook, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"{WHAT[mode]} failed: {done.stderr.strip().splitlines()[-1:]}")
        return _run_of(mode, json.loads(done.stdout.splitlines()[-1]), every, volume)


def _run_of(mode: str, told: dict[str, Any], every: int, volume: Path) -> StallRun:
    steps_s: list[float] = told["steps_s"]
    held = {int(step): seconds for step, seconds in told["held_s"].items()}
    usual_s = statistics.median(sorted(steps_s)[: max(1, len(steps_s) // 2)])
    saves = list(range(every, len(steps_s) + 1, every))
    # A save at the end of step n, and the optimizer's next step, are in the interval from the end of n on: steps_s[n - 1].
    held_s = [held.get(step, 0.0) for step in saves]
    lost_s = [sum(steps_s[n - 1 : n - 1 + every]) - usual_s * len(steps_s[n - 1 : n - 1 + every]) for n in saves]
    files = sorted(volume.glob("checkpoint-*/[!.]*"))
    with ThreadPoolExecutor() as threads:
        digests = dict(zip((str(path.relative_to(volume)) for path in files), threads.map(_digest, files), strict=True))
    device, size = str(told["device"]), int(told["state_bytes"])
    return StallRun(mode, held_s[0], held_s[1:], lost_s[1:], usual_s, size, device, len(told["early"]), digests)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table(runs: list[StallRun]) -> str:
    """Return medians over all saves, the maximum, and the ratio of a blocking save to the median."""
    first, step_s = runs[0], statistics.median(r.step_s for r in runs)
    saves = len(first.held_s) * sum(r.mode == first.mode for r in runs)
    lines = [
        f"\n{first.state_bytes / 1e9:.2f} GB of state on {first.device}, steps of {step_s:.2f} s; "
        f"medians over {saves} saves (worst)\n",
        f"{'':<26}{'held s':>20}{'in steps':>10}{'less':>8}{'first s':>10}{'lost s':>20}{'less':>8}",
    ]
    blocking = _medians(runs, BLOCKING)
    for mode in dict.fromkeys(r.mode for r in runs):
        held, worst, lost, most, start = _medians(runs, mode)
        lines.append(
            f"{WHAT[mode]:<26}{held:>12.3f} ({worst:.3f}){held / step_s:>10.2f}{blocking[0] / held:>7.1f}x{start:>10.2f}"
            f"{lost:>12.3f} ({most:.3f}){_times_less(blocking[2], lost)}"
        )
    early = dict.fromkeys(WHAT[r.mode] for r in runs if r.early)
    lines += [f"{what}: saves waited for the save before them (--every N: more steps between two saves)" for what in early]
    lines.append(f"the same bytes in every file of the last checkpoint, blocking and not: {'yes' if are_equal(runs) else 'NO'}")
    return "\n".join(lines)


def _times_less(blocking_s: float, lost_s: float) -> str:
    return f"{blocking_s / lost_s:>7.1f}x" if lost_s > blocking_s / 100 else f"{'–':>8}"


def _medians(runs: list[StallRun], mode: str) -> tuple[float, float, float, float, float]:
    of_mode = [r for r in runs if r.mode == mode]
    held, lost = [s for r in of_mode for s in r.held_s], [s for r in of_mode for s in r.lost_s]
    start = statistics.median(r.first_held_s for r in of_mode)
    return statistics.median(held), max(held), statistics.median(lost), max(lost), start


def are_equal(runs: list[StallRun]) -> bool:
    """Whether all checkpoints of the hook are the same."""
    digests = [r.digests for r in runs if not r.mode.startswith("dcp")]
    return bool(digests[0]) and all(digest == digests[0] for digest in digests)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", help="sizes of the state; 0.5,2 on a CPU, 2,20 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="per round")
    parser.add_argument("--every", type=int, help="steps from one save to the next; 6 on a CPU, 250 on a GPU")
    parser.add_argument("--modes", type=some_of(MODES), default=list(MODES), help=",".join(MODES))
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch  # its import takes seconds, and the tests of this module's table need none

    if BLOCKING not in options.modes:
        options.modes.append(BLOCKING)
    options.is_cuda = torch.cuda.is_available()
    measured: dict[str, list[StallRun]] = {}
    sizes = options.gb or ("2,20" if options.is_cuda else "0.5,2")
    for size in sizes.split(","):
        free = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
        if free < 3e9 * float(size):
            raise SystemExit(f"{size} GB of state need {3 * float(size):.1f} GB of disk: --folder names another place")
        measured[size] = []
        for one in _runs(size, options):
            measured[size].append(one)
            print(f"{size} GB, {WHAT[one.mode]}: {_told(one)}", file=sys.stderr, flush=True)
            if options.json:  # each time: this takes long, and what was measured is not lost with the rest
                write(options.json, {done: [asdict(r) for r in runs] for done, runs in measured.items()})
        print(table(measured[size]), flush=True)


def _runs(size: str, options: argparse.Namespace) -> Iterator[StallRun]:
    """Run each mode in each round. One that fails is not tried again, and the others are compared without it."""
    failed = set[str]()
    for mode in options.modes * options.rounds:
        try:
            if mode not in failed:
                yield run(mode, float(size), options)
        except CannotRun as error:
            if mode == BLOCKING:  # the others are compared with it
                raise SystemExit(str(error)) from None
            failed.add(mode)
            print(error, file=sys.stderr, flush=True)


def _told(one: StallRun) -> str:
    each = ", ".join(f"{held:.3f} held and {lost:.3f} lost" for held, lost in zip(one.held_s, one.lost_s, strict=False))
    return f"{one.first_held_s:.3f} s held, then {each}; steps of {one.step_s:.3f} s"


if __name__ == "__main__":
    main()
