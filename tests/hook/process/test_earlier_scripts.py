"""The record of the scripts that trained before, as another program may have left it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_hook.process import earlier_scripts

ENDED = {"script": "a.py", "calls": 1, "steps": 5, "attempt": "a"}


@pytest.mark.parametrize(
    "scripts",
    ["5", "{}", '"x"', "[5]", "[{}]", json.dumps([ENDED]).replace('"steps": 5', '"steps": 1e999'), "[" * 100_000],
    ids=lambda scripts: scripts[:30],
)
def test_a_record_of_another_form_says_nothing(scripts: str, volume: Path) -> None:
    """A number beyond all bounds ended the training."""
    (volume / ".ckpt/ranks").mkdir(parents=True)
    path = volume / ".ckpt/ranks/scripts.json"
    path.write_text(f'{{"container": "c", "scripts": {json.dumps([ENDED])}}}')
    assert [ended.steps for ended in earlier_scripts._read(volume, "c")] == [5]
    for content in (scripts, f'{{"container": "c", "scripts": {scripts}}}'):
        path.write_text(content)
        assert earlier_scripts._read(volume, "c") == []
