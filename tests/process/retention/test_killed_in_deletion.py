"""A sidecar that is killed in the middle of a deletion in the store, and the next one on another volume."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sidecar.daemon.settings import from_environment
from sidecar.store.opening import open_from
from tests import servers
from tests.process.sidecar_process import sidecar, until, write_checkpoint


@pytest.mark.slow
def test_the_next_pod_deletes_what_a_killed_one_left(moto_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies, settings = True, moto_server.settings(prefix="killed") | {"CKPT_KEEP_STORE": "1", "CKPT_RESUME": "on-demand"}

    def rule(request: servers.Request) -> servers.ProxyAnswer | None:
        deletes = request.method == "DELETE" or (request.method == "POST" and "delete" in request.query)
        what = f"{request.path}{request.body.decode(errors='replace')}"
        if dies and deletes and "killed/checkpoint-1/" in what and ".complete" not in what:
            running.process.kill()
            return servers.s3_error(503, "SlowDown")
        return None

    with servers.Proxy(moto_server.endpoint, rule).running() as endpoint:
        settings["AWS_S3_ENDPOINT"] = endpoint
        with sidecar(tmp_path / "volume", settings) as running:
            running.ready()
            for step in (1, 2):
                write_checkpoint(running.volume, f"checkpoint-{step}", {"model": b"x" * 100}, {"attempt": "a"})
                running.committed(f"checkpoint-{step}")
            running.wait()
        dies = False
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with closing(open_from(from_environment(settings))) as store:
            left = {stored.key for stored in store.list("checkpoint-1/")}
            assert {"checkpoint-1/model", "checkpoint-1/.ckpt/deletion.json"} <= left
            assert "checkpoint-1/.complete" not in left
            with sidecar(tmp_path / "other", settings) as running:
                until(lambda: running.events("store_deletion_finished"))
                assert list(store.list("checkpoint-1/")) == []
                assert list(store.list("checkpoint-2/.complete"))
