"""Answers in whatever pieces: the whole body, or one kind of error. The wire itself is tested over sockets."""

from __future__ import annotations

from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from typing import Any, cast

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.store.http.answer import MAX_HEAD_BYTES, MAX_INTERIM_ANSWERS, HeadReader, OpenAnswer, begins_answer


class Pieces:
    """A connection that gives what was sent in these pieces, and then its end: a kernel may cut anywhere."""

    def __init__(self, *pieces: bytes) -> None:
        self._left = [piece for piece in pieces if piece]

    def setsockopt(self, *_: int) -> None: ...

    def recv(self, most: int) -> bytes:
        if not self._left:
            return b""
        piece, rest = self._left[0][:most], self._left[0][most:]
        self._left[:1] = [rest] if rest else []
        return piece

    def recv_into(self, buffer: memoryview, _size: int, _flags: int) -> int:
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def head_of(*pieces: bytes, method: str = "GET") -> OpenAnswer:
    return HeadReader(cast("Any", Pieces(*pieces)), method).read()


@st.composite
def cut(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    at = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    return [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True)]


def chunked(chunks: list[bytes]) -> bytes:
    body = b"".join(b"%x;name=value\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
    return body + b"0\r\nTrailer: t\r\n\r\n"


@given(chunks=st.lists(st.binary(max_size=50), max_size=6), way=st.sampled_from(["length", "chunks", "close"]), data=st.data())
def test_the_body_is_what_was_sent_wherever_it_was_cut(chunks: list[bytes], way: str, data: st.DataObject) -> None:
    body = b"".join(chunks)
    field, sent = {
        "length": (b"Content-Length: %d\r\n" % len(body), body),
        "chunks": (b"Transfer-Encoding: chunked\r\n", chunked(chunks)),
        "close": (b"", body),
    }[way]
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 Partial Content\r\nX-A: 1\r\n" + field + b"x-a:  2 \r\n\r\n" + sent
    answer = head_of(*data.draw(cut(raw)))
    assert (answer.status, answer.headers["x-a"]) == (206, "1, 2")
    assert answer.read() == body
    assert answer.leaves_connection_usable == (way != "close")


@given(
    raw=st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda rest: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + rest)
)
def test_any_bytes_are_an_answer_or_one_kind_of_error(raw: bytes) -> None:
    try:
        head_of(raw).read()
    except HTTPException:
        return


@given(left_out=st.integers(1, 60), is_chunked=st.booleans())
def test_a_body_that_ends_early_is_an_error_and_its_connection_is_not_used_again(left_out: int, is_chunked: bool) -> None:
    field, sent = (
        (b"Transfer-Encoding: chunked", chunked([b"x" * 50, b"y" * 9])) if is_chunked else (b"Content-Length: 59", b"x" * 59)
    )
    answer = head_of(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n" + sent[: max(0, len(sent) - left_out)])
    with pytest.raises(HTTPException):
        answer.read()
    assert not answer.leaves_connection_usable


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n",
    ],
)
def test_a_connection_that_will_close_or_is_out_of_step_is_not_used_again(raw: bytes) -> None:
    answer = head_of(raw)
    assert answer.read() == b"ok"
    assert not answer.leaves_connection_usable


@pytest.mark.parametrize(("status", "method"), [(b"204 No Content", "GET"), (b"304 Not Modified", "GET"), (b"200 OK", "HEAD")])
def test_what_has_no_body_is_not_waited_for(status: bytes, method: str) -> None:
    answer = head_of(b"HTTP/1.1 " + status + b"\r\nContent-Length: 10\r\n\r\n", method=method)
    assert answer.read() == b""
    assert answer.leaves_connection_usable


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", RemoteDisconnected),
        (b"SSH-2.0-OpenSSH_9.9\r\n", BadStatusLine),
        (b"HTTP/1.1 OK\r\n\r\n", BadStatusLine),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES, HTTPException),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", HTTPException),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * (MAX_INTERIM_ANSWERS + 1) + b"HTTP/1.1 200 OK\r\n\r\n", HTTPException),
        (b"HTTP/1.1  200 OK\r\n\r\n", BadStatusLine),
        (b"HTTP/1.1 200 O\x00K\r\n\r\n", BadStatusLine),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\n folded: first\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nETag: a\x0bb\r\n\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nETag: a\r\r\n\r\n", HTTPException),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", HTTPException),
    ],
)
def test_what_is_no_answer_is_named(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        head_of(raw)


@pytest.mark.parametrize(
    "chunks",
    [
        b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3 ;x\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\nno trailer\r\n\r\n",
        b"3\r\nabc\r\n0\r\nT: x\r\r\n\r\n",
    ],
)
def test_chunks_that_another_program_reads_differently_are_refused(chunks: bytes) -> None:
    answer = head_of(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    with pytest.raises(HTTPException):
        answer.read()
    assert not answer.leaves_connection_usable


STATUS_LINES = st.sampled_from(
    [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 206", b"HTTP/1.1 404 ", b"HTTP/1.1 204 None"]
)
FIELDS = st.sampled_from(
    [
        *(b"Content-Length: " + text for text in (b"0", b"3", b"7", b"-3", b"+3", b"3, 3", b"3, 7", b"x", b"", b"3 3", b"0x3")),
        *(b"Transfer-Encoding: " + text for text in (b"chunked", b"Chunked", b"gzip", b"gzip, chunked", b"identity")),
        *(b"Connection: close", b"X-A: b", b"X-A:  c\t", b'ETag: "e"', b"Content-Range: bytes 0-2/7"),
    ]
)
CHUNKED = (b"3\r\nabc\r\n0\r\n\r\n", b"3;x=y\r\nabc\r\n0\r\nT: t\r\n\r\n", b"03\r\nabc\r\n00\r\n\r\n", b"3\r\nabc\r\n")
ILL_CHUNKED = (b"3\r\nabcd\r\n0\r\n\r\n", b"3z\r\nabc\r\n0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n")
BODIES = st.sampled_from([b"", b"abc", b"abcdefg", *CHUNKED, *ILL_CHUNKED])
INTERIM = st.lists(st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\n"]), max_size=2)


def as_h11_reads_it(raw: bytes) -> tuple[int, bytes] | None:
    """Return status and body, or ``None`` for what is no answer."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "s3")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(raw)
        connection.receive_data(b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.ConnectionClosed) or event in (h11.NEED_DATA, h11.PAUSED):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, body


@given(interim=INTERIM, line=STATUS_LINES, fields=st.lists(FIELDS, max_size=4), body=BODIES)
def test_answers_are_read_as_another_library_reads_them(
    interim: list[bytes], line: bytes, fields: list[bytes], body: bytes
) -> None:
    raw = b"".join(interim) + b"\r\n".join([line, *fields, b"", b""]) + body
    try:
        answer = head_of(raw)
        ours = answer.status, answer.read()
    except HTTPException:
        ours = None
    assert ours == as_h11_reads_it(raw)


@given(
    interim=st.lists(
        st.sampled_from([b"100 Continue\r\n\r\n", b"102 x\nA: b\n\n", b"103 Early Hints\r\nLink: x\r\nB:\r\n\r\n"]), max_size=3
    ),
    status=st.integers(200, 599),
    cut=st.integers(0, 200),
)
def test_only_an_answer_that_is_no_interim_one_ends_a_body(interim: list[bytes], status: int, cut: int) -> None:
    before = b"".join(b"HTTP/1.1 " + each for each in interim)
    assert before == b"" or not begins_answer(before)
    assert begins_answer(before + b"HTTP/1.1 %d OK\r\nA: b\r\n\r\n" % status)
    received = (before + b"HTTP/1.1 %d" % status)[:cut]
    assert begins_answer(received) == (received == b"" or cut > len(before) + len(b"HTTP/1.1 "))
