"""What the demo prints while it runs: one line per fact, with the seconds since it began."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any


class Timeline:
    """Lines from several threads, in order."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._lock = threading.Lock()

    def say(self, who: str, text: str) -> None:
        """Print a line."""
        with self._lock:
            print(f"{time.monotonic() - self._began_s:7.2f} s  {who:<8} {text}", flush=True)

    def heading(self, text: str) -> None:
        """Print a line between two acts."""
        with self._lock:
            print(f"\n── {text} " + "─" * max(0, 76 - len(text)), flush=True)


_SENTENCES = {
    "sidecar_started": "watches {dir}, store {store}",
    "store_opened": "store reached; uploads are verified by {verification}",
    "checkpoint_finished": "{checkpoint} is finished ({save_reason}, {files} files, {size_bytes:,} bytes)",
    "checkpoint_uploading": "{checkpoint} goes to the store",
    "checkpoint_committed": "{checkpoint} is durable, {saved_to_durable_s} s after the trainer finished it",
    "checkpoint_committed_before": "{checkpoint} was downloaded: it is durable already",
    "checkpoint_found_bad": "{checkpoint} is bad: {reason}",
    "local_checkpoint_deleted": "{checkpoint} leaves the volume: {reason}",
    "resume_download_started": "{checkpoint} is wanted for a resume: {size_bytes:,} bytes",
    "resume_ready": "{checkpoint} is ready to resume from ({source}, every file verified)",
    "resume_none": "nothing in the store to resume from",
    "termination_noticed": "the pod terminates ({source})",
    "phase_changed": "phase {before} → {phase}",
    "exit_report": "exits {exit_code}; newest durable step {newest_durable_step}",
    "store_degraded": "store trouble: {error}",
}


def sentence(event: dict[str, Any]) -> str | None:
    """Return a log event of the sidecar as a sentence, or ``None`` if the timeline can do without it."""
    name = str(event.get("event"))
    template = _SENTENCES.get(f"{name}_before" if event.get("downloaded") else name)
    try:
        return template.format_map(event) if template else None
    except (KeyError, ValueError):
        return f"{event.get('event')}: {event.get('checkpoint', '')}"


def complain(text: str) -> None:
    """Print a line on standard error."""
    print(f"make demo: {text}", file=sys.stderr, flush=True)
