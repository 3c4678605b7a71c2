"""Every committed input, mutations of them by chance, and a second of fuzzing for each target."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.json_mutator import mutated
from tests.fuzz.target import TARGETS, seeds, target
from tests.lazy import LazyModule

api = LazyModule("tests.fuzz.api")
SLOWEST_S = 2.0
"""CPU time that one input may take."""
MUTATIONS = 60
CALLS = 60
SMOKE_S = 1.0
BY_JSON = [name for name in TARGETS if target(name).is_json]


@pytest.mark.parametrize("name", TARGETS)
def test_every_committed_input_has_the_properties_of_its_target(name: str) -> None:
    check = target(name).check
    assert seeds(name)
    for path in seeds(name):
        began_s = time.process_time()
        check(path.read_bytes())
        assert time.process_time() - began_s < SLOWEST_S, path


@pytest.mark.parametrize("name", BY_JSON)
def test_mutated_documents_have_the_properties_of_their_target(name: str) -> None:
    check, rng = target(name).check, random.Random(name)
    documents = [json.loads(path.read_bytes()) for path in seeds(name) if path.suffix == ".json"]
    for _ in range(MUTATIONS):
        check(json.dumps(mutated(json.loads(json.dumps(rng.choice(documents))), rng)).encode())


def test_a_checked_property_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz.targets import marker

    monkeypatch.setattr(marker, "encode_marker", lambda _: b"{}")
    with pytest.raises(AssertionError):
        marker.check(b'{"step": 20}')


def test_calls_of_the_api_have_documented_answers() -> None:
    with api.running() as started:
        base_url = f"http://127.0.0.1:{started.port}"
        api.drawn(api.calls(base_url), lambda case: api.check_call(case, base_url), examples=CALLS, first=1)
        api.drawn(api.raw_bodies, lambda sent: api.check_body(*sent, base_url), examples=CALLS // 3, first=1)
        assert "Traceback" not in started.log()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
def test_a_second_of_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, SMOKE_S, work=tmp_path, seed=1)
    assert not outcome.finding, outcome.finding
    assert outcome.executions > 10
