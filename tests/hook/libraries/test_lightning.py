"""Lightning on several ranks: an error or an unknown length on one leaves no other waiting."""

from __future__ import annotations

import errno
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.job import SCRIPTS, Answers, finished, marker, training
from tests.hook.several import ThreadConsensus, on_ranks
from tests.lazy import LazyModule

of_lightning = LazyModule("trainer_hook.libraries.lightning_validation")


def trained() -> Any:
    """Return a Trainer that has trained a step."""
    lightning = pytest.importorskip("lightning.pytorch")
    torch = pytest.importorskip("torch")

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=1, barebones=True)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    return trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_waits_in_lightnings_barrier_for_one_that_could_not_write(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained()
    from trainer_hook.libraries import lightning_fit

    waits: list[Any] = []
    monkeypatch.setattr(trainer.strategy, "barrier", lambda *name: waits.append(name))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails:
        monkeypatch.setattr(lightning_fit._PlainFile, "save_checkpoint", full)
    fit = lightning_fit.Fit.__new__(lightning_fit.Fit)
    fit.trainer, fit._pass = trainer, None
    fit._session: Any = None
    fit._batch, fit._unfinished = 0, []
    fit._world = SimpleNamespace(rank=0, size=1, local_size=1)
    fit._validation = SimpleNamespace(before={})
    if fails:
        with pytest.raises(OSError, match="No space left"):
            fit.write(tmp_path / "checkpoint-1")
    else:
        fit.write(tmp_path / "checkpoint-1")
        assert (tmp_path / "checkpoint-1/lightning.ckpt").is_file()
    assert waits == []
    trainer.strategy.barrier("another")
    assert waits == [("another",)]


def may_stop_in(consensus: ThreadConsensus, batches: list[float]) -> bool:
    val_loop = SimpleNamespace(
        setup_data=lambda: None, max_batches=[batches[consensus.world.rank]], batch_progress=SimpleNamespace(state_dict=dict)
    )
    epoch_loop = SimpleNamespace(val_loop=val_loop, _should_accumulate=lambda: False, max_steps=-1, global_step=1)
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop, _skip_backward=False),
        lightning_module=SimpleNamespace(parameters=list),
        _logger_connector=SimpleNamespace(_callback_metrics={}),
    )
    validation = of_lightning.Validation(trainer, consensus)
    validation.begin({})
    return validation.can_stop()


@pytest.mark.parametrize(
    ("batches", "may_stop"),
    [([3, 3], True), ([3, 4], False), ([3, math.inf], False), ([math.inf, 3], False), ([math.inf, math.inf], False)],
)
def test_ranks_of_which_one_does_not_know_its_batches_make_the_same_calls(batches: list[float], may_stop: bool) -> None:
    assert of_lightning.Validation  # torch is imported by the main thread: two at once end the process
    assert on_ranks(2, lambda consensus: may_stop_in(consensus, batches)) == [may_stop] * 2


@pytest.mark.slow
def test_a_worker_that_gets_the_signal_does_not_cut_the_save_short(volume: Path, answers: Answers) -> None:
    """The error of the loader ended training without a save."""
    pytest.importorskip("lightning.pytorch")
    command = [sys.executable, str(SCRIPTS / "lightning_workers.py")]
    with training(command, volume, answers.settings) as running:
        assert running.wait() == 143, running.log()
        assert finished(volume) == ["checkpoint-3"]
        assert running.log().count("finalized: failed") == 1
        assert "WARNING: Fails could not be finalized (ConnectionError: " in running.log()
    meta = marker(volume, "checkpoint-3")["meta"]
    answers.by_call["POST /v1/resume"] = 202, {"state": "ready", "checkpoint": "checkpoint-3", "source": "local", "meta": meta}
    with training(command, volume, answers.settings) as running:
        assert running.wait() == 0, running.log()
        assert running.steps() == [4, 5]
