from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.checksum import checksum, combined, from_text, to_text


def reference(content: bytes) -> int:
    """CRC-64/NVME, bit by bit, from the parameters of the NVM Express specification."""
    crc = 0xFFFF_FFFF_FFFF_FFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C_9329_AC4B_C9B5 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


@given(st.binary(max_size=300))
def test_the_checksum_is_crc64nvme(content: bytes) -> None:
    assert checksum(content) == reference(content)


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_pieces_combine_to_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    assert combined((checksum(piece), len(piece)) for piece in pieces) == checksum(b"".join(pieces))


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_a_checksum_continues_block_by_block(blocks: list[bytes]) -> None:
    crc = 0
    for block in blocks:
        crc = checksum(block, crc)
    assert crc == checksum(b"".join(blocks))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_changed_byte_changes_the_checksum(content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    other = bytearray(content)
    other[at] ^= data.draw(st.integers(1, 255))
    assert checksum(bytes(other)) != checksum(content)


@given(st.integers(0, 2**64 - 1))
def test_a_checksum_survives_its_text(crc: int) -> None:
    text = to_text(crc)
    assert from_text(text) == crc
    assert len(text) == 16


@given(st.text(max_size=20) | st.text("0123456789abcdefABCDEFx_+- \n", min_size=14, max_size=18))
def test_text_that_is_a_checksum_is_the_only_text_of_that_checksum(text: str) -> None:
    try:
        crc = from_text(text)
    except ValueError:
        return
    assert to_text(crc) == text


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "A" * 16, "0x" + "0" * 14, "0" * 16 + "\n", "٠" * 16])
def test_text_in_another_form_is_no_checksum(text: str) -> None:
    with pytest.raises(ValueError, match="16 lower-case hexadecimal digits"):
        from_text(text)


def test_the_check_value_of_the_catalogue_of_crcs() -> None:
    assert to_text(checksum(b"123456789")) == "ae8b14860a799888"


def test_nothing_has_the_checksum_zero() -> None:
    assert checksum(b"") == combined([]) == 0
