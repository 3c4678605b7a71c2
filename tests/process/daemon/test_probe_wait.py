"""``probe --wait``: it returns once the sidecar is ready, and ends when that has ended or the time is over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from sidecar.volume.lock import is_held
from sidecar.volume.opener import Folder
from tests.ports import free_port
from tests.process.sidecar_process import PATIENCE_S, Sidecar, sidecar, until
from trainer_hook.contract import LOCK


@contextmanager
def waiting(environ: Mapping[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sidecar", "probe", *arguments]
    with subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(running: Sidecar, call: str) -> bool:
    """Whether somebody has made a call of the API, as the sidecar counts them."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{running.port}/metrics") as answer:
        return call in answer.read().decode()
    return False


def test_a_sidecar_that_starts_later_is_waited_for(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_API_PORT": str(free_port())}
    environ = {"CKPT_DIR": str(tmp_path / "volume"), "CKPT_API_PORT": settings["CKPT_API_PORT"]}
    with waiting(environ, "--ready", "--wait", "60s") as probe, sidecar(tmp_path / "volume", settings):
        out, err = probe.communicate(timeout=PATIENCE_S)
    assert (probe.returncode, out, err) == (0, "", "")


def test_a_sidecar_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    store = {
        "CKPT_STORE": "s3://bucket/run",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "CKPT_STATE_DIR": str(tmp_path),
    }
    store |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    with sidecar(tmp_path / "volume", store) as running, waiting(running.environ, "--ready", "--wait", "10m") as probe:
        until(lambda: asked(running, "GET /readyz"))
        assert probe.poll() is None, "the store is not reachable"
        running.process.kill()
        running.process.wait()
        out, err = probe.communicate(timeout=PATIENCE_S)
    assert (probe.returncode, out) == (1, "")
    assert err == "checkpoint-sidecar probe: the sidecar has ended; its log says why\n"


def test_a_sidecar_that_is_not_ready_in_time_is_named_with_its_reason(tmp_path: Path) -> None:
    environ = {"CKPT_DIR": str(tmp_path), "CKPT_API_PORT": str(free_port())}
    with waiting(environ, "--wait", "0.5s") as probe:
        out, err = probe.communicate(timeout=PATIENCE_S)
    assert (probe.returncode, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("checkpoint-sidecar probe: not healthy after 0.5 s: no sidecar answers at 127.0.0.1:")


def test_the_lock_of_an_earlier_sidecar_is_no_sign_of_life(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as running:
        running.ready()
        assert is_held(Folder(running.volume) / LOCK)
    lock = Folder(running.volume) / LOCK
    assert not is_held(lock)
    assert (running.volume / LOCK).is_file()
