"""The proxy does the harm that it was asked for, and none other."""

from __future__ import annotations

import functools
import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from tests import servers
from tests.faults.bucket import MIB, NAME, Bucket, random_bytes
from tests.faults.plan import Dice, Fault, Kind, Rule, Rules
from tests.faults.proxy import FaultProxy
from tests.faults.wire import Request


@functools.cache
def whole_content() -> bytes:
    return random_bytes(16 * MIB, 3)


@contextmanager
def client_of(endpoint: str):  # type: ignore[no-untyped-def]
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        region_name=servers.REGION,
        config=Config(retries={"total_max_attempts": 1}, request_checksum_calculation="when_required"),
    )
    yield client
    client.close()


@pytest.fixture
def tried(moto_bucket: Bucket) -> Iterator[Callable[[Fault | None], tuple[FaultProxy, bytes | Exception]]]:
    def try_it(fault: Fault | None) -> tuple[FaultProxy, bytes | Exception]:
        """Write and read 16 MiB through the proxy with one fault in the write or the read."""
        proxy = FaultProxy(moto_bucket.endpoint)
        if fault:
            where = "GetObject" if "download" in fault.kind else "PutObject"
            proxy.plan = Rules([Rule(fault, operation=where)])
        with proxy.running() as endpoint, client_of(endpoint) as client:
            try:
                client.put_object(Bucket=NAME, Key=moto_bucket.prefix, Body=whole_content())
                return proxy, client.get_object(Bucket=NAME, Key=moto_bucket.prefix)["Body"].read()
            except Exception as error:
                return proxy, error

    return try_it


def test_without_a_plan_everything_passes_unchanged_on_one_connection(tried) -> None:
    proxy, read = tried(None)
    assert read == whole_content()
    assert [e.status for e in proxy.log] == [200, 200]
    assert proxy.log[0].request.get("expect") == "100-continue"
    assert (proxy.log[0].received_bytes, proxy.log[1].returned_bytes) == (16 * MIB, 16 * MIB)
    assert len(proxy._threads) == 1


@pytest.mark.parametrize("kind", [Kind.ERROR_500, Kind.SLOW_DOWN, Kind.SLOW_DOWN_EARLY])
def test_an_error_is_answered_and_the_store_is_not_asked(kind: Kind, tried) -> None:
    proxy, error = tried(Fault(kind))
    assert isinstance(error, ClientError)
    assert error.response["Error"]["Code"] == ("InternalError" if kind is Kind.ERROR_500 else "SlowDown")
    assert proxy.log[0].store_status is None
    assert proxy.log[0].received_bytes == (0 if kind is Kind.SLOW_DOWN_EARLY else 16 * MIB)


@pytest.mark.parametrize("kind", [Kind.RESET_BEFORE, Kind.RESET_UPLOAD, Kind.STALL_UPLOAD_CLOSE, Kind.LOST_ANSWER])
def test_a_connection_ends_where_it_was_to_end(kind: Kind, tried) -> None:
    proxy, error = tried(Fault(kind, at=0.25, seconds=0.1))
    assert isinstance(error, Exception)
    received = proxy.log[0].received_bytes
    assert received >= {Kind.RESET_BEFORE: 0, Kind.LOST_ANSWER: 16 * MIB}.get(kind, 4 * MIB)
    assert received <= {Kind.RESET_BEFORE: 0, Kind.LOST_ANSWER: 16 * MIB}.get(kind, 5 * MIB)
    assert proxy.log[0].store_status == (200 if kind is Kind.LOST_ANSWER else None)


@pytest.mark.parametrize("kind", [Kind.RESET_DOWNLOAD, Kind.STALL_DOWNLOAD_CLOSE, Kind.TRUNCATED])
def test_an_answer_ends_early(kind: Kind, tried) -> None:
    proxy, error = tried(Fault(kind, seconds=0.1))
    assert isinstance(error, Exception)
    assert proxy.log[1].returned_bytes == 8 * MIB


@pytest.mark.parametrize("kind", [Kind.CORRUPT_UPLOAD, Kind.CORRUPT_DOWNLOAD])
def test_one_byte_is_changed(kind: Kind, tried) -> None:
    _, read = tried(Fault(kind))
    assert isinstance(read, bytes)
    assert [at for at in range(8 * MIB - 9, 8 * MIB + 9) if read[at] != whole_content()[at]] == [8 * MIB]
    assert (read[: 8 * MIB], read[8 * MIB + 1 :]) == (whole_content()[: 8 * MIB], whole_content()[8 * MIB + 1 :])


@pytest.mark.parametrize("kind", [Kind.STALL_UPLOAD, Kind.STALL_DOWNLOAD, Kind.LATENCY])
def test_time_passes_and_nothing_else_happens(kind: Kind, tried) -> None:
    began_s = time.monotonic()
    _, read = tried(Fault(kind, seconds=1.5))
    assert read == whole_content()
    assert time.monotonic() - began_s > 1.5


def test_a_connection_closes_after_an_answer_that_said_it_stays(tried) -> None:
    proxy, read = tried(Fault(Kind.CLOSED_AFTER))
    assert proxy.log[0].status == 200
    noticed_in_time = read == whole_content() and len(proxy._threads) == 2
    assert noticed_in_time or isinstance(read, ConnectionClosedError)


def test_all_connections_share_the_bandwidth(moto_bucket: Bucket) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.bytes_per_s = 16 * MIB
    with proxy.running() as endpoint, client_of(endpoint) as client:
        began_s = time.monotonic()
        client.put_object(Bucket=NAME, Key=moto_bucket.prefix, Body=whole_content())
        assert 0.9 < time.monotonic() - began_s < 9


def test_a_body_in_chunks_passes(moto_bucket: Bucket) -> None:
    with FaultProxy(moto_bucket.endpoint).running() as endpoint:
        connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
        connection.request("POST", f"/{NAME}?delete", body=iter([b"<Delete>", b"</Delete>"]), encode_chunked=True)
        assert connection.getresponse().read()
        connection.close()


def test_dice_fall_the_same_way_for_the_same_seed_whatever_the_order() -> None:
    requests = [Request(f"PUT /{NAME}/run-1/{n} HTTP/1.1", [("Content-Length", "1")]) for n in range(100)]
    one, two = (Dice(4, share=0.3, kinds=list(Kind)) for _ in range(2))
    fallen = [one(request) for request in requests]
    assert [two(request) for request in reversed(requests)] == fallen[::-1]
    assert 15 < sum(fault is not None for fault in fallen) < 45
