"""A server before a real S3 server that gives untrue answers, also ones that never end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.ports import served
from tests.servers import Proxy, Request

Lie = Callable[[Request], Iterable[bytes] | None]
"""Returns the bytes of an answer, with its head; ``None``: the request is passed on."""


class Liar:
    """``lie`` may be exchanged at any time. ``told``: how many answers were not true."""

    def __init__(self, target: str) -> None:
        self.lie: Lie = lambda _: None
        self.told = 0
        self._proxy = Proxy(target)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        with served(server):
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                self.lie = lambda _: None

    def _handler(liar) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - 'self' is the handler's below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers.items()), body)
                if (said := liar.lie(request)) is None:
                    self._pass_on(request)
                    return
                liar.told += 1
                self.close_connection = True
                with contextlib.suppress(OSError):  # the client has heard enough
                    for piece in said:
                        self.wfile.write(piece)

            def _pass_on(self, request: Request) -> None:
                status, headers, content = liar._proxy._pass_on(request)
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", headers.get("Content-Length", str(len(content))))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - the base class's names

        return Handler
