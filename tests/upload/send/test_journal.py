"""What the journal remembers across lives, and what it takes over from files that were sent early."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.format.manifest import FileEntry
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.store.protocol import Part
from sidecar.upload.send import journal as journal_module
from sidecar.upload.send.journal import Journal
from sidecar.volume.opener import Folder, Place
from sidecar.volume.unfinished import QUIET_GROWING_S, QUIET_S, FilesSeen, Unfinished, list_files


def found(path: str, *, size_bytes: int = 10, mtime_ns: int = 1, inode: int = 1) -> FoundFile:
    return FoundFile(path, size_bytes, mtime_ns, inode)


def entry(path: str) -> FileEntry:
    return FileEntry(path=path, key=f"checkpoint-1/{path}", size_bytes=10, crc64nvme="0" * 16)


def place(tmp_path: Path, name: str = "j") -> Place:
    return Folder(tmp_path) / f"checkpoint-1@{name}.jsonl"


def filled(path: Place) -> Journal:
    """A journal with one file that is whole and one of which a part is there."""
    journal = Journal(path)
    journal.stored(entry("whole"), stamp=found("whole").stamp, first_crc=7)
    journal.begun("half", found("half").stamp, upload_id="u", key="checkpoint-1/half", part_bytes=5)
    journal.part("half", Part(1, 5, "etag"), crc=3)
    journal.close()
    return journal


def test_another_life_knows_what_was_sent_also_after_a_line_was_cut_off(tmp_path: Path) -> None:
    before = filled(place(tmp_path))
    with Path(str(place(tmp_path))).open("ab") as file:
        file.write(b'{"event": "part", "path": "ha')
    after = Journal(place(tmp_path))
    assert after.entries == before.entries
    assert after.uploads == before.uploads
    assert after.stamps == before.stamps
    assert after.first_crcs == {"whole": 7}


def test_what_was_sent_early_is_taken_over_to_be_confirmed(tmp_path: Path) -> None:
    early, journal = filled(place(tmp_path, "early")), Journal(place(tmp_path))
    assert journal.take_over(early, [found("whole"), found("half")]) == []
    journal.close()
    again = Journal(place(tmp_path))
    assert again.unconfirmed == {"whole", "half"}
    assert set(again.entries) == {"whole"}
    assert again.uploads["half"].checksums == {1: 3}


def test_after_a_damaged_line_everything_is_compared_since_that_line_may_have_asked_for_it(tmp_path: Path) -> None:
    """A file that was sent early and changed since would count as sent, and be committed with its earlier content."""
    journal = Journal(place(tmp_path))
    journal.take_over(filled(place(tmp_path, "early")), [found("whole"), found("half")])
    journal.close()
    path = Path(str(place(tmp_path)))
    lines = path.read_bytes().splitlines(keepends=True)
    asks = [number for number, line in enumerate(lines) if b"unconfirmed" in line and b"whole" in line]
    for number in asks:
        lines[number] = bytes(len(lines[number]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    after = Journal(place(tmp_path))
    assert after.entries.keys() == {"whole"}
    assert after.unconfirmed == {"whole", "half"}
    after.confirmed("whole")
    assert after.unconfirmed == {"half"}


def test_files_that_are_others_now_are_not_taken_over_and_their_uploads_are_named(tmp_path: Path) -> None:
    early, journal = filled(place(tmp_path, "early")), Journal(place(tmp_path))
    stale = journal.take_over(early, [found("whole", mtime_ns=2), found("half", inode=2)])
    assert [upload.upload_id for upload in stale] == ["u"]
    assert journal.entries == {}
    assert journal.uploads == {}


def test_uploads_that_were_given_up_are_named_also_in_another_life(tmp_path: Path) -> None:
    early = filled(place(tmp_path, "early"))
    early.dropped("half")
    early.dropped("whole")
    early.close()
    again, journal = Journal(place(tmp_path, "early")), Journal(place(tmp_path))
    assert [upload.upload_id for upload in journal.take_over(again, [found("half")])] == ["u"]
    assert journal.stamps == {}


def test_a_file_continues_what_was_sent_of_its_beginning_unless_it_is_another_or_shorter(tmp_path: Path) -> None:
    journal = Journal(place(tmp_path))
    journal.begun("growing", found("growing").growing_stamp, upload_id="u", key="checkpoint-1/growing", part_bytes=5)
    for number in (1, 2):
        journal.part("growing", Part(number, 5, "etag"), crc=3)
    assert journal.growing() == {"growing"}
    assert journal.has_beginning_of(found("growing", size_bytes=10, mtime_ns=7))
    assert not journal.has_beginning_of(found("growing", size_bytes=9))
    assert not journal.has_beginning_of(found("growing", inode=2))
    journal.grown(found("growing"))
    assert journal.growing() == set()
    assert not journal.has_beginning_of(found("growing"))
    assert journal.is_of(found("growing"))
    journal.close()


def test_a_journal_that_cannot_be_written_is_kept_in_memory(tmp_path: Path) -> None:
    journal = Journal(place(tmp_path / "no such folder"))
    journal.stored(entry("whole"), stamp="s")
    assert set(journal.entries) == {"whole"}


def test_what_was_taken_back_is_not_continued_by_another_life_although_that_could_not_be_written(tmp_path: Path) -> None:
    journal = Journal(place(tmp_path))
    journal.stored(entry("overwritten"), stamp="s")
    with no_room_in(Path(str(place(tmp_path)))):
        journal.stored(entry("other"), stamp="s")
        assert set(Journal(place(tmp_path)).entries) == {"overwritten"}
        journal.dropped("overwritten")
        assert set(journal.entries) == {"other"}
        journal.close()
        assert set(Journal(place(tmp_path)).entries) == set()


@contextmanager
def no_room_in(file: Path) -> Iterator[None]:
    """Let no file of this process become longer than this one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_line_of_a_journal_that_is_full_is_out_of_the_readers_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was taken back beyond the limit counted as sent after each retry: its upload failed until the pod ended."""
    monkeypatch.setattr(journal_module, "MOST_LINES", 10)
    journal = Journal(place(tmp_path))
    journal.begun("ended", "s", upload_id="u", key="checkpoint-1/ended", part_bytes=5)
    journal.begun("dropped", "s", upload_id="v", key="checkpoint-1/dropped", part_bytes=5)
    for number in range(20):
        journal.stored(entry(f"small-{number}"), stamp="s")
    journal.stored(entry("ended"), stamp="s")
    journal.dropped("dropped")
    again = Journal(place(tmp_path))
    assert set(again.entries) == {"ended", *(f"small-{number}" for number in range(6))}
    assert again.uploads == {}
    journal.dropped("small-0")  # not even that has room: what follows is written to a new file
    journal.stored(entry("later"), stamp="s")
    assert set(Journal(place(tmp_path)).entries) == {"later"}
    journal.close()


def test_a_journal_beyond_the_limits_is_not_used_and_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(place(tmp_path))
    with Path(str(place(tmp_path))).open("ab") as file:
        file.write(b'{"event": "part", "path": "ha')
    monkeypatch.setattr(journal_module, "MOST_LINES", 3)
    again = Journal(place(tmp_path))
    assert (again.entries, again.uploads, again.stamps, again.sent_bytes) == ({}, {}, {}, 0)
    monkeypatch.setattr(journal_module, "MOST_LINES", 10)
    assert again.entries == {} != journal.entries
    again.stored(entry("later"), stamp="s")
    again.close()
    assert Path(str(place(tmp_path))).read_bytes().count(b"\n") == 1
    assert set(Journal(place(tmp_path)).entries) == {"later"}


# Files that are being written.


def test_a_file_counts_as_closed_when_the_kernel_said_so_or_nobody_touched_it_for_a_while(tmp_path: Path) -> None:
    for name in ("open", "closed", "old"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link").symlink_to("old")
    now_s = (tmp_path / "open").stat().st_mtime
    os.utime(tmp_path / "old", (now_s - QUIET_S - 1, now_s - QUIET_S - 1))
    assert [f.path for f in list_files(Folder(tmp_path) / "", {str(tmp_path / "closed"): now_s + 1}).closed] == ["closed"]
    # "old" has an old time of its own making: when it was made is what counts.
    assert [
        f.path for f in list_files(Folder(tmp_path) / "", {str(tmp_path / "closed"): now_s + 1}, quiet_only=True).closed
    ] == []
    assert list_files(Folder(tmp_path) / "gone", {}) == FilesSeen((), ())


def test_a_file_that_was_seen_growing_does_not_end_because_its_writer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("never seen before", "growing"):
        (tmp_path / name).write_bytes(b"x")
    now_s = time.time()

    def closed_after(wait_s: float) -> list[str]:
        monkeypatch.setattr(time, "time", lambda: now_s + wait_s)
        return [file.path for file in list_files(Folder(tmp_path) / "", {}, growing={"growing"}).closed]

    assert closed_after(QUIET_S + 1) == ["never seen before"]
    assert closed_after(QUIET_GROWING_S + 1) == ["growing", "never seen before"]
    heard = {str(tmp_path / "growing"): now_s - 1}  # by a clock that is behind that of the files
    monkeypatch.setattr(time, "time", lambda: now_s + QUIET_S + 1)
    assert "growing" in [file.path for file in list_files(Folder(tmp_path) / "", heard, growing={"growing"}).closed]


def test_an_unfinished_file_is_opened_only_as_the_one_that_was_seen(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    [seen] = list_files(Folder(tmp_path) / "", {str(tmp_path / "model"): 1e12}).closed
    source = Unfinished(Folder(tmp_path.parent) / tmp_path.name)
    source.see(seen)
    with source.open("model") as fd:
        assert os.read(fd, 100) == b"weights"
    with pytest.raises(CheckpointChanged), source.open("model"):
        (tmp_path / "model").write_bytes(b"changed while it was read")
    with pytest.raises(CheckpointChanged), source.open("model"):
        pass
    (tmp_path / "model").unlink()
    with pytest.raises(CheckpointRejected), source.open("model"):
        pass


def test_bytes_are_counted_while_threads_add_files(tmp_path: Path) -> None:
    journal, threads = Journal(place(tmp_path)), []
    for first in range(4):
        paths = [f"{first}-{n}" for n in range(3000)]
        threads.append(threading.Thread(target=lambda p=paths: [journal.stored(entry(x), stamp="s", first_crc=1) for x in p]))
    for thread in threads:
        thread.start()
    seen = [0]
    while any(thread.is_alive() for thread in threads):
        seen.append(journal.sent_bytes)
    assert seen == sorted(seen)
    assert journal.sent_bytes == Journal(place(tmp_path)).sent_bytes == 4 * 3000 * 10
    journal.dropped("0-0")
    journal.stored(entry("0-1"), stamp="s", first_crc=1)
    journal.begun("half", "s", upload_id="u", key="checkpoint-1/half", part_bytes=5)
    journal.part("half", Part(1, 5, "etag"), crc=3)
    assert journal.sent_bytes == Journal(place(tmp_path)).sent_bytes == 4 * 3000 * 10 - 10 + 5
