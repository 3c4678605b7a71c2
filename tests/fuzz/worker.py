"""One fuzzing process: ``python -m tests.fuzz.worker TARGET [options of libFuzzer]``. Needs atheris."""

from __future__ import annotations

import hashlib
import json
import random
import sys

import atheris

from tests.fuzz import json_mutator
from tests.fuzz import target as targets

ROOT = targets.HERE.parent.parent
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


def _modules(package: str) -> list[str]:
    """Return the names of all modules of a package of this repository."""
    found = (path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / package).rglob("*.py"))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in found]


def main() -> None:
    """Fuzz one target until libFuzzer's limits are reached or a property does not hold."""
    name = sys.argv[1]
    prefixes = tuple(targets.constant(name, "INSTRUMENTED"))
    packages = sorted({prefix.partition(".")[0] for prefix in prefixes})
    others = [module for package in packages for module in _modules(package) if not module.startswith(prefixes)]
    with atheris.instrument_imports(include=packages, exclude=others, enable_loader_override=False):
        target = targets.target(name)

    def check(raw: bytes) -> None:
        try:
            target.check(raw)
        except BaseException:
            # Here and not by libFuzzer, which sometimes ends before it has written it.
            path = targets.CORPUS / name / f"crash-{hashlib.sha1(raw, usedforsecurity=False).hexdigest()[:16]}"
            path.write_bytes(raw)
            print(f"Test unit written to {path}", flush=True)
            raise

    options = {"custom_mutator": _mutate_json} if target.is_json else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:], f"-max_len={target.most_bytes}"], check, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
