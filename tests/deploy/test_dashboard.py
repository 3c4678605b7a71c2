"""The dashboard's queries, answered by a real Prometheus that scrapes sidecars, and the recording that its picture shows."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.dashboard import panels, prometheus, story, units
from tests.deploy.test_monitoring import ALERTS

_SELECTOR = re.compile(r"checkpoint_sidecar_\w+(?:\{[^}]*\})?")
_, RECORDED = results.read(results.FOLDER / "dashboard.json")


def test_the_picture_shows_the_dashboards_own_queries() -> None:
    shown = {panel["id"]: (panel["title"], [target["expr"] for target in panel["targets"]]) for panel in RECORDED["panels"]}
    asked = {panel["id"]: (panel["title"], [target["expr"] for target in panel["targets"]]) for panel in panels.panels()}
    assert shown == asked, "run: make dashboard plots"


def test_every_panel_of_the_picture_shows_data() -> None:
    assert panels.without_data(RECORDED) == set()
    assert RECORDED["variables"] == {"namespace": ["team-a", "team-b"], "pod": ["llama-0", "mistral-0", "qwen-0-a", "qwen-0-b"]}


def test_the_picture_shows_what_happened_to_the_jobs() -> None:
    shown = {panel["title"]: dict(panels.series_of(panel)) for panel in RECORDED["panels"]}
    phases = shown["Phase"]
    assert set(phases["llama-0"]) - {math.nan} >= {2.0}
    assert {value for value in phases["qwen-0-a"] if value > 2} == {3.0, 4.0}, "drained, then flushed"
    assert max(shown["Pods without a store"][""]) == 1
    assert max(shown["Do not fit the grace period"][""]) == 1
    assert set(shown["Resume: nine of ten"]) == {"none", "ready"}
    first, second = shown["Newest durable step"]["qwen-0-a"], shown["Newest durable step"]["qwen-0-b"]
    assert max(v for v in first if not math.isnan(v)) <= next(v for v in second if not math.isnan(v)), "no step is lost"


@pytest.mark.slow
def test_a_real_prometheus_has_an_answer_for_every_panel_variable_and_alert(tmp_path: Path) -> None:
    if prometheus.program() is None:
        if os.environ.get("CKPT_TEST_PROMTOOL") == "required":
            pytest.fail("prometheus is not installed: Debian package prometheus")
        pytest.skip("prometheus is not installed: Debian package prometheus")
    with prometheus.Prometheus(tmp_path / "prometheus").running() as server, story.play(server, tmp_path, pace=0.25) as times:
        start_s, end_s = math.ceil(times[0]), math.floor(times[1])
        found = panels.recorded(server, start_s=start_s, end_s=end_s, step_s=1)
        selectors = {selector for rule in ALERTS for selector in _SELECTOR.findall(rule["expr"])}
        unknown = {s for s in selectors if not server.range(s, start_s=start_s, end_s=end_s, step_s=1)}
    assert panels.without_data(found) == set()
    assert found["variables"] == RECORDED["variables"]
    assert len(selectors) >= len(ALERTS)
    assert not unknown, "an alert looks at what no sidecar exports"


def test_a_panel_without_data_is_found() -> None:
    nothing, some = {"expr": "a", "series": {"x": "- -"}}, {"expr": "b", "series": {"x": "- 0"}}
    assert panels.without_data({"panels": [{"title": "T", "targets": [some, nothing, {"series": {}}]}]}) == {"T 2", "T 3"}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "s", "250 ms"),
        (0.0, "s", "0 s"),
        (61.5, "s", "1.02 min"),
        (5400, "s", "1.5 hours"),
        (3e6, "Bps", "3 MB/s"),
        (0, "Bps", "0 B/s"),
        (1 << 30, "bytes", "1 GiB"),
        (1000, "none", "1,000"),
        (1200, "short", "1.2 K"),
        (0.5, "reqps", "0.5 req/s"),
    ],
)
def test_values_are_written_with_their_unit(value: float, unit: str, text: str) -> None:
    assert units.written(value, unit) == text


@pytest.mark.parametrize(
    ("lowest", "highest", "decimals", "expected"),
    [(0, 0, None, [0, 0.25, 0.5, 0.75, 1]), (0, 1, 0, [0, 1]), (3, 61, None, [0, 20, 40, 60, 80]), (0, 11, 0, [0, 5, 10, 15])],
)
def test_the_ticks_of_an_axis_are_round(lowest: float, highest: float, decimals: int | None, expected: list[float]) -> None:
    assert units.ticks(lowest, highest, unit="none", decimals=decimals) == pytest.approx(expected)
