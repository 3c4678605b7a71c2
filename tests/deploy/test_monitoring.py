from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sidecar.kubernetes.inject import inject
from tests.api.training import training
from tests.deploy.building import asked, job, sidecar_of
from tests.deploy.schemas import documents, pod_templates
from tests.process.sidecar_process import sidecar

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
[RULE] = documents((MONITORING / "prometheus-rule.yaml").read_text())
ALERTS = [rule for group in RULE["spec"]["groups"] for rule in group["rules"]]
_METRIC = re.compile(r"checkpoint_sidecar_[a-z_]+")


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return panels + [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]


def test_every_metric_that_is_looked_at_is_exported(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as running:
        running.ready()
        with training(volume) as trainer:
            trainer.at(9)
            trainer.save(5, 6 << 20)  # fewer bytes measure no rate
            running.committed("checkpoint-5")
        running.resume("checkpoint-5", asked_by="person")
        with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/metrics") as answer:
            exported = set(re.findall(r"^(checkpoint_sidecar_[a-z_]+)", answer.read().decode(), re.MULTILINE))
    used = {name for text in [*expressions(), *(rule["expr"] for rule in ALERTS)] for name in _METRIC.findall(text)}
    assert len(used) >= 10
    assert used <= exported


def test_panels_have_their_own_place_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["datasource"]["uid"] == "${datasource}")
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_pod_monitor_finds_the_sidecars_that_inject_makes() -> None:
    [monitor] = documents((MONITORING / "pod-monitor.yaml").read_text())
    [template] = pod_templates(inject(job(), asked(metrics_port="9471")).document)
    for name, value in monitor["spec"]["selector"]["matchLabels"].items():
        assert template["metadata"]["labels"][name] == value
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert [port["name"] for port in sidecar_of(template["spec"])["ports"]] == [endpoint["port"]]


def test_every_alert_has_its_runbook() -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / "OPERATIONS.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        base, _, section = rule["annotations"]["runbook_url"].partition("/OPERATIONS.md#")
        assert (base, section) == ("https://git.example/checkpoint-sidecar", rule["alert"].lower())
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("CKPT_TEST_PROMTOOL") == "required":
            pytest.fail("promtool is not installed: Debian package prometheus")
        pytest.skip("promtool is not installed: Debian package prometheus")
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(RULE["spec"], stream)
    (tmp_path / "rules.yaml").write_text(stream.getvalue())
    # The dashboard's expressions are rules, too, to a parser; Grafana's own variables stand for values.
    plain = [text.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$pod", ".*") for text in expressions()]
    recorded = [{"record": f"a:{i}", "expr": text} for i, text in enumerate(plain) if "label_values" not in text]
    (tmp_path / "panels.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}).replace("a:", "a_"))
    shutil.copy(MONITORING / "alerts_test.yaml", tmp_path)
    for command in (["check", "rules", "rules.yaml", "panels.json"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = {
        case["alertname"] for case in documents((MONITORING / "alerts_test.yaml").read_text())[0]["tests"][0]["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in ALERTS}
