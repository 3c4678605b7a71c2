"""Carries a change over to a text that is formatted otherwise: line by line, so that untouched lines stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def merged(original: str, before: str, after: str) -> str | None:
    """Apply the change from ``before`` to ``after`` to ``original``, which says the same as ``before`` in another style.

    Returns:
        ``None`` where a changed line has no counterpart. The caller compares what the result means with what it should.
    """
    lines, old, new = original.splitlines(), before.splitlines(), after.splitlines()
    partner = _partners(old, lines)
    result: list[str] = []
    done = 0
    for tag, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        place = _place(partner, begin, len(old), len(lines))
        stop = place if begin == end else _after(partner, begin, end)
        if place is None or stop is None or place < done:
            return None
        added = _indented(new[new_begin:new_end], _shift(partner, old, lines, begin, end))
        if tag == "insert":
            place = stop = _above_comments(lines, place, added, done)
        result += lines[done:place] + added
        done = stop
    return "\n".join([*result, *lines[done:]]) + "\n"


def _partners(old: Sequence[str], lines: Sequence[str]) -> dict[int, int]:
    matcher = SequenceMatcher(None, [_meaning(line) for line in old], [_meaning(line) for line in lines], autojunk=False)
    return {i + k: j + k for i, j, size in matcher.get_matching_blocks() for k in range(size)}


def _meaning(line: str) -> str:
    return " ".join(line.split())


def _place(partner: dict[int, int], begin: int, count: int, lines: int) -> int | None:
    """Where a change that begins at ``begin`` of the old lines begins in the text."""
    if begin in partner:
        return partner[begin] if begin - 1 not in partner else max(partner[begin - 1] + 1, 0)
    if begin - 1 in partner:
        return partner[begin - 1] + 1
    return lines if begin >= count else None


def _after(partner: dict[int, int], begin: int, end: int) -> int | None:
    if any(index not in partner for index in range(begin, end)):
        return None
    return partner[end - 1] + 1


def _shift(partner: dict[int, int], old: Sequence[str], lines: Sequence[str], begin: int, end: int) -> int:
    """By how many columns the text is indented otherwise around the change."""
    near = begin if begin < end else begin - 1
    for index in (near, begin, begin - 1):
        if index in partner and old[index].strip():
            return _indent(lines[partner[index]]) - _indent(old[index])
    return 0


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _indented(added: Sequence[str], shift: int) -> list[str]:
    if shift >= 0:
        return [" " * shift + line if line.strip() else line for line in added]
    return [line[-shift:] if not line[:-shift].strip() else line for line in added]


def _above_comments(lines: Sequence[str], place: int, added: Sequence[str], least: int) -> int:
    """Comments and blank lines in front of what follows stay with that, unless they are indented more than what is added."""
    first = next((_indent(line) for line in added if line.strip() and not line.lstrip().startswith("#")), 0)
    while place > least:
        line = lines[place - 1]
        if line.strip() and not (line.lstrip().startswith("#") and _indent(line) <= first):
            break
        place -= 1
    return place
