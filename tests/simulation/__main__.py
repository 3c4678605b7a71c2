"""Run one schedule and tell what happened, or look through many for one that breaks an invariant."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter

from tests.simulation.mutants import MUTANTS
from tests.simulation.run import KINDS, play, search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "kind", choices=KINDS, help="step: nodes that commit one step; job: whole pods; retention: of many nodes"
    )
    parser.add_argument("seeds", help="one seed: its story; FIRST:AFTER, or A,B,C: a search")
    parser.add_argument("--mutant", choices=MUTANTS, help="a rule that is broken on purpose")
    parser.add_argument("--logs", action="store_true", help="the story has what the sidecars log")
    parser.add_argument(
        "--until-broken", action="store_true", help="end the search at the first schedule that breaks an invariant"
    )
    parser.add_argument("--json", action="store_true", help="the result of a search as JSON")
    given = parser.parse_args()
    if given.seeds.removeprefix("-").isdecimal():
        return _tell(given.kind, int(given.seeds), given.mutant, logs=given.logs)
    first, _, after = given.seeds.partition(":")
    seeds = range(int(first), int(after)) if after else [int(seed) for seed in first.split(",")]
    began_s = time.perf_counter()
    totals, broken = search(
        given.kind,
        seeds,
        mutant=MUTANTS[given.mutant].apply if given.mutant else None,
        most_broken=1 if given.until_broken else 20,
    )
    took_s, used = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if given.json:
        print(json.dumps({"schedules": len(seeds), "totals": totals, "broken": broken}))
        return 0
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{len(seeds)} schedules in {took_s:.1f} s ({len(seeds) / took_s:.1f}/s; {cpu_s:.1f} s of CPU): {dict(totals)}")
    more = f" --mutant {given.mutant!r}" if given.mutant else ""
    for seed, reason in broken:
        print(f"seed {seed}: {reason}\n  replay: python -m tests.simulation {given.kind} {seed}{more}")
    if broken:
        print(Counter(reason.split(":")[0] for _, reason in broken).most_common(10))
    return 1 if broken else 0


def _tell(kind: str, seed: int, mutant: str | None, *, logs: bool) -> int:
    import pytest

    with pytest.MonkeyPatch.context() as patches:
        if mutant is not None:
            MUTANTS[mutant].apply(patches)
        counts, broken, story = play(kind, seed, tell=True, logs=logs)
    print("\n".join(story))
    print(broken or f"no invariant is broken: {dict(counts)}")
    return 1 if broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a schedule
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
