"""A step that cannot be used, or not now, does not end a resume; what is whole in the store is not given up for it.

Inside one process, with a store in memory whose way to us can be damaged.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.core.commit import damage
from sidecar.core.format import keys
from sidecar.daemon.services import Services
from sidecar.download import downloader as downloader_module
from sidecar.download import pending_commit
from sidecar.download.downloader import Downloader
from sidecar.download.request import AskedBy, ResumeState, ResumeStatus
from sidecar.errors import NotFound
from sidecar.store.protocol import Stored
from tests import mounts
from tests.catalog.test_volume_trouble import new_life
from tests.download.committed import DamagedWay, commit_step
from tests.process.sidecar_process import contents, write_checkpoint

FILES = {"model": b"m" * 3000, "optimizer/state": b"o" * 500, "large": b"l" * (3 << 20)}
OTHERS = {"model": b"M" * 3000, "optimizer/state": b"O" * 500}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(downloader_module, "FULL_PATIENCE_S", 1.0)
    monkeypatch.setattr(downloader_module, "SHORT_PATIENCE_S", 0.05)
    monkeypatch.setattr(pending_commit, "PATIENCE_S", 1.0)
    monkeypatch.setattr(pending_commit, "POLL_S", 0.02)


@pytest.fixture
def store() -> DamagedWay:
    return DamagedWay()


def runtime_on(store: DamagedWay, volume: Path, **settings: str) -> Services:
    services = new_life(volume, **settings)
    services.store_reader.opened(Downloader(store, services.volume, services.executor))
    services.store_reader.grant()
    return services


async def answer(services: Services, checkpoint: str = "latest", *, asked_by: AskedBy | None = None) -> ResumeStatus:
    asked = services.resume_service.request(checkpoint, asked_by=asked_by)
    status = await services.resume_service.progress(asked.id, timeout_s=30)
    assert status is not None
    return status


def reasons(status: ResumeStatus) -> dict[str, str]:
    return {passed.checkpoint: passed.reason for passed in status.passed_over}


@pytest.mark.parametrize("key", ["", "model", "large", "0", "2", ".json", ".complete"])
def test_damage_that_passes_costs_nothing_but_time(key: str, store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, FILES)
        services = runtime_on(store, tmp_path / "volume")
        store.is_damaged = lambda of: of.endswith(key) and store.reads < 7
        status = await answer(services)
        assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())
        assert contents(tmp_path / "volume/checkpoint-20") == FILES
        assert services.quarantine.quarantined == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["/0", "/2", ".json", ".complete"])
def test_what_stays_damaged_though_the_store_says_nothing_is_passed_over_and_tried_again(
    key: str, store: DamagedWay, tmp_path: Path
) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, FILES)
        services = runtime_on(store, tmp_path / "volume")
        store.is_damaged = lambda of: of.startswith("checkpoint-20/") and of.endswith(key)
        status = await answer(services)
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10")
        assert "the next request tries it again" in reasons(status)["checkpoint-20"]
        assert [passed.may_be_whole for passed in status.passed_over] == [True]
        assert services.quarantine.quarantined == {}
        assert store.reads < 100
        store.is_damaged = lambda of: False
        assert (await answer(services)).checkpoint == "checkpoint-20"
        assert contents(tmp_path / "volume/checkpoint-20") == FILES

    asyncio.run(scenario())


def test_nothing_to_resume_from_is_not_said_while_a_committed_step_may_be_whole(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        for step in (10, 20, 30):
            commit_step(store, step, OTHERS)
        services = runtime_on(store, tmp_path / "volume")
        store.is_damaged = lambda of: of.endswith("/0")
        for asked in ("latest", "checkpoint-30"):
            status = await answer(services, asked)
            assert status.state is ResumeState.FAILED
            assert (status.detail or "").startswith("checkpoint-30 is committed and cannot be had now: ")
        assert services.quarantine.quarantined == {}

    asyncio.run(scenario())


def test_another_object_in_the_place_of_the_recorded_one_is_quarantined(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, OTHERS)
        commit_step(store, 30, FILES)
        [replaced] = [stored.key for stored in store.list("checkpoint-20/") if stored.key.endswith("/0")]
        [large] = [stored.key for stored in store.list("checkpoint-30/") if stored.key.endswith("/2")]
        store.put(replaced, b"x" * 3000)
        store.delete([large])
        services = runtime_on(store, tmp_path / "volume")
        status = await answer(services)
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10")
        assert set(services.quarantine.quarantined) == {"checkpoint-20", "checkpoint-30"}
        assert "missing" in reasons(status)["checkpoint-30"]
        store.delete([keys.commit("checkpoint-10")])
        assert (await answer(services)).source == "local", "it was verified when it was downloaded"
        assert (await answer(services, "checkpoint-20")).state is ResumeState.NONE, "that one is known to be bad"

    asyncio.run(scenario())


@pytest.mark.parametrize("said", ["another size", "missing", "another etag"])
@pytest.mark.parametrize("object_name", ["/0", "/2"])
def test_one_damaged_answer_about_an_object_does_not_make_it_known_to_be_bad(
    said: str, object_name: str, tmp_path: Path
) -> None:
    """The store's answer about an object has no checksum, and takes the path that just damaged the object."""

    class Lying(DamagedWay):
        def stat(self, key: str) -> Stored:
            there = super().stat(key)
            if self.reads >= 9 or not key.endswith(object_name):
                return there
            if said == "missing":
                raise NotFound(key)
            return replace(there, etag="f" * 32) if said == "another etag" else replace(there, size_bytes=there.size_bytes + 4)

    async def scenario() -> None:
        store = Lying()
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, FILES)
        services = runtime_on(store, tmp_path / "volume")
        store.is_damaged = lambda key: key.endswith(object_name) and store.reads < 9
        status = await answer(services)
        assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())
        assert services.quarantine.quarantined == {}

    asyncio.run(scenario())


def test_two_answers_about_an_object_that_differ_do_not_make_it_known_to_be_bad(tmp_path: Path) -> None:
    class Lying(DamagedWay):
        lies = 0

        def stat(self, key: str) -> Stored:
            there = super().stat(key)
            return replace(there, size_bytes=there.size_bytes + 8) if self._lies(key) else there

        def list(self, prefix: str) -> Iterator[Stored]:
            return (replace(s, size_bytes=s.size_bytes + 1) if self._lies(s.key) else s for s in super().list(prefix))

        def _lies(self, key: str) -> bool:
            self.lies += (is_it := key.startswith("checkpoint-20/") and key.endswith("/0"))
            return is_it and self.lies <= 3

    async def scenario() -> None:
        store = Lying()
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, OTHERS)
        store.lies = 0
        status = await answer(runtime_on(store, tmp_path / "volume"))
        assert store.lies > 3
        assert (status.checkpoint, status.passed_over) == ("checkpoint-20", ())

    asyncio.run(scenario())


def test_a_name_that_a_damaged_listing_hid_is_found_by_the_next_one(store: DamagedWay, tmp_path: Path) -> None:
    class Hiding(DamagedWay):
        listings = 0

        def list_folders(self) -> Iterator[str]:
            self.listings += 1
            return (n for n in super().list_folders() if self.listings > 1 or n != "checkpoint-20")

    async def scenario(steps: tuple[int, ...]) -> None:
        hiding = Hiding()
        for step in steps:
            commit_step(hiding, step, OTHERS)
        services = runtime_on(hiding, tmp_path / f"volume-{len(steps)}")
        assert (await answer(services)).checkpoint == "checkpoint-20"

    asyncio.run(scenario((10, 20)))
    asyncio.run(scenario((20,)))


def test_a_finished_leftover_of_another_attempt_stays(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 20, FILES, attempt="b")
        left = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"model": b"mine"}, {"attempt": "a"})
        services = runtime_on(store, tmp_path / "volume")
        status = await answer(services, "checkpoint-20")
        assert status.state is ResumeState.FAILED
        assert "rename or delete it" in (status.detail or "")
        assert contents(left) == {"model": b"mine"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("index", "asks_for", "gives_way"), [(0, "latest", False), (0, "checkpoint-20", True), (1, "checkpoint-20", True)]
)
def test_a_part_of_another_attempt_gives_way_to_the_committed_step_once_that_is_chosen(
    index: int, asks_for: str, gives_way: bool, store: DamagedWay, tmp_path: Path
) -> None:
    """An attempt that ended before its step was durable leaves a part on the volume of each node that lives on.

    Before the choice, the nodes may be about to commit their parts instead.
    """

    async def scenario() -> None:
        commit_step(store, 10, OTHERS, OTHERS)
        commit_step(store, 20, FILES, FILES, attempt="b")
        marker = {"attempt": "a", "node": {"index": index, "count": 2}}
        left = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"model": b"mine"}, marker)
        services = runtime_on(store, tmp_path / "volume", CKPT_NODE_INDEX=str(index), CKPT_NODE_COUNT="2")
        status = await answer(services, asks_for)
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-20" if gives_way else "checkpoint-10")
        assert contents(left) == (FILES if gives_way else {"model": b"mine"})

    asyncio.run(scenario())


@pytest.mark.parametrize("is_revoked_first", [False, True])
def test_a_step_that_the_job_is_about_to_commit_again_is_waited_for(
    is_revoked_first: bool, store: DamagedWay, tmp_path: Path
) -> None:
    """Node 0 passed over the newest step half a second before its parts of a later attempt were sent (campaign 89468)."""

    async def scenario() -> None:
        commit_step(store, 10, OTHERS, OTHERS)
        commit_step(store, 20, FILES, FILES, attempt="a")
        marker = {"attempt": "b", "node": {"index": 0, "count": 2}}
        left = write_checkpoint(tmp_path / "volume", "checkpoint-20", OTHERS, marker)
        services = runtime_on(store, tmp_path / "volume", CKPT_NODE_INDEX="0", CKPT_NODE_COUNT="2")
        asked = services.resume_service.request("latest")
        assert (await services.resume_service.progress(asked.id, timeout_s=0.3)).state is ResumeState.CHOOSING  # type: ignore[union-attr]
        if is_revoked_first:
            store.delete([keys.commit("checkpoint-20")])
            await asyncio.sleep(0.2)
        commit_step(store, 20, OTHERS, OTHERS, attempt="b")
        status = await services.resume_service.progress(asked.id, timeout_s=5)
        assert status is not None
        assert (status.state, status.checkpoint, status.source) == (ResumeState.READY, "checkpoint-20", "local")
        assert contents(left) == OTHERS
        assert status.passed_over == ()

    asyncio.run(scenario())


@pytest.mark.parametrize("written", ["half", "rewritten in place", "finished anew", "empty"])
def test_what_a_person_asks_for_does_not_replace_what_the_trainer_writes(
    written: str, store: DamagedWay, tmp_path: Path
) -> None:
    """A trainer that went back writes the step again. It would write the second file into what took the directory's place."""

    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, OTHERS)
        volume = tmp_path / "volume"
        services = runtime_on(store, volume)
        if written == "rewritten in place":
            assert (await answer(services, "checkpoint-20", asked_by=AskedBy.TRAINER)).checkpoint == "checkpoint-20"
            await services.inventory.scan()
        if written == "finished anew":
            write_checkpoint(volume, "checkpoint-20", {"model": b"new"}, {"attempt": "a"})
        (volume / "checkpoint-20").mkdir(parents=True, exist_ok=True)
        if written != "empty":
            (volume / "checkpoint-20/model").write_bytes(b"new")
        for asked in ("latest", "checkpoint-20"):
            status = await answer(services, asked, asked_by=AskedBy.PERSON)
            assert status.checkpoint == (None if asked == "checkpoint-20" else "checkpoint-10")
            assert "the trainer wrote it" in reasons(status)["checkpoint-20"]
        assert written == "empty" or (volume / "checkpoint-20/model").read_bytes() == b"new"
        if written != "finished anew":  # a trainer that waits for a resume does not write there: the directory is abandoned
            assert (await answer(services, asked_by=AskedBy.TRAINER)).checkpoint == "checkpoint-20"
            assert contents(volume / "checkpoint-20") == OTHERS
            assert (await answer(services, "checkpoint-20", asked_by=AskedBy.PERSON)).source == "local"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("nodes", "reason", "is_bad"),
    [
        ([{"a": b"1", "a/b": b"2"}], "'a' is a file and the directory of 'a/b'", False),
        ([{"a": b"1"}, {"a/b": b"2"}], "of different nodes", False),
        ([{"x" * 256: b"1"}], "256 bytes", False),
    ],
    ids=["a and a/b", "of two nodes", "long name"],
)
def test_a_step_whose_names_no_volume_holds_is_passed_over(
    nodes: list[dict[str, bytes]], reason: str, is_bad: bool, store: DamagedWay, tmp_path: Path
) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, *nodes)
        status = await answer(runtime_on(store, tmp_path / "volume"))
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10")
        assert reason in reasons(status)["checkpoint-20"]

    asyncio.run(scenario())


def test_what_another_commit_of_the_name_left_in_the_way_is_cleared(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 20, {"model": b"now a file"})
        before = tmp_path / "volume/.ckpt/incoming/checkpoint-20/model/deep"
        before.mkdir(parents=True)
        (before / "part").write_bytes(b"x")
        status = await answer(runtime_on(store, tmp_path / "volume"))
        assert (status.state, status.passed_over) == (ResumeState.READY, ())
        assert contents(tmp_path / "volume/checkpoint-20") == {"model": b"now a file"}

    asyncio.run(scenario())


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_volume(tmp_path / "small", "2m") as folder:
        yield folder


def test_a_full_volume_ends_the_request_and_no_older_step_is_used_for_it(store: DamagedWay, small_volume: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        commit_step(store, 20, FILES)
        services = runtime_on(store, small_volume)
        status = await answer(services)
        assert (status.state, status.checkpoint) == (ResumeState.FAILED, None)
        assert (status.detail or "").startswith("checkpoint-20: No space left on device (")
        assert "are free): free space" in (status.detail or "")

    asyncio.run(scenario())


def test_a_volume_that_became_read_only_says_so(store: DamagedWay, small_volume: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 20, OTHERS)
        services = runtime_on(store, small_volume)
        subprocess.run(["mount", "-o", "remount,ro", str(small_volume)], check=True)
        status = await answer(services)
        assert status.state is ResumeState.FAILED
        assert "read-only" in (status.detail or "")
        assert "free space" not in (status.detail or "")

    asyncio.run(scenario())
