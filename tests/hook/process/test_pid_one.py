from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from trainer_hook.process import pid_one


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("jit", "is_left"),
    [("0", True), ("off", True), ("No", True), (" false ", True), ("1", False), ("on", False), (None, False)],
)
def test_every_spelling_of_off_leaves_sigterm_as_it_is(jit: str | None, is_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_JIT", raising=False)
    if jit is not None:
        monkeypatch.setenv("CKPT_JIT", jit)
    pid_one.end_by_sigterm()
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == is_left
