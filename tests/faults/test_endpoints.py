"""Stores that can less than S3: what a sidecar finds out about them, says about them, and does about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.bucket import Bucket, checkpoint_files, random_bytes
from tests.faults.dialects import ConditionsIgnored, ConditionsRefused, NoChecksums
from tests.faults.plan import Fault, Kind, Rule, Rules
from tests.faults.proxy import Dialect, FaultProxy
from tests.faults.wire import Request
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

NAME = "checkpoint-2"
UNCONDITIONAL = [ConditionsRefused(), ConditionsIgnored()]


def names_of(dialect: object) -> str:
    return type(dialect).__name__ if isinstance(dialect, Dialect) else str(dialect)


@pytest.fixture
def without_checksums(moto_bucket: Bucket) -> FaultProxy:
    return FaultProxy(moto_bucket.endpoint, dialect=NoChecksums(400, "InvalidArgument"))


@pytest.mark.parametrize(("status", "code"), [(400, "InvalidArgument"), (501, "NotImplemented")])
def test_without_checksums_objects_are_read_back_and_status_says_so(
    status: int, code: str, moto_bucket: Bucket, tmp_path: Path
) -> None:
    without_checksums = FaultProxy(moto_bucket.endpoint, dialect=NoChecksums(status, code))
    with without_checksums.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        assert running.ready().status()["store"]["verification"] == "read-back"
        write_checkpoint(running.volume, NAME, checkpoint_files())
        running.committed(NAME)
    moto_bucket.assert_holds(NAME, checkpoint_files())
    read = {exchange.key.partition("/")[2] for exchange in without_checksums.log if exchange.operation == "GetObject"}
    assert read >= {f"{NAME}/{path}" for path in checkpoint_files()}


@pytest.mark.slow
def test_without_checksums_a_resume_is_the_same(without_checksums: FaultProxy, moto_bucket: Bucket, tmp_path: Path) -> None:
    with without_checksums.running() as endpoint:
        with sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
            running.ready()
            write_checkpoint(running.volume, NAME, checkpoint_files())
            running.committed(NAME)
        with sidecar(tmp_path / "new-volume", moto_bucket.settings(endpoint)) as running:
            assert running.up().resume()["source"] == "store"
            assert contents(running.volume / NAME) == checkpoint_files()


@pytest.mark.parametrize(("operation", "key"), [("UploadPart", "model"), ("PutObject", r"small/07\.bin$")])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.slow
def test_without_checksums_a_byte_that_changed_on_the_way_up_is_found_and_sent_again(
    operation: str, key: str, times: int, without_checksums: FaultProxy, moto_bucket: Bucket, tmp_path: Path
) -> None:
    plan = Rules([Rule(Fault(Kind.CORRUPT_UPLOAD), operation=operation, key=key, times=times)])
    with without_checksums.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        without_checksums.plan = plan
        write_checkpoint(running.volume, NAME, checkpoint_files())
        running.committed(NAME)
    assert plan.unused() == []
    moto_bucket.assert_holds(NAME, checkpoint_files())


def test_without_checksums_damage_that_stays_keeps_a_checkpoint_uncommitted(
    without_checksums: FaultProxy, moto_bucket: Bucket, tmp_path: Path
) -> None:
    with without_checksums.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        without_checksums.plan = Rules([Rule(Fault(Kind.CORRUPT_UPLOAD), operation="PutObject", key="model", times=1000)])
        write_checkpoint(running.volume, NAME, {"model": random_bytes(100_000, 1)})
        until(lambda: sum(e.operation == "PutObject" and "model" in e.key for e in without_checksums.log) >= 4)
        assert not moto_bucket.is_committed(NAME)
        without_checksums.plan = Rules([])
        running.committed(NAME, timeout_s=60)
    moto_bucket.assert_holds(NAME, {"model": random_bytes(100_000, 1)})


def test_damage_in_the_store_is_found_at_resume_and_the_older_step_is_taken(
    without_checksums: FaultProxy, moto_bucket: Bucket, tmp_path: Path
) -> None:
    files = {"model": random_bytes(1_000_000, 1)}
    with without_checksums.running() as endpoint:
        with sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
            running.ready()
            for name in ("checkpoint-1", NAME):
                write_checkpoint(running.volume, name, files)
                running.committed(name)
        moto_bucket.put(f"{NAME}/model", random_bytes(1_000_000, 2))
        with sidecar(tmp_path / "new-volume", moto_bucket.settings(endpoint)) as running:
            answer = running.up().resume()
            assert answer["checkpoint"] == "checkpoint-1"
            assert NAME in running.status()["bad"]
            assert contents(running.volume / "checkpoint-1") == files


@pytest.mark.parametrize("dialect", UNCONDITIONAL, ids=names_of)
@pytest.mark.slow
def test_without_conditional_writes_status_says_so_and_a_checkpoint_is_committed(
    dialect: Dialect, moto_bucket: Bucket, tmp_path: Path
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint, dialect=dialect)
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        assert running.ready().status()["store"]["conditional_put"] is False
        write_checkpoint(running.volume, NAME, checkpoint_files())
        running.committed(NAME)
        assert running.terminate() == 0
    moto_bucket.assert_holds(NAME, checkpoint_files())


@pytest.mark.parametrize("dialect", UNCONDITIONAL, ids=names_of)
@pytest.mark.parametrize("kind", [Kind.LOST_ANSWER, Kind.ERROR_500, Kind.RESET_UPLOAD])
def test_without_conditional_writes_a_commit_that_failed_on_the_way_is_repeated(
    kind: Kind, dialect: Dialect, moto_bucket: Bucket, tmp_path: Path
) -> None:
    plan = Rules([Rule(Fault(kind), operation="PutObject", key=rf"{NAME}/\.complete$")])
    proxy = FaultProxy(moto_bucket.endpoint, plan, dialect=dialect)
    files = {"model": random_bytes(100_000, 1)}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        write_checkpoint(running.volume, NAME, files)
        running.committed(NAME)
        assert running.terminate() == 0
    assert plan.unused() == []
    moto_bucket.assert_holds(NAME, files)


@pytest.mark.parametrize("dialect", UNCONDITIONAL, ids=names_of)
def test_without_conditional_writes_a_restart_leaves_a_commit_as_it_is(
    dialect: Dialect, moto_bucket: Bucket, tmp_path: Path
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint, dialect=dialect)
    with proxy.running() as endpoint:
        for _ in range(2):
            with sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
                running.ready()
                if not moto_bucket.is_committed(NAME):
                    write_checkpoint(running.volume, NAME, {"model": b"x"})
                running.committed(NAME)
                committed_at = json.loads(moto_bucket.get(f"{NAME}/.complete"))["committed_at"]
                running.kill()
    commits = [e for e in proxy.log if e.operation == "PutObject" and e.key.endswith(f"{NAME}/.complete") and e.status == 200]
    assert len(commits) == 1
    assert json.loads(moto_bucket.get(f"{NAME}/.complete"))["committed_at"] == committed_at


@pytest.mark.parametrize(("times", "starts"), [(1, True), (100, False)])
@pytest.mark.slow
def test_a_probe_that_another_sidecar_takes_for_abandoned_is_made_again(
    times: int, starts: bool, moto_bucket: Bucket, tmp_path: Path
) -> None:
    aborted = 0

    def abort(request: Request) -> None:
        nonlocal aborted
        if request.operation == "CompleteMultipartUpload" and "/.ckpt-probe/" in request.key and aborted < times:
            aborted += moto_bucket.abort_unfinished_uploads()

    proxy = FaultProxy(moto_bucket.endpoint, abort)
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        if starts:
            running.ready()
        else:
            assert running.wait() == 2
            assert "(unfinished upload): not in the store" in running.log()
    assert aborted >= min(times, 3)
