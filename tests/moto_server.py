"""``python -P tests/moto_server.py PORT``: moto, whose conditional writes come one after the other.

moto looks for the object and writes it in two steps, so that of two writers at once both could be the first.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class Conditional:
    """moto with one lock for all writes with a condition."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._app.debug = True
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ or environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            return self._answer(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # before the lock: it may never arrive
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_simple("127.0.0.1", int(sys.argv[1]), Conditional(), threaded=True, request_handler=MotoRequestHandler)
