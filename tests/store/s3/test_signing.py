"""Signatures: botocore's own, for whatever keys, queries, headers and credentials."""

from __future__ import annotations

import datetime
import functools
import hashlib
from unittest import mock
from urllib.parse import quote, urlencode

import boto3
import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.store.s3.signing import UNSIGNED, Signer

ADDRESSES = {
    "path": ("http://store:9000", "path"),
    "host": ("https://s3.eu-central-1.amazonaws.com", "virtual"),
    "ipv6": ("http://[::1]:9000", "path"),
    "usual port": ("https://store:443", "path"),
}
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
NAMES = st.sampled_from(["Range", "If-Match", "x-amz-checksum-crc64nvme", "x-amz-server-side-encryption", "Content-MD5"])


def signer(credentials: Credentials, address: str = "path") -> Signer:
    endpoint, style = ADDRESSES[address]
    client = boto3.session.Session("id", "secret").client(
        "s3", region_name="eu-central-1", endpoint_url=endpoint, config=Config(s3={"addressing_style": style})
    )
    presigned = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "k"})
    return Signer(credentials.get_frozen_credentials, presigned=presigned, region="eu-central-1")


@functools.cache
def usual_signer(address: str, token: str | None) -> Signer:
    return signer(Credentials("id", "se/cret+", token), address)


class _Botocore(botocore.auth.S3SigV4Auth):
    sha256 = UNSIGNED

    def payload(self, request: AWSRequest) -> str:
        return self.sha256


@given(
    address=st.sampled_from(sorted(ADDRESSES)),
    token=st.sampled_from([None, "to+ken/=="]),
    method=st.sampled_from(["GET", "PUT"]),
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    query=st.dictionaries(PRINTABLE.filter(bool), PRINTABLE | st.integers(0, 10_000), max_size=3),
    headers=st.dictionaries(NAMES, PRINTABLE, max_size=4),
    sha256=st.sampled_from([UNSIGNED, hashlib.sha256(b"").hexdigest()]),
    now_s=st.integers(0, 4_000_000_000),
)
@example("host", None, "GET", "", {"0": "", "00": ""}, {}, UNSIGNED, 0)
def test_what_is_signed_is_signed_as_botocore_does(
    address: str,
    token: str | None,
    method: str,
    key: str,
    query: dict[str, str | int],
    headers: dict[str, str],
    sha256: str,
    now_s: int,
) -> None:
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    with mock.patch("time.gmtime", return_value=now.utctimetuple()):
        ours = usual_signer(address, token).request(method, key, query=query, headers=headers, sha256=sha256)
    address_alone = usual_signer(address, token).request(method, "k").url.removesuffix("k")
    path = address_alone + quote(key, safe="/~") if key else _of_bucket(address_alone)
    url = path + ("?" + urlencode(query, quote_via=quote, safe="~") if query else "")
    theirs = AWSRequest(method=method, url=url, headers=dict(headers))
    auth = _Botocore(ReadOnlyCredentials("id", "se/cret+", token), "s3", "eu-central-1")
    auth.sha256 = sha256
    with mock.patch("botocore.auth.get_current_datetime", return_value=now):
        auth.add_auth(theirs)
    assert {name.lower(): value for name, value in ours.headers.items()} == {
        name.lower(): value for name, value in theirs.headers.items()
    }
    assert sorted(ours.url.partition("?")[2].split("&")) == sorted(url.partition("?")[2].split("&"))
    assert ours.url.partition("?")[0] == url.partition("?")[0]


def _of_bucket(address: str) -> str:
    """Return the address of the bucket itself: no slash behind a name in the path, one behind a host alone."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest if rest.count('/') == 1 else rest.rstrip('/')}"


def test_rotated_credentials_sign_at_once() -> None:
    credentials = Credentials("id", "old")
    made = signer(credentials)
    before = made.request("GET", "k").headers["Authorization"]
    credentials.secret_key = "new"
    after = made.request("GET", "k").headers["Authorization"]
    assert before.partition("Signature=")[2] != after.partition("Signature=")[2]
