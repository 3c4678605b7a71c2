"""``CKPT_STORE`` and what is said when it cannot be meant."""

from __future__ import annotations

import pytest

from sidecar.daemon.settings import from_environment
from sidecar.errors import ConfigurationError
from sidecar.store.file.store import FileStore
from sidecar.store.opening import open_from
from sidecar.store.protocol import Store
from sidecar.store.s3.store import S3Store
from sidecar.store_url import shown


def opened(**environ: str) -> Store:
    return open_from(from_environment(environ))


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "s3://bucket", "s3://bucket/a/b c", "s3://my.bucket-1/x"])
def test_an_s3_url_opens_s3(url: str) -> None:
    store = opened(CKPT_STORE=url)
    assert isinstance(store, S3Store)
    assert store.url == url


def test_a_prefix_that_leaves_no_room_for_the_key_of_a_manifest_is_refused() -> None:
    assert opened(CKPT_STORE=f"s3://bucket/{'p' * 800}").key_limits.prefix_bytes == 801
    with pytest.raises(ConfigurationError, match=r"has a prefix of 801 bytes, 800 at most: keys of S3 have 1,024"):
        opened(CKPT_STORE=f"s3://bucket/{'p' * 801}")


def test_the_bucket_of_a_data_connection_fills_in() -> None:
    assert opened(CKPT_STORE="s3:///runs/7", AWS_S3_BUCKET="models").url == "s3://models/runs/7"


def test_a_file_url_opens_a_folder() -> None:
    store = opened(CKPT_STORE="file:///mnt/pvc/run%201")
    assert isinstance(store, FileStore)
    assert store.url == "file:///mnt/pvc/run 1"


NOT_A_STORE = ["bucket/prefix", "gs://bucket/x", "/mnt/pvc", "file://host/path", "file:relative", "file:///"]
NOT_A_BUCKET = ["s3://", "s3://ab", "s3://UPPER_/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?versionId=1"]


@pytest.mark.parametrize("url", NOT_A_STORE + NOT_A_BUCKET)
def test_anything_else_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigurationError, match="CKPT_STORE"):
        opened(CKPT_STORE=url)


def test_a_folder_on_the_volume_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="outside CKPT_DIR"):
        opened(CKPT_STORE="file:///checkpoints/store", CKPT_DIR="/checkpoints")


@pytest.mark.parametrize(
    "endpoint",
    ["minio:9000", "ftp://x", "https://", "s3.amazonaws.com", "http://x:99y", "http://[::1", "http://x/?a", "http://x#a"],
)
def test_an_endpoint_without_scheme_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="AWS_S3_ENDPOINT"):
        opened(CKPT_STORE="s3://bucket/x", AWS_S3_ENDPOINT=endpoint)


def test_credentials_in_urls_are_refused_and_not_repeated() -> None:
    for environ in (
        {"CKPT_STORE": "s3://key:hunter2@bucket/x"},
        {"CKPT_STORE": "s3://bucket/x", "AWS_S3_ENDPOINT": "https://key:hunter2@host"},
    ):
        with pytest.raises(ConfigurationError, match="must not hold credentials") as caught:
            opened(**environ)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"CKPT_STORE": "https://bucket.host/x?X-Amz-Signature=hunter2"},
        {"CKPT_STORE": "s3://bucket/x#hunter2"},
        {"CKPT_STORE": "key:hunter2@bucket/x"},
        {"CKPT_STORE": "s3://bucket/x", "AWS_S3_ENDPOINT": "key:hunter2@host:9000"},
        {"CKPT_STORE": "s3://bucket/x", "AWS_S3_ENDPOINT": "https://host/?signature=hunter2"},
        {"CKPT_STORE": "s3://bucket/x", "AWS_S3_ENDPOINT": "https://key:hunter2@host:99y"},
        {"CKPT_STORE": "s3://bucket/x", "CKPT_SPOT": "aws", "CKPT_SPOT_ENDPOINT": "key:hunter2@host"},
    ],
)
def test_secrets_of_a_wrong_url_are_not_repeated(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        opened(**environ)
    assert "hunter2" not in str(caught.value)


def test_a_url_in_a_message_keeps_what_is_no_secret() -> None:
    assert shown("s3://bucket/a@b/c") == "s3://bucket/a@b/c"
    assert shown("S3://key:secret@bucket/a@b?x=y") == "S3://…@bucket/a@b?…"
