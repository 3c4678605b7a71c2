"""The program ``kubectl-ckpt``, which kubectl runs as ``kubectl ckpt``: exceptions become one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from sidecar.cli import streams
from sidecar.cli.main import exit_code
from sidecar.cli.missing_package import not_installed
from sidecar.cli.output import fail
from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_UNREACHABLE
from sidecar.errors import ConfigurationError, SidecarError
from sidecar.kubectl.cluster import ClusterUnreachable

PROGRAM = "kubectl ckpt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (docs/kubectl.md, "Exit codes")."""
    arguments = sys.argv[1:] if arguments is None else arguments
    failed = partial(fail, as_json="--json" in arguments, program=PROGRAM)
    streams.prepare()
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except streams.OutputLost as error:
        return failed(f": {error}", EXIT_FAILED)
    except ClusterUnreachable as error:
        return failed(f": {error}", EXIT_UNREACHABLE)
    except SidecarError as error:
        return failed(f": {error}", exit_code(error))
    except ModuleNotFoundError as error:
        return failed(f": {not_installed(error, 'kubectl-ckpt')}", EXIT_CONFIGURATION)
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_FAILED


def _invoke(arguments: Sequence[str]) -> int:
    from typer.exceptions import TyperException

    from sidecar.cli.app import outcome
    from sidecar.kubectl.app import app

    try:
        return outcome(app, PROGRAM, arguments)
    except TyperException as error:
        raise ConfigurationError(f"{error.format_message().rstrip('.')}: see '{PROGRAM} --help'") from None
