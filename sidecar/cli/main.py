"""The program ``checkpoint-sidecar``: runs a command, and turns its exceptions into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sidecar.cli.client import Refused, Unreachable
from sidecar.cli.direct import DIRECT
from sidecar.cli.missing_package import not_installed
from sidecar.cli.output import fail
from sidecar.cli.streams import OutputLost
from sidecar.core.lifecycle.exit_codes import (
    EXIT_CONFIGURATION,
    EXIT_DAMAGED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
)
from sidecar.errors import (
    AccessRefused,
    ConfigurationError,
    CorruptObject,
    Fenced,
    NotFound,
    NothingFound,
    RequestRefused,
    SidecarError,
    StoreUnavailable,
    UnreadableRun,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (FORMAT.md, "Exit codes")."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    said, as_json = f" {name}" if name else "", "--json" in arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except OutputLost as error:
        return fail(f"{said}: {error}", EXIT_FAILED)
    except (Unreachable, Refused, SidecarError) as error:
        # A probe has two exit codes: the kubelet knows no others.
        return fail(f"{said}: {error}", EXIT_FAILED if name == "probe" else exit_code(error), as_json=as_json)
    except ModuleNotFoundError as error:
        return fail(f"{said}: {not_installed(error, name)}", EXIT_CONFIGURATION, as_json=as_json)
    except KeyboardInterrupt:
        if name not in ("pull", "push"):
            return EXIT_INTERRUPTED
        return fail(f"{said}: interrupted: the same command continues", EXIT_INTERRUPTED, as_json=as_json)
    except BrokenPipeError:
        return EXIT_FAILED


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that raised an error."""
    match error:
        case ConfigurationError() | AccessRefused() | UnreadableRun():
            return EXIT_CONFIGURATION
        case NothingFound() | NotFound() | Refused(status=404):
            return EXIT_NOTHING
        case Unreachable() | StoreUnavailable():
            return EXIT_UNREACHABLE
        case Refused() | RequestRefused() | Fenced():
            return EXIT_REFUSED
        case CorruptObject():
            return EXIT_DAMAGED
        case _:
            return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    if command := DIRECT.get(tuple(arguments)):
        return command()
    # Not above: typer takes longer to load than a probe may take.
    from sidecar.cli.app import invoke

    return invoke(arguments)
