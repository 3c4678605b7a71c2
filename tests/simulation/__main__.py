"""Run one schedule and tell what happened, or look through many for one that breaks an invariant."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter

from tests.simulation.run import quiet, search
from tests.simulation.schedule import Schedule


def main() -> int:
    first, _, after = sys.argv[1].partition(":")
    if after:
        began_s = time.perf_counter()
        totals, broken = search(range(int(first), int(after)))
        took_s, used = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime
        print(f"{int(after) - int(first)} schedules in {took_s:.1f} s ({cpu_s:.1f} s of CPU): {dict(totals)}")
        for seed, reason in broken[:20]:
            print(f"seed {seed}: {reason}   (python -m tests.simulation {seed})")
        print(Counter(reason.split(":")[0] for _, reason in broken).most_common(10))
        return 1 if broken else 0
    schedule = Schedule(int(first), tell=True)
    try:
        with quiet():
            outcome = schedule.run()
    finally:
        print("\n".join(schedule.world.story or []))
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
