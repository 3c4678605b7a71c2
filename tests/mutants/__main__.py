"""``python -m tests.mutants [MODULE…] [--seconds S]``: exit code 1 if a mutant survives that ``survivors.txt`` lacks."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import hypothesis
import pydantic  # noqa: F401 - imported once, here, and not in each child
import pytest

from tests.mutants.operators import Mutant, mutants

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "sidecar" / "core"
SURVIVORS = Path(__file__).parent / "survivors.txt"
EXAMPLES = 40
"""Per property test, without shrinking."""
LONGEST_S = 120.0
"""Time of one run of the tests; a mutant whose tests take longer is killed."""


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._mutant.module else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree, self._mutant.module, "exec"), module.__dict__)


class _Quick:
    """Plugin of pytest: a failing property is not shrunk."""

    def pytest_configure(self) -> None:
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        health = list(hypothesis.HealthCheck)
        hypothesis.settings.register_profile(
            "mutants", max_examples=EXAMPLES, deadline=None, phases=phases, suppress_health_check=health, database=None
        )
        hypothesis.settings.load_profile("mutants")


def tests_of(module: str) -> list[Path]:
    """Return the tests of a module: its own first, then those that import it."""
    *_, package, name = module.split(".")
    folder = ROOT / "tests" / "core"
    imports = re.compile(
        rf"^from {re.escape(module)} import|^from sidecar\.core\.{package} import [^#\n]*\b{name}\b", re.MULTILINE
    )
    others = [path for path in sorted(folder.rglob("test_*.py")) if imports.search(path.read_text())]
    return sorted(others, key=lambda path: path != folder / package / f"test_{name}.py")


def is_killed(mutant: Mutant | None, tests: Path) -> bool:
    """Run tests in a forked process; whether one fails. ``None``: the original."""
    child = os.fork()
    if child == 0:
        os._exit(_child(mutant, tests))
    deadline_s = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _child(mutant: Mutant | None, tests: Path) -> int:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for name in [name for name in sys.modules if name.startswith("sidecar")]:
        del sys.modules[name]
    if mutant is not None:
        sys.meta_path.insert(0, _Changed(mutant))
    plugins = ["cacheprovider", "xdist", "schemathesis"]
    off = [argument for name in plugins for argument in ("-p", f"no:{name}")]
    return int(
        pytest.main(
            [str(tests), "-x", "-q", "--hypothesis-seed=1", "-W", "ignore:Module already imported", *off], plugins=[_Quick()]
        )
    )


def survives(mutant: Mutant) -> bool:
    """Whether no test of its module and package fails."""
    return not any(is_killed(mutant, tests) for tests in tests_of(mutant.module))


def known_survivors() -> dict[str, str]:
    """Return the listed mutants with their reasons."""
    lines = [line for line in SURVIVORS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" # ", 1) for line in lines)


def modules(wanted: Sequence[str]) -> list[str]:
    """Return the modules of the core whose name, after ``sidecar.core.``, begins with one of ``wanted``; none: all."""
    paths = [path for path in sorted(CORE.rglob("*.py")) if path.name != "__init__.py"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name for name in names if not wanted or name.removeprefix("sidecar.core.").startswith(tuple(wanted))]


def main() -> None:
    """Run the tests on mutants and print the survivors."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help="such as commit, or schedule.flush; none: all of sidecar/core")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants, chosen by the seed; 0: all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further mutant is begun")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = modules(options.modules)
    every = [mutant for name in chosen for mutant in mutants(name, (ROOT / f"{name.replace('.', '/')}.py").read_text())]
    known, began_s = known_survivors(), time.monotonic()
    sampled = random.Random(options.seed).sample(every, options.sample or len(every))
    listed = [mutant for mutant in sampled if mutant.key in known]

    def survives_in_time(mutant: Mutant) -> bool | None:
        if time.monotonic() - began_s > options.seconds:
            return None
        survived = survives(mutant)
        if survived:
            print(f"SURVIVES {mutant.key}   (line {mutant.line})", flush=True)
        return survived

    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(survives_in_time, [mutant for mutant in sampled if mutant.key not in known]))
    killed, survived = results.count(False), results.count(True)
    keys = {mutant.key for mutant in every}
    stale = [key for key in known if key.partition(":")[0] in chosen and key not in keys]
    print("\n".join(f"NO SUCH MUTANT any more, remove it from {SURVIVORS.name}: {key}" for key in stale))
    print(
        f"{killed + survived} of {len(every)} mutants of {len(chosen)} modules (seed {options.seed}): {killed} killed, "
        f"{survived} survive; {len(listed)} are listed as equivalent; {time.monotonic() - began_s:.0f} s"
    )
    sys.exit(bool(survived or stale))


if __name__ == "__main__":
    main()
