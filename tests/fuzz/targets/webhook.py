"""AdmissionReviews: each body has an answer with status 200 or 400, whose patch applies to the object."""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
from typing import Any

import jsonpatch
from structlog.testing import capture_logs

from sidecar.kubernetes.inject import Options
from sidecar.kubernetes.inject.options import with_given
from sidecar.kubernetes.webhook.app import create_app

INSTRUMENTED = ("sidecar.kubernetes",)
IS_JSON = True
APP = create_app(with_given(Options(), {"store": "s3://bucket/runs/{namespace}/{name}"}))
LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)
SCOPE = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/mutate",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


def check(raw: bytes) -> None:
    with capture_logs() as logged:
        status, answer = LOOP.run_until_complete(_posted(raw))
    json.dumps(logged)
    assert status in (200, 400), status
    if status == 400:
        return
    response = answer["response"]
    assert response["allowed"] in (True, False)
    assert all(warning.isprintable() for warning in response.get("warnings", ()))
    if "patch" in response:
        jsonpatch.apply_patch(json.loads(raw)["request"]["object"], json.loads(base64.b64decode(response["patch"])))


async def _posted(raw: bytes) -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await APP({**SCOPE, "headers": list(SCOPE["headers"])}, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body)
