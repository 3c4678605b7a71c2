"""Play the story and record what the dashboard's queries answer: ``make dashboard``."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.dashboard import panels, prometheus, story

STEP_S = 2.0


def main() -> int:
    """Record into ``--json``. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.dashboard")
    parser.add_argument("--json", type=Path, default=results.FOLDER / "dashboard.json", metavar="FILE")
    parser.add_argument("--pace", type=float, default=1.0, help="1: two and a half minutes; 0.5: half of that")
    options = parser.parse_args()
    if prometheus.program() is None:
        sys.stderr.write("prometheus is not installed: Debian package prometheus\n")
        return 2
    found = record(options.pace)
    results.write(options.json, found)
    empty = panels.without_data(found)
    sys.stdout.write(f"{options.json}; without data: {', '.join(sorted(empty)) or 'no panel'}\n")
    return 0


def record(pace: float) -> dict[str, object]:
    """Return the recording of a story, with the version of Prometheus."""
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        folder = Path(name)
        with prometheus.Prometheus(folder / "prometheus").running() as server, story.play(server, folder, pace=pace) as times:
            start_s = math.ceil(times[0])
            end_s = start_s + (times[1] - start_s) // STEP_S * STEP_S
            return {"prometheus": prometheus.version()} | panels.recorded(server, start_s=start_s, end_s=end_s, step_s=STEP_S)


if __name__ == "__main__":
    sys.exit(main())
