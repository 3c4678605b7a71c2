"""A notebook's kernel with the hook on its PYTHONPATH trains, is preempted, and continues in a new pod."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.volume.hook_install import install
from tests.hook.conftest import Settings, pod
from tests.hook.job import PATIENCE_S, SCRIPTS, finished, marker, plain_environ, trainer_state
from tests.process.sidecar_process import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="ipykernel is not installed"),
]
IMPORTS = "import sys; sys.path.insert(0, {folder!r}); sys.argv = ['train', {told!r}]; import train"
TRAINS = "train.main()"


class Kernel:
    """An IPython kernel as a process of its own."""

    def __init__(self, manager: Any, client: Any, log_path: Path) -> None:
        self._manager = manager
        self._client = client
        self._log_path = log_path
        self._shown = ""
        self.process = manager.provisioner.process

    def run(self, cell: str) -> None:
        """Begin to run a cell."""
        self._client.execute(cell)

    def said(self) -> str:
        """Return what the process wrote, and then what cells show."""
        while self._client.iopub_channel.msg_ready():
            content = self._client.get_iopub_msg(timeout=PATIENCE_S)["content"]
            self._shown += content.get("text", "") + content.get("ename", "")
        return self._log_path.read_text() + self._shown

    def shut_down(self) -> None:
        """Ask it to end, as closing a notebook does."""
        self._manager.shutdown_wait_time = PATIENCE_S  # after half of it Jupyter sends SIGTERM
        self._manager.shutdown_kernel()

    def says(self, text: str) -> None:
        until(lambda: text in self.said() or self.process.poll() is not None, what=text)
        assert text in self.said()


@contextmanager
def kernel(volume: Path, hook: Path, settings: Settings) -> Iterator[Kernel]:
    """Start a kernel in a folder of its own, with the hook through its environment alone."""
    from jupyter_client.manager import start_new_kernel

    work = volume.parent / f"{volume.name}-work"
    work.mkdir()
    environ = plain_environ() | {"CKPT_DIR": str(volume), "CKPT_HOOK": "auto", "PYTHONPATH": str(hook)} | settings
    with (work / "log").open("wb") as log:
        manager, client = start_new_kernel(env=environ, cwd=str(work), stdout=log, stderr=log)
    try:
        yield Kernel(manager, client, work / "log")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_cell_that_trains_is_preempted_and_resumes_exactly(tmp_path: Path, unhooked: Callable[..., str]) -> None:
    hook, store, volume, empty = install(tmp_path / "hook").folder, tmp_path / "store", tmp_path / "volume", tmp_path / "empty"
    volume.mkdir()
    empty.mkdir()
    told: dict[str, Any] = {"args": {"max_steps": 24}}

    def imports(**more: Any) -> str:
        return IMPORTS.format(folder=str(SCRIPTS), told=json.dumps(told | more))

    with pod(volume, store) as (sidecar, found), kernel(volume, hook, found) as first:
        first.run(imports(sleep_s=0.2))
        first.run(TRAINS)
        first.says("rank 0 step 5\n")
        os.kill(first.process.pid, signal.SIGTERM)
        first.says("SystemExit")
        assert until(lambda: first.process.poll() is not None), "the process ends, too"
        assert first.process.poll() == 143
        [jit] = finished(volume)
        assert marker(volume, jit)["reason"] == "jit"
        sidecar.committed(jit)
        assert sidecar.terminate() == 0
    with pod(empty, store) as (_, found), kernel(empty, hook, found) as second:
        second.run(imports())
        second.run(TRAINS)
        second.says("weights ")
        assert f"resumes from {jit} (" in second.said(), second.said()
        assert f"rank 0 step {int(jit.split('-')[1]) + 1}\n" in second.said()
        second.run("sys.exit(1)")  # ends a cell, not the kernel
        second.says("SystemExit")
        told_at_last = second.said()
        second.shut_down()
    assert trainer_state(empty)["state"] == "succeeded"
    assert (store / "final/.complete").exists()
    [digest] = re.findall("^weights .*$", told_at_last, re.MULTILINE)
    assert digest in unhooked(**told)
