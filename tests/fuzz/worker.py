"""One fuzzing process: ``python -m tests.fuzz.worker TARGET [options of libFuzzer]``. Needs atheris."""

from __future__ import annotations

import json
import random
import sys

import atheris

from tests.fuzz import json_mutator
from tests.fuzz import target as targets

SHARE_OF_JSON = 0.7
"""Share of the mutations of a JSON target that change the parsed document."""


def _mutate_json(raw: bytes, most_bytes: int, seed: int) -> bytes:
    rng = random.Random(seed)
    if rng.random() < SHARE_OF_JSON:
        try:
            mutated = json.dumps(json_mutator.mutated(json.loads(raw), rng), ensure_ascii=rng.random() < 0.5).encode()
            if len(mutated) <= most_bytes:
                return mutated
        except (ValueError, RecursionError, OverflowError):
            pass
    return bytes(atheris.Mutate(raw, most_bytes))


def main() -> None:
    """Fuzz one target until libFuzzer's limits are reached or a property does not hold."""
    name = sys.argv[1]
    with atheris.instrument_imports(include=list(targets.constant(name, "INSTRUMENTED")), enable_loader_override=False):
        target = targets.target(name)
    options = {"custom_mutator": _mutate_json} if target.is_json else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:], f"-max_len={target.most_bytes}"], target.check, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
