"""A sidecar that may open few descriptors, and clients that open many connections."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from tests.process.sidecar_process import sidecar, write_checkpoint

MOST_FILES = 64


def test_many_connections_leave_descriptors_for_checkpoints_and_probes(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path}/store"}
    with (
        sidecar(tmp_path / "volume", settings, within=["prlimit", f"--nofile={MOST_FILES}"]) as running,
        contextlib.ExitStack() as clients,
    ):
        running.ready()
        for _ in range(10 * MOST_FILES):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", running.port))
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(1 << 20)}, {})
        running.committed("checkpoint-10")
        assert "Too many open files" not in running.log(), "nor is the log full of it"
        assert running.terminate() == 0
