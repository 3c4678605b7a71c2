"""Findings of ``doctor``: what is right, what works worse than it could, and what would make a run fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION, EXIT_DAMAGED, EXIT_DONE, EXIT_UNREACHABLE


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """A run works, with a feature lost or slower."""
    FAILURE = "failure"
    """A run would not start, or its checkpoints would not be durable or usable."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact with its consequence."""

    check: str
    """Name of the check, stable for programs."""
    severity: Severity
    text: str
    """What was found, and the consequence."""
    next_step: str | None = None
    """What to do about it; ``None`` only where nothing has to be done."""
    exit_code: int = EXIT_DONE


def is_full(error: str) -> bool:
    """Whether the text of an error of a file system says that it, or its user's quota, is full."""
    return any(text in error.lower() for text in ("no space left on device", "disk quota exceeded"))


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, Severity.OK, text)


def warning(check: str, text: str, next_step: str) -> Finding:
    """Return a finding with which a run works."""
    return Finding(check, Severity.WARNING, text, next_step)


def failure(check: str, text: str, next_step: str, *, exit_code: int = EXIT_CONFIGURATION) -> Finding:
    """Return a finding with which a run fails."""
    return Finding(check, Severity.FAILURE, text, next_step, exit_code)


def exit_code_of(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return the exit code: 0, or that of the gravest failure; a store out of reach hides all else about it.

    ``strict``: warnings count as failures.
    """
    found = list(findings)
    codes = {finding.exit_code for finding in found if finding.severity is Severity.FAILURE}
    for code in (EXIT_UNREACHABLE, EXIT_DAMAGED, EXIT_CONFIGURATION):
        if code in codes:
            return code
    warned = any(finding.severity is Severity.WARNING for finding in found)
    return EXIT_CONFIGURATION if codes or (strict and warned) else EXIT_DONE
