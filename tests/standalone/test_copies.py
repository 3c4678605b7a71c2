"""Push and pull without a sidecar: the same commit as the sidecar's, the same verification as a resume's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import key_limits, keys
from sidecar.errors import StoreError, StoreUnavailable
from sidecar.standalone.directory import SourceDirectory
from sidecar.standalone.pushing import Pusher
from sidecar.transfer.health import Health
from tests.standalone.conftest import Person, checkpoint, old


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def files_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != ".complete"}


def test_what_was_pushed_is_listed_shown_verified_and_pulled(person: Person, out: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        old(checkpoint(out, step))
    pushed = person.json("push", str(out), person.url)["pushed"]
    assert [(p["checkpoint"], p["state"], p["is_new"]) for p in pushed] == [
        ("checkpoint-10", "committed", True),
        ("checkpoint-20", "committed", True),
    ]
    listed = person.json("ls", person.url)["checkpoints"]
    assert [(c["name"], c["state"], c["objects"]) for c in listed] == [
        ("checkpoint-20", "committed", 2),
        ("checkpoint-10", "committed", 2),
    ]
    shown = person.json("show", person.at("checkpoint-10"))
    assert {f["path"] for f in shown["files"]} == {"model.safetensors", "sub/optimizer.pt"}
    assert person.json("verify", person.url)["checkpoints"][0]["checkpoint"] == "checkpoint-20"
    assert len(person.json("verify", person.url, "--all", "--quick")["checkpoints"]) == 2
    target = tmp_path / "laptop"
    pulled = person.json("pull", person.url, str(target))
    assert (pulled["state"], pulled["path"], pulled["downloaded"]) == ("ready", str(target / "checkpoint-20"), True)
    assert files_of(target / "checkpoint-20") == files_of(out / "checkpoint-20")
    assert [entry.name for entry in target.iterdir()] == ["checkpoint-20"]
    assert person.json("pull", person.at("checkpoint-20"), str(target))["downloaded"] is False


def test_a_second_push_of_the_same_content_sends_nothing_and_other_content_is_refused(local: Person, out: Path) -> None:
    path = old(checkpoint(out, 10))
    assert local.run("push", str(path), local.url) == 0
    assert local.json("push", str(path), local.url)["pushed"][0]["is_new"] is False
    (path / "model.safetensors").write_bytes(b"another")
    old(path)
    assert local.run("push", str(path), local.url) == 7
    assert "add --replace" in local.err
    assert local.run("verify", local.at("checkpoint-10")) == 0
    assert local.json("push", str(path), local.url, "--replace")["pushed"][0]["is_new"] is True
    assert local.run("verify", local.at("checkpoint-10")) == 0
    with local.store() as store:
        assert store.get("checkpoint-10/model.safetensors") == b"another"


def test_a_push_of_several_goes_on_after_one_that_is_refused_and_says_what_became_of_each(local: Person, out: Path) -> None:
    assert local.run("push", str(old(checkpoint(out, 10))), local.url) == 0
    old(checkpoint(out, 10, {"model.safetensors": b"another"}))
    for step in (5, 20):
        old(checkpoint(out, step))
    assert local.run("push", str(out), local.url) == 7
    assert {line.partition(": ")[0] for line in local.out.splitlines()} == {"checkpoint-5", "checkpoint-10", "checkpoint-20"}
    assert "checkpoint-20: committed: 2 files" in local.out
    assert "checkpoint-10: refused: " in local.out
    assert "add --replace" in local.out
    assert local.err == "checkpoint-sidecar push: refused: checkpoint-10\n"
    answer = local.json("push", str(out), local.url, code=7)
    assert [p["is_new"] for p in answer["pushed"]] == [False, False]
    assert [p["checkpoint"] for p in answer["refused"]] == ["checkpoint-10"]
    assert answer["exit_code"] == 7


def test_a_push_that_fails_says_what_it_has_done_before(local: Person, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        old(checkpoint(out, step))
    pushes = Pusher.push

    async def fails_at_20(pusher: Pusher, source: Any, found: Any, *more: Any, **options: Any) -> Any:
        if found.name == "checkpoint-20":
            raise StoreUnavailable("the store is away")
        return await pushes(pusher, source, found, *more, **options)

    monkeypatch.setattr(Pusher, "push", fails_at_20)
    assert local.run("push", str(out), local.url) == 6
    assert local.out.startswith("checkpoint-10: committed: ")
    assert local.err == "checkpoint-sidecar push: the store is away\n"


def test_a_pulled_checkpoint_can_be_pushed_to_another_store(local: Person, out: Path, tmp_path: Path) -> None:
    assert local.run("push", str(old(checkpoint(out, 10))), local.url) == 0
    assert local.run("pull", local.at("checkpoint-10"), str(tmp_path / "laptop")) == 0
    other = f"file://{tmp_path}/other"
    assert local.run("push", str(tmp_path / "laptop" / "checkpoint-10"), other) == 0
    assert local.run("verify", other) == 0


def test_the_layout_of_the_kubeflow_sdk_is_pushed_without_its_unfinished_steps(local: Person, out: Path) -> None:
    old(checkpoint(out, 10))
    torn = checkpoint(out, 20)
    (torn / "checkpoint-is-incomplete.txt.node-0-rank-0").write_text("Checkpoint started at step 20")
    old(torn)
    assert local.run("push", str(torn), local.url) == 7
    assert "not finished" in local.err
    pushed = local.json("push", str(out), local.url)
    assert [p["checkpoint"] for p in pushed["pushed"]] == ["checkpoint-10"]
    assert [p["checkpoint"] for p in pushed["passed_over"]] == ["checkpoint-20"]


def test_a_directory_with_a_file_whose_key_is_too_long_is_refused(
    local: Person, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limits, "MAX_KEY_BYTES", 20)
    assert local.run("push", str(old(checkpoint(out, 10))), local.url) == 7
    assert "keys have 20 at most: shorten its path" in local.err


def test_a_directory_that_is_being_written_is_refused(local: Person, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(out, 10)
    looks = SourceDirectory.is_unchanged

    async def written_to(source: SourceDirectory) -> bool:
        (path / "late.pt").write_bytes(b"late")
        return await looks(source)

    monkeypatch.setattr(SourceDirectory, "is_unchanged", written_to)
    assert local.run("push", str(path), local.url) == 7
    assert "it is being written" in local.err


@pytest.mark.parametrize("change", ["rewritten", "added", "removed"])
def test_a_directory_that_changes_while_it_is_pushed_is_not_committed(
    change: str, local: Person, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old(checkpoint(out, 10))
    opens = SourceDirectory.open

    @contextmanager
    def changing(source: SourceDirectory, name: str) -> Iterator[int]:
        with opens(source, name) as fd:
            if change == "rewritten":
                (path / name).write_bytes(b"rewritten")
            elif change == "added":
                (path / "late.pt").write_bytes(b"late")
            else:
                (path / "sub" / "optimizer.pt").unlink(missing_ok=True)
            yield fd

    monkeypatch.setattr(SourceDirectory, "open", changing)
    assert local.run("push", str(path), local.url) in (1, 7)
    with local.store() as store:
        assert keys.commit("checkpoint-10") not in {stored.key for stored in store.list("")}
    assert local.run("pull", local.url, str(out / "laptop")) == 5


def test_files_that_are_not_regular_are_refused(local: Person, out: Path) -> None:
    path = checkpoint(out, 10)
    (path / "link.pt").symlink_to("/etc/passwd")
    assert local.run("push", str(old_without_links(path)), local.url) == 7
    assert "symbolic link" in local.err


def old_without_links(path: Path) -> Path:
    past_s = time.time() - 60
    for file in path.rglob("*"):
        os.utime(file, (past_s, past_s), follow_symlinks=False)
    return path


def test_a_pull_whose_request_failed_ends_as_unreachable_though_others_are_answered_later(
    local: Person, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 1, as a defect does."""
    from sidecar.store.file.store import FileStore

    contents = {f"{n}.pt": bytes([n]) * (3 << 20) for n in range(4)}
    assert local.run("push", str(old(checkpoint(out, 10, contents))), local.url) == 0
    read, given_up = FileStore.read, Health.given_up

    def cut(store: FileStore, key: str, **options: Any) -> Any:
        if key.endswith("2.pt"):
            raise StoreUnavailable("the cable was pulled")
        return read(store, key, **options)

    def given_up_while_another_is_answered(health: Health, error: StoreError) -> None:
        given_up(health, error)
        health.succeeded()

    monkeypatch.setattr(FileStore, "read", cut)
    monkeypatch.setattr(Health, "given_up", given_up_while_another_is_answered)
    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 0.0)
    assert local.run("pull", local.at("checkpoint-10"), str(out / "laptop")) == 6, local.err
    assert "checkpoint-10: the cable was pulled: what arrived is kept, and the same command continues" in local.err


def test_a_pull_that_was_cut_off_continues_where_it_was(local: Person, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidecar.store.file.store import FileStore

    contents = {f"{n}.pt": bytes([n]) * (3 << 20) for n in range(4)}
    assert local.run("push", str(old(checkpoint(out, 10, contents))), local.url) == 0
    reads: list[str] = []
    read = FileStore.read

    def counted(store: FileStore, key: str, **options: Any) -> Any:
        if key.endswith(".pt"):
            reads.append(key)
            if is_cut and len(reads) > 2:
                until_s = time.monotonic() + 20
                while not whole_files() and time.monotonic() < until_s:
                    time.sleep(0.01)
                raise StoreUnavailable("the cable was pulled")
        return read(store, key, **options)

    def whole_files() -> list[Path]:
        return list((target / ".ckpt" / "incoming" / "checkpoint-10").glob("*.pt"))

    monkeypatch.setattr(FileStore, "read", counted)
    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 0.0)
    target, is_cut = out / "laptop", True
    assert local.run("pull", local.at("checkpoint-10"), str(target)) == 6
    assert "the cable was pulled" in local.err
    assert not (target / "checkpoint-10").exists()
    kept = whole_files()
    assert kept
    reads.clear()
    is_cut = False
    assert local.run("pull", local.at("checkpoint-10"), str(target)) == 0
    assert len(reads) == 4 - len(kept) < 4
    assert files_of(target / "checkpoint-10") == contents
    assert not (target / ".ckpt").exists()


def test_a_directory_of_somebody_else_in_the_way_stays(local: Person, out: Path, tmp_path: Path) -> None:
    assert local.run("push", str(old(checkpoint(out, 10))), local.url) == 0
    mine = checkpoint(tmp_path / "mine", 10, {"notes.txt": b"mine"})
    (mine / ".complete").write_bytes(b"")
    assert local.run("pull", local.at("checkpoint-10"), str(tmp_path / "mine")) == 1
    assert "in the way" in local.err
    assert files_of(mine) == {"notes.txt": b"mine"}


def test_there_is_nothing_to_resume_from_in_an_empty_prefix(person: Person, tmp_path: Path) -> None:
    if person.endpoint is None:
        (tmp_path / "store" / "run").mkdir(parents=True)
    assert person.run("pull", person.url, str(tmp_path / "laptop")) == 5


def test_a_checkpoint_that_is_not_there_is_named_alike_by_all_commands(person: Person, out: Path, tmp_path: Path) -> None:
    assert person.run("push", str(old(checkpoint(out, 10))), person.url) == 0
    missing = person.at("checkpoint-40")
    for command, *more in (["ls"], ["show"], ["pull", str(tmp_path / "laptop")], ["rm", "--yes"]):
        assert person.run(command, missing, *more) == 5
        assert (person.out, person.err) == ("", f"checkpoint-sidecar {command}: {missing}: no such checkpoint\n")
    assert person.run("ls", person.at("checkpoint-10")) == 0


def test_parts_of_two_nodes_are_committed_with_the_second_and_pulled_by_rank(local: Person, out: Path) -> None:
    for index, code in ((0, 3), (1, 0)):
        files = {"model.pt": b"m" * 10, f"rng_state_{index}.pth": b"r%d" % index}
        path = checkpoint(out / f"node-{index}", 10, files)
        marker = {"attempt": "a", "node": {"index": index, "count": 2}, "world_size": 2}
        (path / ".complete").write_text(json.dumps(marker))
        assert local.run("push", str(path), local.url) == code
    assert local.run("pull", local.at("checkpoint-10"), str(out / "share"), "--rank", "1") == 0
    assert set(files_of(out / "share" / "checkpoint-10")) == {"model.pt", "rng_state_1.pth"}
    assert local.run("pull", local.at("checkpoint-10"), str(out / "all")) == 0
    assert set(files_of(out / "all" / "checkpoint-10")) == {"model.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert local.run("pull", local.at("checkpoint-10"), str(out / "none"), "--rank", "2") == 2
    assert "ranks [2] must be some of 0 … 1" in local.err
    assert local.run("push", str(out / "share" / "checkpoint-10"), f"{local.url}-copy") == 7
    assert "a part of a checkpoint" in local.err


def test_an_older_checkpoint_in_place_of_a_damaged_newest_one_is_said_and_no_success_unless_asked_for(
    local: Person, pushed: Any, tmp_path: Path
) -> None:
    pushed(local, 10, 20)
    damaged = Path(local.url.removeprefix("file://"), "checkpoint-20/model.safetensors")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    older = str(tmp_path / "in/checkpoint-10")
    assert local.run("pull", local.url, str(tmp_path / "in")) == 8
    assert local.out == f"{older}\n"
    said = "checkpoint-sidecar pull: pulled checkpoint-10, which is older than checkpoint-20: that cannot be used"
    assert "checkpoint-sidecar pull: passed over checkpoint-20: " in local.err
    assert local.err.endswith(f"{said}; with --or-older this is a success\n")
    answer = local.json("pull", local.url, str(tmp_path / "in"), code=8)
    assert (answer["path"], answer["exit_code"]) == (older, 8)
    assert "older than checkpoint-20" in answer["error"]
    assert local.run("pull", local.url, str(tmp_path / "in"), "--or-older") == 0
    assert local.out == f"{older}\n"
    assert local.err.endswith(f"{said}\n")
    assert "error" not in local.json("pull", local.url, str(tmp_path / "in"), "--or-older")


def test_a_newer_step_that_is_still_being_uploaded_is_no_reason_against_the_newest_committed_one(
    local: Person, pushed: Any, tmp_path: Path
) -> None:
    pushed(local, 10)
    with local.store() as store:
        store.put("checkpoint-20/model.safetensors", b"half")
    assert local.run("pull", local.url, str(tmp_path / "in")) == 0
    assert local.out == f"{tmp_path / 'in/checkpoint-10'}\n"
