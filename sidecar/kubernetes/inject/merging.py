"""Applies the difference of two texts to a third one, which has the content of the first in another style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher


def merged(original: str, before: str, after: str) -> str | None:
    """Apply the change from ``before`` to ``after`` to ``original``, which has the content of ``before`` in another style.

    Returns:
        ``None`` where a changed line has no counterpart. The caller parses the result and compares it with the wanted content.
    """
    lines, old, new = _joined(original.splitlines()), before.splitlines(), after.splitlines()
    partner = _partners(old, lines)
    steps = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    columns = _Columns(new, _indents(steps, partner, lines))
    result: list[str] = []
    done = 0
    for tag, begin, end, new_begin, new_end in steps:
        if tag == "equal":
            continue
        place = _place(partner, begin, len(old), len(lines))
        stop = place if begin == end else _after(partner, begin, end)
        if place is None or stop is None or place < done:
            return None
        added = [_indented(new[index], columns.shift(index)) for index in range(new_begin, new_end)]
        if tag == "insert":
            place = stop = _above_comments(lines, place, added, done)
        result += lines[done:place] + added
        done = stop
    return "\n".join([*result, *lines[done:]]) + "\n"


def _partners(old: Sequence[str], lines: Sequence[str]) -> dict[int, int]:
    matcher = SequenceMatcher(None, [_meaning(line) for line in old], [_meaning(line) for line in lines], autojunk=False)
    return {i + k: j + k for i, j, size in matcher.get_matching_blocks() for k in range(size)}


def _joined(lines: Sequence[str]) -> list[str]:
    """Join a lone dash or key with the line of its value, as templates write it."""
    found: list[str] = []
    for line in lines:
        last = found[-1].strip() if found else ""
        if last == "-" or (last.endswith(":") and line.strip() in ("[]", "{}", "null", "~")):
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


def _meaning(line: str) -> str:
    words = " ".join(line.split())
    return words.removesuffix(" null") if words.endswith(": null") else words


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


def _indents(steps: Iterable[tuple[str, int, int, int, int]], partner: dict[int, int], lines: Sequence[str]) -> dict[int, int]:
    """Return by how much the original indents each new line that it has, too."""
    found = {}
    for tag, begin, end, new_begin, new_end in steps:
        # A line that is replaced stands where the one before it stood.
        if tag == "equal" or (tag == "replace" and end - begin == new_end - new_begin):
            pairs = zip(range(begin, end), range(new_begin, new_end), strict=True)
            found.update({there: _indent(lines[partner[here]]) for here, there in pairs if here in partner})
    return found


class _Columns:
    """Shifts new lines to the columns of their neighbours in the original.

    A list may be indented against its key there, and another one not.
    """

    def __init__(self, new: Sequence[str], indents: dict[int, int]) -> None:
        self._new = new
        self._indents = indents

    def shift(self, index: int) -> int:
        """Return the shift of a neighbour in the same mapping or list, else that of what it lies in."""
        above = self._near(index, -1)
        if above is None:
            return 0
        if above not in self._indents:
            return self.shift(above)
        if _level(self._new[above]) == _level(self._new[index]):
            return self._known(above)
        below = self._near(index, 1)
        while below is not None and _level(self._new[below]) == _level(self._new[index]):
            if below in self._indents:
                return self._known(below)
            below = self._near(below, 1)
        return self._known(above)

    def _known(self, index: int) -> int:
        return self._indents[index] - _indent(self._new[index])

    def _near(self, index: int, step: int) -> int | None:
        """Return the nearest line on one side that is not deeper."""
        level = _level(self._new[index])
        index += step
        while 0 <= index < len(self._new):
            line = self._new[index]
            if line.strip() and not line.lstrip().startswith("#") and _level(line) <= level:
                return index
            index += step
        return None


def _level(line: str) -> int:
    """Order lines by depth: an entry of a list lies deeper than a key in the same column, which may be the list's own."""
    return 2 * _indent(line) + line.lstrip().startswith("- ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _indented(line: str, shift: int) -> str:
    if not line.strip():
        return line
    return " " * shift + line if shift >= 0 else line[min(-shift, _indent(line)) :]


def _above_comments(lines: Sequence[str], place: int, added: Sequence[str], least: int) -> int:
    """Comments and blank lines stay with the line below them, unless they are indented more than the added lines."""
    first = next((_indent(line) for line in added if line.strip() and not line.lstrip().startswith("#")), 0)
    while place > least:
        line = lines[place - 1]
        if line.strip() and not (line.lstrip().startswith("#") and _indent(line) <= first):
            break
        place -= 1
    return place
