"""botocore's errors in this program's words. The only place that knows them."""

from __future__ import annotations

import email.utils
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.exceptions as boto

from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    CorruptObject,
    NotFound,
    SidecarError,
    StoreError,
    StoreUnavailable,
)

_REFUSALS = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct CKPT_STORE or AWS_S3_ENDPOINT",
    "InvalidAccessKeyId": "the store does not know this access key: correct AWS_ACCESS_KEY_ID or AWS_S3_ENDPOINT",
    "SignatureDoesNotMatch": "the secret key is wrong: correct AWS_SECRET_ACCESS_KEY",
    "AuthorizationHeaderMalformed": "the region is wrong: set AWS_DEFAULT_REGION to the bucket's",
    "PermanentRedirect": "the bucket is in another region: set AWS_DEFAULT_REGION to it",
    "IllegalLocationConstraintException": "the bucket is in another region: set AWS_DEFAULT_REGION to it",
    "InvalidBucketName": "the bucket's name is not valid: correct CKPT_STORE",
    "InvalidToken": "the session token is not valid: renew AWS_SESSION_TOKEN",
    "ExpiredToken": "the credentials expired: renew them; mounted secrets are read again",
    "ExpiredTokenException": "the credentials expired: renew them; mounted secrets are read again",
    "AccountProblem": "the store's owner has to solve a problem of the account",
    "AllAccessDisabled": "access to the bucket is disabled",
    "NotImplemented": "the store does not implement this operation",
    "InvalidArgument": "the store refused an argument",
    "InvalidRequest": "the store refused the request",
    "EntityTooSmall": "a part is smaller than this store allows: raise CKPT_PART_SIZE",
    "QuotaExceeded": "the quota of the bucket is used up: raise it, or set CKPT_KEEP_STORE",
    "KMS.DisabledException": "the KMS key is disabled: enable it, or change CKPT_SSE_KMS_KEY_ID",
    "KMS.NotFoundException": "the KMS key does not exist: correct CKPT_SSE_KMS_KEY_ID",
}
_PERMISSIONS = {
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "DeleteObjects": "s3:DeleteObject",
}
_CORRUPT = frozenset(
    {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody"}
)
_NOT_FOUND = frozenset({"NoSuchKey", "NoSuchUpload", "404", "NotFound", "NoSuchVersion", "InvalidPart"})
_EXISTS = frozenset({"PreconditionFailed", "412"})
_BUSY = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
    | {"Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "XMinioServerNotInitialized"}
)


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Turn botocore's errors into ``StoreError`` with ``name``, the object or bucket, in the text."""
    try:
        yield
    except boto.ClientError as error:
        raise from_response(name, error) from None
    except (boto.BotoCoreError, OSError) as error:
        raise from_transport(name, error) from error


def from_response(name: str, error: boto.ClientError) -> StoreError:
    """Return what an answer of the store means."""
    answer: Any = error.response
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = str(answer.get("Error", {}).get("Message", ""))[:200]
    if code in _NOT_FOUND or (status == 404 and code != "NoSuchBucket"):
        return NotFound(name)
    if code in _EXISTS or status == 412:
        return AlreadyExists(name)
    if code in _CORRUPT:
        return CorruptObject(name, want="the checksum that was sent", got=f"the store answered {code}")
    if code in _BUSY or status in (429, 500, 502, 503, 504):
        return StoreUnavailable(f"{name}: the store answered {code or status}; it is tried again")
    if code == "RequestTimeTooSkewed":
        return AccessRefused(f"{name}: {_skew(answer)}")
    if code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled"):
        permission = _PERMISSIONS.get(error.operation_name, f"s3:{error.operation_name}")
        return AccessRefused(
            f"{name}: {error.operation_name} was denied: grant {permission} on the bucket and prefix to these credentials"
        )
    advice = _REFUSALS.get(code, said or "see the store's own log")
    return AccessRefused(f"{name}: {code or status}: {advice}")


def from_transport(name: str, error: Exception) -> SidecarError:
    """Return what a failure on the way to the store means."""
    cause = _root(error)
    if isinstance(cause, SidecarError):
        return cause
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return AccessRefused(
            f"{name}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "mount them (CKPT_CREDENTIALS_DIR) or give the pod a role"
        )
    if isinstance(error, boto.ParamValidationError | boto.InvalidEndpointDiscoveryConfigurationError | ValueError):
        return AccessRefused(f"{name}: {str(error)[:300]}: correct CKPT_STORE or AWS_S3_ENDPOINT")
    if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return AccessRefused(
            f"{name}: the store's certificate is not trusted ({_short(cause)}): name its authority in CKPT_CA_BUNDLE"
        )
    if isinstance(cause, ssl.SSLError) or isinstance(error, boto.SSLError):
        return AccessRefused(
            f"{name}: TLS failed ({_short(cause)}): does AWS_S3_ENDPOINT say https where the store speaks http?"
        )
    return StoreUnavailable(f"{name}: the store does not answer ({_short(error)}); it is tried again")


def _root(error: BaseException) -> BaseException:
    """Return the innermost cause: botocore keeps it in ``kwargs``, urllib3 in ``reason`` or the arguments."""
    for _ in range(8):
        inner = getattr(error, "kwargs", {}).get("error") or getattr(error, "reason", None) or error.__cause__
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _skew(answer: Any) -> str:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        behind_s = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return "this machine's clock differs too much from the store's: set it by NTP"
    direction = "behind" if behind_s > 0 else "ahead of"
    return f"this machine's clock is {abs(behind_s):.0f} s {direction} the store's: set it by NTP"
