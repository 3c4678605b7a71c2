"""What a person removes from a store: never half of a commit, never under a live run without saying so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.run_document import encode_run
from sidecar.errors import StoreError
from sidecar.lifecycle import idle_prefix
from sidecar.store.file.store import FileStore
from sidecar.store.protocol import Store
from tests.standalone.conftest import Person, checkpoint, old


def steps_in(store: Store) -> set[str]:
    return {stored.key.partition("/")[0] for stored in store.list(keys.STEPS)}


def hold(store: Store, **fields: Any) -> None:
    store.put(keys.RUN, encode_run(Run("r", holder="pod-1", beat=1, **fields)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_prefix, "SILENCE_S", 1.0)
    monkeypatch.setattr(idle_prefix, "POLL_S", 0.2)


def test_a_removed_checkpoint_leaves_nothing(person: Person, pushed: Any) -> None:
    pushed(person, 10, 20)
    removed = person.json("rm", person.at("checkpoint-20"), "--yes")
    assert (removed["name"], removed["was_committed"], removed["objects"]) == ("checkpoint-20", True, 2)
    with person.store() as store:
        assert steps_in(store) == {"checkpoint-10"}
    assert person.run("rm", person.at("checkpoint-20"), "--yes") == 5


def test_nobody_is_asked_without_a_terminal(local: Person, pushed: Any) -> None:
    pushed(local, 10)
    assert local.run("rm", local.at("checkpoint-10")) == 7
    assert "add --yes" in local.err
    assert local.run("verify", local.at("checkpoint-10")) == 0


def test_a_removal_that_is_cut_off_leaves_no_commit_and_can_be_repeated(
    local: Person, pushed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(local, 10, 20)
    delete, calls = FileStore.delete, []

    def cut_off(store: FileStore, gone: Iterable[str]) -> None:
        chosen = list(gone)
        if any(key.startswith("checkpoint-20") for key in chosen):
            calls.append(chosen)
            if len(calls) == 3:
                raise StoreError("cut off")
        delete(store, chosen)

    monkeypatch.setattr(FileStore, "delete", cut_off)
    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 0.0)
    assert local.run("rm", local.at("checkpoint-20"), "--yes") == 1
    assert calls[0] == ["checkpoint-20/.complete"]
    assert local.json("ls", local.at("checkpoint-20"))["checkpoints"][0]["state"] != "committed"
    assert local.json("verify", local.url)["checkpoints"][0]["checkpoint"] == "checkpoint-10"
    monkeypatch.setattr(FileStore, "delete", delete)
    assert local.run("rm", local.at("checkpoint-20"), "--yes") == 0
    with local.store() as store:
        assert steps_in(store) == {"checkpoint-10"}


def test_prune_deletes_what_the_dry_run_says(person: Person, pushed: Any) -> None:
    pushed(person, 10, 20, 30, 40, 50)
    planned = person.json("prune", person.url, "--keep", "2", "--every", "20", "--dry-run")
    assert {d["checkpoint"]: d["reason"] for d in planned["deleted"]} == dict.fromkeys(
        ["checkpoint-10", "checkpoint-30"], "2 newer are committed and were seen whole"
    )
    assert [(k["checkpoint"], k["reason"]) for k in planned["kept"]] == [
        ("checkpoint-50", "one of the 2 newest"),
        ("checkpoint-40", "one of the 2 newest"),
        ("checkpoint-20", "a multiple of 20 steps"),
    ]
    with person.store() as store:
        assert len(steps_in(store)) == 5
    done = person.json("prune", person.url, "--keep", "2", "--every", "20", "--yes")
    assert done["deleted"] == planned["deleted"]
    with person.store() as store:
        assert steps_in(store) == {"checkpoint-20", "checkpoint-40", "checkpoint-50"}


def test_what_is_damaged_does_not_count_for_prune(local: Person, pushed: Any) -> None:
    pushed(local, 10, 20, 30)
    with local.store() as store:
        store.delete(["checkpoint-30/model.safetensors"])
    planned = local.json("prune", local.url, "--keep", "2", "--dry-run")
    assert not planned["deleted"]
    assert "checkpoint-10" in {k["checkpoint"] for k in planned["kept"]}


class Living(FileStore):
    """A run answers each request for a sign of life."""

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Any:
        stored = super().put(key, content, only_if_absent=only_if_absent)
        if key == keys.ASKED:
            super().put(keys.RUN, encode_run(Run("r", holder="pod-1", beat=2)))
        return stored


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", ["rm", "prune", "push"])
def test_nothing_is_written_below_the_prefix_of_a_live_run(
    command: str, local: Person, pushed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(local, 10, 20, 30)
    with local.store() as store:
        hold(store)
    monkeypatch.setattr("sidecar.store.opening.FileStore", Living)
    new = old(checkpoint(tmp_path / "new", 40))
    arguments = {
        "rm": ["rm", local.at("checkpoint-10"), "--yes"],
        "prune": ["prune", local.url, "--keep", "1", "--yes"],
        "push": ["push", str(new), local.url],
    }[command]
    assert local.run(*arguments) == 7
    assert "a run is using this prefix (pod pod-1)" in local.err
    with local.store() as store:
        assert steps_in(store) == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}
        assert keys.ASKED not in {stored.key for stored in store.list("run")}


@pytest.mark.usefixtures("quick")
def test_the_newest_of_a_live_run_stays_also_if_a_person_insists(local: Person, pushed: Any) -> None:
    pushed(local, 10, 20)
    with local.store() as store:
        hold(store)
    assert local.run("rm", local.at("checkpoint-20"), "--yes", "--while-live") == 7
    assert "would resume" in local.err
    with local.store() as store:
        store.put("checkpoint-30/model.safetensors", b"being uploaded")
    assert local.run("rm", local.at("checkpoint-30"), "--yes", "--while-live") == 7
    assert "may be uploading it" in local.err
    assert local.run("rm", local.at("checkpoint-10"), "--yes", "--while-live") == 0


def test_what_a_person_insists_on_is_refused_without_a_word_about_a_run_that_may_not_exist(local: Person, pushed: Any) -> None:
    pushed(local, 10)
    with local.store() as store:
        store.put("checkpoint-30/model.safetensors", b"abandoned")
    for step in (10, 30):
        assert local.run("rm", local.at(f"checkpoint-{step}"), "--yes", "--while-live") == 7
        assert "uses the prefix now" not in local.err
        assert "without --while-live" in local.err
        assert local.run("rm", local.at(f"checkpoint-{step}"), "--yes") == 0


@pytest.mark.usefixtures("quick")
def test_a_silent_holder_is_waited_for_and_not_fenced(local: Person, pushed: Any) -> None:
    pushed(local, 10, 20)
    with local.store() as store:
        hold(store)
        before = store.get(keys.RUN)
    assert local.run("rm", local.at("checkpoint-10"), "--yes") == 0
    assert "asking pod pod-1" in local.err
    with local.store() as store:
        assert store.get(keys.RUN) == before
        assert not list(store.list(keys.CLAIMS))


@pytest.mark.usefixtures("quick")
def test_a_run_that_begins_meanwhile_stops_the_command(
    local: Person, pushed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(local, 10)
    put_file = FileStore.put_file

    def begins(store: FileStore, key: str, body: Any) -> Any:
        hold(store)
        return put_file(store, key, body)

    monkeypatch.setattr(FileStore, "put_file", begins)
    assert local.run("push", str(old(checkpoint(tmp_path / "new", 40))), local.url) == 7
    assert "a run (pod pod-1) has begun to use this prefix" in local.err
    with local.store() as store:
        assert keys.commit("checkpoint-40") not in {stored.key for stored in store.list("checkpoint-40/")}
