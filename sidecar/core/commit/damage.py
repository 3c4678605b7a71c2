"""Classification of damaged reads: damaged in the store, or only in transit.

A step counts as bad only by the store's own metadata of its objects. Everything else is *unreadable now*: it is read again with
growing pauses, then passed over, and tried again by the next request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Container, Sequence

FULL_PATIENCE_S = 90.0
"""Seconds for which the first step that arrives damaged is read again before an older one is tried. A resume from an older step
costs the training since, usually minutes on all GPUs; a transient network fault ends within that time."""
SHORT_PATIENCE_S = 4.0
"""The same for further steps of a request, for steps that were unreadable before, and for mounted stores, where the kernel
answers a repeated read from its page cache."""
LEAST_READS = 4
"""Minimum number of reads before an object is passed over, however long one takes."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
"""Maximum pause between two reads in seconds, which bounds the delay until a recovered network is noticed."""

_MD5 = re.compile(r"[0-9a-f]{32}", re.ASCII)


def pause_s(reads: int) -> float:
    """Return the pause before the next read of an object, in seconds; ``reads``: its damaged reads so far, at least 1."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(reads, 1) - 1, 30))


def is_patience_over(*, reads: int, since_first_s: float, patience_s: float) -> bool:
    """Whether to pass over a step after ``reads`` damaged reads, the first ``since_first_s`` seconds ago."""
    return reads >= LEAST_READS and since_first_s >= patience_s


def is_known_bad(*, size_bytes: int, etags: Collection[str] | None, there: tuple[int, str] | None, came: Sequence[str]) -> bool:
    """Whether an object is damaged in the store, by the store's own metadata.

    Args:
        size_bytes: Recorded size.
        etags: Etags that manifests recorded for it; empty: none known; ``None``: none are recorded for objects of its kind.
        there: Current size in bytes and etag in the store; ``None``: the object is missing.
        came: Checksums of the damaged reads, latest last.

    Returns:
        True if it is missing, has another size, or has another etag and two reads gave the same wrong content. Another etag
        alone is no proof: a copy of the whole bucket gives all objects new ones. Without recorded etags the reads decide.
    """
    if there is None or there[0] != size_bytes:
        return True
    recorded = [etag for etag in etags or () if etag]
    has_other_etag = bool(recorded) and bool(there[1]) and there[1] not in recorded
    return (has_other_etag or etags is None) and len(came) >= 2 and came[-1] == came[-2]


def is_record_in_force(missing: str | None, listed: Container[str]) -> bool:
    """Whether a quarantine record still keeps its commit from a resume.

    ``missing``: the object that the store did not have, if that was the reason. ``listed``: the checkpoint's keys now. Objects
    of a replicated or copied bucket arrive in any order, and a deleted one may have been restored.
    """
    return missing is None or missing not in listed


def is_content_of(raw: bytes, *, size_bytes: int, etag: str) -> bool:
    """Whether bytes are provably the stored ones: the etag is their MD5, as S3's is for small objects without KMS."""
    if len(raw) != size_bytes or not _MD5.fullmatch(etag):
        return False
    return hashlib.md5(raw, usedforsecurity=False).hexdigest() == etag
