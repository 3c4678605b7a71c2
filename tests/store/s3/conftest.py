"""Stores on the servers of these tests."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.store.protocol import Verification
from sidecar.store.s3.store import S3Options, S3Store
from tests.servers import Proxy, ProxyAnswer
from tests.store.conftest import BUCKET, Source, _make_bucket

Opener = Callable[..., S3Store]


@pytest.fixture
def opener(credentials_dir: Path) -> Opener:
    def open_at(endpoint: str, **options: object) -> S3Store:
        chosen = {"bucket": BUCKET, "prefix": uuid.uuid4().hex, "credentials_dir": credentials_dir} | options
        return S3Store(S3Options(endpoint_url=endpoint, **chosen))  # type: ignore[arg-type]

    return open_at


@pytest.fixture
def moto(moto_endpoint: str) -> str:
    _make_bucket(moto_endpoint)
    return moto_endpoint


@pytest.fixture
def plain(tmp_path: Path) -> Source:
    return Source(tmp_path, Verification.MD5)


def always(answer: ProxyAnswer) -> Proxy:
    return Proxy(rule=lambda _: answer)
