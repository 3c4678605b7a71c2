"""A validation that a just-in-time save interrupts: nothing of it is kept, and the resumed run repeats it first.

The checkpoint then holds the random state, the position in the data and the metrics from before the validation.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from trainer_hook.libraries.weights_sample import WeightsSample
from trainer_hook.process.rank_consensus import RankConsensus

UNFINISHED = "validation"


class Validation:
    """Every method is called on every rank at the same point of the loops."""

    def __init__(self, trainer: Any, consensus: RankConsensus) -> None:
        self._trainer = trainer
        self._consensus = consensus
        self._progress: dict[str, Any] = {}
        self._alike = False
        self._trained: WeightsSample | None = None
        """Of the weights that are trained, as the last validation began with them."""
        self.before: dict[str, Any] | None = None
        """This rank's position and metrics before the running validation; ``None``: none runs."""

    @property
    def _epoch_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def begin(self, position: dict[str, Any]) -> None:
        """A validation is about to begin. ``position``: this rank's."""
        loop = self._epoch_loop.val_loop
        loop.setup_data()
        batches = [float(number) for number in loop.max_batches]
        known = all(math.isfinite(number) for number in batches)
        first = self._consensus.from_rank_0(batches)  # also on a rank that does not know its own
        # Only ranks with equal numbers of batches make the same number of collective calls.
        self._alike = self._consensus.all_agree(known and batches == first)
        self._trained = WeightsSample(self._trainer.lightning_module)
        self._progress = loop.batch_progress.state_dict()
        self.before = position | {"metrics": _plain(self._trainer._logger_connector._callback_metrics)}

    def end(self) -> None:
        """The validation has ended."""
        self.before = None

    def can_stop(self) -> bool:
        """Whether all ranks may stop here: a step has just ended, and a resumed run would validate again. Collective."""
        loop = self._epoch_loop
        if self.before is None or not self._alike or loop._should_accumulate() or 0 < loop.max_steps <= loop.global_step:
            return False
        if self._trainer.fit_loop._skip_backward:  # the last epoch of stochastic weight averaging, which it cannot resume
            return False
        return self._trained is None or self._trained.is_same(self._consensus.all_agree)

    def take_back(self) -> None:
        """Set Lightning's own state back to before the validation, for the last save of this process."""
        assert self.before is not None
        trainer, loop = self._trainer, self._epoch_loop
        trainer.training = True
        loop.val_loop.batch_progress.load_state_dict(self._progress)
        if loop.batch_progress.is_last_batch:
            # The resumed run trains no more batch of this epoch, from which it could compute the metrics at its end.
            connector = trainer._logger_connector
            connector.epoch_end_reached()
            with contextlib.suppress(Exception):
                self.before["metrics"] |= _plain(connector.metrics["callback"])

    def catch_up(self, metrics: dict[str, Any], data_fetcher: Any) -> None:
        """Do the tail of the step that a run resumes from: the validation, and the schedulers and callbacks after it."""
        loop = self._epoch_loop
        self._trainer._logger_connector._callback_metrics.update(metrics)
        loop._should_check_val_fx = lambda *_: True  # with a time-based interval it might not be due any more
        try:
            loop.on_advance_end(data_fetcher)
        finally:
            del loop._should_check_val_fx


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in metrics.items()}
