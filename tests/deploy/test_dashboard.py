"""The dashboard's queries, answered by a real Prometheus that scrapes sidecars."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from tests.deploy.dashboard import panels, prometheus, story
from tests.deploy.test_monitoring import ALERTS

_SELECTOR = re.compile(r"checkpoint_sidecar_\w+(?:\{[^}]*\})?")


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
    assert found["variables"] == {"namespace": ["team-a", "team-b"], "pod": ["llama-0", "mistral-0", "qwen-0-a", "qwen-0-b"]}
    assert len(selectors) >= len(ALERTS)
    assert not unknown, "an alert looks at what no sidecar exports"


def test_a_panel_without_data_is_found() -> None:
    nothing, some = {"expr": "a", "series": {"x": "- -"}}, {"expr": "b", "series": {"x": "- 0"}}
    assert panels.without_data({"panels": [{"title": "T", "targets": [some, nothing, {"series": {}}]}]}) == {"T 2", "T 3"}
