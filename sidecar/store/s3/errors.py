"""Translation of botocore's errors into ``StoreError``. No other module catches them.

The code in S3's own error document decides what an answer means, never the status alone: load balancers, proxies and firewalls
answer 403, 404 or 412 too, and know nothing of objects.
"""

from __future__ import annotations

import email.utils
import http.client
import re
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    ArchivedObject,
    CorruptObject,
    ImpossibleKey,
    NoCredentials,
    NotFound,
    PartRefused,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    UntrustedStore,
)
from sidecar.store.s3.answers import IncompleteDocument


class UnusableCredentials(boto.BotoCoreError):
    """What gives credentials answered with something else. ``error``: what was raised."""

    fmt = "{error}"


class NoAnswerOfCredentials(boto.BotoCoreError):
    """What gives credentials does not answer. ``error``: what was raised."""

    fmt = "{error}"


class UnusableSettings(boto.BotoCoreError):
    """No client can be made of the settings. ``error``: what was raised."""

    fmt = "{error}"


_REFUSALS = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct its name or AWS_S3_ENDPOINT",
    "InvalidAccessKeyId": "the store does not know this access key: correct AWS_ACCESS_KEY_ID or AWS_S3_ENDPOINT",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy before the store changes the Host header or the path: "
    "correct AWS_SECRET_ACCESS_KEY or the proxy",
    "InvalidBucketName": "the bucket's name is not valid: correct CKPT_STORE",
    "InvalidToken": "the session token is not valid: renew AWS_SESSION_TOKEN",
    "InvalidTokenId": "the session token is not valid: renew AWS_SESSION_TOKEN",  # of MinIO
    "ExpiredToken": "the credentials expired: renew them; mounted secrets are read again",
    "ExpiredTokenException": "the credentials expired: renew them; mounted secrets are read again",
    "AccountProblem": "the store's owner has to solve a problem of the account",
    "AllAccessDisabled": "access to the bucket is disabled",
    "UserSuspended": "the store's owner has suspended the user of this access key: have it enabled, or use another key",
    "AccessControlListNotSupported": "the bucket takes no ACLs: unset CKPT_S3_ACL",
    "NotImplemented": "the store does not implement this operation",
    "InvalidArgument": "the store refused an argument",
    "InvalidRequest": "the store refused the request",
    "EntityTooSmall": "a part is smaller than this store allows: raise CKPT_PART_SIZE",
    "KMS.DisabledException": "the KMS key is disabled: enable it, or change CKPT_SSE_KMS_KEY_ID",
    "KMS.NotFoundException": "the KMS key does not exist: correct CKPT_SSE_KMS_KEY_ID",
}
_VAGUE = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})
"""Codes of which only the message says something, where the store sends one."""
_FULL = {
    "QuotaExceeded": "the quota of the bucket is used up: raise it, or set CKPT_KEEP_STORE",
    "XMinioAdminBucketQuotaExceeded": "the quota of the bucket is used up: raise it, or set CKPT_KEEP_STORE",
    "XMinioStorageFull": "the store's disks are full: enlarge them, delete objects, or set CKPT_KEEP_STORE",
}
_NOT_AT_THIS_TIME = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED: a clock is set, or a certificate renewed, without a change of settings."""
_BROKEN = frozenset({"DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "SSLV3_ALERT_BAD_RECORD_MAC", "BAD_LENGTH"})
"""Reasons of OpenSSL: a bit has flipped on the way, or (the last) the connection ended while it was written to."""
_OTHER_REGION = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException"}
)
_OF_ROLES = frozenset({"AssumeRoleWithWebIdentity", "AssumeRole", "AssumeRoleWithSAML", "GetRoleCredentials", "CreateToken"})
"""Requests to the services that credentials come from."""
_READ = "s3:GetObject, and s3:ListBucket, without which an object that is not there counts as denied,"
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": _READ,
    "HeadObject": _READ,
    "CopyObject": "s3:GetObject and s3:PutObject",
    "UploadPartCopy": "s3:GetObject and s3:PutObject",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
}
_REQUIRED_OF_OBJECTS = ", or set what the bucket's policy requires: CKPT_S3_ACL (that also needs s3:PutObjectAcl), CKPT_SSE"
_REQUIRED_OF_ALL = ", or set CKPT_S3_REQUEST_PAYER=requester if it is a requester-pays bucket"
_CORRUPT = frozenset(
    {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody"}
)
_NAME_REFUSED = frozenset({"KeyTooLongError", "InvalidObjectName", "XMinioInvalidObjectName"})
"""Of S3, of Ceph RGW, and of MinIO, which takes 255 bytes between two slashes."""
_NAMING = frozenset({"PutObject", "CreateMultipartUpload", "CopyObject"})
_NOT_FOUND = frozenset({"NoSuchKey", "NoSuchUpload", "NoSuchVersion", "InvalidPart"})
_BUSY = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"})
_TRANSIENT = frozenset(
    {"InternalError", "ServiceUnavailable", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
    | {"XMinioServerNotInitialized"}
    | {"MalformedXML"}  # the client's XML is well-formed: a bit has flipped on the way
)


_OF_CREDENTIALS = (
    UnusableCredentials
    | NoAnswerOfCredentials
    | boto.NoCredentialsError
    | boto.PartialCredentialsError
    | boto.CredentialRetrievalError
)
_OF_PROXIES = {
    "403": "the proxy refuses this address: have it allowed there, or name the store in NO_PROXY",
    "407": "the proxy wants a user and a password: set them in HTTPS_PROXY or HTTP_PROXY",
}
_TUNNEL = re.compile(r"(?:Tunnel connection failed: |the proxy \S+: )(403|407)\b")
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9.:_-]{2,80}")
"""Error codes of S3. For an answer without an error document, botocore uses the status as the code, such as "404"."""


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Translate botocore's errors into ``StoreError``; the text begins with ``name``, the object or bucket."""
    try:
        yield
    except boto.ClientError as error:
        raise from_response(name, error) from None
    except (boto.BotoCoreError, ResponseParserError, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
        raise from_transport(name, error) from error


def from_response(name: str, error: boto.ClientError) -> StoreError:
    """Return the error that an answer of the store means."""
    answer: Any = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = code_of(error)
    if error.operation_name in _OF_ROLES:
        return _no_role(name, error.operation_name, code or str(status), status, _message(answer))
    if code is None:
        return _unexplained(name, status, answer)
    if code in _NOT_FOUND:
        return NotFound(name)
    if code == "InvalidArgument" and error.operation_name == "UploadPart":
        return PartRefused(name, code)
    if code in _NAME_REFUSED and error.operation_name in _NAMING:
        return ImpossibleKey(name, f"the store answered {code}")
    if code == "EntityTooLarge":
        return TooLarge(name, "the store answered EntityTooLarge")
    if code == "InvalidObjectState" and error.operation_name == "GetObject":
        return ArchivedObject(name)
    if code == "PreconditionFailed":
        return AlreadyExists(name)
    if code in _CORRUPT:
        return CorruptObject(name, want="the checksum that was sent", got=f"the store answered {code}")
    if code == "InvalidRange":
        return CorruptObject(name, want="the range that was asked for", got="the object is shorter")
    if code in _BUSY or status == 429:
        return StoreBusy(f"{name}: the store answered {code}; it is tried again, with fewer requests at once")
    if code in _TRANSIENT or status in (500, 502, 503, 504):
        return StoreUnavailable(f"{name}: the store answered {code}; it is tried again")
    if code in _FULL:
        return StoreFull(f"{name}: {code}: {_FULL[code]}", code=code)
    advice = _refusal(error.operation_name, code, answer) or f"{code}: see the log of the store"
    return AccessRefused(f"{name}: {advice}", code=code)


def _no_role(name: str, operation: str, code: str, status: int, message: str) -> StoreError:
    """Return the error for credentials of a role that the service behind it did not give."""
    text = f"{name}: no credentials ({operation}: {code}{f': {message}' if message else ''})"
    if code in _BUSY | _TRANSIENT or status == 429 or status >= 500:
        return StoreUnavailable(f"{text}: the service is asked again")
    return NoCredentials(f"{text}: correct the pod's role, its trust policy or its service account")


def _message(answer: Any) -> str:
    return " ".join(str(answer.get("Error", {}).get("Message") or "").split())[:200]  # None: Ceph RGW sends an empty one


def code_of(error: boto.ClientError) -> str | None:
    """Return the code in S3's error document, or ``None`` if there is none: a proxy may have answered."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code if _CODE.fullmatch(code) else None


def _unexplained(name: str, status: int, answer: Any) -> StoreError:
    """Return the error for an answer without S3's error document: it says nothing about objects, and is retried."""
    if status == 400:
        return AccessRefused(
            f"{name}: refused without a reason: does AWS_S3_ENDPOINT name an S3 server, and is its http or https right?"
        )
    if status == 413:
        return AccessRefused(
            f"{name}: a proxy before the store refuses bodies of this size (413): raise its limit "
            "(nginx: client_max_body_size), or set CKPT_PART_SIZE below it"
        )
    if status == 429:
        return StoreBusy(f"{name}: the store answered 429; it is tried again, with fewer requests at once")
    hint = ""
    if 300 <= status < 400:
        hint = f" ({_redirected(answer)}does AWS_S3_ENDPOINT name the store itself?)"
    elif status == 407:
        hint = f" ({_OF_PROXIES['407']})"
    elif status < 500:
        hint = (
            " without an error of S3 (a load balancer, proxy or firewall on the way? does AWS_S3_ENDPOINT name an S3 server?)"
        )
    return StoreUnavailable(f"{name}: the store answered {status}{hint}; it is tried again")


def _redirected(answer: Any) -> str:
    """Return the target of a redirect, without the path and the query, which may hold secrets."""
    with suppress(ValueError):
        to = urlsplit(str(answer["ResponseMetadata"].get("HTTPHeaders", {}).get("location", "")))
        if to.hostname:
            return f"redirected to {to.scheme}://{to.hostname[:200]}{f':{to.port}' if to.port else ''}: "
    return ""


def refused_deletion(url: str, failed: Sequence[tuple[str, str]]) -> StoreError:
    """Return the error for objects that ``DeleteObjects`` did not delete. ``failed``: their keys and the store's codes."""
    key, code = failed[0]
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    text = f"{url}: not deleted: {key}{more}: {code or 'no reason given'}"
    if code == "AccessDenied":
        return AccessRefused(f"{text}: grant s3:DeleteObject on the bucket and prefix to these credentials", code=code)
    return StoreUnavailable(f"{text}; it is tried again")


def _refusal(operation: str, code: str, answer: Any) -> str:
    if code == "RequestTimeTooSkewed":
        return _skew(answer)
    if code in _OTHER_REGION:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
        return f"the bucket is in another region ({code}): set AWS_DEFAULT_REGION to {region or 'it'}"
    if code in ("AccessDenied", "Forbidden"):
        permission = _PERMISSIONS.get(operation, f"s3:{operation}")
        advice = f"{operation} was denied: grant {permission} on the bucket and prefix to these credentials"
        return advice + (_REQUIRED_OF_OBJECTS if operation in _NAMING else _REQUIRED_OF_ALL)
    advice, message = _REFUSALS.get(code, _message(answer)), _message(answer)
    if code in _VAGUE and message:
        advice = f"{advice} ({message})"
    if code in _VAGUE and operation in _NAMING:
        advice += ": if CKPT_SSE is set, unset it or set up encryption in the store (a KMS; Ceph RGW wants https for it, too)"
    return f"{code}: {advice}" if advice else ""


def from_transport(name: str, error: Exception) -> StoreError:
    """Return the error that a failure of credentials, network, TLS or parsing means."""
    cause = _root(error)
    is_of_file = isinstance(error, OSError) and error.filename is not None  # a mounted secret, or the token of a role
    if is_of_file or isinstance(error, _OF_CREDENTIALS):
        return _no_credentials(name, error)
    if isinstance(error, UnusableSettings | boto.ParamValidationError):
        return AccessRefused(f"{name}: {' '.join(str(error).split())[:300]}: correct CKPT_STORE or the AWS_ settings")
    if isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code in _NOT_AT_THIS_TIME:
        return StoreUnavailable(
            f"{name}: by this machine's clock the store's certificate is not valid now ({_short(cause)}): "
            "set the clock by NTP, or renew the certificate; it is tried again"
        )
    if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return UntrustedStore(
            f"{name}: the store's certificate is not trusted ({_short(cause)}): name its authority in CKPT_CA_BUNDLE"
        )
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError) or getattr(cause, "reason", "") in _BROKEN:
        return StoreUnavailable(f"{name}: the connection broke off in TLS ({_short(cause)}); it is tried again")
    if isinstance(cause, ssl.SSLError) or isinstance(error, boto.SSLError):
        return UntrustedStore(
            f"{name}: TLS failed ({_short(cause)}): does AWS_S3_ENDPOINT say https where the store speaks http?"
        )
    if isinstance(error, IncompleteDocument):
        return StoreUnavailable(f"{name}: the answer is not whole, or not the store's ({error}); it is tried again")
    if isinstance(error, ResponseParserError) or type(cause) is http.client.BadStatusLine:
        return AccessRefused(
            f"{name}: what answers does not speak S3 ({_short(cause)}): "
            "does AWS_S3_ENDPOINT name an S3 server, and does it say http where that speaks https?"
        )
    if isinstance(error, boto.EndpointConnectionError):
        hint = "check AWS_S3_ENDPOINT, DNS and the network"
        return StoreUnavailable(f"{name}: {_origin(error)} does not answer ({_short(cause)}): {hint}; it is tried again")
    why = _short(error) if cause is error else f"{_short(error)} {_short(cause)}"
    return StoreUnavailable(f"{name}: the store does not answer ({why}){_of_tunnel(why)}; it is tried again")


def _no_credentials(name: str, error: Exception) -> StoreError:
    """Return the error for credentials that are not there, or that a file, a program or a service did not give."""
    cause = error.kwargs["error"] if isinstance(error, UnusableCredentials | NoAnswerOfCredentials) else error
    asked = "from a credential_process or the service of a role: "
    text = f"{name}: no credentials ({asked if isinstance(error, UnusableCredentials) else ''}{_short(cause, most=400)})"
    if isinstance(error, NoAnswerOfCredentials) and not isinstance(cause, boto.SSLError):
        return StoreUnavailable(
            f"{text}: does what gives them answer? check its address (AWS_ENDPOINT_URL_STS), DNS, the network and the proxy; "
            "it is tried again"
        )
    if isinstance(cause, boto.SSLError):
        return NoCredentials(
            f"{text}: name the authority of that service's certificate in CKPT_CA_BUNDLE, or correct its https"
        )
    if isinstance(cause, RuntimeError):  # they have expired when they arrive
        return NoCredentials(f"{text}: set this machine's clock by NTP, or that of the service that gives them")
    return NoCredentials(
        f"{text}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, mount them (CKPT_CREDENTIALS_DIR) or give the pod a role"
    )


def _of_tunnel(why: str) -> str:
    """Return what to do where a proxy does not answer, or refused the tunnel of an https store; else an empty text."""
    if status := _TUNNEL.search(why):
        return f": {_OF_PROXIES[status[1]]}"
    return ": correct HTTPS_PROXY or HTTP_PROXY, or name the store in NO_PROXY" if "CannotConnect: the proxy " in why else ""


def _origin(error: boto.EndpointConnectionError) -> str:
    """Return scheme and host of the request: its query may hold secrets."""
    with suppress(ValueError):
        asked = urlsplit(str(error.kwargs.get("endpoint_url", "")))
        if asked.scheme and asked.netloc:
            return f"{asked.scheme}://{asked.netloc[:200]}"
    return "the store"


def _root(error: BaseException) -> BaseException:
    """Return the innermost cause: botocore keeps it in ``kwargs``, urllib3 in ``reason`` or the arguments."""
    for _ in range(8):
        inner = getattr(error, "kwargs", {}).get("error") or getattr(error, "reason", None) or error.__cause__
        inner = inner or next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _short(error: BaseException, *, most: int = 160) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def _skew(answer: Any) -> str:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        behind_s = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return "this machine's clock differs too much from the store's: set it by NTP"
    direction = "behind" if behind_s > 0 else "ahead of"
    return f"this machine's clock is {abs(behind_s):.0f} s {direction} the store's: set it by NTP"
