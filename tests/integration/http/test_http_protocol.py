"""HTTP/1.1 as the gateway speaks it, in raw bytes: what is kept open, what is closed, and how bodies are framed."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from farhand.api.server.connection_limits import MAX_OF_TOKEN
from tests.support.harness import SHARED_TOKEN, GatewayProcess

BODY = b'{"tool": "no.such.tool"}'


def head(gateway: GatewayProcess, first: str = "POST /v1/tools/invoke HTTP/1.1", *lines: str) -> bytes:
    known = (f"Host: 127.0.0.1:{gateway.port}", f"Authorization: Bearer {gateway.token}")
    return "\r\n".join([first, *known, "Content-Type: application/json", *lines, "", ""]).encode()


class Raw:
    def __init__(self, gateway: GatewayProcess) -> None:
        self._socket = socket.create_connection(("127.0.0.1", gateway.port), timeout=30)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self._socket.sendall(part)

    def until(self, end: bytes) -> bytes:
        """Return what arrives up to and with `end`."""
        data = b""
        while not data.endswith(end):
            piece = self._socket.recv(1)
            assert piece, f"the connection was closed after {data!r}"
            data += piece
        return data

    def answer(self) -> tuple[bytes, bytes]:
        """Return the head and the body of an answer with a length."""
        top = self.until(b"\r\n\r\n")
        size = int(next(line for line in top.split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
        body = b""
        while len(body) < size:
            body += self._socket.recv(size - len(body))
        return top, body

    def rest(self) -> bytes:
        """Return everything until the gateway closes the connection."""
        data = b""
        while piece := self._socket.recv(65536):
            data += piece
        return data


def test_a_client_that_expects_100_continue_gets_it(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, "POST /v1/tools/invoke HTTP/1.1", "Expect: 100-continue", "Content-Length: 24"))
        assert line.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.send(BODY)
        assert line.answer()[0].startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_may_be_chunked_and_longer_than_what_is_kept_unread(shared_gateway: GatewayProcess) -> None:
    text = json.dumps({"tool": "no.such.tool", "args": {"text": "x" * 300_000}}).encode()
    parts = [text[at : at + 50_000] for at in range(0, len(text), 50_000)]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    with Raw(shared_gateway) as line:
        for _ in range(2):  # the connection can be used again
            line.send(head(shared_gateway, "POST /v1/tools/invoke HTTP/1.1", "Transfer-Encoding: chunked"))
            line.send(*chunks, b"0\r\nTrailer: ignored\r\n\r\n")
            top, body = line.answer()
            assert top.startswith(b"HTTP/1.1 200") and json.loads(body)["error"]["kind"] == "not_found"


def test_a_stream_is_chunked_and_ends(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        wanted = b'{"tool": "no.such.tool", "stream": true}'
        line.send(head(shared_gateway, "POST /v1/tools/invoke HTTP/1.1", f"Content-Length: {len(wanted)}") + wanted)
        top = line.until(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in top and b"content-length" not in top
        assert b"event: done" in line.until(b"\r\n0\r\n\r\n")
        line.send(head(shared_gateway, "GET /version HTTP/1.1"))
        assert line.answer()[0].startswith(b"HTTP/1.1 200")


def test_the_answer_to_head_has_the_length_but_no_body(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, "HEAD /version HTTP/1.1"))
        top = line.until(b"\r\n\r\n")
        assert b"content-length: " in top and b"content-length: 0" not in top and b"\r\ndate: " in top
        line.send(head(shared_gateway, "GET /version HTTP/1.1"))
        assert line.answer()[1].startswith(b"{")


def test_a_connection_closes_when_the_client_wants_it_to(shared_gateway: GatewayProcess) -> None:
    for first, *lines in (("GET /version HTTP/1.0",), ("GET /version HTTP/1.1", "Connection: close")):
        with Raw(shared_gateway) as line:
            line.send(head(shared_gateway, first, *lines))
            assert b"connection: close\r\n" in line.rest()


def test_an_idle_connection_is_closed_and_one_in_use_is_not(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        for _ in range(4):
            line.send(head(shared_gateway, "GET /version HTTP/1.1"))
            line.answer()
            time.sleep(2.0)  # longer together than a connection may be idle
        assert line.rest() == b""


def test_bytes_that_are_not_http_are_refused_after_the_request_before_them(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, "GET /version HTTP/1.1") + b"nonsense\r\n\r\n")
        assert line.rest().count(b"HTTP/1.1 200 OK") == 1
    with Raw(shared_gateway) as line:
        line.send(b"nonsense\r\n\r\n")
        assert line.rest().startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_path_in_a_whole_url_is_found(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, f"GET http://127.0.0.1:{shared_gateway.port}/version?x=1 HTTP/1.1"))
        assert line.answer()[0].startswith(b"HTTP/1.1 200")


SOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 22}==")


@pytest.mark.parametrize("lines", [(), ("Content-Length: 5",)])
def test_a_socket_does_not_begin_before_the_answers_to_earlier_requests(
    shared_gateway: GatewayProcess, lines: tuple[str, ...]
) -> None:
    """They would get among its frames, without a limit to what is kept for a client that does not read."""
    call = head(shared_gateway, "POST /v1/tools/invoke HTTP/1.1", f"Content-Length: {len(BODY)}") + BODY
    socket_head = head(shared_gateway, f"GET /v1/nodes/ws?token={SHARED_TOKEN} HTTP/1.1", *SOCKET, *lines)
    with Raw(shared_gateway) as line:
        line.send(call + socket_head + b"x" * (5 if lines else 0))
        assert json.loads(line.answer()[1])["error"]["kind"] == "not_found"
        top, body = line.answer()
        assert top.startswith(b"HTTP/1.1 4") and b"connection: close\r\n" in top, body
        assert line.rest() == b""


def test_nothing_is_read_after_a_request_for_another_protocol(shared_gateway: GatewayProcess) -> None:
    """The parser drops what arrived along with such a request, so that a part of a body could become a request."""
    with Raw(shared_gateway) as line:
        first = head(shared_gateway, "GET /version HTTP/1.1", "Connection: Upgrade", "Upgrade: h2c")
        line.send(first + head(shared_gateway, "POST /v1/tools/invoke HTTP/1.1", "Content-Length: 100"))
        assert line.answer()[0].startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):  # the gateway has closed the connection, or is about to
            line.send(head(shared_gateway, "GET /v1/tokens HTTP/1.1"))
            assert line.rest() == b""


def test_a_request_in_place_of_a_refused_body_is_not_taken_for_it(shared_gateway: GatewayProcess) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, "POST /v1/nowhere HTTP/1.1", "Expect: 100-continue", "Content-Length: 60"))
        top, _ = line.answer()
        assert top.startswith(b"HTTP/1.1 404") and b"connection: close\r\n" in top and line.rest() == b""


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", id="chunk"),
        pytest.param(b"X: " + b"x" * 70_000, id="head"),
    ],
)
def test_a_refusal_does_not_take_the_place_of_an_earlier_answer(shared_gateway: GatewayProcess, rest: bytes) -> None:
    with Raw(shared_gateway) as line:
        line.send(head(shared_gateway, "GET /version HTTP/1.1") + head(shared_gateway)[:-2] + rest)
        assert line.answer()[0].startswith(b"HTTP/1.1 200")


def test_the_idle_connections_of_a_token_are_limited(shared_gateway: GatewayProcess) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["read"]}).json()
    request = head(shared_gateway, "GET /v1/freeze HTTP/1.1").replace(
        shared_gateway.token.encode(), made["token"].encode()
    )
    lines = [Raw(shared_gateway) for _ in range(MAX_OF_TOKEN + 1)]
    try:
        for line in lines:
            line.send(request)
        closed = [line for line in lines if b"connection: close" in line.answer()[0]]
        assert len(closed) == 1 and closed[0].rest() == b""
        lines[0].send(head(shared_gateway, "GET /version HTTP/1.1"))
        assert lines[0].answer()[0].startswith(b"HTTP/1.1 200")
    finally:
        for line in lines:
            line.__exit__()
    assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 200
