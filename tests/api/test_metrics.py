"""Names, types and meanings of the metrics, and the durations that events tell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from sidecar import __version__
from sidecar.api.metrics import DESCRIPTIONS, PREFIX
from sidecar.api.metrics_reference import reference
from sidecar.catalog.durations import MOST_WAITING, Durations
from tests.api.training import training
from tests.process.sidecar_process import sidecar, until

ROOT = Path(__file__).parents[2]


def test_the_reference_is_made_of_the_code() -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    assert written == reference(), "run: make reference"


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def test_every_described_metric_is_exported_and_every_exported_one_is_described(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    # On demand: the answer of a prefetch would be counted, too, as ready if the machine is slow.
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_RESUME": "on-demand"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        with training(running.volume) as trainer:
            trainer.at(9)
            trainer.save(5, 6 << 20)  # fewer bytes measure no rate
            running.committed("checkpoint-5")
            running.resume("checkpoint-5", asked_by="person")
            running.status()
            # A prediction needs a measured rate, which is sampled.
            text = until(lambda: found if "predicted_save_seconds" in (found := _metrics(running.port)) else None)
    exported = dict(re.findall(rf"^# TYPE {PREFIX}(\w+) (\w+)$", text, re.MULTILINE))
    described = {d.name + ("_total" if d.kind == "counter" else ""): d.kind for d in DESCRIPTIONS}
    assert exported == described
    assert f'{PREFIX}build_info{{python="' in text
    assert f'version="{__version__}"}} 1.0' in text
    for line in (
        "ranks 1.0",
        "trainer_step 9.0",
        "trainer_planned_steps 1000.0",
        'save_seconds_count{reason="periodic"} 1.0',
        'upload_seconds_count{reason="periodic"} 1.0',
        "commit_seconds_count 1.0",
        'durable_seconds_count{reason="periodic"} 1.0',
        'resume_seconds_count{outcome="ready"} 1.0',
        'api_request_seconds_count{call="GET /v1/status"}',
    ):
        assert f"{PREFIX}{line}" in text, line
    assert "wait_s" not in text
    if promtool is None:
        if os.environ.get("CKPT_TEST_PROMTOOL") == "required":
            pytest.fail("promtool is not installed: Debian package prometheus")
        pytest.skip("promtool is not installed: Debian package prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr.strip()) == (0, ""), checked.stdout + checked.stderr


def test_histograms_exist_before_their_first_duration_which_rate_would_not_count() -> None:
    durations = Durations()
    for by_reason in (durations.save, durations.upload, durations.durable):
        assert set(by_reason) == {"periodic", "jit", "manual", "final", "unknown"}
    assert set(durations.commit) == {""}
    assert set(durations.resume) == {"ready", "none", "failed"}
    assert {h.buckets()[-1][1] for each in (durations.save, durations.commit, durations.resume) for h in each.values()} == {0}


def test_a_commit_is_measured_from_this_nodes_manifest_on_also_when_it_waits_for_others() -> None:
    now_s = 100.0
    durations = Durations(now_s=lambda: now_s)
    durations.happened("checkpoint_finished", {"checkpoint": "checkpoint-5", "save_reason": "jit", "save_s": 3.0})
    durations.happened("checkpoint_uploaded", {"checkpoint": "checkpoint-5", "upload_s": 7.0})
    durations.happened("checkpoint_uploaded", {"checkpoint": "checkpoint-5", "reason": "waits for node 1"})
    now_s = 140.0
    durations.happened("checkpoint_committed", {"checkpoint": "checkpoint-5", "saved_to_durable_s": 48.0})
    sums = [durations.save["jit"], durations.upload["jit"], durations.commit[""], durations.durable["jit"]]
    assert [histogram.sum_s for histogram in sums] == [3.0, 7.0, 40.0, 48.0]
    durations.happened("checkpoint_committed", {"checkpoint": "checkpoint-5"})
    assert durations.commit[""].buckets()[-1][1] == 1, "found committed again by a later process"


def test_checkpoints_that_never_get_a_commit_take_no_memory() -> None:
    durations = Durations()
    for step in range(3 * MOST_WAITING):
        durations.happened("checkpoint_finished", {"checkpoint": f"checkpoint-{step}", "save_reason": "periodic"})
        durations.happened("checkpoint_uploaded", {"checkpoint": f"checkpoint-{step}", "upload_s": 1.0})
    assert len(durations._reasons) <= MOST_WAITING
    assert len(durations._uploaded_s) <= MOST_WAITING + 1
