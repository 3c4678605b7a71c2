"""Credentials in a proxy's URL: sent to the proxy, and to nobody else, nor written anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import StoreUnavailable
from sidecar.store.http.proxy import HttpProxy, is_exempt, proxy_at
from sidecar.store.s3 import client
from sidecar.store.s3.store import S3Options, S3Store
from tests.store.scripted import CONTENT, Asked, answering, head, s3, whole

USER, PASSWORD = "trainer", "p@ss:w/rd #1%"
BASIC = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.fixture(autouse=True)
def _proxies_are_looked_up_anew() -> Iterator[None]:
    client._proxy_of.cache_clear()
    yield
    client._proxy_of.cache_clear()


def through(
    endpoint: str,
    proxy: str,
    credentials_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    client: Literal["wire", "boto3"] = "wire",
) -> S3Store:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy)
    options = S3Options(bucket="b", prefix="run", endpoint_url=endpoint, credentials_dir=credentials_dir, client=client)
    return S3Store(options)


def with_user(endpoint: str) -> str:
    return endpoint.replace("http://", f"http://{USER}:{quote(PASSWORD, safe='')}@")


@given(TEXTS.filter(bool), TEXTS)
def test_any_user_and_password_are_read_as_they_were_encoded(user: str, password: str) -> None:
    url = f"http://{quote(user, safe='')}:{quote(password, safe='')}@proxy.test:3128"
    proxy = proxy_at(url)
    assert proxy.authorization is not None
    assert base64.b64decode(proxy.authorization.removeprefix("Basic ")).decode() == f"{user}:{password}"
    assert proxy.authorization not in repr(proxy)


@pytest.mark.parametrize("url", ["ftp://proxy.test:443", "socks5://user:secret@proxy.test:1080", "SOCKS5h://proxy.test"])
def test_a_proxy_that_speaks_something_else_is_refused_by_name(url: str) -> None:
    """It was spoken to as an HTTP proxy, and the store seemed not to answer."""
    with pytest.raises(ValueError, match=r"names a (ftp|socks5|SOCKS5h) proxy, which is not supported: name an HTTP proxy"):
        proxy_at(url)
    assert proxy_at("https://proxy.test") == proxy_at("HTTP://proxy.test") == HttpProxy("proxy.test", 80)


@pytest.mark.parametrize("url", ["http://proxy.test", "proxy.test", "proxy.test:80", "http://proxy.test:80/"])
def test_a_proxy_without_a_user_is_told_nothing(url: str) -> None:
    assert proxy_at(url) == HttpProxy("proxy.test", 80)
    assert proxy_at(url).headers == {}


@pytest.mark.parametrize("url", ["http://user:hunt/er2@proxy.test:1", "http://", "http://user:hunter2@:x", "http://[hunter2"])
def test_what_is_no_url_is_named_without_what_is_in_it(url: str) -> None:
    with pytest.raises(ValueError, match="percent-encode") as caught:
        proxy_at(url)
    assert "hunt" not in str(caught.value)


@given(st.ip_addresses(), st.integers(0, 128), st.ip_addresses())
def test_a_network_is_exempt_with_all_its_addresses_and_no_others(
    inside: IPv4Address | IPv6Address, length: int, other: IPv4Address | IPv6Address
) -> None:
    network = ip_network(f"{inside}/{min(length, inside.max_prefixlen)}", strict=False)
    no_proxy = f".svc, localhost,{network}"
    assert is_exempt(str(inside), no_proxy)
    assert is_exempt(str(inside), str(inside))
    assert is_exempt(str(other), no_proxy) == (other in network)
    assert not is_exempt("minio.test", no_proxy)


@pytest.mark.parametrize("way", ["wire", "boto3"])
@pytest.mark.parametrize("exempt", ["127.0.0.0/8", ".svc,127.0.0.1/32"])
def test_a_store_in_a_network_without_proxy_is_asked_directly(
    exempt: str, way: Literal["wire", "boto3"], credentials_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, exempt)
    with answering(s3) as endpoint:
        store = through(endpoint, "http://127.0.0.1:1", credentials_dir, monkeypatch, client=way)
        assert store.get("k") == CONTENT
        with store.read("k", length=len(CONTENT)) as body:
            assert body.readinto(memoryview(bytearray(len(CONTENT)))) == len(CONTENT)


def test_a_plain_request_carries_the_credentials_to_the_proxy(credentials_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    with answering(s3, asked) as proxy:
        assert through("http://s3.test", with_user(proxy), credentials_dir, monkeypatch).get("k") == CONTENT
    assert [request.headers["proxy-authorization"] for request in asked] == [BASIC]
    assert "proxy-authorization" not in asked[0].headers["authorization"]


def test_a_tunnel_is_asked_for_with_the_credentials_and_their_refusal_shows_none(
    credentials_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = []
    with answering(lambda _: head("407 Proxy Authentication Required", "Content-Length: 0"), asked) as proxy:
        store = through("https://s3.test", with_user(proxy), credentials_dir, monkeypatch)
        with pytest.raises(StoreUnavailable, match=r"the proxy 127\.0\.0\.1:\d+: .*407") as caught:
            store.get("k")
    assert [(request.method, request.headers["proxy-authorization"]) for request in asked] == [("CONNECT", BASIC)]
    assert "p@ss" not in str(caught.value)
    assert BASIC not in str(caught.value)


REFUSED_TUNNELS = {"407 Proxy Authentication Required": "a user and a password.*HTTPS_PROXY", "403 Forbidden": "NO_PROXY"}


@pytest.mark.parametrize("way", ["control", "wire", "boto3"])
@pytest.mark.parametrize("status", REFUSED_TUNNELS)
def test_a_refused_tunnel_says_what_to_do(
    status: str, way: Literal["control", "wire", "boto3"], credentials_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        if way == "control":
            store.get("k")
        else:
            with store.read("k", length=3) as body:
                body.readinto(memoryview(bytearray(3)))

    with answering(lambda _: head(status, "Content-Length: 0")) as proxy:
        client: Literal["wire", "boto3"] = "boto3" if way == "boto3" else "wire"
        store = through("https://s3.test", proxy, credentials_dir, monkeypatch, client=client)
        with pytest.raises(StoreUnavailable, match=rf"{status[:3]}.*{REFUSED_TUNNELS[status]}"):
            ask()


def test_a_proxy_that_wants_credentials_says_so(credentials_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda _: whole("407 Proxy Authentication Required")) as proxy:
        store = through("http://s3.test", proxy, credentials_dir, monkeypatch)
        with pytest.raises(StoreUnavailable, match=r"407 .*user and a password.*HTTP_PROXY"):
            store.get("k")


def test_a_url_that_cannot_be_read_makes_the_store_unavailable(credentials_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = through("http://s3.test", "http://user:hunt/er2@proxy.test:1", credentials_dir, monkeypatch)
    with pytest.raises(StoreUnavailable, match="percent-encode") as caught:
        store.get("k")
    assert "hunt" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://store.test", "https://store.test"])
def test_a_proxy_that_is_away_is_named_and_not_the_store(
    endpoint: str, credentials_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = through(endpoint, "http://127.0.0.1:1", credentials_dir, monkeypatch)
    with pytest.raises(StoreUnavailable, match=r"the proxy 127\.0\.0\.1:1: .*correct HTTPS_PROXY or HTTP_PROXY"):
        store.get("k")
    store.close()
