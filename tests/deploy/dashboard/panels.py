"""The panels of ``deploy/monitoring/dashboard.json``, and what Prometheus answers their expressions.

A recording has one text per series, a value for each instant (``-``: none): small, and readable in a diff.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.dashboard.prometheus import SCRAPE_S, Prometheus

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "deploy/monitoring/dashboard.json").read_text())
_LABEL = re.compile(r"\{\{(\w+)\}\}")
_LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something: all but the headings of rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def substituted(expression: str, *, step_s: float) -> str:
    """Return an expression with values for Grafana's variables: everything selected, points ``step_s`` apart."""
    rate_interval_s = max(step_s + SCRAPE_S, 4 * SCRAPE_S)
    expression = expression.replace("$__rate_interval", f"{rate_interval_s:g}s")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            expression = expression.replace(f"${variable['name']}", variable["allValue"])
    if "$" in expression:
        raise ValueError(f"a variable of Grafana's without a value here: {expression}")
    return expression


def recorded(prometheus: Prometheus, *, start_s: float, end_s: float, step_s: float) -> dict[str, Any]:
    """Return the answers to all panels of the dashboard, over a range.

    Raises:
        ValueError: Prometheus refused an expression.
    """
    answers = []
    for panel in panels():
        targets = []
        for target in panel["targets"]:
            expression = substituted(target["expr"], step_s=step_s)
            found = prometheus.range(expression, start_s=start_s, end_s=end_s, step_s=step_s)
            series = {_legend(target["legendFormat"], labels): encoded(values) for labels, values in found}
            targets.append({"expr": target["expr"], "series": dict(sorted(series.items()))})
        answers.append({"id": panel["id"], "title": panel["title"], "targets": targets})
    return {"step_s": step_s, "scrape_s": SCRAPE_S, "variables": variables(prometheus), "panels": answers}


def variables(prometheus: Prometheus) -> dict[str, list[str]]:
    """Return what the dashboard's variables can be set to."""
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if match := _LABEL_VALUES.fullmatch(variable.get("definition", "")):
            found[variable["name"]] = prometheus.label_values(match[2], substituted(match[1], step_s=SCRAPE_S))
    return found


def without_data(found: Mapping[str, Any]) -> set[str]:
    """Return the targets of a recording that show nothing: the panel's title, and the number of the target from 1 on."""
    return {
        f"{panel['title']} {number}"
        for panel in found["panels"]
        for number, target in enumerate(panel["targets"], 1)
        if not any(not math.isnan(value) for text in target["series"].values() for value in decoded(text))
    }


def encoded(values: Sequence[float]) -> str:
    """Return values as a text; ``-`` is NaN."""
    return " ".join("-" if math.isnan(value) else f"{value:.4g}" for value in values)


def decoded(text: str) -> list[float]:
    """Return the values of a text."""
    return [math.nan if value == "-" else float(value) for value in text.split()]


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), form)


def series_of(answer: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield legend and values of each series of a panel's answer."""
    for target in answer["targets"]:
        for legend, text in target["series"].items():
            yield legend, decoded(text)
