"""SIGTERM to a sidecar that starts on a volume which gives errors."""

from __future__ import annotations

from pathlib import Path

from tests.forks import ROOT
from tests.process.sidecar_process import sidecar, until, write_checkpoint


def settings(tmp_path: Path) -> dict[str, str]:
    """Return settings under which the volume cannot be prepared while there is a file ``fails``."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os\nreal = os.mkdir\n"
        "def failing(path, *a, **k):\n"
        f"    if os.path.exists({str(tmp_path / 'fails')!r}): raise OSError(5, 'Input/output error', path)\n"
        "    return real(path, *a, **k)\nos.mkdir = failing\n"
    )
    (tmp_path / "fails").touch()
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}", "PYTHONPATH": f"{site}:{ROOT}"}


def test_it_ends_at_once_and_says_that_the_volume_failed(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    write_checkpoint(volume, "checkpoint-20", {"model": b"weights"}, {})
    with sidecar(volume, settings(tmp_path)) as running:
        until(lambda: len(running.events("volume_failed")) == 2)
        assert running.terminate() == 3
        assert len(running.events("volume_failed")) == 2, "no pause after SIGTERM"
        reason = running.events("ended_without_the_volume")[0]["reason"]
        assert reason == f"{volume}/.ckpt: Input/output error: the volume failed until the end; on it are checkpoint-20"


def test_it_flushes_if_the_volume_is_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "volume", "checkpoint-20", {"model": b"weights"}, {})
    with sidecar(tmp_path / "volume", settings(tmp_path)) as running:
        until(lambda: len(running.events("volume_failed")) == 1)
        (tmp_path / "fails").unlink()
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-20"]
        assert running.report["notice"]["source"] == "sigterm"
