"""A log that cannot be written: its lines are dropped, and nothing else happens."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from sidecar.daemon.logging import LogOutput, configure


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield descriptor, path
    os.close(descriptor)


def full_after(monkeypatch: pytest.MonkeyPatch, room: list[int]) -> None:
    """Let writes succeed for ``room[0]`` bytes."""
    write: Callable[[int, bytes], int] = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)


def test_what_cannot_be_written_is_dropped_and_counted_after_the_next_line_that_can(
    log_file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, room = LogOutput(log_file[0], "{} dropped".format), [1000]
    full_after(monkeypatch, room)
    output.info("first")
    room[0] = 0
    output.error("second")
    output.warning("third")
    room[0] = 1000
    output.info("fourth")
    output.info("fifth")
    assert log_file[1].read_text() == "first\nfourth\n2 dropped\nfifth\n"


@pytest.mark.parametrize("room_bytes", [0, 1, 6, 7, 8, 13, 18])
def test_lines_begin_after_an_end_of_line_wherever_the_disk_was_full(
    room_bytes: int, log_file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, room = LogOutput(log_file[0], "{} dropped".format), [room_bytes]
    full_after(monkeypatch, room)
    output.info("second")
    output.info("third")
    room[0] = 1000
    output.info("fourth")
    output.info("fifth")
    lines = log_file[1].read_text().splitlines()
    assert lines.count("fourth") == lines.count("fifth") == 1
    told = [line for line in lines if line.endswith(" dropped")]
    assert told == [f"{2 - (room_bytes >= 7) - (room_bytes >= 13)} dropped"][: room_bytes < 13]


def test_the_number_of_dropped_lines_is_kept_until_it_could_be_written(
    log_file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, room = LogOutput(log_file[0], "{} dropped".format), [0]
    full_after(monkeypatch, room)
    output.info("first")
    room[0] = len("second\n")
    output.info("second")
    room[0] = 1000
    output.info("third")
    assert log_file[1].read_text() == "second\nthird\n1 dropped\n"


def test_a_name_that_is_not_utf_8_is_escaped(log_file: tuple[int, Path]) -> None:
    LogOutput(log_file[0], str).info("a\udcffb ä")
    assert log_file[1].read_text() == "a\\udcffb ä\n"


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_log_on_a_full_disk_raises_nothing_and_goes_on_afterwards(
    style: str, log_file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [0]
    full_after(monkeypatch, room)
    with os.fdopen(os.dup(log_file[0]), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        configure("json" if style == "json" else "console")
        log = structlog.get_logger()
        try:
            raise ValueError("of the test")
        except ValueError:
            log.exception("failed")
        log.info("two")
        room[0] = 100_000
        log.info("three")
    line, told = log_file[1].read_text().splitlines()
    assert "three" in line
    assert "log_lines_dropped" in told
    assert style == "console" or json.loads(told)["lines"] == 2


def test_a_library_that_repeats_itself_is_one_json_object_a_line_without_a_stack_trace(
    log_file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refresh() -> None:
        try:
            raise FileNotFoundError("/var/run/secrets/token")
        except FileNotFoundError:
            logger.warning("Refreshing temporary credentials failed during %s refresh period.", "mandatory", exc_info=True)

    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(log_file[0]), "w"))
    root, logger = logging.getLogger(), logging.getLogger("aiobotocore.credentials")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    try:
        configure("json")
        for _ in range(1000):
            refresh()
    finally:
        structlog.reset_defaults()
        sys.stdout.close()
    said = [json.loads(line) for line in log_file[1].read_text().splitlines()]
    assert [event["times"] for event in said] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert (said[0]["level"], said[0]["library"], said[0]["error"]) == ("warning", logger.name, "/var/run/secrets/token")
    assert said[0]["message"] == "Refreshing temporary credentials failed during mandatory refresh period."
    assert "exception" not in said[0]
