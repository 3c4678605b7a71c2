"""What measurements of a store mean for a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sidecar.core.format.readable import rate_text
from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION, EXIT_DAMAGED, EXIT_UNREACHABLE
from sidecar.core.planning.findings import Finding, failure, is_full, ok, warning

DENIED_CODES = frozenset({"AccessDenied", "Forbidden", "AllAccessDisabled"})
"""Codes of S3 that deny one operation; others concern the whole access."""
LEAST_SKEW_S, MOST_SKEW_S = 30.0, 900.0
"""Seconds by which this machine's clock may differ from the store's: unremarkable below the first; S3 refuses above the second.
Source: S3 user guide, "RequestTimeTooSkewed"."""


class Operation(StrEnum):
    """Requests that the sidecar makes, by the names of the S3 API; in the order in which they are tried."""

    LIST = "ListObjectsV2"
    DELETE = "DeleteObjects"
    PUT = "PutObject"
    GET = "GetObject"
    BEGIN = "CreateMultipartUpload"
    PART = "UploadPart"
    LIST_PARTS = "ListParts"
    LIST_UPLOADS = "ListMultipartUploads"
    COMPLETE = "CompleteMultipartUpload"
    ABORT = "AbortMultipartUpload"
    COPY = "CopyObject"


@dataclass(frozen=True, slots=True)
class Need:
    """What an operation is for."""

    permission: str
    lost: str
    """What a run loses without it."""
    is_vital: bool
    """No run is possible without it."""


NEEDS = {
    Operation.LIST: Need("s3:ListBucket", "no resume finds a checkpoint, and the sidecar does not start", is_vital=True),
    Operation.DELETE: Need(
        "s3:DeleteObject",
        "the sidecar does not start; a step that is written again cannot be revoked, and CKPT_KEEP_STORE deletes nothing",
        is_vital=True,
    ),
    Operation.PUT: Need("s3:PutObject", "nothing can be uploaded", is_vital=True),
    Operation.GET: Need("s3:GetObject", "no resume can read a checkpoint, and commits cannot be verified", is_vital=True),
    Operation.BEGIN: Need("s3:PutObject", "files larger than a part cannot be uploaded", is_vital=True),
    Operation.PART: Need("s3:PutObject", "files larger than a part cannot be uploaded", is_vital=True),
    Operation.LIST_PARTS: Need(
        "s3:ListMultipartUploadParts",
        "unfinished uploads of killed pods cannot be judged, so they stay and cost storage",
        is_vital=False,
    ),
    Operation.LIST_UPLOADS: Need(
        "s3:ListBucketMultipartUploads",
        "unfinished uploads of killed pods are not found, so they stay and cost storage",
        is_vital=False,
    ),
    Operation.COMPLETE: Need("s3:PutObject", "files larger than a part cannot be uploaded", is_vital=True),
    Operation.ABORT: Need(
        "s3:AbortMultipartUpload", "unfinished uploads cannot be aborted, so they stay and cost storage", is_vital=False
    ),
    Operation.COPY: Need(
        "s3:GetObject and s3:PutObject", "unchanged files are not copied in the store: they are sent again", is_vital=False
    ),
}


class Trouble(StrEnum):
    """Why a store cannot be used at all; also the name of the check."""

    REACH = "reach"
    TLS = "tls"
    CREDENTIALS = "credentials"
    BUCKET = "bucket"
    CLOCK = "clock"
    POLICY = "policy"
    ACCESS = "access"
    INTEGRITY = "integrity"


_TROUBLE_OF_CODE = {
    "NoSuchBucket": Trouble.BUCKET,
    "InvalidBucketName": Trouble.BUCKET,
    "PermanentRedirect": Trouble.BUCKET,
    "AuthorizationHeaderMalformed": Trouble.BUCKET,
    "IllegalLocationConstraintException": Trouble.BUCKET,
    "InvalidAccessKeyId": Trouble.CREDENTIALS,
    "SignatureDoesNotMatch": Trouble.CREDENTIALS,
    "InvalidToken": Trouble.CREDENTIALS,
    "InvalidTokenId": Trouble.CREDENTIALS,
    "InvalidClientTokenId": Trouble.CREDENTIALS,
    "ExpiredToken": Trouble.CREDENTIALS,
    "ExpiredTokenException": Trouble.CREDENTIALS,
    "RequestTimeTooSkewed": Trouble.CLOCK,
}
_NEXT_STEP = {
    Trouble.REACH: "check AWS_S3_ENDPOINT, DNS, network policies and the proxy from this pod, then run doctor again",
    Trouble.TLS: "name the authority of the store's certificate in CKPT_CA_BUNDLE, or correct https or http in AWS_S3_ENDPOINT",
    Trouble.CREDENTIALS: "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the mounted secret (CKPT_CREDENTIALS_DIR) or "
    "the pod's role",
    Trouble.BUCKET: "create the bucket, or correct CKPT_STORE, AWS_S3_ENDPOINT or AWS_DEFAULT_REGION",
    Trouble.CLOCK: "set this machine's clock by NTP",
    Trouble.POLICY: "set it here, then run doctor again; and in the manifest (inject --set). An ACL needs s3:PutObjectAcl",
    Trouble.ACCESS: "correct CKPT_STORE and the AWS_ settings by the store's answer",
    Trouble.INTEGRITY: "look at the network path (proxies, caches) and at the store's own log",
}


def trouble_of_code(code: str | None) -> Trouble:
    """Return what a refusal of the whole access is about. ``code``: S3's; ``None``: the store gave none."""
    return _TROUBLE_OF_CODE.get(code or "", Trouble.ACCESS)


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of one operation. ``error`` is ``None`` where it succeeded."""

    operation: Operation
    error: str | None = None
    is_denied: bool = False
    """The store denied it for lack of permission."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What was measured of a store. ``None``: not measured, since something before it failed."""

    url: str
    trouble: tuple[Trouble, str] | None = None
    """Why the store cannot be used at all, with the error's text."""
    tried: tuple[Tried, ...] = ()
    verification: str | None = None
    """Value of ``Verification``."""
    conditional_put: bool | None = None
    round_trip_s: float | None = None
    skew_s: float | None = None
    """This machine's clock minus the store's."""
    is_encrypted: bool | None = None
    """Whether the store is reached by https. ``None``: it is no network store."""
    verifies_tls: bool = True
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    rate_error: str | None = None
    """Why the rates could not be measured."""
    is_rate_refused: bool = False
    """The store, or a proxy before it, refuses bodies of the measurement's size: it refuses those of checkpoints, too."""
    ends_with_container: bool = False
    """It is a folder on the container's own file system, which is deleted with the container."""
    left_behind: tuple[str, ...] = ()
    """Keys that could not be deleted."""


def store_findings(facts: StoreFacts) -> Iterator[Finding]:
    """Yield the findings about a store."""
    if facts.trouble is not None:
        trouble, text = facts.trouble
        codes = {Trouble.REACH: EXIT_UNREACHABLE, Trouble.INTEGRITY: EXIT_DAMAGED}
        step = _folder_step(text) if facts.url.startswith("file:") else _NEXT_STEP[trouble]
        yield failure(trouble.value, text, step, exit_code=codes.get(trouble, EXIT_CONFIGURATION))
        return
    yield ok("access", f"{facts.url}: reached, and access is allowed")
    if facts.ends_with_container:
        text = "the folder is on this container's own file system, which is deleted with the container"
        step = "mount a volume that lasts there, such as a PVC, or correct CKPT_STORE"
        yield failure("lasting", text, step, exit_code=EXIT_CONFIGURATION)
    yield from _tls(facts)
    yield from _permissions(facts)
    yield from _capabilities(facts)
    yield from _clock(facts.skew_s)
    yield from _link(facts)
    if facts.left_behind:
        keys = ", ".join(facts.left_behind)
        yield warning("left-behind", f"could not be deleted: {keys}", "grant s3:DeleteObject; the next start deletes them")


def _folder_step(error: str) -> str:
    if is_full(error):
        return "free space on the volume of the store, or enlarge it, then run doctor again"
    return "mount the volume of the store, or create its folder, writable for this user, then run doctor again"


def _tls(facts: StoreFacts) -> Iterator[Finding]:
    if facts.is_encrypted is None:
        return
    if not facts.is_encrypted:
        text = "the store is reached by http: who is on the way can read checkpoints"
        yield warning("tls", text, "set AWS_S3_ENDPOINT to https://…, unless that network is trusted")
    elif not facts.verifies_tls:
        text = "the store's certificate is not verified (CKPT_VERIFY_TLS=false)"
        yield warning("tls", text, "name its authority in CKPT_CA_BUNDLE and remove CKPT_VERIFY_TLS")
    else:
        yield ok("tls", "https, and the certificate is trusted")


def _permissions(facts: StoreFacts) -> Iterator[Finding]:
    everything = len(facts.tried) > 1 and all(tried.is_denied for tried in facts.tried)
    payer = ", or set CKPT_S3_REQUEST_PAYER=requester if it is a requester-pays bucket" if everything else ""
    for tried in facts.tried:
        need = NEEDS[tried.operation]
        check = f"permission:{tried.operation.value}"
        if tried.error is None:
            yield ok(check, "allowed")
            continue
        finding = failure if need.is_vital else warning
        if tried.is_denied:
            text, step = f"denied: {need.lost}", f"grant {need.permission} on bucket and prefix ({facts.url}){payer}"
        else:
            text, step = f"{tried.error}: {need.lost}", "see the log of the store, or ask its operator for this operation"
        yield finding(check, text, step)
    untried = [operation.value for operation in Operation if operation not in {tried.operation for tried in facts.tried}]
    if untried:
        text = f"not tried, because of what failed before: {', '.join(untried)}"
        yield warning("permission", text, "correct that, then run doctor again")


def _capabilities(facts: StoreFacts) -> Iterator[Finding]:
    verified = {
        "store-crc": "the store verifies the CRC64NVME of each object",
        "signed-sha256": "the store verifies the SHA-256 of each request",
        "md5": "the store's etags are MD5s, which the sidecar compares",
        "fsync": "a file system: write and fsync are confirmed",
    }
    if facts.verification in verified:
        yield ok("verification", verified[facts.verification])
    elif facts.verification == "read-back":
        text = "uploads are read back to be verified: each costs its bytes twice"
        yield warning(
            "verification", text, "allow for it in the grace period; a store that verifies checksums needs no reading back"
        )
    elif facts.verification is not None:
        yield warning("verification", "uploads are not verified (CKPT_VERIFY=off)", "unset CKPT_VERIFY")
    if facts.conditional_put:
        yield ok("conditional-put", "the store refuses a conditional write over an existing object")
    elif facts.conditional_put is False:
        text = "the store ignores conditional writes: two pods that claim a prefix in the same instant are told apart later"
        yield warning(
            "conditional-put", text, "use a store with If-None-Match, or make sure that one pod at a time uses a prefix"
        )


def _clock(skew_s: float | None) -> Iterator[Finding]:
    if skew_s is None:
        return
    text = f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's"
    if abs(skew_s) < LEAST_SKEW_S:
        yield ok("clock", "this machine's clock agrees with the store's")
    elif abs(skew_s) < MOST_SKEW_S:
        yield warning("clock", f"{text}: S3 refuses requests from {MOST_SKEW_S / 60:.0f} min on", _NEXT_STEP[Trouble.CLOCK])
    else:
        yield failure("clock", f"{text}: S3 refuses requests", _NEXT_STEP[Trouble.CLOCK])


def _link(facts: StoreFacts) -> Iterator[Finding]:
    if facts.round_trip_s is not None:
        yield ok("round-trip", f"{facts.round_trip_s * 1000:.1f} ms")
    for check, rate in (("upload-rate", facts.up_bytes_per_s), ("download-rate", facts.down_bytes_per_s)):
        if rate is not None:
            yield ok(check, rate_text(rate))
    if facts.rate_error is not None and facts.is_rate_refused:
        yield failure("rate", facts.rate_error, "correct that: larger files do not reach the store")
    elif facts.rate_error is not None:
        yield warning("rate", f"not measured: {facts.rate_error}", "correct that, then run doctor again")
