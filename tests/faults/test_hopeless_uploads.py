"""Uploads that cannot succeed: the others land, the link is not filled with bytes in vain, and the reason is said."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import keys
from sidecar.daemon.settings import from_environment
from sidecar.errors import AlreadyExists, CorruptObject
from sidecar.store.opening import open_from
from sidecar.store.protocol import Verification
from tests.faults.bucket import MIB, Bucket
from tests.faults.dialects import ConditionsIgnored
from tests.faults.plan import Fault, Kind, Rule, Rules
from tests.faults.proxy import Dialect, FaultProxy
from tests.faults.wire import Request
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

FOR_EVER = 10**9
MODEL = bytes(2 * MIB)  # of checkpoint-20: equal files of the others would be copied


def failures(running: Sidecar) -> list[dict[str, Any]]:
    return running.events("upload_starts_again")


@pytest.mark.slow
def test_an_upload_that_is_always_damaged_waits_longer_each_time_and_nothing_waits_for_it(
    moto_bucket: Bucket, tmp_path: Path
) -> None:
    harm = Rule(Fault(Kind.CORRUPT_UPLOAD), operation="PutObject", key="checkpoint-20/model$", times=FOR_EVER)
    proxy = FaultProxy(moto_bucket.endpoint, Rules([harm]))
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", {"model": MODEL})
        until(lambda: len(failures(running)) >= 2)
        write_checkpoint(running.volume, "checkpoint-10", {"model": b"1" * MIB})
        write_checkpoint(running.volume, "checkpoint-30", {"model": b"3" * MIB})
        running.committed("checkpoint-30")
        running.committed("checkpoint-10")
        until(lambda: len(failures(running)) >= 3)
        said = failures(running)
        assert [each["failures"] for each in said] == [1, 2, 3]
        for each, least_s in zip(said, (0.5, 1, 2), strict=True):
            assert least_s <= each["again_in_s"] <= 2 * least_s
        assert said[-1]["level"] == "error"
        assert "check this node's memory and network" in said[-1]["hint"]
        [waiting] = [each for each in running.status()["queue"] if each["checkpoint"] == "checkpoint-20"]
        assert "failed 3 times" in waiting["reason"]
        harm.times = 0
        # SIGTERM cuts the wait short: the upload is retried at once.
        assert running.terminate() == 0
    moto_bucket.assert_holds("checkpoint-20", {"model": MODEL})


class SmallObjectsOnly(Dialect):
    """Refuses to join one object, as S3 does when it is larger than objects may be."""

    def refusal(self, request: Request) -> tuple[int, str] | None:
        refused = request.operation == "CompleteMultipartUpload" and request.key.endswith("checkpoint-20/model")
        return (400, "EntityTooLarge") if refused else None


def test_a_file_that_the_store_finds_too_large_is_rejected_for_good_and_the_others_land(
    moto_bucket: Bucket, tmp_path: Path
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint, dialect=SmallObjectsOnly())
    small_parts = {"CKPT_PART_SIZE": "5Mi"}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | small_parts) as running:
        running.ready()
        for step in (10, 20):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": bytes(11 * MIB)})
        running.committed("checkpoint-10")
        reason = until(lambda: running.status()["rejected"].get("checkpoint-20"))
        assert "is too large for one object" in reason
        assert "several files" in reason
        write_checkpoint(running.volume, "checkpoint-30", {"model": bytes(11 * MIB)})
        running.committed("checkpoint-30")
        assert running.status()["rejected"].keys() == {"checkpoint-20"}
        until(lambda: not moto_bucket.unfinished_uploads(), what="its parts are removed")


def test_a_file_whose_key_is_too_long_is_rejected_at_once_and_the_others_land(moto_bucket: Bucket, tmp_path: Path) -> None:
    """The store refused each request of it, and its checkpoint waited for ever."""
    moto_bucket.prefix += "/" + "p" * 700
    with sidecar(tmp_path / "volume", moto_bucket.settings()) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", {"model": b"model", f"{'d' * 200}/{'n' * 200}": b"long"})
        reason = until(lambda: running.status()["rejected"].get("checkpoint-20"))
        assert "keys have 1024 at most: shorten its path or the prefix" in reason
        write_checkpoint(running.volume, "checkpoint-30", {"model": b"model"})
        running.committed("checkpoint-30")
    stored = moto_bucket.keys()
    assert not [key for key in stored if key.startswith("checkpoint-20/")]


class NoLongNames(Dialect):
    """Refuses long names between two slashes, as MinIO does."""

    def refusal(self, request: Request) -> tuple[int, str] | None:
        is_long = max(map(len, request.key.split("/"))) > 50
        return (400, "XMinioInvalidObjectName") if is_long and request.operation == "PutObject" else None


def test_a_name_that_the_store_refuses_is_rejected_for_good_and_the_others_land(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint, dialect=NoLongNames())
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", {"model": b"model", "n" * 60: b"long"})
        reason = until(lambda: running.status()["rejected"].get("checkpoint-20"))
        assert "takes no object of this name (the store answered XMinioInvalidObjectName): shorten the path" in reason
        write_checkpoint(running.volume, "checkpoint-30", {"model": b"model"})
        running.committed("checkpoint-30")


class TooLargeInTheEnd(SmallObjectsOnly):
    """Says so only when it is told to."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def refusal(self, request: Request) -> tuple[int, str] | None:
        refused = super().refusal(request)
        if refused is not None:
            self.asked.set()
            self.may_answer.wait(60)
        return refused


def test_what_was_superseded_meanwhile_and_is_found_too_large_then_disturbs_nothing(
    moto_bucket: Bucket, tmp_path: Path
) -> None:
    dialect = TooLargeInTheEnd()
    proxy = FaultProxy(moto_bucket.endpoint, dialect=dialect)
    with proxy.running() as endpoint:
        settings = moto_bucket.settings(endpoint) | {"CKPT_PART_SIZE": "5Mi", "CKPT_SUPERSEDED": "skip"}
        with sidecar(tmp_path / "volume", settings) as running:
            running.ready()
            write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(11 * MIB)})
            assert dialect.asked.wait(60)
            write_checkpoint(running.volume, "checkpoint-30", {"model": b"newer"})
            until(lambda: running.events("checkpoint_superseded"))
            dialect.may_answer.set()
            until(lambda: not moto_bucket.unfinished_uploads(), what="its parts are removed")
            write_checkpoint(running.volume, "checkpoint-40", {"model": b"newest"})
            running.committed("checkpoint-40")
            assert not running.events("service_failed")
            assert not running.events("upload_defect")
            assert running.terminate() == 0


class FewParts(Dialect):
    """Takes parts with low numbers only."""

    most = 3

    def refusal(self, request: Request) -> tuple[int, str] | None:
        return (400, "InvalidArgument") if (request.part or 0) > self.most else None


@pytest.mark.slow
def test_a_part_that_the_store_refuses_is_not_sent_for_ever_and_the_others_land(moto_bucket: Bucket, tmp_path: Path) -> None:
    dialect = FewParts()
    proxy, content = FaultProxy(moto_bucket.endpoint, dialect=dialect), os.urandom(31 * MIB)
    with proxy.running() as endpoint:
        settings = moto_bucket.settings(endpoint) | {"CKPT_PART_SIZE": "5Mi"}
        with sidecar(tmp_path / "volume", settings) as running:
            running.ready()
            write_checkpoint(running.volume, "checkpoint-20", {"model": content})
            until(lambda: failures(running))
            write_checkpoint(running.volume, "checkpoint-10", {"model": b"small"})
            running.committed("checkpoint-10")
            until(lambda: len(failures(running)) >= 2)
            assert "CKPT_PART_SIZE" in failures(running)[-1]["hint"]
            dialect.most = 10_000
            running.committed("checkpoint-20")
            assert running.terminate() == 0
    moto_bucket.assert_holds("checkpoint-20", {"model": content})
    assert moto_bucket.unfinished_uploads() == []


def read_back(credentials_dir: Path) -> dict[str, str]:
    return {"CKPT_VERIFY": "read-back", "CKPT_CREDENTIALS_DIR": str(credentials_dir)}


COMMIT = keys.commit("checkpoint-1")
OURS, THEIRS = b'{"committed_at": "ours"}', b'{"committed_at": "of another node"}'


class Interfering:
    """Lets another node write the commit between our write and our look at what was written."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.is_wanted = False

    def __call__(self, request: Request) -> Fault | None:
        if self.is_wanted and request.operation == "GetObject" and request.key.endswith(COMMIT):
            self.is_wanted = False
            self._bucket.put(COMMIT, THEIRS)
        return None


@pytest.mark.parametrize("only_if_absent", [True, False])
def test_where_nothing_can_be_conditional_a_commit_of_another_node_is_not_taken_for_a_damaged_one(
    only_if_absent: bool, plain_bucket: Bucket, credentials_dir: Path
) -> None:
    interfering = Interfering(plain_bucket)
    proxy = FaultProxy(plain_bucket.endpoint, interfering, dialect=ConditionsIgnored())
    with proxy.running() as endpoint:
        store = open_from(from_environment(plain_bucket.settings(endpoint) | read_back(credentials_dir)))
        can = store.probe()
        assert (can.verification, can.conditional_put) == (Verification.READ_BACK, False)
        interfering.is_wanted = True
        if only_if_absent:
            with pytest.raises(AlreadyExists):
                store.put(COMMIT, OURS, only_if_absent=True)
        else:
            store.put(COMMIT, OURS)
        assert not interfering.is_wanted
        store.close()
    assert plain_bucket.get(COMMIT) == THEIRS


def test_what_was_damaged_on_its_way_is_removed_where_it_is_read_back(moto_bucket: Bucket, credentials_dir: Path) -> None:
    harm = Rules([Rule(Fault(Kind.CORRUPT_UPLOAD), operation="PutObject", key=COMMIT)])
    proxy = FaultProxy(moto_bucket.endpoint)
    with proxy.running() as endpoint:
        store = open_from(from_environment(moto_bucket.settings(endpoint) | read_back(credentials_dir)))
        store.probe()
        proxy.plan = harm
        with pytest.raises(CorruptObject):
            store.put(COMMIT, OURS)
        store.close()
    assert not moto_bucket.is_committed("checkpoint-1")
