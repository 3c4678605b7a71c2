"""What an S3 server can really do. Not every store that accepts a checksum looks at it, so the probe sends wrong ones."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from sidecar.core import keys
from sidecar.core.checksum import checksum
from sidecar.core.parts import MIB
from sidecar.errors import AccessRefused, AlreadyExists, ConfigurationError, CorruptObject, NotFound
from sidecar.store.protocol import Capabilities, Store, Verification
from sidecar.store.slice import FileSlice, OpenGate

MIN_PART_BYTES, MAX_PARTS = 5 * MIB, 10_000
"""Source: S3 user guide, "Multipart upload limits"."""
CONTENT = b"checkpoint-sidecar probe\n"
WRONG_CRC = checksum(CONTENT) ^ 1
TRIES, NEAR_S = 3, 0.01
"""Below this, the first run of our own code takes longer than the way there: it is measured again."""
CHOSEN = {"read-back": Verification.READ_BACK, "off": Verification.OFF}


class Probed(Store, Protocol):
    """An S3 store whose way of verification can be set, to see whether it works."""

    verification: Verification
    crc_with_parts: bool
    """Whether it wants the checksum of each part, not only that of the whole."""

    def put_with_crc(self, key: str, content: bytes, *, crc64nvme: int) -> None:
        """Write a small object with a checksum, right or wrong."""
        ...


def probe(store: Probed, verify: Literal["auto", "md5", "read-back", "off"]) -> Capabilities:
    """Write, read, list and delete one small object, and find out how uploads are verified.

    Raises:
        AccessRefused, StoreUnavailable: See the store.
        ConfigurationError: ``CKPT_VERIFY=md5`` where the store does not answer with MD5s.
    """
    key = f"{keys.PROBE}{uuid.uuid4().hex}"
    next(iter(store.list(keys.PROBE)), None)
    store.put(key, CONTENT)
    try:
        if store.get(key) != CONTENT:
            raise CorruptObject(key, want="what was written", got="the store returned something else")
        round_trip_s = _round_trip_s(store, key)
        conditional = _is_conditional(store, key)
        verification = CHOSEN.get(verify) or _found(store, key, verify)
    finally:
        store.delete([key])
    return Capabilities(
        verification,
        conditional_put=conditional,
        min_part_bytes=MIN_PART_BYTES,
        max_parts=MAX_PARTS,
        round_trip_s=round_trip_s,
    )


def _round_trip_s(store: Probed, key: str) -> float:
    """Return what a small request takes: the slower of a read and a write; some stores read fast and write slowly."""
    tries: list[float] = []
    with _slice() as body:
        while len(tries) < TRIES and (not tries or tries[-1] < NEAR_S):
            began_s = time.monotonic()
            store.get(key)
            read_s = time.monotonic()
            store.put_file(key, body)
            tries.append(max(read_s - began_s, time.monotonic() - read_s))
    return min(tries)


def _is_conditional(store: Probed, key: str) -> bool:
    try:
        store.put(key, CONTENT[:-1], only_if_absent=True)  # the same content would pass for a write of our own
    except AlreadyExists:
        return True
    except AccessRefused:  # "NotImplemented": plain writes were accepted before
        return False
    return False


def _found(store: Probed, key: str, verify: str) -> Verification:
    before = store.verification
    ways = [(Verification.MD5, _answers_with_md5)]
    if verify == "auto":  # cheapest first: a CRC costs nothing, SHA-256 half of MD5
        ways = [(Verification.STORE_CRC, _compares_checksums), (Verification.SIGNED_SHA256, _compares_hashes), *ways]
    try:
        with _slice() as body:
            for verification, works in ways:
                store.verification = verification
                if works(store, key, body):
                    return verification
    finally:
        store.verification = before
    if verify == "md5":
        raise ConfigurationError(f"CKPT_VERIFY=md5: {store.url} does not answer with MD5s: choose auto or read-back")
    return Verification.READ_BACK


def _compares_checksums(store: Probed, key: str, body: FileSlice) -> bool:
    """Whether wrong checksums of objects and of joined objects are refused, and right ones accepted."""
    if not _refused(lambda: store.put_with_crc(key, CONTENT, crc64nvme=WRONG_CRC)):
        return False
    try:
        store.put_file(key, body)
    except (CorruptObject, AccessRefused):  # refuses what is right: its checksums are of no use to us
        return False
    for with_parts in (False, True):
        store.crc_with_parts = with_parts
        if _compares_joined(store, key, body):
            return True
    return False


def _compares_joined(store: Probed, key: str, body: FileSlice) -> bool:
    upload_id = ""
    try:
        upload_id = store.begin_upload(key)
        parts = [store.upload_part(key, upload_id, 1, body)]
        if _refused(lambda: store.complete_upload(key, upload_id, parts, crc64nvme=WRONG_CRC)):
            store.complete_upload(key, upload_id, parts, crc64nvme=body.crc64nvme)
            return True
    except (CorruptObject, AccessRefused, NotFound):
        pass
    if upload_id:
        store.abort_upload(key, upload_id)
    return False


def _compares_hashes(store: Probed, key: str, body: FileSlice) -> bool:
    """Whether an object and a part whose signed SHA-256 is wrong are refused, and right ones accepted."""
    upload_id = ""
    try:
        store.put_file(key, body)
        if not _refused(lambda: store.put_file(key, _WronglyHashed(body))):
            return False
        upload_id = store.begin_upload(key)
        parts = [store.upload_part(key, upload_id, 1, body)]
        if _refused(lambda: store.upload_part(key, upload_id, 2, _WronglyHashed(body))):
            store.complete_upload(key, upload_id, parts, crc64nvme=body.crc64nvme)
            return True
    except (CorruptObject, AccessRefused, NotFound):
        pass
    if upload_id:
        store.abort_upload(key, upload_id)
    return False


def _refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except (CorruptObject, AccessRefused):
        return True
    return False


class _WronglyHashed(FileSlice):
    """A slice that says it is something else."""

    def __init__(self, body: FileSlice) -> None:
        super().__init__(body.fd, body.offset, body.size_bytes, gate=body.gate, name=body.name)

    def sha256_ahead(self) -> str:
        return hashlib.sha256(b"something else").hexdigest()


def _answers_with_md5(store: Probed, key: str, body: FileSlice) -> bool:
    """Whether the etags of objects, parts and joined objects are made of the MD5 of what the store received."""
    upload_id = ""
    try:
        store.put_file(key, body)
        upload_id = store.begin_upload(key)
        part = store.upload_part(key, upload_id, 1, body)
        store.complete_upload(key, upload_id, [part], crc64nvme=body.crc64nvme)
    except CorruptObject:
        if upload_id:
            store.abort_upload(key, upload_id)
        return False
    return True


@contextmanager
def _slice() -> Iterator[FileSlice]:
    fd = os.memfd_create("probe")
    try:
        os.write(fd, CONTENT)
        yield FileSlice(fd, 0, len(CONTENT), gate=OpenGate(), name="probe", with_md5=True)
    finally:
        os.close(fd)
