"""Batches per step, counted from where a run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lazy import LazyModule

torch, of_torch = LazyModule("torch"), LazyModule("trainer_hook.torch")

BATCHES = list(range(8))


@pytest.mark.parametrize("skipped", [0, 1, 2, 3, 4, 6])
def test_a_step_has_all_of_its_batches_wherever_another_number_of_ranks_continues(
    skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPT_DIR", raising=False)
    monkeypatch.setattr("trainer_hook.process.settings.DEFAULT_DIR", str(tmp_path / "none"))
    ckpt = of_torch.Checkpointer(model=torch.nn.Linear(1, 1))
    ckpt.batch = skipped  # as after a resume: each rank has another share of the epoch
    monkeypatch.setattr(ckpt, "_begin_pass", lambda loader: iter(loader[ckpt.batch :]))
    used, steps = 0, []
    with ckpt:
        for _ in ckpt.steps(BATCHES, accumulate=4):
            used += 1
            steps.append((used, ckpt.global_step))
    counted = [at for at, done in steps if done > dict(steps).get(at - 1, 0)]
    assert counted == list(range(5, used + 1, 4)), "seen at the batch after each step"
    assert used == 8 - skipped // 4 * 4
