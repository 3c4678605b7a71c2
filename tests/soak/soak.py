"""One run: a sidecar and a trainer for some minutes, sampled, and what was wrong at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import servers
from tests.campaign.campaign import stores
from tests.campaign.reader import Bucket, Folder, Reader, content_of, step_of
from tests.campaign.run import BUCKET, TRACES, ends
from tests.process.sidecar_process import Sidecar
from tests.soak import samples, trainer
from tests.soak.growth import Bound, Growth, costs, growth
from tests.soak.way import BURST_EVERY_S, BURSTS, CountingProxy, troubles

GRACE_S = 60
SETTINGS = {
    "CKPT_GRACE_SECONDS": str(GRACE_S),
    "CKPT_KEEP_LOCAL": "3",
    "CKPT_KEEP_STORE": "10",
    "CKPT_KEEP_EVERY_STEPS": "50",
}
"""Every fifth checkpoint stays in the store for ever, so that the store grows while retention works."""
TRAINER = {"CKPT_SAVE_TOTAL_LIMIT": "4", "CKPT_JIT": "1"}
LOOKS = 5
"""Calls of the API in each sample, of which the median counts: one that falls into a scan says nothing."""
SHORTEST_S = 3 * BURST_EVERY_S * len(BURSTS)
"""Shortest run in each third of which each trouble of the way comes once: in shorter ones costs are not compared."""
LATEST_S = 60.0
"""Longest time for which nothing new may become durable while the trainer saves each second."""

BOUNDS = {
    "RSS": Bound(1.06, 5, "MiB"),
    "PSS": Bound(1.06, 5, "MiB"),
    "anonymous memory": Bound(1.08, 5, "MiB"),
    "threads": Bound(1, 14),  # pools start their threads one after the other, as they are needed
    **{f"descriptors: {kind}": Bound(1.2, 4) for kind in samples.KINDS},
    "descriptors: sockets": Bound(1.2, 14),  # each of those threads opens its connection with its first request
    "inotify watches": Bound(1.2, 3),
    "files in .ckpt": Bound(1.5, 40),
    ".ckpt": Bound(1.5, 2000, "KiB"),
    "journals": Bound(1.5, 100, "KiB"),
    "checkpoints not durable yet": Bound(1.2, 5),
    "answer of /healthz": Bound(1.5, 10, "ms"),
    "answer of /v1/status": Bound(1.5, 15, "ms"),
    "CPU of a commit": Bound(1.2, 5, "ms"),
    "requests of a commit": Bound(1.1, 2),
}
"""By measure: what is noise. A leak of one descriptor or 20 KiB with each commit exceeds it in twenty minutes."""

Sample = Mapping[str, float]


@dataclass
class Outcome:
    """What a run found."""

    store: str
    length_s: float
    grown: list[Growth] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[float, Sample]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.problems and all(each.is_flat for each in self.grown)


class Log:
    """The log of a sidecar, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(errors="replace")
        self._rest = ""
        self.events: Counter[str] = Counter()
        self.last_commit_s = time.monotonic()

    def read(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line).get("event", "")
                self.events[event] += 1
                if event == "checkpoint_committed":
                    self.last_commit_s = time.monotonic()

    def close(self) -> None:
        self._file.close()


class Soak:
    """A pod that trains. ``proxy``: its way to the store; ``None``: a folder."""

    def __init__(self, folder: Path, settings: Mapping[str, str], proxy: CountingProxy | None) -> None:
        self._folder, self._proxy = folder, proxy
        self._volume = folder / "volume"
        self._volume.mkdir()
        # A fresh interpreter: in a forked one, pages are shared and imports are not counted.
        self.sidecar = Sidecar(self._volume, settings, folder / "sidecar.log", within=("env",))
        self._log = Log(folder / "sidecar.log")
        self._trainer: subprocess.Popen[bytes] | None = None
        self.newest_s = 0.0
        self.longest_s = 0.0
        """Longest time without a commit."""

    def train(self) -> None:
        environ = self.sidecar.environ | TRAINER
        environ["CKPT_SIDECAR_URL"] = f"http://127.0.0.1:{self.sidecar.port}"
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "trainer_hook", "run", "--", sys.executable, "-m", trainer.__name__]
        with (self._folder / "trainer.log").open("ab") as log:
            self._trainer = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def sample(self) -> Sample:
        pid = self.sidecar.process.pid
        self._log.read()
        events = self._log.events
        waits_s = time.monotonic() - self._log.last_commit_s
        self.longest_s = max(self.longest_s, waits_s)
        finished, committed = events["checkpoint_finished"], events["checkpoint_committed"]
        found = {"commits": float(committed), "checkpoints not durable yet": float(max(0, finished - committed))}
        found |= {"requests": float(sum(self._proxy.asked.values()))} if self._proxy else {}
        found["committed in the store"] = float(committed - events["store_checkpoint_deleted"])
        for path in ("/healthz", "/v1/status"):
            found[f"answer of {path}"] = statistics.median(self._answer_ms(path) for _ in range(LOOKS))
        return (
            found
            | samples.of_memory(pid)
            | samples.of_descriptors(pid)
            | samples.of_processor(pid)
            | samples.of_volume(self._volume)
        )

    def _answer_ms(self, path: str) -> float:
        began_s = time.perf_counter()
        self.sidecar.call("GET", path)
        return (time.perf_counter() - began_s) * 1000

    def problem(self) -> str | None:
        """Return why the run cannot go on; ``None``: it can."""
        if self.sidecar.process.poll() is not None:
            return f"the sidecar ended with {self.sidecar.process.poll()}: {self.sidecar.log()[-1500:]}"
        if self._trainer is not None and self._trainer.poll() is not None:
            return f"the trainer ended with {self._trainer.poll()}: {(self._folder / 'trainer.log').read_text()[-1500:]}"
        return None

    def end(self) -> Iterator[str]:
        """End the trainer, then the sidecar, as Kubernetes does. Yields what is wrong."""
        assert self._trainer is not None
        self._trainer.send_signal(signal.SIGTERM)
        if (code := self._trainer.wait(GRACE_S)) != 143:
            yield f"exit code {code} of the trainer: {(self._folder / 'trainer.log').read_text()[-1500:]}"
        self.sidecar.process.send_signal(signal.SIGTERM)
        if (ended := ends(self.sidecar, within_s=GRACE_S + 15)) != 0:
            yield f"exit code {ended} of the sidecar: {self.sidecar.log()[-1500:]}"
        self._log.read()
        for log in self._folder.glob("*.log"):
            text = log.read_text(errors="replace")
            yield from (f"{log.name}: {text[text.index(trace) :][:1500]}" for trace in TRACES if trace in text)

    def check_newest(self, reader: Reader) -> Iterator[str]:
        """Compare the newest checkpoints of the store with what was written. Yields what is wrong."""
        saved = max((step_of(path.parent.name) for path in self._volume.glob("checkpoint-*/.complete")), default=-1)
        names = reader.names()
        if not names or step_of(names[-1]) != saved:
            yield f"checkpoint-{saved} is the newest on the volume, and {names[-1:]} in the store"
        for name in names[-3:]:
            commit = reader.commit(name)
            wanted = {path: content_of(trainer.content(step_of(name), path)) for path in trainer.SIZES}
            if commit is None or not commit.is_whole or commit.nodes != {0: wanted}:
                yield f"{name} is not in the store as it was written: {commit and commit.problems}"

    def close(self) -> None:
        for process in (self._trainer, self.sidecar.process):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        self._log.close()

    @property
    def events(self) -> Counter[str]:
        return self._log.events


@contextlib.contextmanager
def _way(store: str, folder: Path, length_s: float) -> Iterator[tuple[Reader, dict[str, str], CountingProxy | None]]:
    if store == "file":
        (folder / "store").mkdir()
        yield Reader(Folder(folder / "store")), {"CKPT_STORE": f"file://{folder / 'store'}"}, None
        return
    with stores([store], folder / "servers") as (endpoints, missing):
        if store in missing:
            raise RuntimeError(missing[store])
        prefix, proxy = f"soak-{uuid.uuid4().hex[:8]}", CountingProxy(endpoints[store], seed=1)
        reader = Reader(Bucket(endpoints[store], BUCKET, prefix, keys=(servers.ACCESS_KEY, servers.SECRET_KEY)))
        with proxy.running() as endpoint:
            proxy.begin(troubles(length_s))
            settings = {
                "CKPT_STORE": f"s3://{BUCKET}/{prefix}",
                "AWS_S3_ENDPOINT": endpoint,
                "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
                "AWS_DEFAULT_REGION": servers.REGION,
            }
            yield reader, settings, proxy


def run(store: str, folder: Path, *, length_s: float, every_s: float, warm_s: float) -> Outcome:
    """Train for ``length_s`` seconds, after ``warm_s`` seconds that are not compared, and sample every ``every_s`` seconds."""
    outcome = Outcome(store, length_s)
    with _way(store, folder, warm_s + length_s + GRACE_S) as (reader, settings, proxy):
        soak = Soak(folder, SETTINGS | settings, proxy)
        try:
            soak.sidecar.ready()
            soak.train()
            began_s = time.monotonic()
            while (now_s := time.monotonic() - began_s) < warm_s + length_s:
                if (problem := soak.problem()) is not None:
                    outcome.problems.append(problem)
                    return outcome
                sample = soak.sample()
                if now_s >= warm_s:
                    outcome.samples.append((now_s, sample))
                time.sleep(every_s)
            if proxy is not None:
                proxy.heal()
            outcome.problems += soak.end()
            outcome.problems += soak.check_newest(reader)
        finally:
            soak.close()
    if soak.longest_s > LATEST_S:
        outcome.problems.append(f"nothing became durable for {soak.longest_s:.0f} s, and {LATEST_S:.0f} s are allowed")
    _count(outcome, soak, proxy)
    return outcome


def _count(outcome: Outcome, soak: Soak, proxy: CountingProxy | None) -> None:
    told, last = outcome.samples, outcome.samples[-1][1]
    series = {name: [(at_s, sample[name]) for at_s, sample in told] for name in last}
    series["CPU of a commit"] = [(at_s, cost * 1000) for at_s, cost in costs(told, "CPU seconds", "commits")]
    if proxy is not None:
        series["requests of a commit"] = costs(told, "requests", "commits")
        outcome.requests, outcome.faults = dict(proxy.asked), dict(+proxy.harmed)
    if outcome.length_s < SHORTEST_S:
        series = {name: values for name, values in series.items() if not name.endswith(" of a commit")}
    outcome.grown = [growth(name, series[name], bound) for name, bound in BOUNDS.items() if name in series]
    outcome.figures = {
        "checkpoints saved": soak.events["checkpoint_finished"],
        "checkpoints committed": soak.events["checkpoint_committed"],
        "deleted in the store": soak.events["store_checkpoint_deleted"],
        "committed in the store at the end": last["committed in the store"],
        "longest time without a commit, s": soak.longest_s,
        "share of a core": (last["CPU seconds"] - told[0][1]["CPU seconds"]) / (told[-1][0] - told[0][0]),
    }
