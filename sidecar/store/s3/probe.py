"""Probe of an S3 server's capabilities. Some stores accept checksums without verifying them, so the probe sends wrong ones."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol

from sidecar.core.format import keys
from sidecar.core.format.checksum import checksum
from sidecar.core.lifecycle.fencing import seconds_of
from sidecar.core.schedule.parts import MAX_PARTS, MIN_PART_BYTES
from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    ConfigurationError,
    CorruptObject,
    NotFound,
    SettingRequired,
    StoreError,
)
from sidecar.store.protocol import Capabilities, Part, Store, Stored, Verification
from sidecar.store.slice import FileSlice, slice_of

CONTENT = b"checkpoint-sidecar probe\n"
WRONG_CRC = checksum(CONTENT) ^ 1
TRIES, NEAR_S = 3, 0.01
"""Round trips below ``NEAR_S`` seconds are measured up to ``TRIES`` times: the first run of our own code takes longer."""
ABANDONED_S = 3600.0
"""Age in seconds from which an object of another probe counts as left by one that was killed."""
CHOSEN = {"read-back": Verification.READ_BACK, "off": Verification.OFF}

ACL: dict[str, str] = {"acl": "bucket-owner-full-control"}
REQUIRED: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("an ACL", "CKPT_S3_ACL=bucket-owner-full-control", ACL),
    ("encryption", "CKPT_SSE=AES256", {"sse": "AES256"}),
    ("encryption by KMS", "CKPT_SSE=aws:kms", {"sse": "aws:kms"}),
    ("an ACL and encryption", "CKPT_S3_ACL=bucket-owner-full-control and CKPT_SSE=AES256", ACL | {"sse": "AES256"}),
    ("an ACL and encryption by KMS", "CKPT_S3_ACL=bucket-owner-full-control and CKPT_SSE=aws:kms", ACL | {"sse": "aws:kms"}),
)
"""What a bucket's policy may require, with the settings that bring it, and their options of the store."""


class Probed(Store, Protocol):
    """An S3 store whose verification method can be set, so that it can be tested."""

    verification: Verification
    crc_with_parts: bool
    """Whether each part is sent with its CRC64NVME, where the store compares that of whole objects."""
    md5_with_bodies: bool
    """Whether bodies that are sent without a CRC64NVME need a Content-MD5."""

    def takes(self, key: str, content: bytes, options: Mapping[str, str]) -> bool:
        """Write a small object with these options in place of the store's own; return whether that succeeded."""
        ...

    def put_with_crc(self, key: str, content: bytes, *, crc64nvme: int) -> None:
        """Write a small object with the given checksum, which may be wrong on purpose."""
        ...


def probe(store: Probed, verify: Literal["auto", "md5", "read-back", "off"]) -> Capabilities:
    """Write, read, list and delete one small object, and determine how uploads are verified.

    Raises:
        AccessRefused, StoreUnavailable: As ``Store.probe``.
        SettingRequired: The bucket's policy denies writes without an ACL or encryption.
        ConfigurationError: ``CKPT_VERIFY=md5``, but the store's etags are not MD5s.
    """
    key = f"{keys.PROBE}{uuid.uuid4().hex}"
    found = list(store.list(keys.PROBE))
    _put_first(store, key)
    try:
        _delete_older_probes(store, found, key)
        if store.get(key) != CONTENT:
            raise CorruptObject(key, want="what was written", got="the store returned something else")
        store.md5_with_bodies = _wants_checksums(store, key)
        round_trip_s = _round_trip_s(store, key)
        conditional = _is_conditional(store, key)
        verification = CHOSEN.get(verify) or _found(store, key, verify)
    finally:
        store.delete([key])
    return Capabilities(
        verification,
        conditional_put=conditional,
        conditional_files=conditional,
        min_part_bytes=MIN_PART_BYTES,
        max_parts=MAX_PARTS,
        round_trip_s=round_trip_s,
    )


def _put_first(store: Probed, key: str) -> None:
    """Write an object; where that is denied, find the setting that the bucket's policy requires."""
    try:
        store.put(key, CONTENT)
    except AccessRefused as refused:
        for wanted, settings, options in REQUIRED if refused.code == "AccessDenied" else ():
            if store.takes(key, CONTENT, options):
                store.delete([key])
                text = f"{store.url}: the bucket's policy requires {wanted} of every object: set {settings}"
                raise SettingRequired(text, code=refused.code) from None
        raise


def _delete_older_probes(store: Probed, found: Sequence[Stored], key: str) -> None:
    """Delete what killed probes left: the objects ``found`` that are an hour older than ``key``, by the store's clock."""
    if found:
        now_s = next((seconds_of(there.modified) for there in store.list(key)), None)
        store.delete([old.key for old in found if now_s and (at_s := seconds_of(old.modified)) and now_s - at_s > ABANDONED_S])


def _round_trip_s(store: Probed, key: str) -> float:
    """Return the round trip of a small file in seconds: the slower of a read and a write, which differ in some stores.

    Files go another way than documents, whose client takes longer for a request than a near store does.
    """
    tries: list[float] = []
    with slice_of(CONTENT, name="probe") as body:
        while len(tries) < TRIES and (not tries or tries[-1] < NEAR_S):
            began_s = time.monotonic()
            with store.read(key, length=len(CONTENT)) as answer:
                answer.readinto(memoryview(bytearray(len(CONTENT))))
            read_s = time.monotonic()
            store.put_file(key, body)
            tries.append(max(read_s - began_s, time.monotonic() - read_s))
    return min(tries)


def _wants_checksums(store: Probed, key: str) -> bool:
    """Whether the bucket takes no body without a checksum, as AWS does where Object Lock has a default retention."""
    store.md5_with_bodies = False
    with slice_of(CONTENT, name="probe") as body:
        try:
            store.put_file(key, body)
        except AccessRefused as refused:
            if refused.code is None:
                raise
            return True
    return False


def _is_conditional(store: Probed, key: str) -> bool:
    """Whether the store refuses a conditional write over an object, and takes one where an object was deleted.

    Ceph RGW 16 refuses the latter for ever in a bucket with suspended versioning: no step that was revoked could be committed.
    """
    try:
        store.put(key, CONTENT[:-1], only_if_absent=True)  # equal content would count as our own earlier write
    except AlreadyExists:
        return _takes_after_deletion(store, key)
    except AccessRefused as refused:  # "NotImplemented": unconditional writes were accepted before
        if refused.code is None:
            raise
    return False


def _takes_after_deletion(store: Probed, key: str) -> bool:
    store.delete([key])
    try:
        store.put(key, CONTENT, only_if_absent=True)
    except AlreadyExists:
        return False
    return True


def _found(store: Probed, key: str, verify: str) -> Verification:
    before = store.verification
    ways = [(Verification.MD5, _answers_with_md5)]
    if verify == "auto":  # cheapest first: a CRC costs next to nothing, SHA-256 half of MD5
        ways = [(Verification.STORE_CRC, _compares_checksums), (Verification.SIGNED_SHA256, _compares_hashes), *ways]
    try:
        with slice_of(CONTENT, name="probe") as body:
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
    """Whether the store refuses wrong CRCs of single and of multipart objects, and accepts right ones."""
    if not _refused(lambda: store.put_with_crc(key, CONTENT, crc64nvme=WRONG_CRC)):
        return False
    try:
        store.put_file(key, body)
    except (CorruptObject, AccessRefused):  # it refuses a right checksum, so its verification cannot be used
        return False
    for with_parts in (True, False):
        store.crc_with_parts = with_parts
        if _compares_upload(store, key, body, lambda i, p: store.complete_upload(key, i, p, crc64nvme=WRONG_CRC)):
            return True
    return False


def _compares_hashes(store: Probed, key: str, body: FileSlice) -> bool:
    """Whether the store refuses objects and parts with a wrong signed SHA-256, and accepts right ones."""
    wrong = _WronglyHashed(body)
    try:
        store.put_file(key, body)
        if not _refused(lambda: store.put_file(key, wrong)):
            return False
    except (CorruptObject, AccessRefused, NotFound):
        return False
    return _compares_upload(store, key, body, lambda i, _: store.upload_part(key, i, 2, wrong))


def _compares_upload(store: Probed, key: str, body: FileSlice, write_wrong: Callable[[str, Sequence[Part]], object]) -> bool:
    """Whether the store refuses ``write_wrong`` in an upload with one part, and then completes the upload."""
    upload_id, parts = "", list[Part]()
    try:
        upload_id = store.begin_upload(key)
        parts.append(store.upload_part(key, upload_id, 1, body))
        if _refused(lambda: write_wrong(upload_id, parts)):
            store.complete_upload(key, upload_id, parts, crc64nvme=body.crc64nvme)
            return True
    except (CorruptObject, AccessRefused, NotFound):
        pass
    if upload_id:
        _end_upload(store, key, upload_id, parts, body)
    return False


def _refused(write: Callable[[], object]) -> bool:
    """Whether the store itself refuses a write. A firewall's refusal does not count: it verifies no checksum."""
    try:
        write()
    except CorruptObject:
        return True
    except AccessRefused as refused:
        return refused.code is not None
    return False


class _WronglyHashed(FileSlice):
    """A slice that reports a wrong SHA-256."""

    def __init__(self, body: FileSlice) -> None:
        super().__init__(body.fd, body.offset, body.size_bytes, gate=body.gate, name=body.name)

    def sha256_ahead(self) -> str:
        return hashlib.sha256(b"something else").hexdigest()


def _answers_with_md5(store: Probed, key: str, body: FileSlice) -> bool:
    """Whether the etags of objects, parts and multipart objects are derived from the MD5 of the received bytes."""
    upload_id, parts = "", list[Part]()
    try:
        store.put_file(key, body)
        upload_id = store.begin_upload(key)
        parts.append(store.upload_part(key, upload_id, 1, body))
        store.complete_upload(key, upload_id, parts, crc64nvme=body.crc64nvme)
    except CorruptObject:
        if upload_id:
            _end_upload(store, key, upload_id, parts, body)
        return False
    return True


def _end_upload(store: Probed, key: str, upload_id: str, parts: Sequence[Part], body: FileSlice) -> None:
    """Abort an upload of a test. Without the permission to do so, complete it: the probe can delete an object."""
    try:
        store.abort_upload(key, upload_id)
    except AccessRefused:
        with suppress(StoreError):
            store.complete_upload(key, upload_id, parts, crc64nvme=body.crc64nvme)
