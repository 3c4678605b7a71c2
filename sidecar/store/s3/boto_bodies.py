"""Bodies of objects by boto3 (``CKPT_S3_CLIENT=boto3``): an operator's way around the wire, and its counterpart in tests.

It hedges nothing, cannot continue an answer that breaks off, and signs no hash in advance; the caller tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import HTTPClientError

from sidecar.errors import SidecarError
from sidecar.store.s3.answers import OpenBody, check_object, etag_of_write
from sidecar.store.s3.bodies import Fields, Query
from sidecar.store.slice import FileSlice

_PARAMETERS = {
    "content-md5": "ContentMD5",
    "range": "Range",
    "if-match": "IfMatch",
    "if-none-match": "IfNoneMatch",
    "x-amz-acl": "ACL",
    "x-amz-checksum-crc64nvme": "ChecksumCRC64NVME",
    "x-amz-server-side-encryption": "ServerSideEncryption",
    "x-amz-server-side-encryption-aws-kms-key-id": "SSEKMSKeyId",
}
"""boto3's names of the headers that this program sends."""


class BotoRequests:
    """Bodies by a boto3 client, which is made anew when the credentials change."""

    def __init__(
        self,
        credentials: Callable[[], ReadOnlyCredentials],
        *,
        bucket: str,
        config: Mapping[str, Any],
        before_call: Callable[..., None],
        **options: Any,
    ) -> None:
        """Prepare.

        ``config``: settings of the client; ``before_call``: its handler of that event; ``options``: its endpoint, region and
        trust.
        """
        self._credentials = credentials
        self._bucket = bucket
        self._config = config
        self._before_call = before_call
        self._options = options
        self._made: tuple[ReadOnlyCredentials, Any] | None = None

    @contextmanager
    def putting(  # noqa: D102
        self, key: str, body: FileSlice, *, headers: Fields, sha256: str, query: Query = None
    ) -> Iterator[Callable[[], str]]:
        asked = {"Bucket": self._bucket, "Key": key, "Body": body, **_parameters(headers)}
        operation, client = "UploadPart" if query else "PutObject", self._client()
        if query:
            asked |= {"PartNumber": query["partNumber"], "UploadId": query["uploadId"]}

        def answered() -> str:
            body.seek(0)
            try:
                answer = client.upload_part(**asked) if query else client.put_object(**asked)
            except HTTPClientError as error:
                raise _of_body(error) or error from None
            return etag_of_write(answer["ResponseMetadata"]["HTTPHeaders"], b"", operation)

        yield answered

    @contextmanager
    def getting(self, key: str, headers: Fields, *, silences: int = 0) -> Iterator[Callable[[], OpenBody]]:  # noqa: D102
        client = self._client()
        with ExitStack() as opened:

            def answered() -> OpenBody:
                answer = client.get_object(Bucket=self._bucket, Key=key, **_parameters(headers))
                opened.enter_context(closing(answer["Body"]))
                return _Answer(answer, key)

            yield answered

    def close(self) -> None:  # noqa: D102
        if self._made is not None:
            self._made[1].close()

    def _client(self) -> Any:
        current = self._credentials()
        if self._made is None or self._made[0] != current:
            session = boto3.session.Session(
                aws_access_key_id=current.access_key, aws_secret_access_key=current.secret_key, aws_session_token=current.token
            )
            client = session.client("s3", config=Config(**self._config), **self._options)
            client.meta.events.register("before-call.s3", self._before_call)
            self._made = current, client
        return self._made[1]


class _Answer:
    """A GetObject answer whose body is not read yet."""

    def __init__(self, answer: Mapping[str, Any], key: str) -> None:
        told = answer["ResponseMetadata"]
        self.status: int = told["HTTPStatusCode"]
        self.headers: dict[str, str] = told["HTTPHeaders"]
        check_object(self.headers, key)
        self.is_chunked = "transfer-encoding" in self.headers
        length = self.headers.get("content-length", "")
        self.body_bytes = int(length) if length.isdigit() else None
        self.is_whole = False
        self._body = answer["Body"]

    def readinto(self, buffer: memoryview, /) -> int:
        count: int = self._body.readinto(buffer)
        self.is_whole = count == 0
        return count


def _parameters(headers: Fields) -> dict[str, str]:
    return {_PARAMETERS[name.lower()]: value for name, value in headers.items()}


def _of_body(error: HTTPClientError) -> SidecarError | None:
    """Return the error of the file that was to be sent, which botocore takes for one of the connection."""
    cause = error.kwargs.get("error")
    return cause if isinstance(cause, SidecarError) else None
