"""Pictures of the documentation, drawn from ``benchmarks/results/*.json``: ``make plots``.

Each is one SVG without scripts and fonts of its own; its colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from benchmarks import results
from benchmarks.dashboard import picture

IMAGES = results.FOLDER.parents[1] / "docs/images"
WIDTH = 860
LABEL_PX, ROW_PX, BAR_PX = 210, 30, 18
STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #57606a } .ours { font-weight: 600 }
.strong { font-weight: 600 } .good { fill: #1a7f37; font-weight: 600 } .bad { fill: #cf222e; font-weight: 600 }
.bar { fill: #8c959f } .bar-ours { fill: #0969da } .store { fill: #1a7f37 } .line { stroke: #8c959f; fill: none }
.cut { stroke: #cf222e; stroke-width: 2; fill: none } .arrow { stroke: #1a7f37; stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .good { fill: #3fb950 } .bad { fill: #f85149 }
  .bar { fill: #6e7681 } .bar-ours { fill: #4493f8 } .store { fill: #3fb950 } .line { stroke: #6e7681 }
  .cut { stroke: #f85149 } .arrow { stroke: #3fb950 }
}
"""


def main() -> int:
    """Draw each picture whose results are there. Returns the exit code."""
    for source, draw in PICTURES.items():
        if not (results.FOLDER / source).exists():
            continue
        for name, text in draw(*results.read(results.FOLDER / source)).items():
            (IMAGES / name).write_text(text)
            sys.stdout.write(f"docs/images/{name}\n")
    return 0


def demo(conditions: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, str]:
    """Draw the run of ``make demo``, by its steps."""
    from examples.demo.scenario import MAX_STEPS, SAVE_STEPS

    left, right = 90, WIDTH - 30
    stopped, resumed = int(outcome["jit_step"]), int(outcome["resumed_step"])

    def x(step: float) -> float:
        return left + (right - left) * step / MAX_STEPS

    identical = "bit-identical" if outcome["bit_identical"] else "NOT identical"
    body = [
        _text(20, 28, f"make demo: SIGTERM at step {stopped}, the volume is deleted, a new pod goes on", "title"),
        _text(20, 78, "pod 1", "strong"),
        _bar(x(0), 64, x(stopped) - x(0), "bar-ours"),
        f'<path class="cut" d="M{x(stopped) - 5:.1f} 60l10 26m0 -26l-10 26"/>',
        _text(x(stopped) + 14, 71, "SIGTERM; pod and volume are gone", "bad"),
        _text(
            x(stopped) + 14,
            88,
            f"saved after {outcome['save_s']:.2f} s, durable after {outcome['sigterm_to_durable_s']:.2f} s",
            "small",
        ),
        _text(20, 138, "store", "strong"),
        f'<line class="line" x1="{left}" x2="{right}" y1="133" y2="133"/>',
        _text(20, 198, "pod 2", "strong"),
        _bar(x(resumed), 184, x(MAX_STEPS) - x(resumed), "bar-ours"),
        _text(left, 189, f"resumed at {resumed}", "strong"),
        _text(left, 206, f"in {outcome['resume_s']:.2f} s", "small"),
        f'<path class="arrow" d="M{x(stopped):.1f} 82V126"/>',
        f'<path class="arrow" d="M{x(resumed):.1f} 140V184m-4 -7l4 7l4 -7"/>',
    ]
    for step in sorted({*range(SAVE_STEPS, MAX_STEPS + 1, SAVE_STEPS), stopped}):
        body.append(f'<circle class="store" cx="{x(step):.1f}" cy="133" r="6"/>')
        if step == stopped or abs(step - stopped) > 2:
            body.append(_text(x(step) + (10 if step < MAX_STEPS else -62), 122, f"step {step}", "small"))
    lost = int(outcome["steps_lost"])
    body += [
        _text(
            20,
            244,
            f"{lost} steps lost · final weights {identical} to those of an uninterrupted run",
            "good" if not lost else "bad",
        ),
        _text(
            20,
            266,
            f"{MAX_STEPS} steps of a tiny Llama; a save every {SAVE_STEPS} steps · {results.in_words(dict(conditions))}",
            "small",
        ),
    ]
    return {"demo.svg": _svg(280, f"Timeline of make demo: {lost} steps lost", body)}


def transfer(conditions: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Draw CPU time, memory and, on a machine without other load, time of large files; one picture for each direction."""
    drawn = {}
    for result in found:
        if result["work"] != "big" or result["store"] != "sink":
            continue
        gib = result["size_bytes"] / (1 << 30)
        costs = {name: _cost(runs, result["starts"].get(name, [])) for name, runs in result["costs"].items()}
        costs = {name: cost for name, cost in costs.items() if name not in result["failed"]}
        panels = [
            ("CPU seconds per GiB", {name: cost["cpu_s"] / gib for name, cost in costs.items()}, "{:.2f}"),
            ("peak memory, MiB", {name: cost["peak_rss_mib"] for name, cost in costs.items()}, "{:.0f}"),
        ]
        if _is_quiet(conditions):
            panels.insert(1, ("seconds per GiB", {name: cost["wall_s"] / gib for name, cost in costs.items()}, "{:.2f}"))
        way = "Upload" if result["direction"] == "up" else "Download"
        title = f"{way} of {result['size_bytes'] >> 20} MiB over HTTP, medians of {result['rounds']} rounds (less is better)"
        drawn[f"bench-{result['direction']}load.svg"] = _bars(title, panels, conditions)
    return drawn


def sigterm(conditions: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Draw the seconds from SIGTERM until the last checkpoint is durable; nothing where other programs used the machine."""
    if not _is_quiet(conditions):
        return {}
    titles = {"idle": "nothing else to send", "half-sent": "an older one half sent", "backlog": "three older ones"}
    panels = []
    for situation in found["situations"]:
        seconds = {who: median(runs) for who, runs in situation["seconds"].items()}
        panels.append(
            (
                titles[situation["situation"]],
                {"ours": seconds["ours"], "Kubeflow SDK's scheme": seconds["kubeflow"]},
                "{:.1f} s",
            )
        )
    title = f"SIGTERM until durable: {found['mib']} MiB over {found['mbit_per_s']} Mbit/s, {found['round_trip_ms']} ms"
    return {"bench-sigterm.svg": _bars(title, panels, conditions)}


PICTURES: dict[str, Callable[[Mapping[str, Any], Any], dict[str, str]]] = {
    "demo.json": demo,
    "transfer.json": transfer,
    "sigterm.json": sigterm,
    "dashboard.json": picture.draw,
}
NAMES = {"ours": "checkpoint-sidecar", "wire": "plain sockets (the limit)"}


def _is_quiet(conditions: Mapping[str, Any]) -> bool:
    """Whether wall time was measured: with more runnable processes than cores it tells about the others."""
    return float(conditions["load"]) <= float(conditions["machine"]["cores"])


def _cost(runs: Sequence[Mapping[str, float]], starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return medians, CPU and wall time without the start, as ``benchmarks.report`` does."""
    cost = {name: median(run[name] for run in runs) for name in ("cpu_s", "wall_s", "peak_rss_mib")}
    for name in ("cpu_s", "wall_s"):
        cost[name] -= median(start[name] for start in starts) if starts else 0.0
    return cost


def _bars(title: str, panels: Sequence[tuple[str, Mapping[str, float], str]], conditions: Mapping[str, Any]) -> str:
    """Return panels of horizontal bars beside each other, with one list of names."""
    names = sorted(panels[0][1], key=lambda name: panels[0][1][name])
    room = (WIDTH - LABEL_PX - 20) / len(panels)
    body = [_text(20, 28, title, "title")]
    for row, name in enumerate(names):
        body.append(_text(20, 86 + row * ROW_PX, NAMES.get(name, name), "ours" if name == "ours" else ""))
    for number, (heading, values, form) in enumerate(panels):
        left, most = LABEL_PX + number * room, max(values.values())
        body.append(_text(left, 58, heading, "small"))
        for row, name in enumerate(names):
            length = max(2.0, (room - 70) * values[name] / most)
            kind = "bar-ours" if name == "ours" else "bar"
            body.append(_bar(left, 72 + row * ROW_PX, length, kind))
            body.append(
                _text(left + length + 6, 86 + row * ROW_PX, form.format(values[name]), "ours" if name == "ours" else "")
            )
    bottom = 84 + len(names) * ROW_PX
    body.append(
        _text(20, bottom + 10, f"{results.in_words(dict(conditions))}; only ratios within one picture are comparable", "small")
    )
    return _svg(bottom + 26, title, body)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}"{_class(kind)}>{escape(text, quote=False)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_PX}" rx="3"{_class(kind)}/>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _svg(height: int, title: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
