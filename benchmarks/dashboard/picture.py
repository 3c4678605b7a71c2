"""Pictures of the dashboard's panels, in the grid of ``deploy/monitoring/dashboard.json``, from a recording."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from benchmarks.dashboard.panels import DASHBOARD, series_of
from benchmarks.dashboard.units import ticks, written

WIDTH, MARGIN, GAP, HEAD_PX, FOOT_PX = 1000, 12, 8, 52, 34
COLUMN_PX, ROW_PX = (WIDTH - 2 * MARGIN) / 24, 27
AXIS_PX, CHARACTER_PX, LEGEND_PX = 68, 6.5, 15
LIGHT = [
    "#37872d",
    "#b58900",
    "#1f60c4",
    "#d9620d",
    "#c4162a",
    "#8f3bb8",
    "#0b8a8f",
    "#6b7a00",
    "#d6439a",
    "#5b6b7b",
    "#8a5a2b",
    "#2aa198",
]
DARK = [
    "#73bf69",
    "#f2cc0c",
    "#5794f2",
    "#ff9830",
    "#f2495c",
    "#b877d9",
    "#3fc7cc",
    "#b5c334",
    "#ff85c8",
    "#a7b3bf",
    "#c99a6b",
    "#7fd8be",
]
NAMED = {"green": 0, "yellow": 1, "blue": 2, "orange": 3, "red": 4, "purple": 5, "text": 9}
ON_PAGES = {
    "dashboard.svg": ("What a kill now would cost", "Uploads"),
    "dashboard-pods.svg": ("Pods", "Training and durations"),
}
"""Which rows of panels a picture shows."""


def draw(conditions: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return each picture by its name."""
    answers = {answer["id"]: answer for answer in found["panels"]}
    drawn = {}
    for name, titles in ON_PAGES.items():
        panels = [panel for row, inside in _rows() if row["title"] in titles for panel in (row, *inside)]
        top = min(panel["gridPos"]["y"] for panel in panels)
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - top
        length_s = found["step_s"] * (len(next(series_of(found["panels"][0]))[1]) - 1)
        body = [*_head(), *_foot(HEAD_PX + bottom * ROW_PX, conditions, found, length_s)]
        for panel in panels:
            place = panel["gridPos"]
            x, y = MARGIN + place["x"] * COLUMN_PX, HEAD_PX + (place["y"] - top) * ROW_PX
            box = Box(x, y, place["w"] * COLUMN_PX - GAP, place["h"] * ROW_PX - GAP, found["step_s"])
            body += _DRAWN[panel["type"]](panel, answers.get(panel["id"]), box)
        drawn[name] = _svg(HEAD_PX + bottom * ROW_PX + FOOT_PX, f"Dashboard: {', '.join(titles)}", body)
    return drawn


def _rows() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    rows: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            rows.append((panel, []))
        else:
            rows[-1][1].append(panel)
    return rows


class Box:
    """The place of a panel, in pixels, and the seconds between its points."""

    def __init__(self, x: float, y: float, width: float, height: float, step_s: float) -> None:
        self.x, self.y, self.width, self.height, self.step_s = x, y, width, height, step_s

    def frame(self, title: str) -> list[str]:
        """Return the panel without its content."""
        return [_rect("panel", self.x, self.y, self.width, self.height), _text(self.x + 9, self.y + 18, title, "title")]


class Plot:
    """The area of a diagram, and its scales: points of time along, values up."""

    def __init__(self, box: Box, points: int, bottom: float, steps: Sequence[float]) -> None:
        self.left, self.right = box.x + AXIS_PX, box.x + box.width - 12
        self.top, self.bottom = box.y + 30, bottom
        self._points, self._step_s, self._steps = points, box.step_s, steps

    def x(self, number: float) -> float:
        """Return where a point of time is."""
        return self.left + (self.right - self.left) * number / (self._points - 1)

    def y(self, value: float) -> float:
        """Return where a value is."""
        lowest, highest = self._steps[0], self._steps[-1]
        return self.bottom - (self.bottom - self.top) * (value - lowest) / (highest - lowest)

    def axes(self, unit: str | None) -> list[str]:
        """Return grid lines with their values and times."""
        drawn = []
        for step in self._steps:
            drawn.append(f'<path class="grid" d="M{self.left:.1f} {self.y(step):.1f}H{self.right:.1f}"/>')
            drawn.append(_text(self.left - 7, self.y(step) + 4, written(step, unit), "small end"))
        return drawn + self.times()

    def times(self) -> list[str]:
        """Return the labels of the time axis, every 30 s where there is room."""
        room = (self.right - self.left) / (self._points - 1) / self._step_s
        every = round(next(seconds for seconds in (30, 60, 120, 600) if seconds * room > 40) / self._step_s)
        labels = []
        for number in range(0, self._points, every):
            minutes, seconds = divmod(round(number * self._step_s), 60)
            labels.append(_text(self.x(number), self.bottom + 15, f"{minutes}:{seconds:02}", "small middle"))
        return labels


def _row(panel: Mapping[str, Any], _: object, box: Box) -> list[str]:
    return [_text(box.x + 2, box.y + 17, f"▾ {panel['title']}", "row")]


def _stat(panel: Mapping[str, Any], answer: Mapping[str, Any], box: Box) -> list[str]:
    defaults = panel["fieldConfig"]["defaults"]
    values = next((values for _, values in series_of(answer)), [])
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return [*box.frame(panel["title"]), _text(box.x + box.width / 2, box.y + box.height / 2, "No data", "middle")]
    last = numbers[-1]
    color = NAMED[
        [step for step in defaults["thresholds"]["steps"] if step["value"] is None or last >= step["value"]][-1]["color"]
    ]
    highest, bottom = max([*numbers, 1e-9]), box.y + box.height - 4
    line = [
        f"{box.x + 1 + (box.width - 2) * n / (len(values) - 1):.1f} {bottom - 34 * value / highest:.1f}"
        for n, value in enumerate(values)
        if not math.isnan(value)
    ]
    first, end = line[0].split()[0], line[-1].split()[0]
    return [
        *box.frame(panel["title"]),
        f'<path class="f{color}" d="M{first} {bottom:.1f}L{"L".join(line)}L{end} {bottom:.1f}Z"/>',
        f'<path class="s{color}" d="M{"L".join(line)}"/>',
        _text(box.x + box.width / 2, box.y + box.height / 2 + 8, written(last, defaults["unit"]), f"big t{color}"),
    ]


def _timeseries(panel: Mapping[str, Any], answer: Mapping[str, Any], box: Box) -> list[str]:
    defaults = panel["fieldConfig"]["defaults"]
    series = [(name, values) for name, values in series_of(answer) if not all(map(math.isnan, values))]
    if not series:
        return [*box.frame(panel["title"]), _text(box.x + box.width / 2, box.y + box.height / 2, "No data", "middle")]
    is_stacked = "stacking" in defaults.get("custom", {})
    tops = _stacked([values for _, values in series]) if is_stacked else [values for _, values in series]
    numbers = [value for values in tops for value in values if not math.isnan(value)]
    legend, height = _legend([name for name, _ in series], box)
    steps = ticks(min(numbers), max(numbers), unit=defaults["unit"], decimals=defaults.get("decimals"))
    plot = Plot(box, len(tops[0]), box.y + box.height - height - 29, steps)
    drawn = [*box.frame(panel["title"]), *plot.axes(defaults["unit"])]
    for number, values in enumerate(tops):
        if is_stacked:
            below = [top - value for top, value in zip(values, series[number][1], strict=True)]
            drawn.append(_area(plot, below, values, number))
        drawn += _lines(plot, values, number)
    return drawn + legend


def _stacked(series: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each series on top of those before it, of which missing values count as nothing."""
    tops: list[list[float]] = []
    below = [0.0] * len(series[0])
    for values in series:
        tops.append([low + value for low, value in zip(below, values, strict=True)])
        below = [low if math.isnan(top) else top for low, top in zip(below, tops[-1], strict=True)]
    return tops


def _runs(values: Sequence[float]) -> Iterable[list[int]]:
    """Yield the numbers of points that follow each other without a gap."""
    for is_gap, run in groupby(range(len(values)), key=lambda n: math.isnan(values[n])):
        if not is_gap:
            yield list(run)


def _lines(plot: Plot, values: Sequence[float], number: int) -> list[str]:
    color = number % len(LIGHT)
    drawn = []
    for run in _runs(values):
        if len(run) == 1:
            drawn.append(f'<circle class="d{color}" cx="{plot.x(run[0]):.1f}" cy="{plot.y(values[run[0]]):.1f}" r="2"/>')
        else:
            drawn.append(f'<path class="s{color}" d="M{"L".join(_point(plot, n, values[n]) for n in run)}"/>')
    return drawn


def _area(plot: Plot, below: Sequence[float], values: Sequence[float], number: int) -> str:
    outlines = []
    for run in _runs(values):
        up = [_point(plot, n, values[n]) for n in run]
        down = [_point(plot, n, below[n]) for n in reversed(run)]
        outlines.append(f"M{'L'.join(up + down)}Z")
    return f'<path class="f{number % len(LIGHT)}" d="{"".join(outlines)}"/>'


def _point(plot: Plot, number: int, value: float) -> str:
    return f"{plot.x(number):.1f} {plot.y(value):.1f}"


def _legend(names: Sequence[str], box: Box) -> tuple[list[str], float]:
    """Return the legend at the bottom of a panel, and its height."""
    places, x, line = [], 0.0, 0
    for name in names:
        width = 20 + len(name) * CHARACTER_PX + 10
        if x and x + width > box.width - 16:
            x, line = 0.0, line + 1
        places.append((name, x, line))
        x += width
    top = box.y + box.height - line * LEGEND_PX - 9
    drawn = []
    for number, (name, left, below) in enumerate(places):
        x, y = box.x + 10 + left, top + below * LEGEND_PX
        drawn.append(f'<path class="s{number % len(LIGHT)} key" d="M{x:.1f} {y - 4:.1f}h13"/>')
        drawn.append(_text(x + 18, y, name, "small"))
    return drawn, line * LEGEND_PX + 12


def _state_timeline(panel: Mapping[str, Any], answer: Mapping[str, Any], box: Box) -> list[str]:
    states = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    series = list(series_of(answer))
    plot = Plot(box, len(series[0][1]), box.y + box.height - 40, [0.0, 1.0])
    room = (plot.bottom - plot.top) / len(series)
    drawn = [*box.frame(panel["title"]), *plot.times()]
    for row, (name, values) in enumerate(series):
        y = plot.top + row * room
        drawn.append(_text(plot.left - 7, y + room / 2 + 4, name, "small end"))
        for value, run in groupby(range(len(values)), key=lambda n: None if math.isnan(values[n]) else values[n]):
            numbers = list(run)
            if value is None:
                continue
            left, right = plot.x(numbers[0]), min(plot.x(numbers[-1] + 1), plot.right)
            state = states[f"{value:g}"]
            color = NAMED[state["color"]]
            drawn.append(_rect(f"b{color}", left, y + 2, right - left, room - 4))
            if right - left > len(state["text"]) * CHARACTER_PX + 8:
                drawn.append(_text((left + right) / 2, y + room / 2 + 4, state["text"], "small middle"))
    for number, state in enumerate(states.values()):
        x, y = box.x + 10 + number * 78, box.y + box.height - 9
        drawn.append(_rect(f"d{NAMED[state['color']]}", x, y - 8, 9, 9))
        drawn.append(_text(x + 14, y, state["text"], "small"))
    return drawn


_DRAWN: dict[str, Callable[[Any, Any, Box], list[str]]] = {
    "row": _row,
    "stat": _stat,
    "timeseries": _timeseries,
    "state-timeline": _state_timeline,
}


def _head() -> list[str]:
    drawn, x = [_text(MARGIN + 2, 31, DASHBOARD["title"], "name")], 205.0
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            drawn.append(_text(x, 31, variable["label"], "small"))
            left = x + len(variable["label"]) * CHARACTER_PX + 14
            drawn.append(_rect("panel", left, 15, 44, 24))
            drawn.append(_text(left + 22, 31, variable["current"]["text"], "small middle"))
            x = left + 72
    return drawn


def _foot(y: float, conditions: Mapping[str, Any], found: Mapping[str, Any], length_s: float) -> list[str]:
    said = (
        "Drawn from dashboard.json, not by Grafana: its queries over "
        f"{length_s:.0f} s of four real sidecars, answered by Prometheus {found['prometheus']}, {conditions['date']}"
    )
    return [_text(MARGIN + 2, y + 20, said, "small")]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text, quote=False)}</text>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    head, page = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', _rect("page", 0, 0, WIDTH, height)
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_style()}</style>", page, *body, "</svg>"]) + "\n"


def _style() -> str:
    dark = " ".join(_colors(DARK))
    return f"""
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }}
.name {{ font-size: 16px }} .title {{ font-size: 12.5px }} .row {{ font-size: 14px }} .big {{ font-size: 30px }}
.name, .title, .row, .big {{ font-weight: 600 }}
.small {{ font-size: 11.5px; fill: #57606a }} .end {{ text-anchor: end }} .middle, .big {{ text-anchor: middle }}
.page {{ fill: #f4f5f5 }} .panel {{ fill: #ffffff; stroke: #dfe1e5 }}
.grid {{ stroke: #e6e8eb; fill: none }} path {{ stroke-width: 1.6; stroke-linejoin: round }} .key {{ stroke-width: 4 }}
{" ".join(_colors(LIGHT))}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #d8d9da }} .small {{ fill: #9fa7b3 }} .page {{ fill: #111217 }} .panel {{ fill: #181b1f; stroke: #2b2f36 }}
  .grid {{ stroke: #2b2f36 }}
  {dark}
}}
"""


def _colors(colors: Sequence[str]) -> Iterable[str]:
    """Yield the classes of a colour: s line, f area, d dot, b bar, t text."""
    for number, color in enumerate(colors):
        yield f".s{number} {{ stroke: {color}; fill: none }} .d{number}, .t{number} {{ fill: {color} }}"
        yield f".f{number}, .b{number} {{ fill: {color}; fill-opacity: .35; stroke: none }}"
