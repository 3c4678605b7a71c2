"""What an ended pod left unfinished in the store is removed, and what a pod that is ending still sends is not."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.format import keys
from sidecar.core.lifecycle.orphan_uploads import ORPHAN_AFTER_S
from sidecar.errors import AccessRefused
from sidecar.lifecycle.deadline import Deadline
from sidecar.store.file.store import FileStore
from sidecar.store.file.uploads import UPLOADS
from sidecar.store.protocol import Part
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.upload.commit import orphan_uploads
from sidecar.upload.commit.orphan_uploads import OrphanUploads
from sidecar.upload.send.journal import Journal
from sidecar.volume.volume import Volume
from tests.process.conftest import Place
from tests.process.sidecar_process import sidecar, until, write_checkpoint
from tests.servers import ON_RGW

MIB = 1 << 20


# MinIO lists unfinished uploads of a whole bucket, or of one key, and not below a prefix.
@pytest.mark.parametrize("place", ["moto", ON_RGW], indirect=True)
@pytest.mark.slow
def test_a_replacement_pod_spares_the_flush_of_the_pod_that_it_replaces(place: Place, tmp_path: Path) -> None:
    content = os.urandom(30 * MIB)
    slow = {"CKPT_BANDWIDTH_LIMIT": "8MB/s", "CKPT_PART_SIZE": "5Mi", "CKPT_CONCURRENCY": "2", "CKPT_GRACE_SECONDS": "600"}
    with sidecar(tmp_path / "old", place.settings | slow) as old:
        write_checkpoint(old.ready().volume, "checkpoint-10", {"model": content}, {"reason": "jit"})
        until(lambda: sum(each["sent_bytes"] for each in old.status()["queue"]) > 10 * MIB, what="parts are in the store")
        old.call("POST", "/v1/bandwidth", {"limit": "200kB/s"})  # its flush is not over before the other pod has looked
        old.process.send_signal(signal.SIGTERM)
        until(lambda: b'"ending"' in place.store.get(keys.RUN), what="the old pod says that it is terminating")
        with sidecar(tmp_path / "new", place.settings) as new:
            until(lambda: new.events("waits_for_earlier_pod"))
            assert old.process.poll() is None, "the pods must overlap"
            old.call("POST", "/v1/bandwidth", {"limit": None})
            assert old.wait() == 0
            assert new.ready().resume()["checkpoint"] == "checkpoint-10"
            write_checkpoint(new.volume, "checkpoint-15", {"model": b"new"})
            new.committed("checkpoint-15")
            assert not new.events("orphan_upload_aborted")
        assert not old.events("upload_starts_again")
        [committed] = old.events("checkpoint_committed")
        assert (committed["checkpoint"], committed["retries"]) == ("checkpoint-10", 0)
    assert place.read("checkpoint-10/model") == content


class Uploads:
    """Unfinished uploads in a folder, as old as a test wants them to be, by the file system's clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = FileStore(tmp_path / "store")
        self.store.probe()
        (tmp_path / "volume").mkdir()
        self.volume = Volume(tmp_path / "volume")
        self.volume.prepare()
        self._folder = tmp_path / "store" / UPLOADS

    def begin(self, key: str, *, age_s: float, part_age_s: float | None = None) -> str:
        upload_id = self.store.begin_upload(key)
        self._set_age(self._folder / upload_id / "key", age_s)
        if part_age_s is not None:
            part = self._folder / upload_id / "part-00001-0123456789abcdef"
            part.write_bytes(b"part")
            self._set_age(part, part_age_s)
        return upload_id

    def _set_age(self, path: Path, age_s: float) -> None:
        at_s = time.time() - age_s
        os.utime(path, (at_s, at_s))

    def left(self) -> set[str]:
        return {upload.key for upload in self.store.pending_uploads("")}

    async def run(self, end: Callable[[], bool], *, deadline: Deadline | None = None) -> None:
        executor = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health())
        its = OrphanUploads(self.store, executor, self.volume, Catalog(Events()), deadline or Deadline(), alone=True)
        running = asyncio.create_task(its.run())
        try:
            async with asyncio.timeout(30):
                while not end():
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            executor.close()


async def test_what_was_quiet_for_longer_than_any_grace_period_is_removed(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    old_s = ORPHAN_AFTER_S + 60
    uploads.begin("checkpoint-1/orphan", age_s=old_s)
    uploads.begin("checkpoint-2/orphan", age_s=2 * old_s, part_age_s=old_s)
    uploads.begin("checkpoint-3/young", age_s=ORPHAN_AFTER_S - 60)
    uploads.begin("checkpoint-4/sends-yet", age_s=2 * old_s, part_age_s=60)
    uploads.begin("weights/of-somebody-else", age_s=2 * old_s)
    journal = Journal(uploads.volume.early_journal("checkpoint-5"))
    for path, age_s in (("given-up", 10.0), ("continued", 2 * old_s)):
        upload_id = uploads.begin(f"checkpoint-5/{path}", age_s=age_s)
        journal.begun(path, "stamp", upload_id=upload_id, key=f"checkpoint-5/{path}", part_bytes=MIB)
    journal.part("given-up", Part(1, 4, "0123456789abcdef"), crc=1)
    journal.dropped("given-up")
    kept = {"checkpoint-3/young", "checkpoint-4/sends-yet", "weights/of-somebody-else", "checkpoint-5/continued"}
    await uploads.run(lambda: uploads.left() == kept)
    journal.close()


async def test_an_upload_that_the_store_refuses_to_abort_keeps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of another owner, or under a legal hold: the scan ended at it, in each life of each pod."""
    uploads, abort = Uploads(tmp_path), FileStore.abort_upload
    for step in (1, 2, 3):
        uploads.begin(f"checkpoint-{step}/orphan", age_s=ORPHAN_AFTER_S + 60)

    def refuse(store: FileStore, key: str, upload_id: str) -> None:
        if key != "checkpoint-3/orphan":
            raise AccessRefused(f"aborting {key} was denied")
        abort(store, key, upload_id)

    monkeypatch.setattr(FileStore, "abort_upload", refuse)
    with structlog.testing.capture_logs() as logged:
        await uploads.run(lambda: any(event["event"] == "orphan_uploads_not_aborted" for event in logged))
    assert uploads.left() == {"checkpoint-1/orphan", "checkpoint-2/orphan"}
    [told] = [event for event in logged if event["event"] == "orphan_uploads_not_aborted"]
    assert (told["uploads"], set(told["keys"])) == (2, uploads.left())


async def test_journals_that_cannot_be_read_now_end_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that fails at the start was a traceback each second; without journals nothing is known to be an orphan."""
    uploads, looks = Uploads(tmp_path), 0
    uploads.begin("checkpoint-1/orphan", age_s=ORPHAN_AFTER_S + 60)

    def fails(_: Volume) -> None:
        nonlocal looks
        looks += 1
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(orphan_uploads, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(Volume, "journals", fails)
    await uploads.run(lambda: looks > 1)
    assert uploads.left() == {"checkpoint-1/orphan"}


async def test_what_was_spared_at_the_start_is_removed_by_a_later_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphan_uploads, "SCAN_INTERVAL_S", 0.05)
    uploads, looks = Uploads(tmp_path), 0
    upload_id = uploads.begin("checkpoint-1/model", age_s=10)

    class Ending(Deadline):
        def is_set(self) -> bool:  # asked once for each look
            nonlocal looks
            looks += 1
            if looks == 3:
                uploads._set_age(tmp_path / "store" / UPLOADS / upload_id / "key", ORPHAN_AFTER_S + 60)
            return looks < 3

    await uploads.run(lambda: not uploads.left(), deadline=Ending())
    assert looks >= 3, "nobody looks while the pod terminates"
