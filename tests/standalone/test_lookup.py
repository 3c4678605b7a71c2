"""What a store is said to hold, whatever it holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.options import address_to_read
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import Quarantined, encode
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.run_document import encode_run
from tests import servers
from tests.standalone.conftest import Person


def problems(person: Person, *arguments: str) -> list[tuple[str, str]]:
    found = person.json("verify", *arguments, code=8)["checkpoints"][0]["problems"]
    return [(p["kind"], p["key"]) for p in found]


def test_every_kind_of_damage_is_named_with_its_object(person: Person, pushed: Any) -> None:
    pushed(person, 10, 20, 30, 40)
    with person.store() as store:
        content = store.get("checkpoint-10/model.safetensors")
        flipped = bytes([content[0] ^ 1]) + content[1:]
        store.put("checkpoint-10/model.safetensors", flipped)
        store.delete(["checkpoint-20/sub/optimizer.pt"])
        manifest = next(s.key for s in store.list(keys.manifests("checkpoint-30")))
        store.put(manifest, store.get(manifest)[:-20])
        store.put("checkpoint-40/.complete", b'{"format": 1, "name": "chec')
    assert person.run("verify", person.at("checkpoint-10"), "--quick") == 0  # sizes are right
    assert problems(person, person.at("checkpoint-10")) == [("content", "checkpoint-10/model.safetensors")]
    assert problems(person, person.at("checkpoint-20"), "--quick") == [("missing", "checkpoint-20/sub/optimizer.pt")]
    assert problems(person, person.at("checkpoint-30"), "--quick") == [("document", manifest)]
    assert problems(person, person.at("checkpoint-40"), "--quick") == [("document", "checkpoint-40/.complete")]
    verdicts = person.json("verify", person.url, "--all", code=8)["checkpoints"]
    assert [c["is_verified"] for c in verdicts] == [False] * 4
    with person.store() as store:
        assert store.get("checkpoint-10/model.safetensors") == flipped  # nothing was mended


def test_a_checkpoint_that_was_copied_to_another_name_is_told_as_what_it_is(local: Person, pushed: Any) -> None:
    pushed(local, 20)
    with local.store() as store:
        for key in [stored.key for stored in store.list("checkpoint-20/")]:
            store.put(key.replace("checkpoint-20", "checkpoint-35", 1), store.get(key))
    assert local.run("verify", local.at("checkpoint-35")) == 8
    assert "checkpoint-35/.complete: says that it is the commit of checkpoint-20" in local.out


def test_a_bad_step_is_shown_as_bad_not_pulled_and_released(person: Person, pushed: Any, tmp_path: Path) -> None:
    pushed(person, 10, 20)
    with person.store() as store:
        crc = checksum.text_of(store.get("checkpoint-20/.complete"))
        reason = "model: crc64nvme \x1b[31mred"
        key = keys.quarantined("checkpoint-20", crc)
        store.put(key, encode(Quarantined(commit_crc64nvme=crc, reason=reason, at="2026-03-01T12:00:00Z", node="0")))
    assert [c["state"] for c in person.json("ls", person.url)["checkpoints"]] == ["bad", "committed"]
    found = person.json("bad", "ls", person.url)["bad"]
    assert [(q["checkpoint"], q["applies"], q["reason"]) for q in found] == [("checkpoint-20", True, reason)]
    assert person.run("bad", "ls", person.url) == 0
    assert "\x1b" not in person.out
    assert "\\x1b[31mred" in person.out
    assert person.json("show", person.at("checkpoint-20"))["state"] == "bad"
    pulled = person.json("pull", person.url, str(tmp_path / "laptop"), code=8)
    assert pulled["checkpoint"] == "checkpoint-10"
    assert [p["checkpoint"] for p in pulled["passed_over"]] == ["checkpoint-20"]
    assert person.run("pull", person.at("checkpoint-20"), str(tmp_path / "named")) == 8
    assert person.run("verify", person.at("checkpoint-20")) == 8
    assert "nothing else is wrong now (every byte): `checkpoint-sidecar bad release`" in person.out
    assert person.run("bad", "release", person.at("checkpoint-20")) == 0
    assert person.run("bad", "release", person.at("checkpoint-20")) == 5
    assert person.run("verify", person.at("checkpoint-20")) == 0


def test_a_quarantine_for_a_missing_object_is_over_when_the_object_is_there(person: Person, pushed: Any) -> None:
    pushed(person, 20)
    with person.store() as store:
        crc = checksum.text_of(store.get("checkpoint-20/.complete"))
        record = Quarantined(commit_crc64nvme=crc, reason="missing in the store", missing="checkpoint-20/sub/optimizer.pt")
        store.put(keys.quarantined("checkpoint-20", crc), encode(record))

    def states() -> tuple[str, str, bool]:
        [listed] = person.json("ls", person.url)["checkpoints"]
        [found] = person.json("bad", "ls", person.url)["bad"]
        return listed["state"], person.json("show", person.at("checkpoint-20"))["state"], found["applies"]

    assert states() == ("committed", "committed", False)
    assert person.run("verify", person.at("checkpoint-20")) == 0
    with person.store() as store:
        store.delete(["checkpoint-20/sub/optimizer.pt"])
    assert states() == ("bad", "bad", True)
    assert [kind for kind, _ in problems(person, person.at("checkpoint-20"))] == ["bad", "missing"]


def test_an_archived_object_is_named_and_counts_as_no_damage_of_the_store(person_of: Any, pushed: Any, tmp_path: Path) -> None:
    person = pushed(person_of("moto"), 10, 20)
    bucket, _, prefix = person.url.removeprefix("s3://").partition("/")
    servers.archive(person.endpoint, bucket, f"{prefix}/checkpoint-20/model.safetensors")
    assert problems(person, person.at("checkpoint-20")) == [("archived", "checkpoint-20/model.safetensors")]
    pulled = person.json("pull", person.url, str(tmp_path / "laptop"), code=8)
    assert pulled["checkpoint"] == "checkpoint-10"
    assert person.run("pull", person.at("checkpoint-20"), str(tmp_path / "named")) == 1
    servers.archive(person.endpoint, bucket, f"{prefix}/checkpoint-20/.complete")
    listed = person.json("ls", person.url, "--long")["checkpoints"]
    assert [c["state"] for c in listed] == ["unreadable", "committed"]


def test_the_folder_above_runs_lists_the_runs(person: Person, pushed: Any) -> None:
    pushed(person, 10, 20)
    above = person.url.rpartition("/")[0]
    with person.store() as store:
        store.put(keys.RUN, encode_run(Run("r1", job="default/train", holder="pod-1")))
    runs = person.json("ls", above)["runs"]
    assert runs == [
        {
            "name": "run",
            "is_run": True,
            "checkpoints": 2,
            "newest": "checkpoint-20",
            "job": "default/train",
            "run_id": "r1",
            "holder": "pod-1",
        }
    ]
    if person.endpoint is not None:
        top = person.json("ls", above.rpartition("/")[0])["runs"]
        assert not any(run["is_run"] for run in top)


def test_foreign_and_incomplete_checkpoints_are_told_apart(local: Person, pushed: Any) -> None:
    pushed(local, 10)
    with local.store() as store:
        store.put("checkpoint-20/model.safetensors", b"of another program")
        store.put("checkpoint-30/model.safetensors", b"m")
        store.put(f"{keys.manifests('checkpoint-30', 'a')}node-00000-of-00002.json", b"{}")
        store.put("checkpoint-40/checkpoint-is-incomplete.txt.node-0-rank-0", b"")
        store.put("checkpoint-007/model.safetensors", b"no checkpoint of ours")
    states = {c["name"]: c["state"] for c in local.json("ls", local.url)["checkpoints"]}
    assert states == {
        "checkpoint-10": "committed",
        "checkpoint-20": "foreign",
        "checkpoint-30": "incomplete",
        "checkpoint-40": "incomplete",
    }
    shown = local.json("show", local.at("checkpoint-30"))
    assert shown["uploaded"] == ["checkpoint-30/.ckpt/a/node-00000-of-00002.json"]
    assert local.run("verify", local.at("checkpoint-30")) == 5


def test_terminal_escapes_in_names_are_escaped(local: Person, pushed: Any, tmp_path: Path) -> None:
    pushed(local, 10)
    evil = "\x1b]0;title\x07\x1b[2J"
    (tmp_path / "store" / f"run{evil}" / "checkpoint-1").mkdir(parents=True)
    with local.store() as store:
        store.put(keys.RUN, encode_run(Run("r1", job=evil, holder=evil)))
    above = local.url.rpartition("/")[0]
    for arguments in (["ls", above], ["ls", above, "--json"]):
        assert local.run(*arguments) == 0
        assert "\x1b" not in local.out
        assert "\x07" not in local.out


def test_a_folder_that_is_missing_is_told_once_and_at_once(local: Person) -> None:
    began_s = time.monotonic()
    missing = f"{local.url.removesuffix('run')}typo"
    assert local.run("ls", missing) == 6
    assert time.monotonic() - began_s < 10
    assert local.err == f"checkpoint-sidecar ls: {missing}: no such folder: is its volume mounted?\n"


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("http://bucket/run", 2, "must be s3://bucket/prefix or file:///path"),
        ("s3://key:secret@bucket/run", 2, "must not hold credentials"),
        ("file:///no/such/folder", 6, "no such folder"),
        ("s3://bucket/run", 6, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_opened_is_one_line_and_a_code(
    url: str, code: int, says: str, local: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 1.0)
    assert local.run("ls", url, "--json") == code
    answer = json.loads(local.out)
    assert answer["exit_code"] == code
    assert says in answer["error"]
    assert "secret" not in local.err
    assert local.err.splitlines()[-1].startswith("checkpoint-sidecar ls: ")


def test_credentials_that_are_missing_are_named_in_one_line(local: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_S3_ENDPOINT", "http://127.0.0.1:9")
    assert local.run("ls", "s3://bucket/run") == 2
    assert local.err.count("\n") == 1
    assert "credentials" in local.err


@pytest.mark.parametrize("is_pushed", [False, True])
@pytest.mark.parametrize(("name", "hint"), [("nonsense", ""), ("checkpoint-3O", "; 'checkpoint-3O' is no checkpoint's name: ")])
def test_a_misspelled_checkpoint_of_a_run_in_a_folder_is_not_found_at_once(
    name: str, hint: str, is_pushed: bool, local: Person
) -> None:
    with local.store() as store:
        if is_pushed:
            store.put(keys.commit("checkpoint-30"), b"{}")
        else:
            store.put(keys.RUN, encode_run(Run("r1", job="j", holder="h")))
    for command in (["show", local.at(name)], ["verify", local.at(name)], ["pull", local.at(name), "."]):
        assert local.run(*command) == 5
        assert local.err.startswith(f"checkpoint-sidecar {command[0]}: {local.at(name)}: no such checkpoint{hint}")
        assert local.err.count("\n") == 1


def test_a_folder_that_may_not_be_mounted_is_not_taken_for_a_misspelled_checkpoint(tmp_path: Path) -> None:
    for text in (f"file://{tmp_path}/runs/nonsense", f"file://{tmp_path}/nonsense", "s3://bucket/nonsense", "file://host/x"):
        assert address_to_read(text).store == text
