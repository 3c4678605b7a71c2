"""Nodes that load one step load the same writing of it: a node without a sidecar may have another attempt's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.volume.boot import boot_id
from tests.hook.several import ThreadConsensus, on_ranks
from trainer_hook.contract import FINAL, META_RESTORED, META_RESTORED_BOOT, ListedFile, Marker, Node, SaveIdentity
from trainer_hook.process.answers import ResumeResult
from trainer_hook.process.client import Client, SidecarAbsent
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.volume.checkpoint_folder import finish

Result = Any


class Ready(Client):
    """The sidecar of a node: it has put the committed step on the volume. On other nodes none answers."""

    def __init__(self, volume: Path, *, is_there: bool, save: SaveIdentity | None = None) -> None:
        super().__init__("http://127.0.0.1:9", volume)
        self._is_there = is_there
        self._save = save

    def resume(self, checkpoint: str, **_: Any) -> ResumeResult:
        if not self._is_there:
            raise SidecarAbsent("no sidecar answers")
        return ResumeResult("checkpoint-20" if checkpoint == "latest" else checkpoint, "store", save=self._save)

    def older_checkpoints(self, than_step: int, **_: Any) -> Any:
        return iter(["checkpoint-10"] if than_step > 10 else [])


TIME, LATER = "2026-03-01T12:00:00.250Z", "2026-03-01T12:00:07.000Z"


def downloaded(attempt: str, *, created_at: str = TIME) -> Marker:
    return Marker(attempt=attempt, created_at=created_at, meta={META_RESTORED: "1f", META_RESTORED_BOOT: boot_id()})


def part(attempt: str, save_id: str = "1") -> Marker:
    return Marker(attempt=attempt, save_id=save_id, node=Node(1, 2))


def write(volume: Path, name: str, marker: Marker) -> None:
    (folder := volume / name).mkdir(parents=True)
    (folder / "model").write_bytes(b"weights")
    fields = {field: getattr(marker, field) for field in ("attempt", "save_id", "created_at", "node", "meta")}
    finish(folder, Marker(files=(ListedFile("model", 7),), **fields))


def on_nodes(
    tmp_path: Path, act: Callable[[Resumer], Result], *, save: SaveIdentity | None = None, sidecars: int = 1
) -> list[Result]:
    """Return what ``act`` returns on two nodes, of which the second has no sidecar."""

    def one(consensus: ThreadConsensus) -> Result:
        volume = tmp_path / f"node-{consensus.world.rank}"
        settings = from_environment({"CKPT_DIR": str(volume)})
        client = Ready(volume, is_there=consensus.world.rank < sidecars, save=save)
        return act(Resumer(settings, client, consensus, missing=lambda *_, **__: []))

    return on_ranks(2, one)


CASES = [
    (part("a"), "checkpoint-10"),
    (part("b"), "checkpoint-20"),
    (downloaded("a"), "checkpoint-10"),
    (downloaded("b", created_at=LATER), "checkpoint-10"),
    (downloaded("b"), "checkpoint-20"),
    (Marker(), "checkpoint-10"),
]


@pytest.mark.parametrize(("there", "name"), CASES)
def test_a_node_without_a_sidecar_loads_no_other_attempt_than_the_others(
    there: Marker, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in range(2):
        write(tmp_path / f"node-{node}", "checkpoint-10", downloaded("a"))
    write(tmp_path / "node-0", "checkpoint-20", downloaded("b"))
    write(tmp_path / "node-1", "checkpoint-20", there)
    chosen = on_nodes(tmp_path, lambda resumer: resumer.choose(0))
    assert [choice and choice.name for choice in chosen] == [name] * 2
    told = "checkpoint-20 is passed over: it is of another save than that of rank 0 (here: "
    assert (told in capsys.readouterr().err) == (name != "checkpoint-20")


@pytest.mark.parametrize(("attempt", "is_used"), [("a", False), ("b", True)])
def test_nor_another_final_model(attempt: str, is_used: bool, tmp_path: Path) -> None:
    write(tmp_path / "node-0", FINAL, downloaded("b"))
    write(tmp_path / "node-1", FINAL, part(attempt))
    assert [path is not None for path in on_nodes(tmp_path, lambda resumer: resumer.final(0))] == [is_used] * 2


@pytest.mark.parametrize(("attempt", "is_fetched"), [("a", False), ("b", True)])
def test_nor_another_best_model(attempt: str, is_fetched: bool, tmp_path: Path) -> None:
    write(tmp_path / "node-0", "checkpoint-20", downloaded("b"))
    write(tmp_path / "node-1", "checkpoint-20", part(attempt))
    assert [reason is None for reason in on_nodes(tmp_path, lambda r: r.fetch("checkpoint-20"))] == [is_fetched] * 2


COMMITTED = SaveIdentity("b", "2", TIME, is_committed=True)


def test_a_node_whose_sidecar_has_compared_its_older_download_with_the_commit_loads_that(tmp_path: Path) -> None:
    """An attempt that repeats a step may write the same bytes: then nothing is downloaded, and the marker stays."""
    write(tmp_path / "node-0", "checkpoint-20", downloaded("b"))
    write(tmp_path / "node-1", "checkpoint-20", downloaded("a"))
    chosen = on_nodes(tmp_path, lambda resumer: resumer.choose(0), save=COMMITTED, sidecars=2)
    assert [choice and (choice.name, choice.attempt) for choice in chosen] == [("checkpoint-20", "b")] * 2


@pytest.mark.parametrize(("save_id", "name"), [("1", "checkpoint-10"), ("2", "checkpoint-20")])
def test_an_earlier_writing_of_the_same_attempt_is_not_the_committed_one(save_id: str, name: str, tmp_path: Path) -> None:
    for node in range(2):
        write(tmp_path / f"node-{node}", "checkpoint-10", part("b"))
    write(tmp_path / "node-0", "checkpoint-20", downloaded("b"))
    write(tmp_path / "node-1", "checkpoint-20", part("b", save_id))

    class Older(Ready):
        def resume(self, checkpoint: str, **told: Any) -> ResumeResult:
            answer = super().resume(checkpoint, **told)
            return answer if answer.checkpoint == "checkpoint-20" else ResumeResult(answer.checkpoint, "local")

    def choose(consensus: ThreadConsensus) -> str | None:
        volume = tmp_path / f"node-{consensus.world.rank}"
        client = Older(volume, is_there=consensus.world.rank == 0, save=COMMITTED)
        settings = from_environment({"CKPT_DIR": str(volume)})
        choice = Resumer(settings, client, consensus, missing=lambda *_, **__: []).choose(0)
        return choice and choice.name

    assert on_ranks(2, choose) == [name] * 2


class Many(Ready):
    """Node 0 gets every step. On node 1 each request takes as long as it may."""

    def __init__(self, volume: Path, *, is_there: bool, is_silent: bool) -> None:
        super().__init__(volume, is_there=is_there)
        self.asked: list[str] = []
        self._is_silent = is_silent

    def resume(self, checkpoint: str, **told: Any) -> ResumeResult:
        self.asked.append(checkpoint)
        if self._is_there:
            return super().resume(checkpoint, **told)
        time.sleep(told["timeout_s"])
        if self._is_silent:
            raise SidecarAbsent("a sidecar holds the volume, and does not answer")
        return ResumeResult(detail="downloading", known=False)

    def older_checkpoints(self, than_step: int, **_: Any) -> Any:
        return (f"checkpoint-{step}" for step in range(than_step - 1, 0, -1))


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_node_that_had_no_step_in_time_is_not_waited_for_again_with_each_older_one(
    is_silent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All GPUs waited for the number of checkpoints in the store times CKPT_RESUME_TIMEOUT_S."""
    write(tmp_path / "node-0", "checkpoint-20", downloaded("b"))
    (tmp_path / "node-1").mkdir()

    def choose(consensus: ThreadConsensus) -> list[str]:
        volume, rank = tmp_path / f"node-{consensus.world.rank}", consensus.world.rank
        client = Many(volume, is_there=rank == 0, is_silent=is_silent)
        settings = from_environment({"CKPT_DIR": str(volume), "CKPT_RESUME_TIMEOUT_S": "0.05"})
        assert Resumer(settings, client, consensus, missing=lambda *_, **__: []).choose(0) is None
        return client.asked

    assert on_ranks(2, choose) == [["latest"], ["checkpoint-20"]]
    assert "FROM SCRATCH, although there may be a checkpoint to continue from: not every node had" in capsys.readouterr().err


def test_older_steps_are_not_asked_for_after_one_that_did_not_come_in_time(tmp_path: Path) -> None:
    """Of a single node: the newest one lacks something, and the next one does not come."""

    class Slow(Many):
        def resume(self, checkpoint: str, **told: Any) -> ResumeResult:
            self._is_there = checkpoint == "latest"
            return super().resume(checkpoint, **told)

    client = Slow(tmp_path, is_there=True, is_silent=False)
    settings = from_environment({"CKPT_DIR": str(tmp_path), "CKPT_RESUME_TIMEOUT_S": "0.05"})
    assert Resumer(settings, client, RankConsensus(), missing=lambda *_, **__: ["optimizer.pt"]).choose(0) is None
    assert client.asked == ["latest", "checkpoint-19"]
