"""``checkpoint-sidecar webhook``: serves over TLS and takes up new certificates while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from sidecar.daemon.logging import configure
from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.options import Options, from_environment
from sidecar.kubernetes.webhook.app import create_app
from sidecar.kubernetes.webhook.limits import server_limits
from sidecar.serving import is_news

log = structlog.get_logger()

_CHECK_S = 2.0
_LEAVE_S = 5.0
"""From SIGTERM to the last request. A second SIGTERM, or SIGINT, ends it at once."""


class Certificate:
    """A certificate and its key in two files, and the TLS context that serves them."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._loaded: object = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def load(self) -> bool:
        """Load the files if they have changed; connections made from now on use them. Returns whether they had.

        Raises:
            OSError: A file cannot be read, or the two do not belong together (ssl.SSLError).
        """
        # A mounted Secret is replaced by renaming a link: other inodes, and both files at the same instant.
        found = [(at.st_ino, at.st_mtime_ns, at.st_size) for at in (path.stat() for path in self._files)]
        if found == self._loaded:
            return False
        # Tried on a context of its own first: half of a pair must not stay in the one that serves.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
        self.context.load_cert_chain(*self._files)
        self._loaded = found
        return True

    async def keep_fresh(self) -> None:
        """Look for new files for ever. While they do not load, the old ones serve."""
        said = ""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                if self.load():
                    log.info("certificate_reloaded", file=str(self._files[0]))
                said = ""
            except OSError as error:
                if str(error) != said:
                    log.warning("certificate_not_loaded", file=str(self._files[0]), error=str(error))
                said = str(error)


class _Server(uvicorn.Server):
    """Ends with exit code 0 when it is told to: uvicorn would raise the signal once more.

    After SIGTERM it serves for a while: API servers send requests until all nodes know that the pod goes, and a refused one
    means a pod that is not made.
    """

    _is_leaving = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.handle_exit, signal.SIGINT, None)
        loop.add_signal_handler(signal.SIGTERM, self._leave, loop)
        yield

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(0 if self._is_leaving else _LEAVE_S, self.handle_exit, signal.SIGTERM, None)
        self._is_leaving = True


def run(*, host: str, port: int, tls_cert: Path, tls_key: Path) -> None:
    """Serve until SIGTERM; what is injected comes from the environment and from annotations.

    Raises:
        ConfigurationError: An environment variable is not valid, or the certificate cannot be loaded.
    """
    log_style = os.environ.get("CKPT_LOG") or "json"
    if log_style not in ("json", "console"):
        raise ConfigurationError(f"CKPT_LOG={log_style!r}: must be json or console")
    configure("console" if log_style == "console" else "json")
    asyncio.run(serve(from_environment(os.environ), Certificate(tls_cert, tls_key), host=host, port=port))


async def serve(defaults: Options, certificate: Certificate, *, host: str, port: int) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigurationError: The certificate cannot be loaded.
    """
    try:
        certificate.load()
    except OSError as error:
        raise ConfigurationError(
            f"the certificate cannot be loaded: {error.filename or ''} {error}".replace("  ", " ")
        ) from None
    config = uvicorn.Config(create_app(defaults), host=host, port=port, log_config=None, access_log=False, **server_limits())
    logging.getLogger("uvicorn.error").addFilter(is_news)
    config.load()
    config.ssl = certificate.context
    server = _Server(config)
    fresh = asyncio.create_task(certificate.keep_fresh())
    try:
        await server.serve()
    finally:
        fresh.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fresh
