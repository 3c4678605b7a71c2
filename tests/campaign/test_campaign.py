"""A bounded campaign, and proof that its reader and its witness see what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import servers
from tests.campaign import campaign
from tests.campaign.plan import ACTS, ENDINGS, SORTS, STORES, story
from tests.campaign.proxy import TROUBLES
from tests.campaign.published import Published, files_of
from tests.campaign.reader import Folder, Reader
from tests.campaign.witness import Witness
from tests.faults.wire import Request
from tests.process.sidecar_process import sidecar, write_checkpoint

SEEDS = range(1000, 1012)
AT_ONCE = 5
FILES = {"model": b"weights" * 1000, "deep/optimizer": b"moments"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_dozen_runs_through_faults_break_no_invariant(tmp_path: Path) -> None:
    missing = {"rgw": not servers.rgw_is_installed(), "minio": not servers.minio_is_built()}
    for store in [store for store, is_missing in missing.items() if is_missing and servers.is_required(store.upper())]:
        pytest.fail(f"{store} is required and cannot run here")
    chosen = [store for store in STORES if not missing.get(store)]
    results = campaign.search(SEEDS, chosen=chosen, at_once=AT_ONCE, base=tmp_path / "campaign")
    found = campaign.summary(results, 0.0)
    print(campaign.table(found))
    assert found["violations"] == 0, campaign.as_json(results, found)
    assert found["runs"] >= len(SEEDS) * 3 // 4, found["skipped"]


def test_a_seed_says_the_same_each_time_and_other_seeds_say_everything() -> None:
    told = [story(seed) for seed in range(400)]
    assert told == [story(seed) for seed in range(400)]
    lives = [life for each in told for life in each.lives]
    assert {each.sort for each in told} == set(SORTS)
    assert {each.store for each in told} == set(STORES)
    assert {trouble.kind for life in lives for trouble in life.troubles} == set(TROUBLES)
    assert {life.act for life in lives} >= set(ACTS)
    assert {life.ending for life in lives} == set(ENDINGS)
    pairs = [life for life in lives if len({trouble.kind for trouble in life.troubles}) == 2]
    assert len(pairs) > len(lives) // 5


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder store with ``checkpoint-10``, as a sidecar leaves it."""
    place = tmp_path_factory.mktemp("committed")
    with sidecar(place / "volume", {"CKPT_STORE": f"file://{place / 'store'}"}) as running:
        write_checkpoint(running.ready().volume, "checkpoint-10", FILES, {})
        running.committed("checkpoint-10")
    return place


@pytest.fixture
def store(committed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(committed / "store", tmp_path / "store"))


def published(committed: Path) -> Published:
    known = Published()
    known.add("checkpoint-10", "pod", {0: files_of(committed / "volume/checkpoint-10")})
    return known


def test_the_reader_takes_what_a_sidecar_committed_and_knows_its_version(committed: Path, store: Path) -> None:
    reader = Reader(Folder(store))
    found = reader.newest_whole()
    assert found is not None
    assert found.name == "checkpoint-10"
    assert published(committed).of_commit(found) is not None
    assert reader.verified_bytes > sum(map(len, FILES.values()))


@pytest.mark.parametrize("victim", ["model", "deep/optimizer", ".complete", "manifest"])
@pytest.mark.parametrize("harm", ["flipped", "missing", "cut"])
def test_the_reader_sees_damage(victim: str, harm: str, store: Path) -> None:
    folder = store / "checkpoint-10"
    path = next((folder / ".ckpt").rglob("node-*.json")) if victim == "manifest" else folder / victim
    raw = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(raw[:-3] if harm == "cut" else bytes([raw[0] ^ 1]) + raw[1:])
    reader = Reader(Folder(store))
    assert reader.newest_whole() is None


def test_content_that_nobody_published_is_not_a_version(committed: Path, store: Path) -> None:
    found = Reader(Folder(store)).newest_whole()
    known = Published()
    known.add("checkpoint-10", "pod", {0: files_of(committed / "volume/checkpoint-10") | {"more": (1, "0")}})
    assert found is not None
    assert known.of_commit(found) is None


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("checkpoint-10/model", "I4: checkpoint-10/model is deleted"),
        ("checkpoint-10/.complete", "I7: the commit of checkpoint-10 is deleted"),
        ("checkpoint-10/of-nobody", None),
        ("run.json", None),
    ],
)
def test_the_witness_sees_a_deletion_that_no_rule_allows(key: str, said: str | None, committed: Path, store: Path) -> None:
    witness = Witness("run", Reader(Folder(store)), published(committed), keep=1)
    list(witness.request_body(Request(f"DELETE /bucket/run/{key} HTTP/1.1", []), iter(())))
    assert [violation.startswith(said or "") for violation in witness.violations] == ([True] if said else [])
