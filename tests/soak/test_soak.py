"""A bounded soak, and proof that growth is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.sidecar_process import until
from tests.soak import samples
from tests.soak.__main__ import report
from tests.soak.growth import Bound, costs, growth
from tests.soak.soak import BOUNDS, run
from tests.soak.way import BURSTS, STEADY, troubles

LEAKS = """
import ctypes, os, sys, threading, time
libc, kept, watching = ctypes.CDLL(None), [], ctypes.CDLL(None).inotify_init()
for number in range(10**6):
    kept.append((os.urandom(1 << 20), open("/dev/null"), os.pipe()))
    os.mkdir(f"{sys.argv[1]}/{number}")
    libc.inotify_add_watch(watching, f"{sys.argv[1]}/{number}".encode(), 2)
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("store", ["file", "moto"])
def test_nothing_grows_in_half_a_minute(store: str, tmp_path: Path) -> None:
    outcome = run(store, tmp_path, length_s=24, every_s=0.5, warm_s=8)
    assert outcome.is_good, report(outcome)
    assert outcome.figures["checkpoints committed"] > 10, report(outcome)
    if store != "file":
        assert sum(outcome.faults.values()) > 3, outcome.faults


def test_a_process_that_leaks_exceeds_the_bounds(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAKS, str(tmp_path)]) as leaking:
        try:
            until(lambda: len(list(tmp_path.iterdir())) > 3)
            taken = []
            for number in range(9):
                count = len(list(tmp_path.iterdir()))
                until(lambda count=count: len(list(tmp_path.iterdir())) > count + 6)
                found = samples.of_memory(leaking.pid) | samples.of_descriptors(leaking.pid) | samples.of_processor(leaking.pid)
                taken.append((float(number), found))
        finally:
            leaking.kill()
    wanted = ["RSS", "anonymous memory", "threads", "descriptors: pipes", "descriptors: files", "inotify watches"]
    grown = [growth(name, [(at_s, found[name]) for at_s, found in taken], BOUNDS[name]) for name in wanted]
    assert not [each.name for each in grown if each.is_flat]


def test_growth_is_told_from_noise_by_the_medians_of_the_thirds() -> None:
    noise = [(float(at_s), 100.0 + (at_s * 7919 % 5)) for at_s in range(30)]
    assert growth("noise", [*noise, (31.0, 900.0)], Bound(1.05, 0)).is_flat
    leak = growth("leak", [(at_s, value + at_s) for at_s, value in noise], Bound(1.05, 5))
    assert not leak.is_flat
    assert leak.per_hour == pytest.approx(3600, rel=0.2)
    with pytest.raises(ValueError, match="too few"):
        growth("short", noise[:5], Bound(1, 0))


def test_costs_are_of_one_more_and_batches_are_spread() -> None:
    taken = [(float(number), {"requests": number // 10 * 40.0, "commits": float(number)}) for number in range(181)]
    assert [cost for _, cost in costs(taken, "requests", "commits")] == pytest.approx([4.0] * 9)
    assert costs([(at_s, {"requests": 1.0, "commits": 1.0}) for at_s, _ in taken], "requests", "commits") == []


def test_each_third_of_a_soak_has_the_same_troubles() -> None:
    found = troubles(1200.0)
    assert {trouble.kind for trouble in found} >= {*STEADY, *(kind for kind, _ in BURSTS)}
    bursts = [trouble for trouble in found if trouble.length_s < 100]
    thirds = [sum(trouble.length_s for trouble in bursts if at <= trouble.begin_s < at + 400) for at in (0, 400, 800)]
    assert max(thirds) <= 1.3 * min(thirds)
