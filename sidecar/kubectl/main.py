"""The program ``kubectl-ckpt``, which kubectl runs as ``kubectl ckpt``: exceptions become one line and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress

from sidecar.cli import streams
from sidecar.cli.missing_package import not_installed
from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_NOTHING, EXIT_REFUSED, EXIT_UNREACHABLE
from sidecar.errors import ConfigurationError, NothingFound, RequestRefused, SidecarError
from trainer_hook.contract.plain_text import plain_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (docs/kubectl.md, "Exit codes")."""
    arguments = sys.argv[1:] if arguments is None else arguments
    streams.prepare()
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except streams.OutputLost as error:
        return _fail(str(error), EXIT_FAILED, arguments)
    except SidecarError as error:
        return _fail(str(error), _exit_code(error), arguments)
    except ModuleNotFoundError as error:
        return _fail(not_installed(error, "kubectl-ckpt"), EXIT_CONFIGURATION, arguments)
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_FAILED


def _exit_code(error: SidecarError) -> int:
    from sidecar.kubectl.cluster import ClusterUnreachable

    match error:
        case ConfigurationError():
            return EXIT_CONFIGURATION
        case NothingFound():
            return EXIT_NOTHING
        case ClusterUnreachable():
            return EXIT_UNREACHABLE
        case RequestRefused():
            return EXIT_REFUSED
        case _:
            return EXIT_FAILED


def _invoke(arguments: Sequence[str]) -> int:
    import typer
    from typer.exceptions import TyperException

    from sidecar.kubectl.app import app

    # Not app(): that would end the process and install an exception hook.
    group = typer.main.get_command(app)
    try:
        with group.make_context("kubectl ckpt", list(arguments)) as context:
            return int(group.invoke(context) or 0)
    except typer.Exit as ended:
        return ended.exit_code
    except TyperException as error:
        return _fail(f"{error.format_message().rstrip('.')}: see 'kubectl ckpt --help'", EXIT_CONFIGURATION, arguments)


def _fail(text: str, code: int, arguments: Sequence[str]) -> int:
    text = plain_text(text)
    if "--json" in arguments:
        with suppress(streams.OutputLost, BrokenPipeError):  # the line tells it, too
            print(json.dumps({"error": text, "exit_code": code}), flush=True)
    print(f"kubectl ckpt: {text}", file=sys.stderr, flush=True)
    return code
