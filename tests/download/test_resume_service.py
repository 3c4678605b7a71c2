"""Requests that replace each other, a store that goes away, and a volume whose checkpoints are not what they were."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.core.format.manifest import Commit, Manifest, ManifestEntry, NodeOf
from sidecar.core.format.rank_layout import Share
from sidecar.daemon.services import Services
from sidecar.download import request_worker
from sidecar.download.downloader import Downloader
from sidecar.download.offers import Offer
from sidecar.download.patience import Patience
from sidecar.download.request import AskedBy, ResumeState, ResumeStatus
from sidecar.download.resume_service import MOST_WAITING, TooManyRequests
from sidecar.volume.boot import boot_id
from tests.catalog.test_volume_trouble import new_life
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node, step_of

WHOLE = {"model": b"A" * 100, "optimizer": b"B" * 100}


class SlowToEnd(Downloader):
    """A store of two steps, and downloads that end a while after they were cancelled."""

    def __init__(self, services: Services) -> None:
        super().__init__(MemoryStore(), services.volume, services.executor)
        self.under_way: list[str] = []
        self.most_under_way = 0
        self.fails_when_cancelled = False
        self.cleaned_up: list[str] = []
        self.held = asyncio.Event()

    async def list_folders(self) -> list[str]:
        return ["checkpoint-20", "checkpoint-10"]

    async def commit(self, name: str) -> tuple[Commit, str] | None:
        entry = ManifestEntry(key=keys.manifest(name, "a", Node()), size_bytes=1, crc64nvme="0" * 16)
        commit = Commit(
            name=name,
            step=step_of(name),
            attempt="a",
            created_at=None,
            committed_at=None,
            reason=None,
            world_size=None,
            meta={},
            files=1,
            size_bytes=1,
            manifests=(entry,),
        )
        return commit, "0" * 16

    async def offer(self, commit: Commit, commit_crc: str, share: Share | None = None) -> Offer:
        return Offer(commit, commit_crc, (Manifest(name=commit.name, attempt="a", node=NodeOf(index=0, count=1), files=()),))

    async def download(self, offer: Offer, node: Node, on_progress: Callable[[int, int], None], *, patience: Patience) -> Path:
        self.under_way.append(offer.name)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            self.cleaned_up.append(offer.name)
            on_progress(1, 2)
            if self.fails_when_cancelled:
                raise OSError(28, "No space left on device") from None
            raise
        finally:
            self.under_way.remove(offer.name)
        return self._volume.root / offer.name


async def answered(services: Services, identifier: str | None = None, *, timeout_s: float) -> ResumeStatus:
    """Return the answer to a request, or to what the trainer asked for last."""
    status = await services.resume_service.progress(identifier, timeout_s=timeout_s)
    assert status is not None
    return status


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_begins_when_those_that_it_replaced_have_ended_and_only_it_answers(fails: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        downloader = SlowToEnd(services)
        downloader.fails_when_cancelled = fails
        services.store_reader.opened(downloader)
        services.store_reader.grant()
        services.resume_service.prefetch()
        while not downloader.under_way:
            await asyncio.sleep(0.01)
        services.resume_service.request("latest", 0)
        await asyncio.sleep(0.01)
        services.resume_service.request("checkpoint-10")
        assert downloader.under_way == ["checkpoint-20"], "the first one still ends"
        while downloader.under_way != ["checkpoint-10"]:
            status = services.resume_service.status()
            assert status is not None
            assert (status.state, status.done_bytes) == (ResumeState.CHOOSING, 0)
            await asyncio.sleep(0.01)
        downloader.held.set()
        answer = await answered(services, timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.done_bytes) == (ResumeState.READY, "checkpoint-10", 0)
        assert downloader.most_under_way == 1

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def downloading(downloader: SlowToEnd, name: str) -> None:
    while downloader.under_way != [name]:
        await asyncio.sleep(0.01)


def test_requests_during_the_clean_up_of_a_cancelled_one_do_not_cut_it_short(tmp_path: Path) -> None:
    """Its publication ran on while the next request emptied the folder for downloads."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        downloader = SlowToEnd(services)
        services.store_reader.opened(downloader)
        services.store_reader.grant()
        services.resume_service.request("checkpoint-20", asked_by=AskedBy.TRAINER)
        await downloading(downloader, "checkpoint-20")
        for checkpoint, train_call in (("latest", 0), ("checkpoint-10", 0), ("checkpoint-10", None)):
            services.resume_service.request(checkpoint, train_call, asked_by=AskedBy.TRAINER)
            await asyncio.sleep(0.01)
        await downloading(downloader, "checkpoint-10")
        assert downloader.cleaned_up == ["checkpoint-20"]
        downloader.held.set()
        assert (await answered(services, timeout_s=5)).checkpoint == "checkpoint-10"
        assert downloader.most_under_way == 1

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_each_of_two_who_ask_at_once_gets_the_answer_to_what_was_asked_and_the_trainer_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        downloader = SlowToEnd(services)
        services.store_reader.opened(downloader)
        services.store_reader.grant()
        person = services.resume_service.request("checkpoint-10", asked_by=AskedBy.PERSON)
        await downloading(downloader, "checkpoint-10")
        trainer = services.resume_service.request("latest", 0, asked_by=AskedBy.TRAINER)
        await downloading(downloader, "checkpoint-20")
        late = services.resume_service.request("checkpoint-10", 0, asked_by=AskedBy.PERSON)
        assert "waits for another request: checkpoint-20 of the trainer" in (late.detail or "")
        assert services.resume_service.is_in_use("checkpoint-10"), "it will go on"
        assert services.resume_service.is_in_use("checkpoint-20")
        await asyncio.sleep(0.1)
        assert downloader.under_way == ["checkpoint-20"]
        downloader.held.set()
        answers = [await answered(services, of.id, timeout_s=5) for of in (person, trainer, late)]
        names = ["checkpoint-10", "checkpoint-20", "checkpoint-10"]
        assert [(a.state, a.checkpoint) for a in answers] == [(ResumeState.READY, name) for name in names]
        assert (await answered(services, timeout_s=5)).id == trainer.id, "without an id: the trainer's"
        assert downloader.most_under_way == 1
        assert all(services.resume_service.is_in_use(name) for name in names)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_who_does_not_say_who_asks_is_the_trainer_until_that_says_so_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        older_hook = services.resume_service.request("latest", 0)
        assert (older_hook.asked_by, services.resume_service.status()) == (AskedBy.TRAINER, older_hook)
        hook = services.resume_service.request("latest", 1, asked_by=AskedBy.TRAINER)
        by_hand = services.resume_service.request("checkpoint-10")
        assert by_hand.asked_by is AskedBy.PERSON
        assert services.resume_service.status() == hook
        services.resume_service.close()

    asyncio.run(scenario())


def test_what_the_trainer_asked_before_is_answered_too_if_somebody_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        downloader = SlowToEnd(services)
        services.store_reader.opened(downloader)
        services.store_reader.grant()
        first = services.resume_service.request("latest", asked_by=AskedBy.TRAINER)
        second = services.resume_service.request("checkpoint-10", asked_by=AskedBy.TRAINER)
        downloader.held.set()
        assert (await answered(services, second.id, timeout_s=5)).checkpoint == "checkpoint-10"
        await asyncio.sleep(0.05)
        status = services.resume_service.status(first.id)
        assert status is not None
        assert status.state is ResumeState.CHOOSING, "nobody waits for it"
        assert (await answered(services, first.id, timeout_s=5)).checkpoint == "checkpoint-20"

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_the_same_question_is_one_request_and_answers_are_kept_for_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        downloader = SlowToEnd(services)
        services.store_reader.opened(downloader)
        services.store_reader.grant()
        trainer = services.resume_service.request("latest", asked_by=AskedBy.TRAINER)
        assert services.resume_service.request("latest", asked_by=AskedBy.PERSON).id == trainer.id
        downloader.held.set()
        await answered(services, trainer.id, timeout_s=5)
        first = services.resume_service.request("checkpoint-10", asked_by=AskedBy.PERSON)
        for train_call in range(40):
            asked = services.resume_service.request("checkpoint-10", train_call, asked_by=AskedBy.PERSON)
            await answered(services, asked.id, timeout_s=5)
        assert services.resume_service.status(first.id) is None
        assert await services.resume_service.progress(first.id, timeout_s=5) is None
        assert services.resume_service.status(trainer.id) is not None, "the trainer's latest stays"
        downloader.held.clear()
        for train_call in range(MOST_WAITING):
            services.resume_service.request("checkpoint-10", train_call, asked_by=AskedBy.PERSON)
        with pytest.raises(TooManyRequests):
            services.resume_service.request("checkpoint-10", MOST_WAITING, asked_by=AskedBy.PERSON)
        services.resume_service.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Away(SlowToEnd):
    async def list_folders(self) -> list[str]:
        await asyncio.Event().wait()
        return []


class Empty(SlowToEnd):
    async def list_folders(self) -> list[str]:
        return []


def test_what_was_downloaded_before_is_used_when_the_store_has_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef", "restored_boot": boot_id()}}
        write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
        services.store_reader.opened(Empty(services))
        services.store_reader.grant()
        services.resume_service.request()
        answer = await answered(services, timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.source) == (ResumeState.READY, "checkpoint-20", "local")

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_nothing_is_offered_before_the_prefix_is_known_to_be_this_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the store taken for one that is away."""

    async def scenario() -> None:
        monkeypatch.setattr(request_worker, "LOCAL_PATIENCE_S", 0.05)
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE)
        services.store_reader.opened(Empty(services))
        services.resume_service.request()
        answer = await answered(services, timeout_s=0.5)
        assert (answer.state, answer.detail) == (
            ResumeState.CHOOSING,
            "the pod that held the prefix is asked whether it is alive",
        )
        services.store_reader.grant()
        assert (await answered(services, timeout_s=5)).checkpoint == "checkpoint-20"

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_was_downloaded_before_is_used_when_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(request_worker, "LOCAL_PATIENCE_S", 0.05)
        services = new_life(tmp_path / "volume")
        marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef", "restored_boot": boot_id(), "loss": 1}}
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
        services.store_reader.opened(Away(services))
        services.store_reader.grant()
        services.resume_service.request()
        answer = await answered(services, timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.source) == (ResumeState.READY, "checkpoint-20", "local")
        assert answer.meta == {"loss": 1}
        (folder / "model").write_bytes(b"changed")
        services.resume_service.request("latest", 0)
        answer = await answered(services, timeout_s=0.5)
        assert answer.state is ResumeState.CHOOSING, "one that was changed since is waited out"
        services.resume_service.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("boot", [{}, {"restored_boot": ""}, {"restored_boot": "5e3f0b8e-0000-4000-8000-000000000000"}])
def test_what_was_downloaded_before_the_node_was_restarted_is_not_used_without_the_store(
    boot: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may not have been on the disk, and nothing compares them."""

    async def scenario() -> None:
        monkeypatch.setattr(request_worker, "LOCAL_PATIENCE_S", 0.05)
        services = new_life(tmp_path / "volume")
        marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef", **boot}}
        write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
        services.store_reader.opened(Away(services))
        services.store_reader.grant()
        services.resume_service.request()
        answer = await answered(services, timeout_s=0.5)
        assert answer.state is ResumeState.CHOOSING
        services.resume_service.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}"}


def test_what_was_downloaded_before_is_used_also_once_its_commit_is_known_to_be_gone(
    store: dict[str, str], tmp_path: Path
) -> None:
    marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef", "restored_boot": boot_id()}}
    write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
    with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "on-demand"}) as running:
        until(lambda: running.ready().call("GET", "/v1/checkpoints/checkpoint-20")["state"] == "superseded")
        answer = running.resume()
        assert (answer["state"], answer["source"]) == ("ready", "local"), answer


def test_the_answer_names_the_save_that_the_nodes_of_a_job_compare(store: dict[str, str], tmp_path: Path) -> None:
    marker = {"attempt": "a", "save_id": "3", "created_at": "2026-03-01T12:00:00.250Z"}
    saves = []
    for volume in ("first", "second"):
        with sidecar(tmp_path / volume, store) as running:
            running.ready()
            if volume == "first":
                write_checkpoint(running.volume, "checkpoint-20", WHOLE, marker)
                running.committed("checkpoint-20")
            answer = running.resume()
            saves.append((answer["downloaded"], answer["save"]))
    named = {"attempt": "a", "save_id": "3", "finished_at": "2026-03-01T12:00:00.250Z"}
    assert saves == [(False, named), (True, named)]


@pytest.mark.parametrize("torn_by", ["a deletion", "a rewriting"])
def test_a_local_checkpoint_whose_files_changed_is_not_offered(torn_by: str, store: dict[str, str], tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", store) as running:
        running.ready()
        folder = write_checkpoint(running.volume, "checkpoint-20", WHOLE, {})
        running.committed("checkpoint-20")
        time.sleep(0.02)
        if torn_by == "a deletion":
            (folder / "optimizer").unlink()
        else:
            (folder / "model").write_bytes(b"half")
        answer = running.resume()
        assert (answer["state"], answer["source"]) == ("ready", "store"), answer
        assert contents(folder) == WHOLE


def test_a_commit_made_anew_ends_the_quarantine_of_its_name(store: dict[str, str], tmp_path: Path) -> None:
    with sidecar(tmp_path / "old", store) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"xyz"}, {})
        running.committed("checkpoint-1")
    (tmp_path / "store/checkpoint-1/a").write_bytes(b"xyZ")
    with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        assert running.resume()["state"] == "none"
        [(name, why)] = running.status()["bad"].items()
        assert f"bad        {name}: {why}" in running.command("status").stdout
        assert [line.split()[:2] for line in running.command("ls").stdout.splitlines()[1:]] == [[name, "bad"]]
        assert running.call("GET", f"/v1/checkpoints/{name}")["state"] == "bad"
        with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/v1/live"):  # the store is read while somebody looks
            overview = until(lambda: o if (o := running.call("GET", "/v1/overview"))["checkpoints"] else None)
        assert {c["state"] for c in overview["checkpoints"]} == {"bad"}
        assert overview["durable"] is None, "what is bad is not the newest durable one"
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"good"}, {})
        running.committed("checkpoint-1")
        until(lambda: running.status()["bad"] == {})
        running.kill()
    with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "off"}) as running:
        assert running.up().status()["bad"] == {}
