"""The body of uploads, apart from any store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.checksum import checksum
from sidecar.errors import CheckpointChanged, Stopped
from sidecar.store.slice import BLOCK_BYTES, FileSlice, OpenGate


@contextmanager
def slice_of(
    content: bytes, offset: int = 0, size_bytes: int | None = None, gate: OpenGate | None = None
) -> Iterator[FileSlice]:
    fd = os.memfd_create("slice")
    try:
        os.write(fd, content)
        length = len(content) - offset if size_bytes is None else size_bytes
        yield FileSlice(fd, offset, length, gate=gate or OpenGate(), name="file", with_md5=True)
    finally:
        os.close(fd)


@given(st.binary(max_size=300), st.data())
def test_whatever_the_reads_the_checksums_are_those_of_the_window(content: bytes, drawn: st.DataObject) -> None:
    offset = drawn.draw(st.integers(0, len(content)))
    length = drawn.draw(st.integers(0, len(content) - offset))
    window = content[offset : offset + length]
    with slice_of(content, offset, length) as body:
        for _ in range(drawn.draw(st.integers(0, 2))):  # tries that were broken off
            body.read(drawn.draw(st.integers(1, 400)))
            body.seek(0)
        read = b""
        while block := body.read(drawn.draw(st.integers(1, 100))):
            read += block
        assert read == window
        assert body.crc64nvme == checksum(window) == body.crc64nvme_ahead()
        assert body.md5 == hashlib.md5(window).digest()
        assert body.sha256_ahead() == hashlib.sha256(window).hexdigest()


def test_a_checksum_is_not_given_before_the_end() -> None:
    with slice_of(b"0123456789") as body:
        body.read(4)
        with pytest.raises(ValueError, match="4 of 10 bytes"):
            _ = body.crc64nvme


def test_no_read_is_larger_than_a_block() -> None:
    with slice_of(b"x" * (BLOCK_BYTES + 1)) as body:
        buffer = bytearray(1 << 20)
        assert [body.readinto(buffer) for _ in range(3)] == [BLOCK_BYTES, 1, 0]


def test_a_closed_gate_stops_both_ways_of_reading() -> None:
    gate = OpenGate()
    gate.close()
    with slice_of(b"0123456789", gate=gate) as body:
        for call in (body.read, body.crc64nvme_ahead, body.sha256_ahead):
            with pytest.raises(Stopped):
                call()


def test_a_file_shorter_than_its_slice_has_changed() -> None:
    with slice_of(b"01234", 0, 10) as body:
        with pytest.raises(CheckpointChanged):
            body.crc64nvme_ahead()
        body.read(5)
        with pytest.raises(CheckpointChanged):
            body.read(5)
