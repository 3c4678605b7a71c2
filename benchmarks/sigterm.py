"""Seconds from SIGTERM until the just-in-time checkpoint is durable: this project beside the Kubeflow SDK's scheme.

    python -m benchmarks.sigterm --mib 512 --rounds 3 --trials 10

Both save the same bytes at the same speed and send them over the same link (root). Three situations: nothing else to send, an
older checkpoint half sent, and three older ones of which the first is half sent. Then real trials with a grace period that fits
only one of two checkpoints: sometimes the newer one, sometimes only the older one whose upload is in progress.
"""

from __future__ import annotations

import argparse
import functools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import ours, stores, work
from benchmarks.cost import NOT_INSTALLED, Failed
from benchmarks.results import write
from benchmarks.stores import BUCKET, LINK_MBIT_PER_S, LINK_ROUND_TRIP_MS, StoreServer
from benchmarks.transfer import PEERS_PYTHON, ROOT

SITUATIONS = {"idle": 0, "half-sent": 1, "backlog": 3}
GOALS = {"idle": 0.7, "half-sent": 0.5, "backlog": 0.5}
SAVE_MB_PER_S = 450.0
"""As fast as a Hugging Face Trainer saves a model with its optimizer to a local disk."""
LAST = "checkpoint-99"
TRIAL_MBIT_PER_S, TRIAL_GRACE_S = 400, 8.0


def by_us(store: StoreServer, prefix: str, source: Path, scratch: Path, *, older: int, half_s: float) -> float:
    """Return the seconds from the notice to the commit."""
    with ours.running(store, prefix, scratch, CKPT_RESUME="off", CKPT_GRACE_SECONDS="600") as sidecar:
        for number in range(older):
            sidecar.hand_over(source, f"checkpoint-{number + 1}")
        time.sleep(half_s if older else 1.0)
        told_s = time.time()
        # Both containers are told at once; the sidecar's own SIGTERM comes when the trainer has ended.
        notice = threading.Thread(target=sidecar.drain)
        notice.start()
        work.save_paced(source, sidecar.volume / LAST, mb_per_s=SAVE_MB_PER_S)
        sidecar.mark(LAST, reason="jit")
        notice.join()
        sidecar.process.send_signal(signal.SIGTERM)
        return sidecar.committed_at_s(LAST) - told_s


def by_them(store: StoreServer, prefix: str, source: Path, scratch: Path, *, older: int, half_s: float, python: Path) -> float:
    """Return the seconds from SIGTERM until the last checkpoint is durable."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        module = [str(python), "-m", "benchmarks.peers.kubeflow"]
        command = [*module, store.endpoint, BUCKET, prefix, str(source), folder, str(SAVE_MB_PER_S)]
        environ = store.client_environ() | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdin
            assert training.stdout
            if training.stdout.readline() != "ready\n":
                raise Failed(f"the Kubeflow SDK's scheme did not start (exit code {training.wait()}): make bench-peers")
            training.stdin.write(f"{older}\n")
            training.stdin.flush()
            time.sleep(half_s if older else 1.0)
            told_s = time.time()
            training.send_signal(signal.SIGTERM)
            return float(training.stdout.readline()) - told_s


def trial(store: StoreServer, prefix: str, scratch: Path, rng: random.Random) -> tuple[bool, str]:
    """Run with a grace period that fits only one of two; return whether the right one is durable, and the expectation."""
    room = (TRIAL_GRACE_S - 0.5) * TRIAL_MBIT_PER_S * 1e6 / 8
    newer_fits = rng.random() < 0.5
    newer = room * (rng.uniform(0.45, 0.7) if newer_fits else rng.uniform(1.4, 2))
    older = room * (rng.uniform(0.9, 1.2) if newer_fits else rng.uniform(0.6, 0.8))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        sources = {name: Path(folder, name) for name in ("checkpoint-1", LAST)}
        for source, size_bytes in zip(sources.values(), (older, newer), strict=True):
            work.write_checkpoint(source, round(size_bytes))
        settings = {"CKPT_RESUME": "off", "CKPT_GRACE_SECONDS": str(TRIAL_GRACE_S)}
        with ours.running(store, prefix, scratch, **settings) as sidecar:
            sidecar.hand_over(sources["checkpoint-1"], "checkpoint-1")
            time.sleep(0.25 * older / room * TRIAL_GRACE_S)
            sidecar.hand_over(sources[LAST], LAST, reason="jit")
            durable = sidecar.report()["durable"]
    wanted = LAST if newer_fits else "checkpoint-1"
    return (
        wanted in durable,
        f"{wanted} of {older / 1e6:.0f} and {newer / 1e6:.0f} MB; durable: {', '.join(durable) or 'nothing'}",
    )


def situation(
    name: str, measure: dict[str, Callable[..., float]], options: argparse.Namespace, half_s: float
) -> dict[str, object]:
    """Measure one situation in interleaved rounds, and print it."""
    seconds: dict[str, list[float]] = {who: [] for who in measure}
    for number in range(options.rounds):
        for who in list(measure)[number % 2 :] + list(measure)[: number % 2]:
            took_s = measure[who](prefix=f"{name}-{who}-{number}", older=SITUATIONS[name], half_s=half_s)
            seconds[who].append(took_s)
    medians = {who: statistics.median(each) for who, each in seconds.items()}
    ratio = medians["ours"] / medians["kubeflow"]
    print(
        f"{name:<10} ours {medians['ours']:6.2f} s   Kubeflow SDK's scheme {medians['kubeflow']:6.2f} s   "
        f"ratio {ratio:.2f} (goal {GOALS[name]})",
        flush=True,
    )
    return {"situation": name, "seconds": seconds, "ratio": ratio, "goal": GOALS[name]}


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of each checkpoint")
    parser.add_argument("--mbit", type=int, default=LINK_MBIT_PER_S, help="rate of the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(SITUATIONS), default=list(SITUATIONS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    default = PEERS_PYTHON if PEERS_PYTHON.exists() else Path(sys.executable)
    parser.add_argument("--peers-python", type=Path, default=default, help="interpreter that has s3fs (make bench-peers)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: dict[str, object] = {"mib": options.mib, "mbit_per_s": options.mbit, "round_trip_ms": LINK_ROUND_TRIP_MS}
    try:
        results["situations"] = _situations(options)
        results["trials"] = _trials(options)
    except Failed as failed:
        print(f"benchmarks.sigterm: {failed}", file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    if options.json:
        write(options.json, results)


def _situations(options: argparse.Namespace) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    size_bytes = options.mib * work.MIB
    with tempfile.TemporaryDirectory(dir=work.memory_folder(2 * size_bytes), prefix="bench-") as folder:
        source, scratch = Path(folder, "source"), Path(folder, "scratch")
        work.write_checkpoint(source, size_bytes)
        scratch.mkdir()
        for name in options.only:
            with stores.opened("link", mbit_per_s=options.mbit) as store:
                us = functools.partial(by_us, store, source=source, scratch=scratch)
                them = functools.partial(by_them, store, source=source, scratch=scratch, python=options.peers_python)
                half_s = size_bytes / (options.mbit * 1e6 / 8) / 2
                found.append(situation(name, {"ours": us, "kubeflow": them}, options, half_s))
    return found


def _trials(options: argparse.Namespace) -> list[dict[str, object]]:
    rng, found = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(dir=work.memory_folder(1 << 30), prefix="bench-") as folder:
        for number in range(options.trials):
            with stores.opened("link", mbit_per_s=TRIAL_MBIT_PER_S) as store:
                right, what = trial(store, f"trial-{number}", Path(folder), rng)
            print(f"trial {number + 1:>2}: {'right' if right else 'WRONG'}: {what}", flush=True)
            found.append({"right": right, "what": what})
    if found:
        print(f"the right one of two landed in {sum(bool(each['right']) for each in found)} of {len(found)} trials")
    return found


if __name__ == "__main__":
    main()
