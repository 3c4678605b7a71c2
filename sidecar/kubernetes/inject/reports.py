"""What is said of a document: why it cannot have a sidecar, and warnings; each with the path of the field."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.errors import SidecarError
from trainer_hook.contract.plain_text import plain_text

UNEXPECTED_TYPE = (AttributeError, TypeError, KeyError, ValueError, IndexError, RecursionError)
"""What a field of another type than its API gives it causes, wherever it is read: a document has no schema here."""


class NotInjectable(SidecarError):
    """A document of an unknown form, or one that cannot have a sidecar as it is."""

    def __init__(self, path: str, why: str) -> None:
        path, why = plain_text(path), plain_text(why)
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why


def unexpected_type(path: str, error: Exception) -> NotInjectable:
    """Return the refusal of a document of which a field has another type than its API gives it (``UNEXPECTED_TYPE``)."""
    said = f"{type(error).__name__}: {str(error)[:200]}"
    return NotInjectable(path, f"a field has an unexpected type or value ({said}): kubectl apply --dry-run=server names it")


@dataclass(frozen=True, slots=True)
class InjectWarning:
    """A problem that will show when the workload runs: its path in the document, the problem, the remedy."""

    path: str
    text: str
    unless_injected: str | None = None
    """Name of a training runtime; no warning where the same file injects into it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"
