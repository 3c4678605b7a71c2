"""The request of a node to its sidecar, and a local copy that holds only part of a checkpoint."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from trainer_hook.contract import LOCK, META_PARTIAL, META_RESTORED, Marker
from trainer_hook.process import client as client_module
from trainer_hook.process.answers import ResumeResult
from trainer_hook.process.client import Client, SidecarAbsent
from trainer_hook.process.rank_consensus import RankConsensus, place_among
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.volume.checkpoint_folder import finish


def none_missing(*_: Any, **__: Any) -> list[str]:
    return []


class Asked(Client):
    """Knows what it was asked for; nobody answers it."""

    def __init__(self, volume: Path) -> None:
        super().__init__("http://127.0.0.1:9", volume)
        self.shares: list[Any] = []

    def resume(self, checkpoint: str, **asked: Any) -> ResumeResult:
        self.shares.append(asked["share"])
        raise SidecarAbsent("no sidecar answers")


@pytest.mark.parametrize("meta", [{}, {META_PARTIAL: 3}])
def test_part_of_a_checkpoint_on_the_volume_is_nothing_to_continue_from_without_the_sidecar(
    tmp_path: Path, meta: dict[str, Any]
) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    finish(folder, Marker(step=5, meta=meta))
    resumer = Resumer(
        from_environment({"CKPT_DIR": str(tmp_path)}), Asked(tmp_path), RankConsensus(), missing=lambda *_, **__: []
    )
    choice = resumer.choose(0)
    assert (choice.name if choice else None) == (None if meta else "checkpoint-5")


@pytest.mark.parametrize(("is_on_volume", "waits"), [(False, True), (True, False)])
def test_a_sidecar_that_waits_for_the_one_of_an_earlier_pod_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_volume: bool, waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers only then; 30 s were less than a flush may take, and training began from scratch."""
    monkeypatch.setattr(client_module, "ABSENT_AFTER_S", 0.1)
    monkeypatch.setattr(client_module, "TOLD_AFTER_S", 0.05)
    (tmp_path / ".ckpt").mkdir()
    if is_on_volume:
        (tmp_path / "checkpoint-5").mkdir()
        finish(tmp_path / "checkpoint-5", Marker(step=5))
    settings = from_environment({"CKPT_DIR": str(tmp_path), "CKPT_SIDECAR_URL": f"http://127.0.0.1:{free_port()}"})
    resumer = Resumer(settings, Client(settings.sidecar_url, tmp_path), RankConsensus(), missing=none_missing)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(1.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        began_s = time.monotonic()
        assert (resumer.choose(0) is not None) == is_on_volume
        assert (time.monotonic() - began_s > 1.4) == waits
        time.sleep(max(0.0, began_s + 2.0 - time.monotonic()))
    assert capsys.readouterr().err.count("an earlier pod's still uses the volume") == waits


@pytest.mark.parametrize(
    ("names", "reads_all", "share"),
    [
        (["a", "a", "b", "b"], False, {"world_size": 4, "ranks": [2, 3]}),
        (["a", "b", "a", "b"], False, {"world_size": 4, "ranks": [1, 3]}),
        (["a", "a", "b", "b"], True, None),
        (["a", "a", "a", "a"], False, None),
    ],
)
def test_a_node_asks_for_what_its_own_ranks_read(
    tmp_path: Path, names: list[str], reads_all: bool, share: dict[str, Any] | None
) -> None:
    client, consensus = Asked(tmp_path), RankConsensus()
    consensus.world = place_among(names, 3)
    resumer = Resumer(
        from_environment({"CKPT_DIR": str(tmp_path)}), client, consensus, missing=none_missing, reads_all=reads_all
    )
    with pytest.raises(SidecarAbsent):
        resumer._request("latest", 0)
    assert client.shares == [share]


@pytest.mark.parametrize(
    ("told", "meta", "source"),
    [("store", {META_RESTORED: "1f"}, "store"), ("local", {META_RESTORED: "1f"}, "downloaded"), ("local", {}, "local")],
)
def test_what_the_sidecar_downloaded_before_it_was_asked_is_not_said_to_come_from_the_volume(
    told: str, meta: dict[str, str], source: str, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20/.complete").write_text(json.dumps({"meta": meta}))

    class Telling(Client):
        def resume(self, *_: Any, **__: Any) -> ResumeResult:
            return ResumeResult("checkpoint-20", told)

    client = Telling("http://127.0.0.1:1", tmp_path)
    chosen = Resumer(
        from_environment({"CKPT_DIR": str(tmp_path)}), client, RankConsensus(), missing=lambda *_, **__: []
    ).choose(0)
    assert chosen is not None
    assert chosen.source == source


class Failing(Asked):
    """A sidecar that found something committed and cannot have it."""

    def resume(self, checkpoint: str, **asked: Any) -> ResumeResult:
        return ResumeResult(detail="checkpoint-5 is committed and cannot be had now: volume full", known=False)


def test_a_start_from_scratch_beside_a_committed_checkpoint_is_said_in_capitals_and_never_made_under_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(**settings: str) -> Any:
        settings |= {"CKPT_DIR": str(tmp_path)}
        return Resumer(from_environment(settings), Failing(tmp_path), RankConsensus(), missing=lambda *_, **__: []).choose(0)

    assert choose() is None
    assert "TRAINING STARTS FROM SCRATCH" in (said := capsys.readouterr().err)
    assert "checkpoint-5 is committed" in said
    assert "CKPT_ON_STORE_FAILURE=fail" in said
    with pytest.raises(SystemExit):
        choose(CKPT_ON_STORE_FAILURE="fail")


def saves_5_and_10(volume: Path) -> None:
    for step in (5, 10):
        (volume / f"checkpoint-{step}").mkdir()
        finish(volume / f"checkpoint-{step}", Marker(step=step))


def refuse_10(folder: Path) -> None:
    if folder.name == "checkpoint-10":
        raise OSError("it lacks a file")


class Leaving(Client):
    """A sidecar that has the newest checkpoint, and is absent from then on."""

    def resume(self, checkpoint: str, **_: Any) -> ResumeResult:
        return ResumeResult("checkpoint-10", "store")


def test_without_a_sidecar_an_older_checkpoint_on_the_volume_is_used_where_the_newest_is_not_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that was started again at this instant cost all progress."""
    monkeypatch.setattr(client_module, "ABSENT_AFTER_S", 0.1)
    saves_5_and_10(tmp_path)

    def choose(**settings: str) -> Any:
        read = from_environment(settings | {"CKPT_DIR": str(tmp_path)})
        client = Leaving(f"http://127.0.0.1:{free_port()}", tmp_path)
        return Resumer(read, client, RankConsensus(), missing=none_missing, check=refuse_10).choose(0)

    assert choose().name == "checkpoint-5"
    with pytest.raises(SystemExit):
        choose(CKPT_ON_STORE_FAILURE="fail")


class OutOfTime(Client):
    """A sidecar whose store does not answer: the request for ``slow`` takes as long as it may."""

    def __init__(self, volume: Path, slow: str, *, known: bool) -> None:
        super().__init__("http://127.0.0.1:9", volume)
        self._slow, self._known = slow, known

    def resume(self, checkpoint: str, **asked: Any) -> ResumeResult:
        if checkpoint != self._slow:
            return ResumeResult("checkpoint-10", "store")
        time.sleep(asked["timeout_s"])
        return ResumeResult(detail="the store does not answer", known=self._known)

    def older_checkpoints(self, than_step: int, **_: Any) -> Any:
        return iter(["checkpoint-9"])


@pytest.mark.parametrize(("slow", "known"), [("latest", False), ("checkpoint-9", False), ("checkpoint-9", True)])
def test_nor_does_a_store_that_takes_all_of_the_time_hide_the_older_ones_on_the_volume(
    tmp_path: Path, slow: str, known: bool
) -> None:
    """Training began from scratch beside a checkpoint that needs no store."""
    saves_5_and_10(tmp_path)

    settings = from_environment({"CKPT_DIR": str(tmp_path), "CKPT_RESUME_TIMEOUT_S": "0.05"})
    chosen = Resumer(
        settings, OutOfTime(tmp_path, slow, known=known), RankConsensus(), missing=none_missing, check=refuse_10
    ).choose(0)
    assert chosen is not None
    assert chosen.name == "checkpoint-5"


@pytest.mark.parametrize(("nodes", "meta", "is_usable"), [(1, {}, True), (2, {}, False), (2, {META_RESTORED: "0" * 16}, True)])
def test_what_only_this_nodes_ranks_wrote_is_not_all_that_they_read(
    nodes: int, meta: dict[str, Any], is_usable: bool, tmp_path: Path
) -> None:
    (folder := tmp_path / "checkpoint-4").mkdir()
    finish(folder, Marker(meta=meta))
    consensus = RankConsensus()
    consensus.world = place_among([f"node-{node}" for node in range(nodes)], 0)
    settings = from_environment({"CKPT_DIR": str(tmp_path)})
    resumer = Resumer(settings, Client(settings.sidecar_url, tmp_path), consensus, missing=none_missing)
    assert resumer.is_usable("checkpoint-4") is is_usable
