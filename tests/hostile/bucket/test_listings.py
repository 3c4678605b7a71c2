"""A prefix full of objects that are not this system's, and names that only S3 can hold."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from unicodedata import normalize

import pytest

from sidecar.errors import StoreError
from tests.hostile.bucket.forged import Forged, content_of
from tests.hostile.checks import check_log, most_memory_mib
from tests.marks import slow
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, write_checkpoint
from tests.servers import REAL_STORES

JUNK = 1100
"""More than one page of a listing."""
UNCOMMITTED = 50
NAMES = [
    "checkpoint-020",
    "checkpoint-+1",
    "checkpoint-1e3",
    "checkpoint-\u0661",
    "checkpoint--1",
    f"checkpoint-{10**18}",
    "Final",
]
"""Folders that look like checkpoints."""
IN_NO_FOLDER = [
    "checkpoint-7000",
    "checkpoint-7001/",
    "checkpoint-7002//.complete",
    "checkpoint-7003/.complete/x",
    "//",
    "/.complete",
]
"""Keys that are a file and a folder, a folder without a name, and a commit one folder too low."""


def junk() -> dict[str, bytes]:
    objects = {f"junk-{n}/{uuid.uuid4().hex}": b"" for n in range(50)}
    objects |= {f"checkpoint-1/{n}": b"" for n in range(JUNK)}
    objects |= {f"checkpoint-{8000 + n}/model": b"never committed" for n in range(UNCOMMITTED)}
    objects |= {f"{name}/.complete": b"{}" for name in NAMES}
    return objects | dict.fromkeys(IN_NO_FOLDER, b"") | {"checkpoint-1/.ckpt/": b"", "checkpoint-1/": b"", ".ckpt/token": b"x"}


@pytest.mark.parametrize("place", [*slow("moto"), *REAL_STORES], indirect=True)
def test_the_one_step_among_thousands_of_other_objects_is_found(place: Place, tmp_path: Path) -> None:
    Forged(1).put(place.store)
    objects = junk()

    def put(key: str) -> None:
        # MinIO takes no key with an empty part.
        with suppress(StoreError) if key in IN_NO_FOLDER else nullcontext():
            place.store.put(key, objects[key])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, objects))
    with sidecar(tmp_path / "volume", place.settings) as running:
        answer = running.ready().resume()
        assert answer["checkpoint"] == "checkpoint-1"
        assert contents(running.volume / "checkpoint-1") == {"model": content_of(1)}
        passed = {each["checkpoint"] for each in answer["passed_over"]}
        assert passed >= {f"checkpoint-{8000 + n}" for n in range(UNCOMMITTED)}
        assert not passed & set(NAMES)
        # The other objects stay, also those below a step that is written anew.
        write_checkpoint(running.volume, "checkpoint-9000", {"model": b"new"}, {})
        running.committed("checkpoint-9000")
        assert most_memory_mib(running) < 200
        assert running.terminate() == 0
    check_log(running)
    assert set(place.keys("junk-")) == {key for key in objects if key.startswith("junk-")}


@pytest.mark.parametrize("place", ["moto", *slow("file"), *REAL_STORES], indirect=True)
def test_paths_that_differ_by_case_or_unicode_form_alone_are_different_files(place: Place, tmp_path: Path) -> None:
    step = Forged(1)
    names = [
        "Model",
        "MODEL",
        normalize("NFC", "caf\u00e9"),
        normalize("NFD", "caf\u00e9"),
        "\u212b",
        "\u00c5",
        "\u202egnp",
        "a b",
        "%2e%2e",
    ]
    for name in names:
        step.add(name, name.encode())
    step.put(place.store)
    with sidecar(tmp_path / "volume", place.settings) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-1"
        wanted = {name: name.encode() for name in names} | {"model": content_of(1)}
        assert contents(running.volume / "checkpoint-1") == wanted
