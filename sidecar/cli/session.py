"""A command's work in a store, with its progress on standard error and without the log of a daemon."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from sidecar.cli import progress
from sidecar.standalone.session import StoreSession, run

T = TypeVar("T")


def run_in_store(
    command: str, store: str, work: Callable[[StoreSession, progress.OnProgress], Awaitable[T]], *, counts: bool = False
) -> T:
    """Open a store, do the work, and return its result.

    Args:
        command: Name of the command, for messages.
        store: The prefix.
        work: Gets the opened store, and a function that shows its progress.
        counts: The progress is in numbers of things, not in bytes.

    Raises:
        SidecarError: As ``standalone.session.opened`` and the work do.
    """
    # Errors are raised, and waits are shown as progress: the log's lines are for a daemon.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger().addHandler(logging.NullHandler())  # those of libraries, too, which Python prints otherwise
    with progress.shown(command, counts=counts) as on_progress:
        return run(store, lambda session: work(session, on_progress), happened=progress.Note(command))
