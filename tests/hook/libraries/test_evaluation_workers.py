"""Whether the evaluation had workers in an earlier process. The training itself: ``test_epoch_start``."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_hook.libraries.transformers.evaluation_workers import has_evaluated

ENTRIES = [{"loss": 1.0, "step": 4}, {"eval_loss": 1.0, "step": 4}]


@pytest.mark.parametrize(
    ("state", "meta", "has"),
    [
        ({}, {}, False),
        ({"global_step": 6, "log_history": ENTRIES[:1]}, {}, False),
        ({"global_step": 6, "log_history": ENTRIES}, {}, True),
        ({"global_step": 4, "log_history": ENTRIES}, {}, True),
        ({"global_step": 4, "log_history": ENTRIES}, {"unfinished": ["evaluate"]}, False),  # the first of several datasets
    ],
)
def test_an_evaluation_counts_unless_it_is_repeated(state: dict[str, Any], meta: dict[str, Any], has: bool) -> None:
    assert has_evaluated(state, meta) is has
