"""A bucket full of forged steps. None is resumed, each is told with its reason, and the one that is whole is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.bucket.cases import CASES, LARGE_CASES, Case
from tests.hostile.bucket.forged import Forged, content_of
from tests.hostile.checks import most_memory_mib
from tests.marks import slow
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint
from tests.servers import REAL_STORES

WHOLE = 1
"""The only step that is what it says."""
FIRST = 100
"""The first forged step; all are newer than the whole one."""


def put_all(place: Place, cases: Sequence[Case]) -> None:
    steps = [Forged(WHOLE)]
    for number, case in enumerate(cases, FIRST):
        steps.append(Forged(number))
        case.change(steps[-1])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: step.put(place.store), steps))


def untold(answer: Any, cases: Sequence[Case]) -> dict[str, str | None]:
    """Return the cases whose reason is not among those of the answer, with the answer that was given."""
    reasons = {passed["checkpoint"]: passed["reason"] for passed in answer["passed_over"]}
    told = {case.name: reasons.get(f"checkpoint-{number}") for number, case in enumerate(cases, FIRST)}
    return {case.name: (told[case.name] or "")[-300:] for case in cases if case.says not in (told[case.name] or "")}


def files_beside(running: Sidecar, before: set[Path]) -> set[str]:
    """Return new files outside the volume."""
    after = {path for path in running.volume.parent.rglob("*") if running.volume not in path.parents}
    return {str(path) for path in after - before - {running.volume}}


def check_one_is_used(running: Sidecar, cases: Sequence[Case]) -> None:
    answer = running.up().resume()
    assert (answer["state"], answer["checkpoint"]) == ("ready", f"checkpoint-{WHOLE}"), answer
    assert untold(answer, cases) == {}
    for text in (passed["reason"] for passed in answer["passed_over"]):
        assert text.isprintable(), "no control characters reach a terminal"
        assert len(text) < 3000
    assert contents(running.volume / f"checkpoint-{WHOLE}") == {"model": content_of(WHOLE)}
    assert {path.name for path in running.volume.iterdir()} == {".ckpt", f"checkpoint-{WHOLE}"}
    told = {event["checkpoint"] for event in running.events("checkpoint_found_bad")}
    told |= {event["checkpoint"] for event in running.events("checkpoint_passed_over")}
    quarantined_before = {f"checkpoint-{FIRST + n}" for n, case in enumerate(cases) if "is bad" in case.says}
    assert told | quarantined_before == {f"checkpoint-{FIRST + n}" for n in range(len(cases))}
    # It lives, and goes on.
    write_checkpoint(running.volume, "checkpoint-100000", {"model": b"new"}, {})
    running.committed("checkpoint-100000")
    assert "Traceback" not in running.log()


@pytest.mark.parametrize("place", [*slow("moto"), *REAL_STORES], indirect=True)
def test_no_forged_step_is_resumed_and_each_is_told_with_its_reason(place: Place, tmp_path: Path) -> None:
    put_all(place, CASES)
    before = set(tmp_path.rglob("*"))
    with sidecar(tmp_path / "volume", place.settings) as running:
        check_one_is_used(running, CASES)
        assert {name for name in files_beside(running, before) if not name.endswith(".log")} == set()
        assert most_memory_mib(running) < 200
        assert running.terminate() == 0
    assert place.read(f"checkpoint-{WHOLE}/model") == content_of(WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_documents_of_a_million_entries_take_bounded_memory(place: Place, tmp_path: Path) -> None:
    put_all(place, LARGE_CASES)
    with sidecar(tmp_path / "volume", place.settings) as running:
        check_one_is_used(running, LARGE_CASES)
        assert most_memory_mib(running) < 600
        assert running.terminate() == 0


IN_A_FOLDER = [
    case for case in CASES if case.name in ("manifests: NUL", "manifests: by a way up", f"key {'{name}/' + 'x' * 23!r} of 907")
]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_in_a_folder_ten_gigabytes_and_keys_that_are_no_paths_harm_nothing(place: Place, tmp_path: Path) -> None:
    """A folder has no etags that prove its content, so that each of its steps is tried for some seconds."""
    put_all(place, IN_A_FOLDER)
    for number in (500, 501):
        Forged(number).put(place.store)
    for path in ("checkpoint-500/.complete", "checkpoint-501/.ckpt/a/node-00000-of-00001.json"):
        os.truncate(tmp_path / "store" / path, 10 << 30)
    with sidecar(tmp_path / "volume", place.settings) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == f"checkpoint-{WHOLE}"
        assert untold(answer, IN_A_FOLDER) == {}
        reasons = {passed["checkpoint"]: passed["reason"] for passed in answer["passed_over"]}
        assert "10737418240 bytes, and this document has 33554432 at most" in reasons["checkpoint-500"]
        assert "10737418240 bytes, and this document has" in reasons["checkpoint-501"]
        assert most_memory_mib(running) < 200
        until(lambda: running.status()["phase"] == "running")
