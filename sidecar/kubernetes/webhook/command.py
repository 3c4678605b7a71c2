"""``checkpoint-sidecar webhook``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.options import from_environment


def run(*, host: str, port: int, tls_cert: Path, tls_key: Path) -> None:
    """Serve until SIGTERM; what is injected comes from the environment and from annotations.

    Raises:
        ConfigurationError: An environment variable is not valid, or the certificate cannot be loaded.
    """
    from sidecar.daemon.logging import configure
    from sidecar.kubernetes.webhook.server import Certificate, serve

    log = os.environ.get("CKPT_LOG") or "json"
    if log not in ("json", "console"):
        raise ConfigurationError(f"CKPT_LOG={log!r}: must be json or console")
    configure("console" if log == "console" else "json")
    asyncio.run(serve(from_environment(os.environ), Certificate(tls_cert, tls_key), host=host, port=port))
