"""What ``pod.json`` may say, which without a state directory the trainer can write."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.lifecycle.pod import LAST_REPORT
from sidecar.lifecycle.pod_record import POD, decode_record
from sidecar.volume.volume import Volume
from tests.catalog.conftest import Failing, failing  # noqa: F401 - a fixture
from tests.lifecycle.beginning import begin
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import (
    PINS,
    RUNS,
    TERMINATING,
    TRAINER_STATE,
    Notice,
    TrainerState,
    encode_notice,
    encode_trainer_state,
    rfc3339,
)

SINCE = "2026-03-01T12:00:00.000Z"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pod": "p"},
        {"pod": "q", "since": SINCE},
        {"pod": "p", "since": 3},
        {"pod": "p", "since": "2026"},
        {"pod": "p", "since": SINCE, "booted_s": 10**400},
    ],
)
def test_a_malformed_record_is_none(fields: dict[str, Any]) -> None:
    assert decode_record(json.dumps(fields).encode(), "p") is None


def test_a_record_with_fields_of_another_type_has_their_defaults() -> None:
    record = decode_record(
        json.dumps({"pod": "p", "since": SINCE, "booted_s": "x", "inherited": 3, "boot_id": []}).encode(), "p"
    )
    assert record is not None
    assert (record.since_s, record.booted_s, record.boot_id, record.inherited) == (1772366400.0, 0.0, "", frozenset())


RUN = VolumeRun("s3://b/a", "ns/a")


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """A volume on which an earlier pod was given notice, after its trainer had succeeded."""
    volume = Volume(tmp_path)
    volume.prepare()
    begin(volume, "earlier", run=RUN)
    write_checkpoint(volume.root, "checkpoint-20", {"m": b"x"}, {})
    now = rfc3339(time.time())
    ended = TrainerState("succeeded", "a", 20, 1, 1, rfc3339(time.time() - 60))
    (volume.root / TRAINER_STATE).write_bytes(encode_trainer_state(ended))
    (volume.root / TERMINATING).write_bytes(encode_notice(Notice(now, "sigterm")))
    return volume


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("unreadable", [POD, RUNS, TERMINATING, TRAINER_STATE, LAST_REPORT, PINS])
def test_a_pod_begins_again_where_the_volume_failed(
    unreadable: str,
    number: int,
    volume: Volume,
    failing: Failing,  # noqa: F811
) -> None:
    """What could not be read counted as missing: what an earlier pod had left was this pod's own then."""
    failing(f".ckpt/{Path(unreadable).name}", number)
    with pytest.raises(OSError, match=os.strerror(number)):
        begin(volume, "later", run=RUN)
    failing("")
    pod, termination = begin(volume, "later", run=RUN)
    assert not termination.poll_notice()
    assert not (volume.root / TERMINATING).exists()
    assert not pod.trainer_succeeded()
    assert pod.identity().inherited == {volume.marker_version("checkpoint-20")}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_pod_whose_record_cannot_be_read_now_does_not_become_a_new_one(
    number: int,
    volume: Volume,
    failing: Failing,  # noqa: F811
) -> None:
    before, _ = begin(volume, "later", run=RUN)
    write_checkpoint(volume.root, "checkpoint-30", {"m": b"x"}, {})
    (volume.root / TERMINATING).write_bytes(encode_notice(Notice(rfc3339(time.time()), "prestop")))
    failing(POD, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        begin(volume, "later", run=RUN)
    failing("")
    pod, termination = begin(volume, "later", run=RUN)
    assert pod.identity() == before.identity()
    assert termination.poll_notice(), "the pod is still terminating"
