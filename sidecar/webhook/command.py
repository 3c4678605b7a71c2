"""``checkpoint-sidecar webhook``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from sidecar.errors import ConfigurationError
from sidecar.inject.options import from_environment

EXIT_CONFIGURATION = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``webhook``; what it injects comes from the environment and from annotations."""
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default all)")  # noqa: S104 - serves the API server
    parser.add_argument("--port", type=int, default=8443)
    parser.add_argument(
        "--tls-cert", type=Path, default=Path("/tls/tls.crt"), metavar="FILE", help="read again when it changes"
    )
    parser.add_argument("--tls-key", type=Path, default=Path("/tls/tls.key"), metavar="FILE")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM and return the exit code."""
    from sidecar.logging import configure
    from sidecar.webhook.server import Certificate, serve

    log = os.environ.get("CKPT_LOG") or "json"
    try:
        if log not in ("json", "console"):
            raise ConfigurationError(f"CKPT_LOG={log!r}: must be json or console")
        configure("console" if log == "console" else "json")
        certificate = Certificate(arguments.tls_cert, arguments.tls_key)
        asyncio.run(serve(from_environment(os.environ), certificate, host=arguments.host, port=arguments.port))
    except ConfigurationError as error:
        print(f"checkpoint-sidecar webhook: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    return 0
