"""Play seeds of the campaign, or one of them with its story."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.campaign import campaign
from tests.campaign.plan import SORTS, STORES, story


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("command", choices=("run", "plan"), help="run: play; plan: print what a seed says")
    parser.add_argument("seeds", help="one seed: its story; FIRST:AFTER: many")
    parser.add_argument("--store", default=",".join(STORES), help=f"of {', '.join(STORES)}: the stores to choose from")
    parser.add_argument("--sort", choices=SORTS, help="only seeds of this sort of run")
    parser.add_argument("--at-once", type=int, default=6, help="runs at the same time (6); most of them wait")
    parser.add_argument("--json", type=Path, help="file for the figures and all results")
    parser.add_argument("--folder", type=Path, help="where the files of runs are; those of broken ones stay")
    given = parser.parse_args()
    first, _, after = given.seeds.partition(":")
    seeds: Sequence[int] = range(int(first), int(after or int(first) + 1))
    seeds = [seed for seed in seeds if given.sort in (None, story(seed).sort)]
    chosen = tuple(given.store.split(","))
    if unknown := set(chosen) - set(STORES):
        parser.error(f"--store: {', '.join(sorted(unknown))}: must be of {', '.join(STORES)}")
    if given.command == "plan":
        print(*(story(seed, chosen) for seed in seeds), sep="\n")
        return 0
    base = given.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    for one in (signal.SIGTERM, signal.SIGINT):  # which a shell may have told to ignore in the background
        signal.signal(one, signal.default_int_handler)
    began_s = time.monotonic()
    results = campaign.search(seeds, chosen=chosen, at_once=min(given.at_once, len(seeds)), base=base, tell=_tell)
    if not after:
        print("\n".join(results[0].notes))
    found = campaign.summary(results, time.monotonic() - began_s)
    print(campaign.table(found))
    if given.json:
        given.json.write_text(campaign.as_json(results, found))
    for result in results:
        for violation in result.violations:
            print(f"\nseed {result.seed}: {violation[:4000]}")
    if found["violations"]:
        print(f"\nfiles of broken runs: {base}")
    return 1 if found["violations"] else 0


def _tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
