"""The command ``checkpoint-sidecar``: runs one, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sidecar.cli.client import Refused, Unreachable
from sidecar.cli.direct import DIRECT
from sidecar.cli.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED
from sidecar.cli.missing_package import not_installed
from sidecar.cli.output import fail
from sidecar.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (FORMAT.md, "Exit codes")."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    said, as_json = f" {name}" if name else "", "--json" in arguments
    try:
        return _run(arguments)
    except (Unreachable, Refused) as error:
        return fail(f"{said}: {error}", EXIT_FAILED, as_json=as_json)
    except ConfigurationError as error:
        return fail(f"{said}: {error}", EXIT_CONFIGURATION, as_json=as_json)
    except ModuleNotFoundError as error:
        return fail(f"{said}: {not_installed(error)}", EXIT_CONFIGURATION, as_json=as_json)
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    if command := DIRECT.get(tuple(arguments)):
        return command()
    # Not above: typer takes longer to load than a probe may take.
    from sidecar.cli.app import invoke

    return invoke(arguments)
