from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.leftovers import PROBE_S, is_leftover
from tests import strategies

upload_keys = st.one_of(
    strategies.small_steps.map(lambda step: f"checkpoint-{step}/model"), st.sampled_from(["final/model", ".ckpt-probe/x"])
)
ages = st.floats(0, 1e9)
newest = st.none() | strategies.small_steps


@given(upload_keys, ages, st.booleans(), newest)
def test_what_a_journal_continues_is_never_aborted(key: str, age_s: float, alone: bool, step: int | None) -> None:
    assert not is_leftover(key, "u", age_s=age_s, known={"u"}, alone=alone, newest_committed_step=step)


@given(upload_keys, ages, newest)
def test_a_lone_node_knows_all_uploads_that_go_on(key: str, age_s: float, step: int | None) -> None:
    assert is_leftover(key, "u", age_s=age_s, known=set(), alone=True, newest_committed_step=step)


@given(strategies.small_steps, ages, newest)
def test_what_another_node_may_be_sending_is_left_alone(step: int, age_s: float, newest_step: int | None) -> None:
    aborted = is_leftover(f"checkpoint-{step}/m", "u", age_s=age_s, known=set(), alone=False, newest_committed_step=newest_step)
    assert aborted == (newest_step is not None and step < newest_step)


def test_a_probe_of_another_node_has_an_hour() -> None:
    for age_s, aborted in [(PROBE_S - 1, False), (PROBE_S + 1, True)]:
        assert is_leftover(".ckpt-probe/x", "u", age_s=age_s, known=(), alone=False, newest_committed_step=None) == aborted
