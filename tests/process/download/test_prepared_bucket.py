"""A bucket in which steps are broken, each in its own way: the newest one that is whole is resumed, and each reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.core.commit.commit import commit_of
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import FileEntry, Manifest, NodeOf, encode
from sidecar.store.protocol import Store
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar
from trainer_hook.contract import Node

Parts = list[dict[str, bytes]]
"""Files of each node."""


def put_part(store: Store, name: str, attempt: str, node: Node, files: dict[str, bytes], save_id: str) -> Manifest:
    entries = []
    for path, content in files.items():
        key = keys.shared_file(name, path)
        crc = checksum.text_of(content)
        etag = store.put(key, content).etag
        entries.append(FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=crc, etag=etag))
    of = NodeOf(index=node.index, count=node.count)
    return Manifest(
        name=name, attempt=attempt, save_id=save_id, node=of, created_at="2026-01-01T00:00:00Z", files=tuple(entries)
    )


def put_step(store: Store, step: int, *, attempts: tuple[str, str] = ("a", "a"), saves: tuple[str, str] = ("1", "1")) -> str:
    """Commit a step of two nodes, as they said it."""
    name = f"checkpoint-{step}"
    manifests, raw = [], {}
    for index in (0, 1):
        files = {f"__{index}_0.distcp": f"shard {index} of {step}".encode()}
        manifest = put_part(store, name, attempts[index], Node(index, 2), files, saves[index])
        raw[index] = encode(manifest)
        store.put(keys.manifest(name, attempts[index], Node(index, 2)), raw[index])
        manifests.append(manifest)
    store.put(keys.commit(name), encode(commit_of(manifests, raw, committed_at="2026-01-01T00:00:00Z")))
    return name


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.slow
def test_of_steps_that_are_broken_each_in_its_way_none_is_resumed(place: Place, tmp_path: Path) -> None:
    store = place.store
    put_step(store, 10)
    put_step(store, 20, saves=("1", "2"))
    mixed = put_step(store, 30, attempts=("a", "b"))
    swapped = put_step(store, 40)
    shards = [keys.shared_file(swapped, f"__{index}_0.distcp") for index in (0, 1)]
    first, second = (store.get(key) for key in shards)
    store.put(shards[0], second)
    store.put(shards[1], first)
    other_size = put_step(store, 50)
    store.put(keys.shared_file(other_size, "__1_0.distcp"), b"of another size")
    store.delete([keys.manifest(put_step(store, 60), "a", Node(1, 2))])
    store.delete([keys.commit(put_step(store, 70))])

    three = place.settings | {"CKPT_NODE_INDEX": "2", "CKPT_NODE_COUNT": "3"}
    with sidecar(tmp_path / "volume", three) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        assert contents(running.volume / "checkpoint-10") == {f"__{i}_0.distcp": f"shard {i} of 10".encode() for i in (0, 1)}
        reasons = {passed["checkpoint"]: passed["reason"] for passed in answer["passed_over"]}
        assert list(reasons) == [f"checkpoint-{step}" for step in (70, 60, 50, 40, 30, 20)]
        wanted = {
            "checkpoint-70": "not committed",
            "checkpoint-60": "missing in the store",
            other_size: "its writer recorded",
            swapped: "crc64nvme",
            mixed: "no manifest of attempt",
            "checkpoint-20": "different saves of the step",
        }
        assert {name: wanted[name] in reason for name, reason in reasons.items()} == dict.fromkeys(wanted, True), reasons
        # Two nodes saved it and three run now: that is said.
        said = running.events("resume_with_other_node_count")[-1]
        assert (said["saved_nodes"], said["nodes"]) == (2, 3)

    unknown = place.settings | {"JOB_COMPLETION_INDEX": "1"}  # of how many, only the trainer knows
    with sidecar(tmp_path / "other", unknown) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-10"
        assert running.events("resume_with_other_node_count") == []
