"""Readiness of a sidecar whose store is not usable."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import servers
from tests.process.sidecar_process import sidecar, until, write_checkpoint
from tests.process.upload.test_uploads import FILES


@pytest.mark.slow
def test_a_store_that_refuses_all_writes_and_answers_other_requests_is_not_ready(moto_server, tmp_path: Path) -> None:
    refuses = False

    def rule(request: servers.Request) -> servers.ProxyAnswer | None:
        return servers.s3_error(403, "AccessDenied") if refuses and request.method == "PUT" else None

    with (
        servers.Proxy(moto_server.endpoint, rule).running() as endpoint,
        sidecar(tmp_path / "volume", moto_server.settings(prefix="read-only") | {"AWS_S3_ENDPOINT": endpoint}) as running,
    ):
        running.ready()
        refuses = True
        write_checkpoint(running.volume, "checkpoint-1", FILES)
        until(lambda: running.status()["degraded"])
        answers = set()
        for _ in range(30):
            running.call("GET", "/v1/checkpoints?where=store")
            answers.add(running.call("GET", "/readyz")["http_status"])
            time.sleep(0.1)
        assert 503 in answers
        assert running.call("GET", "/readyz")["http_status"] == 503
        refuses = False
        running.committed("checkpoint-1")
        until(lambda: running.call("GET", "/readyz")["http_status"] == 200)
