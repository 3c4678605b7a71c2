"""Pages that are made of the code: ``python -m docs_site.reference`` writes them, ``--check`` names those that are stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs_site import reference_api, reference_commands, reference_settings
from sidecar.api import metrics_reference

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "settings.md": reference_settings.page,
    "metrics.md": metrics_reference.reference,
    "reference/cli.md": reference_commands.commands_page,
    "reference/annotations.md": reference_commands.annotations_page,
    "reference/exit-codes.md": reference_commands.exit_codes_page,
    "reference/http-api.md": lambda: reference_api.page(reference_api.description()),
}
"""Each page below docs/ and the function that makes it."""


def stale() -> list[str]:
    """Return the names of pages that differ from what the code says."""
    return [name for name, make in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != make()]


def main() -> int:
    """Write the pages, or with ``--check`` only name those that are stale. Returns the exit code."""
    if "--check" in sys.argv[1:]:
        names = stale()
        for name in names:
            sys.stderr.write(f"docs/{name} is stale: run make reference\n")
        return 1 if names else 0
    for name, make in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
