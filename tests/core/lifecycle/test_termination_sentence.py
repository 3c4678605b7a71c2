"""The termination message is read as it was written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.termination_sentence import ALL_DURABLE, Ending, durable_step_text, ending_of


@given(st.none() | st.integers(0, 10**12), st.booleans())
def test_what_was_written_is_read(step: int | None, all_durable: bool) -> None:
    message = f"{ALL_DURABLE if all_durable else 'given up: checkpoint-7 (no time)'}; {durable_step_text(step)}"
    assert ending_of(message) == Ending(all_durable, step)


@given(st.text(max_size=60))
def test_any_text_is_read(message: str) -> None:
    assert ending_of(message).all_durable == message.startswith(ALL_DURABLE)
