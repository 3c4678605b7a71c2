"""Plays seeds, several at once, and counts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import ssl
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests import servers
from tests.campaign import files, volume
from tests.campaign.plan import STORES, Story, story
from tests.campaign.run import BUCKET, opened
from tests.process.sidecar_process import sidecar_forks


@dataclass
class Result:
    """What became of one seed."""

    seed: int
    sort: str
    store: str
    skipped: str | None = None
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    durable_after_s: float | None = None
    digest: str | None = None
    took_s: float = 0.0


@contextlib.contextmanager
def stores(wanted: Sequence[str], folder: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Start the servers. Yields endpoints, and reasons for those that cannot run here."""
    missing: dict[str, str] = {}
    if "rgw" in wanted and not servers.rgw_is_installed():
        missing["rgw"] = "radosgw is not installed: see tests/rgw/up"
    if "minio" in wanted and not servers.minio_is_built():
        missing["minio"] = "MinIO is not built: tests/cluster/build minio"
    with contextlib.ExitStack() as stack:
        endpoints: dict[str, str] = {}
        if servers.SHARED not in os.environ:  # not within a run of tests, which shares its servers
            folder.mkdir(parents=True)
            os.environ[servers.SHARED] = str(folder)
            stack.callback(os.environ.pop, servers.SHARED)
            stack.callback(servers.down_shared)
        if "rgw" in wanted and "rgw" not in missing:
            endpoints["rgw"] = servers.rgw()
        if "minio" in wanted and "minio" not in missing:
            endpoints["minio"] = servers.minio()
        if "moto" in wanted:
            endpoints["moto"] = stack.enter_context(servers.moto())
        for endpoint in endpoints.values():
            servers.create_bucket(endpoint, BUCKET)
        yield endpoints, missing


def why_skipped(told: Story, missing: Mapping[str, str]) -> str | None:
    """Return why a story cannot be played on this machine."""
    if told.store in missing:
        return missing[told.store]
    if told.sort == "hf" and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if told.tls and shutil.which("openssl") is None:
        return "openssl, which makes the certificate, is not installed"
    reasons = (volume.why_not(life.act) for life in told.lives)
    return next((reason for reason in reasons if reason is not None), None)


def play(seed: int, chosen: Sequence[str], endpoints: Mapping[str, str], missing: Mapping[str, str], base: str) -> Result:
    """Play one seed. Its files stay if something is wrong."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "CKPT_"))]:
        del os.environ[name]
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    told = story(seed, chosen)
    result, began_s = Result(seed, told.sort, told.store), time.monotonic()
    result.skipped = why_skipped(told, missing)
    if result.skipped is not None:
        return result
    folder = Path(base) / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with opened(told, folder, endpoints, _certificate(base)) as run:
        try:
            _director(told)(run)
        except BaseException as error:
            run.violation(f"the campaign itself: {error!r}: {traceback.format_exc()}")
        run.check_logs()
        run.close()
    result.violations, result.notes, result.digest = run.violations, run.notes, run.digest
    result.figures, result.faults, result.durable_after_s = dict(run.figures), dict(+run.faults), run.durable_after_s
    result.took_s = time.monotonic() - began_s
    if result.violations:
        (folder / "violations.txt").write_text("\n".join([repr(told), *result.violations]))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _director(told: Story) -> Any:
    if told.sort == "files":
        return files.play
    from tests.campaign import hf, nodes

    return hf.play if told.sort == "hf" else nodes.play


def _certificate(base: str) -> tuple[ssl.SSLContext, Path] | None:
    folder = Path(base) / f"tls-{os.getpid()}"
    if not folder.exists():
        folder.mkdir(parents=True)
        if shutil.which("openssl") is None:
            return None
        _certificates[str(folder)] = servers.self_signed(folder)
    return _certificates.get(str(folder))


_certificates: dict[str, tuple[ssl.SSLContext, Path]] = {}


def warm() -> None:
    """Import what sidecars import before the first of them starts. An interrupt from the terminal is the campaign's alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder:
        sidecar_forks().start(["-m", "this"], environ=os.environ, log=Path(folder) / "log").wait(120)


def search(
    seeds: Sequence[int], *, chosen: Sequence[str] = STORES, at_once: int = 6, base: Path | None = None, tell: Any = print
) -> list[Result]:
    """Play many seeds. ``at_once``: runs at the same time, which mostly wait.

    After an interrupt the runs that have begun are played to their end, and the servers end.
    """
    base = base or Path(tempfile.mkdtemp(prefix="campaign-"))
    base.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    workers = ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=warm)
    with stores(chosen, base / "stores") as (endpoints, missing), workers as pool:
        played = [pool.submit(play, seed, chosen, endpoints, missing, str(base)) for seed in seeds]
        try:
            for future in as_completed(played):
                results.append(result := future.result())
                tell(line(result))
        except KeyboardInterrupt:
            tell("stopped: the runs that have begun are played to their end")
            pool.shutdown(cancel_futures=True)
            told = {result.seed for result in results}
            ended = [future.result() for future in played if future.done() and not future.cancelled()]
            results += [result for result in ended if result.seed not in told]
    if not any(result.violations for result in results):
        shutil.rmtree(base, ignore_errors=True)
    return sorted(results, key=lambda result: result.seed)


def line(result: Result) -> str:
    """Return one line about a run."""
    head = f"seed {result.seed} {result.sort} {result.store}"
    if result.skipped:
        return f"{head}: SKIPPED: {result.skipped}"
    if result.violations:
        first = result.violations[0].splitlines()[0][:300]
        return f"{head}: {len(result.violations)} VIOLATIONS: {first}\n  replay: python -m tests.campaign run {result.seed}"
    return f"{head}: {result.took_s:.1f} s; {', '.join(f'{kind} {count}' for kind, count in sorted(result.faults.items()))}"


def summary(results: Sequence[Result], took_s: float) -> dict[str, Any]:
    """Return the figures of a campaign."""
    figures, faults, runs_with = Counter[str](), Counter[str](), Counter[str]()
    for result in results:
        figures.update(result.figures)
        faults.update(result.faults)
        runs_with.update(result.faults.keys())
    played = [result for result in results if not result.skipped]
    after_s = sorted(result.durable_after_s for result in played if result.durable_after_s is not None)
    digests = {result.digest for result in played if result.digest}
    different = [f"real trainers ended with {len(digests)} different weights"] if len(digests) > 1 else []
    return {
        "runs": len(played),
        "runs_by_sort": dict(Counter(result.sort for result in played)),
        "runs_by_store": dict(Counter(result.store for result in played)),
        "skipped": dict(Counter(result.skipped for result in results if result.skipped)),
        "violations": sum(len(result.violations) for result in played) + len(different),
        "broken_seeds": {result.seed: result.violations[:5] for result in played if result.violations}
        | dict(enumerate(different)),
        "faults": {kind: {"runs": runs_with[kind], "times": faults[kind]} for kind in sorted(faults)},
        "figures": dict(sorted(figures.items())),
        "durable_after_faults_s": {"median": after_s[len(after_s) // 2], "longest": after_s[-1]} if after_s else {},
        "took_s": round(took_s, 1),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    rows = [
        ("runs", found["runs"]),
        *((f"  of {sort}", number) for sort, number in found["runs_by_sort"].items()),
        *((f"  on {store}", number) for store, number in found["runs_by_store"].items()),
        *((f"  skipped: {reason}", number) for reason, number in found["skipped"].items()),
        *found["figures"].items(),
        *(
            (f"seconds until the newest was durable, {which}", f"{s:.1f}")
            for which, s in found["durable_after_faults_s"].items()
        ),
        ("seconds", found["took_s"]),
        ("violations", found["violations"]),
    ]
    lines = [f"{name:<56} {value:>14}" for name, value in rows]
    lines += ["", f"{'fault':<40} {'runs':>10} {'times':>12}"]
    lines += [f"{kind:<40} {count['runs']:>10} {count['times']:>12}" for kind, count in found["faults"].items()]
    return "\n".join(lines)


def as_json(results: Sequence[Result], found: Mapping[str, Any]) -> str:
    told = [{name: value for name, value in asdict(result).items() if name != "notes"} for result in results]
    return json.dumps({"summary": found, "results": told}, indent=1)
