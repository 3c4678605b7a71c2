"""What the tests of the hook share: an environment without settings, and pods made of real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import RANK_VARIABLES, Answers, answering, script, training
from tests.process.sidecar_process import Sidecar, sidecar


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*os.environ, *RANK_VARIABLES):
        if name.startswith("CKPT_") or name in RANK_VARIABLES:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def answers() -> Iterator[Answers]:
    """A sidecar that only answers."""
    with answering() as serving:
        yield serving


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


Settings = dict[str, str]


@contextmanager
def pod(volume: Path, store: Path, settings: Settings | None = None) -> Iterator[tuple[Sidecar, Settings]]:
    """Run a real sidecar. Yields it and the settings with which a trainer finds it."""
    with sidecar(volume, {"CKPT_STORE": f"file://{store}", "CKPT_KEEP_LOCAL": "9"} | (settings or {})) as running:
        yield running, {"CKPT_API_PORT": str(running.port)}


@pytest.fixture(scope="session")
def unhooked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what a script prints when it runs to its end without the hook; each kind runs once."""
    done: dict[str, str] = {}

    def output(**told: Any) -> str:
        if repr(told) not in done:
            with training(script(**told), tmp_path_factory.mktemp("unhooked") / "volume", hooked=False) as running:
                assert running.wait() == 0, running.log()
                done[repr(told)] = running.log()
        return done[repr(told)]

    return output
