"""uvicorn inside the daemon's event loop. Signals belong to the daemon, not to the web server."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from sidecar.api.guard import Guard
from sidecar.catalog.durations import Durations
from sidecar.errors import ConfigurationError
from sidecar.serving import Connection, is_news

MOST_HEAD_BYTES = 16 << 10
"""Maximum size of request line and headers."""


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves one application on listening sockets."""

    def __init__(
        self, app: FastAPI, sockets: list[socket.socket], *, any_host: bool = False, durations: Durations | None = None
    ) -> None:
        """Prepare to serve. ``any_host``: accept any Host header; otherwise only loopback names and unix sockets."""
        config = uvicorn.Config(
            Guard(app, any_host=any_host, durations=durations),
            http=Connection,
            backlog=Connection.backlog(),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=0,
            server_header=False,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )
        logging.getLogger("uvicorn.error").addFilter(is_news)
        self._server = _Uvicorn(config)
        self._sockets = sockets

    async def serve(self) -> None:
        """Serve until ``stop``."""
        await self._server.serve(sockets=self._sockets)

    def stop(self) -> None:
        """Stop. Waiting calls get their answers first; streams that nobody reads are aborted."""
        self._server.should_exit = True


def listen(host: str, port: int, *, setting: str) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigurationError: The port is in use; the text names ``setting``, which sets it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # fails, too, if the port is in use: sockets that do not listen yet may share it
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror}: is another sidecar running, or hostNetwork in use?"
        ) from None
    return listening
