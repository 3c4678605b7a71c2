"""The exit code of a node whose part others have committed while it was about to send it again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.core.commit.commit import ReadyToCommit
from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.lifecycle.states import State
from sidecar.daemon.daemon import Daemon
from sidecar.daemon.settings import Settings
from tests.store.memory import MemoryStore
from tests.upload.commit.test_committer import NAME, Pod
from trainer_hook.contract import Node


async def ending(tmp_path: Path, store: MemoryStore, checkpoint: Finished) -> Daemon:
    """Return a sidecar of node 1 that has to end before it has sent a checkpoint again."""
    settings = Settings.model_construct(
        dir=tmp_path, store="memory://twin", node=Node(1, 2), is_first=False, pod="pod-1", grace_seconds=30.0
    )
    daemon = Daemon(settings, store)
    services = daemon.services
    services.volume.prepare()
    services.state.store_opened.set()
    services.inventory.scanned.set()
    services.catalog.move(services.catalog.finished(checkpoint, held=True), State.UPLOADING)
    services.termination.notice("sigterm")
    return daemon


@pytest.mark.parametrize("harm", ["none", "another save", "another attempt", "object", "manifest", "no commit", "away"])
async def test_a_node_whose_part_others_have_committed_ends_with_0_and_otherwise_gives_it_up(tmp_path: Path, harm: str) -> None:
    """It ended with 3 although the step was durable."""
    store = MemoryStore()
    daemon = await ending(tmp_path, store, Pod(store, None, 1).checkpoint("a"))  # type: ignore[arg-type]
    executor, catalog = daemon.services.executor, daemon.services.catalog
    pods = [Pod(store, executor, index) for index in (0, 1)]
    for pod in pods:
        await pod.publish(f"part {pod.node.index}".encode(), "a")
    if harm != "no commit":
        assert isinstance(await pods[0].committer.try_commit(pods[0].checkpoint("a")), ReadyToCommit)
    tracked = catalog.get(NAME)
    assert tracked is not None
    match harm:
        case "another save":
            tracked.checkpoint = replace(pods[1].checkpoint("a"), created_at_s=1.9e9)
        case "another attempt":
            tracked.checkpoint = pods[1].checkpoint("b")
        case "object":
            store.put(keys.shared_file(NAME, "shard-0"), b"part of something else")
        case "manifest":
            store.delete([pods[0].key("a")])
        case "away":
            daemon.services.state.store_opened.clear()
    try:
        code = await daemon._finish()
    finally:
        executor.close()
    assert code == (0 if harm == "none" else 3)
    assert tracked.state is (State.COMMITTED if harm == "none" else State.GIVEN_UP)


@pytest.mark.parametrize(("later", "code"), [("20260101T000002Z-b", 0), ("20260101T000000Z-b", 3)])
async def test_a_part_of_an_attempt_that_all_nodes_have_left_is_no_loss(tmp_path: Path, later: str, code: int) -> None:
    """The step of a later attempt was durable, and the exit code was 3."""
    store, attempt = MemoryStore(), "20260101T000001Z-a"
    daemon = await ending(tmp_path, store, Pod(store, None, 1).checkpoint(attempt))  # type: ignore[arg-type]
    catalog = daemon.services.catalog
    after = replace(Pod(store, None, 1).checkpoint(later), name="checkpoint-30", step=30, created_at_s=1.9e9)  # type: ignore[arg-type]
    catalog.durable(catalog.finished(after, held=True), at_s=1.9e9)
    try:
        assert await daemon._finish() == code
    finally:
        daemon.services.executor.close()
