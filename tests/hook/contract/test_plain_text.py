"""What is shown of text that somebody else chose."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainer_hook.contract.plain_text import MOST_CHARACTERS, plain_text

anything = st.text(st.characters(exclude_categories=()))
"""Half surrogates, too: ``os.listdir`` makes them of names that are no UTF-8, and JSON may hold them."""


@given(anything)
def test_any_text_can_be_encoded_and_printed_in_one_line(text: str) -> None:
    shown = plain_text(text)
    assert json.loads(json.dumps(shown, ensure_ascii=False).encode()) == shown
    assert all(ord(character) >= 32 and not 127 <= ord(character) < 160 for character in shown)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])))
def test_what_can_be_shown_stays_and_doing_it_again_changes_nothing(text: str) -> None:
    assert plain_text(text) == text
    assert plain_text(plain_text(f"\n{text}")) == plain_text(f"\n{text}")


def test_a_long_text_is_cut() -> None:
    assert plain_text("x" * 900_000) == "x" * MOST_CHARACTERS + "…"


def test_the_limit_is_that_of_the_escaped_text() -> None:
    assert len(plain_text("\ud800" * (MOST_CHARACTERS - 1))) == MOST_CHARACTERS + 1
