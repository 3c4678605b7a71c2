"""``python -P tests/moto_server.py PORT``: moto that is as careful as a store.

Its conditional writes come one after the other, and it compares Content-MD5. moto looks for the object and writes it in two
steps, so that of two writers at once both could be the first, and takes a body that is not of its Content-MD5.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

BAD_DIGEST = b"<Error><Code>BadDigest</Code><Message>The Content-MD5 did not match what we received.</Message></Error>"


class Careful:
    """moto with one lock for all writes with a condition, and a comparison of the MD5 that a request names."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._app.debug = True
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_conditional, md5 = "HTTP_IF_NONE_MATCH" in environ, environ.get("HTTP_CONTENT_MD5")
        if not (is_conditional or md5) or environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            return self._answer(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # before the lock: it may never arrive
        environ["wsgi.input"] = io.BytesIO(body)
        if md5 and base64.b64encode(hashlib.md5(body).digest()).decode() != md5:
            start_response("400 Bad Request", [("Content-Type", "application/xml"), ("Content-Length", str(len(BAD_DIGEST)))])
            return [BAD_DIGEST]
        with self._lock if is_conditional else contextlib.nullcontext():
            return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_simple("127.0.0.1", int(sys.argv[1]), Careful(), threaded=True, request_handler=MotoRequestHandler)
