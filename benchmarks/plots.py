"""The picture of ``make demo`` in the README, drawn from ``benchmarks/results/demo.json``: ``make plots``.

It is one SVG without scripts and fonts of its own; its colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks import results

RESULTS = results.FOLDER / "demo.json"
PICTURE = results.FOLDER.parents[1] / "docs/images/demo.svg"
WIDTH = 860
BAR_PX = 18
STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #57606a }
.strong { font-weight: 600 } .good { fill: #1a7f37; font-weight: 600 } .bad { fill: #cf222e; font-weight: 600 }
.bar-ours { fill: #0969da } .store { fill: #1a7f37 } .line { stroke: #8c959f; fill: none }
.cut { stroke: #cf222e; stroke-width: 2; fill: none } .arrow { stroke: #1a7f37; stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .good { fill: #3fb950 } .bad { fill: #f85149 }
  .bar-ours { fill: #4493f8 } .store { fill: #3fb950 } .line { stroke: #6e7681 }
  .cut { stroke: #f85149 } .arrow { stroke: #3fb950 }
}
"""


def main() -> int:
    """Draw the picture. Returns the exit code."""
    _, outcome = results.read(RESULTS)
    PICTURE.write_text(demo(outcome))
    return 0


def demo(outcome: Mapping[str, Any]) -> str:
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
        _text(x(stopped) + 14, 88, "a checkpoint of the very step is saved, and durable in time", "small"),
        _text(20, 138, "store", "strong"),
        f'<line class="line" x1="{left}" x2="{right}" y1="133" y2="133"/>',
        _text(20, 198, "pod 2", "strong"),
        _bar(x(resumed), 184, x(MAX_STEPS) - x(resumed), "bar-ours"),
        _text(left, 198, f"resumed at {resumed}", "strong"),
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
        _text(20, 266, f"{MAX_STEPS} steps of a tiny Llama; a save every {SAVE_STEPS} steps", "small"),
    ]
    return _svg(280, f"Timeline of make demo: {lost} steps lost", body)


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
