"""What is removed after a commit, in a store that denies a part of it."""

from __future__ import annotations

from collections.abc import Iterator

from structlog.testing import capture_logs

from sidecar.core.commit.commit import Object, manifest_of
from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.errors import AccessRefused
from sidecar.store.protocol import PendingUpload
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.upload.commit.sweeper import Sweeper
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node


class Denying(MemoryStore):
    """A store whose unfinished uploads may not be listed."""

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        raise AccessRefused(f"{prefix}: ListMultipartUploads was denied", code="AccessDenied")


async def test_a_refusal_to_list_unfinished_uploads_is_named_as_such_and_once() -> None:
    store, executor = Denying(), StoreExecutor(concurrency=2, gate=RateGate(None), health=Health())
    sweeper = Sweeper(store, executor)
    with capture_logs() as log:
        for step in (10, 20):
            name = f"checkpoint-{step}"
            checkpoint = Finished(name, "v", step, "periodic", "a", Node(0, 1), 1.8e9, None, (), {})
            left_over = store.put(keys.shared_file(name, "nobody's"), b"left over")
            before = {left_over.key: Object(left_over.size_bytes, left_over.etag)}
            sweeper.committed(checkpoint, [manifest_of(checkpoint, [])], before)
            await sweeper.sweep(checkpoint)
    executor.close()
    assert list(store.list("")) == []
    assert [(line["event"], line["checkpoint"]) for line in log if line["log_level"] == "warning"] == [
        ("unfinished_upload_not_aborted", "checkpoint-10")
    ]
