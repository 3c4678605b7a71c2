"""A sidecar whose log cannot be written does its work all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint


@pytest.mark.parametrize(
    ("redirection", "style"),
    [
        (">/dev/full 2>&1", "json"),
        pytest.param(">/dev/full", "console", marks=pytest.mark.slow),
        pytest.param(">&- 2>&- <&-", "console", marks=pytest.mark.slow),
        ("| head -n 1", "json"),
    ],
)
def test_a_sidecar_without_a_log_uploads_and_ends_as_it_should(redirection: str, style: str, tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_LOG": style}
    script = f'"$@" {redirection}' if "|" in redirection else f'exec "$@" {redirection}'
    with sidecar(tmp_path / "volume", settings, within=["bash", "-c", f"set -o pipefail; {script}", "bash"]) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model.bin": b"weights" * 1000})
        until(lambda: running.status()["newest_durable_step"] == 10, what="the checkpoint is durable")
        os.kill(process(running), signal.SIGTERM)
        assert running.wait() == 0, running.log()
        assert running.report["exit_code"] == 0


def process(running: Sidecar) -> int:
    """Return the sidecar's process: the one that was started, or the first of that shell's pipe."""
    pid = running.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid
