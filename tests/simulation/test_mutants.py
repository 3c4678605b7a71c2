"""Each rule that is broken on purpose is found by a schedule: the simulation sees what it is there for."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.run import batch

MOST = {"step": 3000, "job": 200, "retention": 1000}
AT_ONCE = {"step": 20, "job": 2, "retention": 20}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    most, at_once = MOST[mutant.kind], AT_ONCE[mutant.kind]
    for begins in range(mutant.first_seed, mutant.first_seed + most, at_once):
        _, broken = batch(mutant.kind, range(begins, begins + at_once))
        if broken:
            print(f"{name}: {len(broken)} of {at_once} from seed {begins} on, such as {broken[0]}")
            return
    pytest.fail(f"{name}: not found in {most} schedules from seed {mutant.first_seed} on")
