"""Forged files of the sidecar's own, which it reads from a volume that the trainer can write to."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
import structlog

from sidecar.core.format import checksum
from sidecar.core.format.manifest import FileEntry
from sidecar.core.schedule.parts import DEFAULT_PART_BYTES
from sidecar.download.partial_file import PartialFile
from sidecar.download.quarantine import Quarantine
from sidecar.store.protocol import Part
from sidecar.upload.send import journal as journal_module
from sidecar.upload.send.journal import Journal
from sidecar.volume.volume import Volume
from tests.lifecycle.beginning import begin
from trainer_hook.contract import (
    EXIT_REPORT,
    INCOMING,
    JOURNAL,
    TOKEN,
)


def lines_of(path: Path, *said: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in said))


def test_a_forged_journal_names_no_object_but_those_of_its_checkpoint(volume: Volume) -> None:
    place = volume.early_journal("checkpoint-777")
    keys = ["checkpoint-1/.complete", "checkpoint-1/model", "run.json", "checkpoint-777/model"]
    stored = [
        {
            "event": "stored",
            "stamp": "s",
            "first_crc": 1,
            "entry": {"path": path, "key": key, "size_bytes": 1, "crc64nvme": "0" * 16},
        }
        for key in keys
        for path in ["model"]
    ]
    lines_of(volume.root / place.inside, *stored)
    with structlog.testing.capture_logs() as said:
        journal = Journal(place)
    assert [entry.key for entry in journal.entries.values()] == ["checkpoint-777/model"]
    [event] = said
    assert (event["event"], event["lines"]) == ("journal_lines_ignored", 3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", ["ten gigabytes of nothing", "one endless line", "a million lines", "a million files"])
def test_a_journal_of_any_size_costs_little(content: str, volume: Volume) -> None:
    place = volume.early_journal("checkpoint-777")
    path = volume.root / place.inside
    if content == "ten gigabytes of nothing":
        path.touch()
        os.truncate(path, 10 << 30)
    elif content == "one endless line":
        path.write_bytes(b'{"event":"dropped","path":"' + b"x" * (40 << 20))
    elif content == "a million lines":
        path.write_bytes(b"{}\n" * 1_000_000)
    else:
        path.write_bytes(b"".join(b'{"event":"unconfirmed","path":"%d"}\n' % n for n in range(1_000_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    journal = Journal(place)
    assert time.process_time() - began_s < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 150 << 10  # in KiB
    assert len(journal.unconfirmed) <= journal_module.MOST_LINES


def test_a_journal_is_not_appended_to_a_file_that_has_another_name(volume: Volume) -> None:
    (volume / TOKEN).publish(b"token")
    place = volume.early_journal("checkpoint-1")
    os.link(volume.root / TOKEN, volume.root / place.inside)
    journal = Journal(place)
    journal.begun("model", "s", upload_id="u", key="checkpoint-1/model", part_bytes=5)
    journal.part("model", Part(1, 5, "e"), crc=1)
    assert (volume.root / TOKEN).read_bytes() == b"token"


def test_a_directory_in_a_journals_place_is_removed_with_it(volume: Volume) -> None:
    place = volume.early_journal("checkpoint-1")
    (volume.root / place.inside / "deep").mkdir(parents=True)
    Journal(place).delete()
    assert place.parent.entries() == []


def test_a_forged_record_of_a_download_is_believed_only_for_ranges_that_exist(volume: Volume) -> None:
    entry = FileEntry(path="model", key="k", size_bytes=2 * DEFAULT_PART_BYTES, crc64nvme="0" * 16)
    partial = PartialFile.prepare(volume.incoming / "partial", entry)
    of_zeros = checksum.checksum(bytes(DEFAULT_PART_BYTES))
    record = volume.root / INCOMING / "partial" / f"{partial.place.name}.ranges"
    lines = [[-5, 10, 1], [0, 1 << 62, 1], [7, 9, 1], "x", [1], [1e400, 1, 1], [0, DEFAULT_PART_BYTES, of_zeros]]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 100_000 + "\n")
    assert PartialFile.prepare(volume.incoming / "partial", entry).missing() == [(DEFAULT_PART_BYTES, DEFAULT_PART_BYTES)]
    os.truncate(record, 10 << 30)
    assert PartialFile.prepare(volume.incoming / "partial", entry).done_bytes == DEFAULT_PART_BYTES


@pytest.mark.parametrize("is_private", [False, True])
def test_with_a_state_directory_nothing_of_the_volume_is_taken_for_the_sidecars_own(is_private: bool, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "volume").mkdir()
    volume = Volume(tmp_path / "volume", tmp_path / "state" if is_private else None)
    volume.prepare_state()
    volume.prepare()
    (volume / EXIT_REPORT).publish(json.dumps({"exit_code": 0, "written_at": "2126-01-01T00:00:00Z"}).encode())
    (volume / ".ckpt/pod.json").publish(json.dumps({"pod": "pod", "since": "2001-01-01T00:00:00Z"}).encode())
    (volume / JOURNAL).make_folder()
    (volume / JOURNAL / "quarantine.json").publish(
        json.dumps({"checkpoint-1": {"crc": "0", "reason": "forged", "shared": True}}).encode()
    )
    Journal(volume / JOURNAL / "checkpoint-7@early.jsonl").dropped("model")
    pod, _ = begin(volume)
    is_believed = not is_private
    assert (pod.since_s < 1e9) == is_believed
    assert (pod._ended_in_order_at_s is not None) == is_believed
    assert bool(Quarantine(volume.journal / "quarantine.json").quarantined) == is_believed
    assert bool(volume.early_uploads()) == is_believed
    assert bool(volume.forget_journals_of_trainer()) == is_private
    assert (volume / JOURNAL).is_folder() == is_believed
    assert volume.forget_journals_of_trainer() == []
