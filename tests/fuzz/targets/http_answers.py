"""Answers of a store on our own wire, with h11 as the oracle.

What both accept has the same status, headers and body. What only h11 accepts is refused for a reason of ``STRICTER``; nothing
is accepted that h11 refuses, but a framing field in a trailer. The result does not depend on where the kernel cuts the bytes.
"""

from __future__ import annotations

import re
from http.client import HTTPException
from typing import Any, cast

import h11

from sidecar.store.http.answer import HeadReader
from tests.store.http.test_answer import Pieces

INSTRUMENTED = ("sidecar.store.http.answer",)
WORDS = (
    *(
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"206",
        b"204",
        b"304",
        b"101",
        b"\r\n\r\n",
        b"\r\n ",
    ),
    *(
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"keep-alive",
        b"\r\n0\r\n\r\n",
        b"1;a=b\r\n",
    ),
    *(b"\n\n", b"\r\r\n", b"\x0b", b"\x85", b"\xa0", b": ", b" :", b", ", b"ffffffffffffffff", b"99999999999999999999"),
)
STRICTER = re.compile(
    r"HTTP/[0-9.]+ "  # not of HTTP/1.0 or 1.1
    r"|101: |more than [0-9]+ interim"
    r"|malformed chunk size: b'[0-9A-Fa-f]{16,}"
    r"|Content-Length: [0-9, ]{19,}"
    r"|malformed trailer: b'[ \t]"  # folded
    r"|malformed trailer: b'.*\\x"
    r"|a line of a chunked body without CRLF"
)
FRAMING_TRAILER = re.compile(rb"\r\n0+(;[^\r\n]*)?\r\n([^\r\n]+\r\n)*(transfer-encoding|content-length):", re.IGNORECASE)
"""h11 checks what such a field says. RFC 9112, 6.5.1: in a trailer it has no meaning."""
Read = tuple[int, dict[str, str], bytes, bool]


def check(raw: bytes) -> None:
    for method in ("GET", "HEAD"):
        ours, why = _ours([raw], method)
        small = 1 if len(raw) < 300 else 7
        in_pieces, _ = _ours([raw[at : at + small] for at in range(0, len(raw), small)], method)
        assert ours == in_pieces or (ours and in_pieces and ours[:3] == in_pieces[:3]), (
            f"{ours} in one piece, {in_pieces} in several"
        )
        theirs = _as_h11_reads_it(raw, method)
        if theirs is None:
            assert ours is None or FRAMING_TRAILER.search(raw), f"h11 refuses it: {ours}"
        elif ours is None:
            assert STRICTER.search(why), f"h11 reads {theirs}: {why}"
        else:
            assert ours[:3] == theirs[:3], f"{ours}, h11 reads {theirs}"
            assert theirs[3] or not ours[3] or raw.startswith(b"HTTP/1.0") or b"HTTP/1.0" in raw, (
                "h11 would close the connection"
            )


def _ours(pieces: list[bytes], method: str) -> tuple[Read | None, str]:
    try:
        answer = HeadReader(cast("Any", Pieces(*pieces)), method).read()
        body = answer.read()
    except HTTPException as error:
        return None, str(error)
    headers = {name: _plain(name, value) for name, value in answer.headers.items()}
    return (answer.status, headers, body, answer.leaves_connection_usable), ""


def _plain(name: str, value: str) -> str:
    if name == "content-length":
        return value.split(",")[0].strip()
    return value.lower() if name == "transfer-encoding" else value


def _as_h11_reads_it(raw: bytes, method: str) -> Read | None:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "s3")]))
    connection.send(h11.EndOfMessage())
    status, headers, body = 0, {}, b""
    try:
        connection.receive_data(raw)
        connection.receive_data(b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status, headers = event.status_code, _joined(event)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.ConnectionClosed) or event in (h11.NEED_DATA, h11.PAUSED):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, headers, body, connection.their_state is h11.DONE


def _joined(event: h11.Response) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
