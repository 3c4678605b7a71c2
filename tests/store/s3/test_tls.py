"""Certificates, and endpoints that do not speak S3 at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sidecar.errors import (
    AccessRefused,
    StoreUnavailable,
)
from sidecar.store.protocol import Verification
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.servers import Proxy
from tests.store.s3.conftest import Opener, always


def test_an_unknown_certificate_is_refused_until_it_is_trusted(opener: Opener, moto: str, tmp_path: Path) -> None:
    context, certificate = servers.self_signed(tmp_path)
    with Proxy(moto, tls=context).running() as endpoint:
        with pytest.raises(AccessRefused, match=r"not trusted.*CKPT_CA_BUNDLE"):
            opener(endpoint).probe()
        trusting = opener(endpoint, ca_bundle=certificate)
        assert trusting.probe().verification is Verification.MD5
        assert trusting.put("k", b"x").size_bytes == 1


@pytest.mark.parametrize("content", [None, b"no certificate"])
@pytest.mark.parametrize("variable", ["CKPT_CA_BUNDLE", "AWS_CA_BUNDLE"])
def test_a_bundle_that_cannot_be_read_is_named(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, content: bytes | None
) -> None:
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    options = {"ca_bundle": bundle} if variable == "CKPT_CA_BUNDLE" else {}
    with pytest.raises(AccessRefused, match=rf"{bundle}: no certificates can be read.*correct {variable}"):
        opener("https://127.0.0.1:1", **options).probe()


def test_an_endpoint_that_does_not_answer_is_named_without_the_request(opener: Opener) -> None:
    with pytest.raises(StoreUnavailable, match=r"http://127.0.0.1:1 does not answer.*check AWS_S3_ENDPOINT") as raised:
        opener("http://127.0.0.1:1").probe()
    assert "list-type" not in str(raised.value)


@pytest.mark.parametrize(("from_days", "to_days"), [(1, 30), (-30, -1)], ids=["not yet valid", "expired"])
def test_a_certificate_that_is_not_valid_by_this_clock_is_tried_again(
    opener: Opener, tmp_path: Path, from_days: int, to_days: int
) -> None:
    context, certificate = servers.self_signed(tmp_path, from_days=from_days, to_days=to_days)
    store = Proxy(None, tls=context)
    with store.running() as endpoint, pytest.raises(StoreUnavailable, match=r"not valid now.*NTP.*tried again"):
        opener(endpoint, ca_bundle=certificate).probe()


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_verification_of_the_certificate_can_be_switched_off(opener: Opener, moto: str, tmp_path: Path) -> None:
    context, _ = servers.self_signed(tmp_path)
    with Proxy(moto, tls=context).running() as endpoint:
        assert opener(endpoint, verify_tls=False).put("k", b"x").size_bytes == 1


def test_https_spoken_to_a_plain_server_is_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match="https where the store speaks http"):
        opener(moto.replace("http:", "https:")).probe()


def test_http_spoken_to_a_tls_server_is_named(opener: Opener, tmp_path: Path) -> None:
    said = b"<html><body>The plain HTTP request was sent to HTTPS port</body></html>"  # as nginx says it
    with (
        always((400, {"Content-Type": "text/html"}, said)).running() as endpoint,
        pytest.raises(AccessRefused, match="http or https right"),
    ):
        opener(endpoint).probe()
    context, _ = servers.self_signed(tmp_path)
    with Proxy(tls=context).running() as endpoint, pytest.raises((AccessRefused, StoreUnavailable)):
        opener(endpoint.replace("https:", "http:")).probe()


def test_what_does_not_speak_http_is_named(opener: Opener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _address = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(AccessRefused, match="does not speak S3"):
            opener(f"http://127.0.0.1:{server.getsockname()[1]}").get("k")
        thread.join()


def test_what_answers_everything_with_a_page_is_named(opener: Opener) -> None:
    with always((200, {"Content-Type": "text/html"}, b"<html><body>Welcome</body></html>")).running() as endpoint:
        store = opener(endpoint)
        asked: list[Callable[[], object]] = [
            lambda: list(store.list("")),
            lambda: list(store.pending_uploads("")),
            lambda: list(store.list_parts("k", "u")),
            lambda: store.begin_upload("k"),
            lambda: store.complete_upload("k", "u", [], crc64nvme=0),
        ]
        for ask in asked:
            with pytest.raises(AccessRefused, match="does not speak S3"):
                ask()


@contextmanager
def speaking(conversation: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that has this conversation on each connection."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            conversation(connection)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=listen, daemon=True).start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("what", ["hello", "handshake", "record"])
@pytest.mark.parametrize("way", ["wire", "boto3"])
def test_a_connection_that_ends_or_breaks_in_tls_is_tried_again(opener: Opener, tmp_path: Path, what: str, way: str) -> None:
    context, certificate = servers.self_signed(tmp_path)

    def breaking(connection: socket.socket) -> None:
        if what == "hello":  # a load balancer without a server behind it
            connection.recv(4096)
            return
        with context.wrap_socket(connection, server_side=True) as secured:
            if what == "record":
                secured.recv(4096)
                os.write(secured.fileno(), b"\x17\x03\x03\x00\x20" + b"x" * 32)
                secured.recv(1)

    with speaking(breaking) as endpoint, source(b"x") as body:
        store = opener(endpoint, ca_bundle=certificate, client=way)
        with pytest.raises(StoreUnavailable):
            store.put_file("k", body)
        store.close()


@contextmanager
def source(content: bytes) -> Iterator[FileSlice]:
    fd = os.memfd_create("body")
    try:
        os.write(fd, content)
        yield FileSlice(fd, 0, len(content), gate=OpenGate())
    finally:
        os.close(fd)
