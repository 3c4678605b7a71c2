"""A progress bar for the download of a resume, on a terminal or in a notebook, with tqdm or rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Show = Callable[[int], None]
"""Draws a number of bytes; a negative one closes the bar."""


def is_watched(environ: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 and its output goes to a terminal or notebook."""
    if environ.get("RANK", "0") != "0":
        return False
    stream = sys.stderr
    return "ipykernel" in sys.modules or (stream is not None and not stream.closed and stream.isatty())


class Bar:
    """Shows one download after the other. False where nothing is drawn."""

    def __init__(self, make: Callable[[str, int], Show] | None) -> None:
        self._make = make
        self._name = ""
        self._show: Show | None = None

    def __bool__(self) -> bool:
        return self._make is not None

    def __call__(self, progress: Mapping[str, Any]) -> bool:
        """Draw an answer of ``GET /v1/resume``. Returns whether it was drawn."""
        name, total = str(progress.get("checkpoint") or ""), int(progress.get("total_bytes") or 0)
        if self._make is None or progress.get("state") != "downloading" or not name or not total:
            self.close()
            return False
        if name != self._name or self._show is None:
            self.close()
            self._name, self._show = name, self._make(f"[checkpoint] {name}", total)
        self._show(int(progress.get("done_bytes") or 0))
        return True

    def close(self) -> None:
        """Close the bar."""
        if self._show is not None:
            self._show(-1)
            self._show = None


def bar() -> Bar:
    """Return a bar that draws if this process can."""
    if not is_watched(os.environ):
        return Bar(None)
    for make in (_with_tqdm, _with_rich):
        try:
            return Bar(make())
        except ImportError:
            continue
    return Bar(None)


def _with_tqdm() -> Callable[[str, int], Show]:
    from tqdm.auto import tqdm

    def make(title: str, total: int) -> Show:
        drawn = tqdm(total=total, desc=title, unit="B", unit_scale=True)

        def show(done: int) -> None:
            if done < 0:
                drawn.close()
            else:
                drawn.update(done - drawn.n)

        return show

    return make


def _with_rich() -> Callable[[str, int], Show]:
    from rich import progress as rich

    def make(title: str, total: int) -> Show:
        columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.DownloadColumn())
        drawn = rich.Progress(*columns, rich.TransferSpeedColumn())
        task = drawn.add_task(title, total=total)
        drawn.start()

        def show(done: int) -> None:
            if done < 0:
                drawn.stop()
            else:
                drawn.update(task, completed=done)

        return show

    return make
