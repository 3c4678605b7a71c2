"""No save fills the volume; durable checkpoints are deleted for one, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.conftest import pod
from tests.hook.job import Answers, finished, script, training
from tests.hook.train_call.test_trouble import small_volume  # noqa: F401 - a fixture
from trainer_hook.libraries.transformers.checkpoint_files import state_bytes
from trainer_hook.process.client import Client
from trainer_hook.saving import disk_admission as disk_admission
from trainer_hook.saving.disk_admission import DiskAdmission


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def have(free_bytes: int) -> None:
        monkeypatch.setattr(disk_admission, "free_bytes", lambda volume: free_bytes)

    return have


def test_where_there_is_space_nobody_is_asked(answers: Answers, volume: Path, free: Callable[[int], None]) -> None:
    free(1050)
    assert DiskAdmission(volume, Client(answers.url, volume)).fits(1000)
    assert answers.asked == []


def test_the_sidecar_is_asked_for_what_is_missing(answers: Answers, volume: Path, free: Callable[[int], None]) -> None:
    free(1049)

    def drop(asked: Any) -> Any:
        free(5000)
        return 200, {"free_bytes": 5000, "deleted": ["checkpoint-3"]}

    answers.by_call["POST /v1/room"] = drop
    assert DiskAdmission(volume, Client(answers.url, volume)).fits(1000)
    assert [body for _, _, body in answers.asked] == [{"bytes": 1050}]


@pytest.mark.parametrize("answer", [(200, {"free_bytes": 10, "deleted": []}), (404, {}), (503, {"detail": "no"}), b""])
def test_what_does_not_fit_is_skipped_with_one_warning(
    answer: Any, answers: Answers, volume: Path, free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers.by_call["POST /v1/room"] = answer
    admission = DiskAdmission(volume, Client(answers.url, volume))
    free(10)
    assert [admission.fits(1000), admission.fits(1000)] == [False, False]
    assert capsys.readouterr().err.count("WARNING: saves are skipped") == 1
    free(5000)
    assert admission.fits(1000)
    free(10)
    assert not admission.fits(1000)
    assert capsys.readouterr().err.count("WARNING: saves are skipped") == 1, "once more after it had fitted"


def tensor(numbers: int, *, trained: bool = True) -> Any:
    return SimpleNamespace(numel=lambda: numbers, element_size=lambda: 4, requires_grad=trained)


@pytest.mark.parametrize(("adapter", "expected"), [(False, 4 * (100 + 10 + 20)), (True, 4 * (10 + 20))])
def test_the_first_checkpoint_is_expected_to_hold_weights_and_optimizer(adapter: bool, expected: int) -> None:
    model = SimpleNamespace(parameters=lambda: [tensor(100, trained=False), tensor(10)], buffers=list)
    if adapter:
        model.peft_config = {}
    optimizer = SimpleNamespace(state={0: {"exp_avg": tensor(10), "exp_avg_sq": tensor(10), "step": 3}})
    assert state_bytes(SimpleNamespace(model=model, optimizer=optimizer)) == expected


def test_what_cannot_be_looked_at_is_tried() -> None:
    assert state_bytes(SimpleNamespace(model=None, optimizer=None)) == 0


@pytest.mark.slow
def test_on_a_small_volume_what_is_durable_makes_way_for_the_next(small_volume: Path, tmp_path: Path) -> None:  # noqa: F811
    """Two checkpoints of 0.8 MB fit; the sidecar would keep nine."""
    with (
        pod(small_volume, tmp_path / "store") as (sidecar, found),
        training(
            script(args={"max_steps": 40}, width=6000, sleep_s=0.2), small_volume, found | {"CKPT_SAVE_STEPS": "4"}
        ) as running,
    ):
        for step in (4, 8, 12):
            sidecar.committed(f"checkpoint-{step}")
        assert running.terminate() == 143, running.log()
        jit = f"checkpoint-{running.steps()[-1]}"
        sidecar.committed(jit)
        assert "freed space on the volume: checkpoint-4 left it" in running.log()
        assert "WARNING" not in running.log()
        assert jit in finished(small_volume)
