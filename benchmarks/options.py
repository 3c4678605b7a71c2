"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def some_of(all_of_them: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return the type of an argparse option that is a comma-separated list of known names; an unknown one is an error."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in all_of_them]:
            raise argparse.ArgumentTypeError(f"{','.join(unknown)} is none of {','.join(all_of_them)}")
        return names

    return parse
