"""Progress of long commands on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sidecar.cli.output import say, what_failed
from sidecar.core.format.readable import seconds_text, size_text
from trainer_hook.contract.plain_text import plain_text

LINE_S = 10.0
"""Interval in seconds of the lines where standard error is no terminal."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, the amount done, and the total; 0: unknown. An empty text: nothing is being done."""


class Note:
    """Events of a store, as lines on standard error."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(self, name: str, **fields: Any) -> None:
        """Say that the store does not answer; that it answers again follows from the progress."""
        if name == "store_degraded":
            say(f"tried again: {what_failed(plain_text(str(fields.get('error', ''))))}", self._command)


@contextmanager
def shown(command: str, *, counts: bool = False) -> Iterator[OnProgress]:
    """Yield a function that shows progress, with rate and time left.

    ``counts``: the amounts are numbers of things, not bytes.
    """
    if not sys.stderr.isatty():
        yield _Lines(command, counts=counts)
        return
    with _bars(counts=counts) as on_progress:
        yield on_progress


class _Lines:
    def __init__(self, command: str, *, counts: bool) -> None:
        self._command = command
        self._text: Callable[[float], str] = (lambda amount: f"{amount:,.0f}") if counts else size_text
        self._began_s = self._said_s = time.monotonic()
        self._began_at = 0
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not what:
            return
        if what != self._what:
            self._what, self._began_s, self._began_at = what, now_s, done
        if now_s - self._said_s < LINE_S:
            return
        self._said_s = now_s
        rate = (done - self._began_at) / max(1e-3, now_s - self._began_s)
        left = f", {seconds_text((total - done) / rate)} left" if rate > 0 and total else ""
        amount = f"{self._text(done)} of {self._text(total)}" if total else self._text(done)
        say(f"{what}: {amount}, {self._text(rate)}/s{left}", self._command)


@contextmanager
def _bars(*, counts: bool) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(*_columns(counts=counts), console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.remove_task(task)
                tasks.clear()
                if not what:
                    return
                tasks[what] = progress.add_task(escape(plain_text(what)), total=total or None, completed=done)
            progress.update(tasks[what], completed=done, total=total or None)

        yield on_progress


def _columns(*, counts: bool) -> list[Any]:
    """Return the columns of a bar; amount, rate and time are empty while the total is not known."""
    from rich.console import RenderableType
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class WhileKnown(ProgressColumn):
        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return Text() if task.total is None else self._column(task)

    amounts = [MofNCompleteColumn()] if counts else [DownloadColumn(), TransferSpeedColumn()]
    return [TextColumn("{task.description}"), BarColumn(), *map(WhileKnown, [*amounts, TimeRemainingColumn()])]
