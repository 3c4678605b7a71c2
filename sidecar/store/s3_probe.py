"""What an S3 server can really do. Not every store that accepts a checksum looks at it, so the probe sends wrong ones."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Literal

from botocore.exceptions import BotoCoreError, ClientError

from sidecar.core import keys
from sidecar.errors import AlreadyExists, ConfigurationError
from sidecar.store.protocol import Capabilities, Verification

if TYPE_CHECKING:
    from sidecar.store.s3 import S3Store

CONTENT = b"checkpoint-sidecar probe\n"
CHOSEN = {"md5": Verification.MD5, "read-back": Verification.READ_BACK, "off": Verification.OFF}


def probe(store: S3Store, verify: Literal["auto", "md5", "read-back", "off"]) -> Capabilities:
    """Write, read, list and delete one small object, and find out how uploads are verified.

    Raises:
        AccessRefused, StoreUnavailable: See the store.
        ConfigurationError: ``CKPT_VERIFY=md5`` where the store does not answer with MD5s.
    """
    from sidecar.store.s3 import MAX_PARTS, MIN_PART_BYTES

    key = f"{keys.PROBE}{uuid.uuid4().hex}"
    next(iter(store.list(keys.PROBE)), None)
    stored = store.put(key, CONTENT)
    try:
        store.get(key)
        has_md5 = stored.etag == hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
        if verify == "md5" and not has_md5:
            raise ConfigurationError(f"CKPT_VERIFY=md5: {store.url} does not answer with MD5s: choose auto or read-back")
        verification = CHOSEN.get(verify) or _best(store, key, has_md5=has_md5)
        conditional = _is_conditional(store, key)
    finally:
        store.delete([key])
    return Capabilities(verification, conditional_put=conditional, min_part_bytes=MIN_PART_BYTES, max_parts=MAX_PARTS)


def _best(store: S3Store, key: str, *, has_md5: bool) -> Verification:
    if _refuses_wrong_checksum(store, key):
        return Verification.STORE_CRC
    return Verification.MD5 if has_md5 else Verification.READ_BACK


def _is_conditional(store: S3Store, key: str) -> bool:
    try:
        store.put(key, CONTENT, only_if_absent=True)
    except AlreadyExists:
        return True
    return False


def _refuses_wrong_checksum(store: S3Store, key: str) -> bool:
    try:
        store.put_with_crc(key, CONTENT, crc64nvme=0x1234_5678_9ABC_DEF0)
    except ClientError as error:
        refused = error.response.get("Error", {}).get("Code") in ("BadDigest", "InvalidRequest", "XAmzContentChecksumMismatch")
    except BotoCoreError:
        refused = False
    else:
        refused = False
    return refused and _accepts_right_checksum(store, key)


def _accepts_right_checksum(store: S3Store, key: str) -> bool:
    from sidecar.core.checksum import checksum

    try:
        store.put_with_crc(key, CONTENT, crc64nvme=checksum(CONTENT))
    except (ClientError, BotoCoreError):
        return False
    return True
