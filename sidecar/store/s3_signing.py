"""Signed requests for object bodies, with the address and the credentials that boto3 has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import NoCredentialsError

from sidecar.store.slice import FileSlice
from sidecar.store.wire import Request

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

UNSIGNED = "UNSIGNED-PAYLOAD"
SAFE_IN_PATHS = "/~"
"""Source: S3 API reference, "Create a canonical request": all but unreserved characters and slashes are encoded."""


class Signer:
    """Makes requests for the objects of one bucket. Thread-safe."""

    def __init__(self, client: S3Client, credentials: Credentials | None, *, bucket: str) -> None:
        self._credentials = credentials
        self._region = client.meta.region_name
        # boto3 knows where a bucket lives (path or host, region, FIPS, access points): any address it makes tells.
        example = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
        self._base = urlsplit(example)._replace(query="").geturl().removesuffix("k")

    def request(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        body: FileSlice | None = None,
        sha256: str = UNSIGNED,
    ) -> Request:
        """Return a signed request for an object.

        Args:
            method: ``PUT`` or ``GET``.
            key: The object's whole key in the bucket.
            query: Not yet encoded.
            headers: What is sent besides the signature.
            body: What is sent after the headers.
            sha256: Hash of the body, for a store that compares it.

        Raises:
            NoCredentialsError: There are none.
        """
        if self._credentials is None:
            raise NoCredentialsError
        url = self._base + quote(key, safe=SAFE_IN_PATHS)
        if query:
            url += "?" + urlencode(query, quote_via=quote, safe="~")
        unsigned = AWSRequest(method=method, url=url, headers=dict(headers or {}))
        _Auth(self._credentials.get_frozen_credentials(), self._region, sha256).add_auth(unsigned)
        return Request(method, url, dict(unsigned.headers.items()), body)


class _Auth(S3SigV4Auth):
    def __init__(self, credentials: ReadOnlyCredentials, region: str, sha256: str) -> None:
        super().__init__(credentials, "s3", region)
        self._sha256 = sha256

    def payload(self, request: AWSRequest) -> str:
        return self._sha256
