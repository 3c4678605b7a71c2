"""``python -m tests.soak``: train for a while beside a flaky store, and fail where something grows."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.campaign.plan import STORES
from tests.soak.growth import table
from tests.soak.soak import Outcome, run

WARM_S = 60.0
"""Of a long run: the first commits import, fill caches and open connections."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--store", choices=STORES, default="moto")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds from one sample to the next")
    parser.add_argument("--json", type=Path, help="file for all samples")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    length_s = given.minutes * 60
    outcome = run(given.store, folder, length_s=length_s, every_s=given.every_s, warm_s=min(WARM_S, length_s / 4))
    print(report(outcome))
    if given.json:
        given.json.write_text(json.dumps(asdict(outcome), indent=1))
    if not outcome.is_good:
        print(f"\nlogs: {folder}")
    return 0 if outcome.is_good else 1


def report(outcome: Outcome) -> str:
    """Return all figures as text."""
    lines = [f"{outcome.store}, {outcome.length_s / 60:.1f} minutes, a checkpoint each second", "", table(outcome.grown), ""]
    lines += [f"{name:<40}{value:>12.4g}" for name, value in outcome.figures.items()]
    for title, counted in (("requests", outcome.requests), ("faults", outcome.faults)):
        lines += ["", f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))]
    return "\n".join([*lines, *(f"\nPROBLEM: {problem}" for problem in outcome.problems)])


if __name__ == "__main__":
    sys.exit(main())
