"""``python -m tests.fuzz TARGET… --seconds N``: fuzz targets, as many at once as there are cores; exit code 1: a finding."""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import CORPUS, TARGETS, constant, seeds

API = "api"
"""Not of libFuzzer: hypothesis draws calls from the schema of a running sidecar."""
SLOWEST_S = 10
"""Seconds that one input may take."""
MOST_MIB = 1536
"""Memory of a fuzzing process; a started one has 100 to 300 MiB."""
MOST_ALLOCATED_MIB = 256
LOST_S = 120.0
"""Seconds beyond its time after which a process counts as hanging."""


@dataclass(frozen=True)
class Outcome:
    """Result of one target."""

    name: str
    executions: int
    took_s: float
    finding: str = ""

    def __str__(self) -> str:
        rate = self.executions / max(self.took_s, 0.1)
        return (
            f"{self.name:16} {self.executions:>10} executions {self.took_s:>6.0f} s {rate:>8.0f}/s  {self.finding or 'clean'}"
        )


def fuzz(name: str, seconds: float, *, work: Path, seed: int) -> Outcome:
    """Fuzz one target. A finding is stored in its corpus, where ``test_corpus`` checks it from then on."""
    grown = work / name
    grown.mkdir(parents=True, exist_ok=True)
    # libFuzzer reads the most that a process ever had, and Linux counts what this one had before it became another program.
    inherited_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    options = [
        *(f"-max_total_time={seconds:.0f}", f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MOST_MIB + inherited_mib}"),
        *(f"-malloc_limit_mb={MOST_ALLOCATED_MIB}", f"-seed={seed}", "-len_control=0", "-print_final_stats=1", "-verbosity=1"),
        *(f"-artifact_prefix={CORPUS / name}/", f"-dict={_dictionary(name, work)}", str(grown), str(CORPUS / name)),
    ]
    began_s = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.worker", name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + LOST_S, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = _text(error.stdout) + _text(error.stderr), -1
    took_s = time.monotonic() - began_s
    (work / f"{name}.log").write_text(output)
    counted = re.search(r"stat::number_of_executed_units: *([0-9]+)", output)
    return Outcome(name, int(counted[1]) if counted else 0, took_s, "" if code == 0 else _finding(output, work / f"{name}.log"))


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _finding(output: str, log: Path) -> str:
    written = re.search(r"Test unit written to (\S+)", output)
    raised = [line for line in output.splitlines() if re.match(r"(\w+\.)*\w*(Error|Exception|Exit|Answer)\b", line)]
    said = raised[-1][:200] if raised else "no exception: a timeout, too much memory, or the process ended"
    return f"FINDING {written[1] if written else 'without an input'}: {said} ({log})"


def _dictionary(name: str, work: Path) -> Path:
    """Write the words of a target as libFuzzer reads them: taken from its seeds, and those that it names."""
    words = {word for path in seeds(name) for word in re.findall(rb"[A-Za-z_][A-Za-z0-9_/.-]{2,30}", path.read_bytes())}
    words.update(constant(name, "WORDS"))
    path = work / f"{name}.dict"
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in sorted(words)))
    return path


def fuzz_api(seconds: float, *, seed: int) -> Outcome:
    """Call a running sidecar as its schema says, and otherwise."""
    from tests.fuzz.api import run

    began_s = time.monotonic()
    calls, finding = run(seconds, seed=seed)
    return Outcome(API, calls, time.monotonic() - began_s, finding)


def main() -> None:
    """Run the targets and print executions, seconds and findings of each."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"all, or of: {', '.join((*TARGETS, API))}", default=["all"]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--work", type=Path, default=Path(".fuzz"), help="grown corpora and logs, kept for the next run")
    options = parser.parse_args()
    names = (*TARGETS, API) if options.targets == ["all"] else tuple(options.targets)
    if unknown := set(names) - {*TARGETS, API}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    options.work.mkdir(exist_ok=True)

    def one(name: str) -> Outcome:
        seed = options.seed or int.from_bytes(os.urandom(3), "big") + 1
        if name == API:
            outcome = fuzz_api(options.seconds, seed=seed)
        else:
            outcome = fuzz(name, options.seconds, work=options.work.resolve(), seed=seed)
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(one, names))
    total_s = sum(outcome.took_s for outcome in outcomes)
    print(
        f"{sum(outcome.executions for outcome in outcomes)} executions of {len(outcomes)} targets in {total_s:.0f} s of a core"
    )
    sys.exit(any(outcome.finding for outcome in outcomes))


if __name__ == "__main__":
    main()
