"""A validation inside ``fit()`` that is cut short by a save just in time: nothing of it is kept, the resumed run does it first.

The checkpoint then holds the random state, the place in the data and the metrics from before it. Model and optimizers are
as the step left them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from trainer_hook.process.rank_consensus import Agreement

UNFINISHED = "validation"


class Validation:
    """Every method is called on every rank at the same point of the loops."""

    def __init__(self, trainer: Any, agreement: Agreement) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._progress: dict[str, Any] = {}
        self._alike = False
        self.before: dict[str, Any] | None = None
        """Where the rank stood before the validation that is under way."""

    @property
    def _epoch_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def begin(self, place: dict[str, Any]) -> None:
        """A validation is about to begin.

        Args:
            place: Where this rank stands.
        """
        loop = self._epoch_loop.val_loop
        loop.setup_data()
        batches = [float(number) for number in loop.max_batches]
        known = all(math.isfinite(number) for number in batches)
        # Ranks that validate different numbers of batches would talk of different things.
        self._alike = self._agreement.all_agree(known and batches == self._agreement.from_rank_0(batches))
        self._progress = loop.batch_progress.state_dict()
        self.before = place | {"metrics": _plain(self._trainer._logger_connector._callback_metrics)}

    def end(self) -> None:
        """It is over."""
        self.before = None

    @property
    def can_stop(self) -> bool:
        """Whether all ranks may stop inside, a step has just ended, and a resumed run would come here again."""
        loop = self._epoch_loop
        if self.before is None or not self._alike or loop._should_accumulate():
            return False
        return not 0 < loop.max_steps <= loop.global_step

    def take_back(self) -> None:
        """Have Lightning's own state say that it has not begun. What follows is a save, and the end."""
        assert self.before is not None
        trainer, loop = self._trainer, self._epoch_loop
        trainer.training = True
        loop.val_loop.batch_progress.load_state_dict(self._progress)
        if loop.batch_progress.is_last_batch:
            # The resumed run trains no batch of this epoch, from which it could make the metrics of its end.
            connector = trainer._logger_connector
            connector.epoch_end_reached()
            with contextlib.suppress(Exception):
                self.before["metrics"] |= _plain(connector.metrics["callback"])

    def catch_up(self, metrics: dict[str, Any], data_fetcher: Any) -> None:
        """Do all that follows the step that a run resumes from: the validation, and what comes after it."""
        loop = self._epoch_loop
        self._trainer._logger_connector._callback_metrics.update(metrics)
        loop._should_check_val_fx = lambda *_: True  # by the clock it might not be due any more
        try:
            loop.on_advance_end(data_fetcher)
        finally:
            del loop._should_check_val_fx


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in metrics.items()}
