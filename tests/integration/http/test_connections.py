"""Many requests on one connection, sent as raw bytes: each is checked and answered by itself."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, wait_until


class Line:
    """One keep-alive connection, spoken to in bytes."""

    def __init__(
        self, gateway: GatewayProcess, token: str | None = None, extra: str = "", path: str = "/v1/tools/invoke"
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\n"
            f"Authorization: Bearer {token or gateway.token}\r\nContent-Type: application/json\r\n{extra}"
        )
        self._received = b""

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def bytes_of(self, body: Any) -> bytes:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return f"{self._head}Content-Length: {len(text)}\r\n\r\n".encode() + text

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> tuple[int, dict[str, str], Any]:
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, rest = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers["content-length"])
        self._received = rest
        while len(self._received) < size:
            self._more()
        body, self._received = self._received[:size], self._received[size:]
        return int(first.split()[1]), headers, json.loads(body)

    def call(self, body: Any) -> tuple[int, dict[str, str], Any]:
        self.send(self.bytes_of(body))
        return self.receive()

    def say_no_more(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def reads_to_the_end(self) -> bytes:
        data, self._received = self._received, b""
        while more := self._socket.recv(65536):
            data += more
        return data

    def ended(self) -> bool:
        return self._socket.recv(1) == b""

    def _more(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the gateway closed the connection"
        self._received += data


@pytest.fixture
def line(shared_gateway: GatewayProcess) -> Iterator[Line]:
    with Line(shared_gateway) as opened:
        yield opened


def read(path: str) -> dict[str, Any]:
    return {"tool": "hands__Bash", "args": {"command": f"printf %s {path}"}}


def warm(line: Line, body: Any) -> None:
    for _ in range(3):
        assert line.call(body)[0] == 200


def test_every_call_of_a_connection_is_answered_alike(hands: NodeProcess, line: Line) -> None:
    answers = [line.call(read("same")) for _ in range(6)]
    shapes = [
        (
            status,
            sorted(headers),
            {**body, "request_id": 0, "duration_ms": 0, "result": body["result"]["output"]},
        )
        for status, headers, body in answers
    ]
    assert all(shape == shapes[0] for shape in shapes)
    assert len({body["request_id"] for _, _, body in answers}) == 6
    assert all(headers["x-request-id"] == body["request_id"] for _, headers, body in answers)


def test_refused_calls_and_bad_bodies_are_answered_as_ever(hands: NodeProcess, line: Line) -> None:
    bodies = [
        {"tool": "nobody.has_it", "args": {}},
        {"tool": "hands__Bash", "args": {}},
        {"tool": "", "args": {}},
        b'{"tool": "hands__Bash", "args": {"command": }}',
        b'{"tool": "\xff\xfe"}',
        {"tool": "hands__Bash", "args": {"command": "true"}, "timeout_ms": 0},
        {"tool": "hands__Bash", "args": {"command": "true"}, "background": True},
    ]
    for body in bodies:
        first, *others = [line.call(body) for _ in range(4)]
        for other in others:
            assert other[0] == first[0]
            assert _plain(other[2]) == _plain(first[2])


def _plain(body: Any) -> str:
    return re.sub(r'"(request_id|duration_ms|state)": ("[^"]*"|\d+)', "", json.dumps(body))


def test_a_revoked_token_is_refused_on_the_connection_it_used(
    hands: NodeProcess, shared_gateway: GatewayProcess
) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"label": "connection"}).json()
    with Line(shared_gateway, made["token"]) as line:
        warm(line, read("mine"))
        assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 200
        assert line.call(read("mine"))[0] == 401


def test_pipelined_requests_have_each_the_rights_of_their_own_credential(
    hands: NodeProcess, shared_gateway: GatewayProcess
) -> None:
    """As through a proxy that sends the requests of several clients over one connection."""
    narrow = shared_gateway.request("POST", "/v1/tokens", {"label": "pipelined", "scopes": ["read"]}).json()
    call = {**read("mine"), "session_key": "connection-pipelined"}
    with Line(shared_gateway, narrow["token"]) as line, Line(shared_gateway) as owner:
        refused, allowed = line.bytes_of(call), owner.bytes_of(call)
        for _ in range(3):
            line.send(refused + allowed)
            assert [line.receive()[0] for _ in range(2)] == [403, 200]
            line.send(allowed + refused)
            assert [line.receive()[0] for _ in range(2)] == [200, 403]
        assert shared_gateway.get("/v1/calls?session_key=connection-pipelined")["count"] == 6
        # The head of one client, followed by a head of the owner whose body is still to come.
        line.send(refused)
        assert line.receive()[0] == 403
        body = allowed[allowed.index(b"\r\n\r\n") + 4 :]
        filler = len(refused) - refused.index(b"\r\n\r\n") - 4
        head = allowed[: -len(body)]
        size = filler + len(head)
        while True:  # a Content-Length that equals everything after the first head
            longer = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % size, head)
            if size == filler + len(longer):
                break
            size = filler + len(longer)
        line.send(refused + longer)
        assert line.receive()[0] == 403
        line.send(body + b" " * (size - len(body)))
        assert line.receive()[0] == 200
        line.send(refused + b"\n" * (size - filler))  # empty lines between requests are ignored
        assert line.receive()[0] == 403
    assert shared_gateway.get("/v1/calls?session_key=connection-pipelined")["count"] == 7


@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_body_kept_back_until_its_token_was_revoked_is_refused(
    hands: NodeProcess, shared_gateway: GatewayProcess, calls_before: int
) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"label": "kept-back"}).json()
    with Line(shared_gateway, made["token"]) as line:
        body = {**read("late"), "session_key": f"kept-back-{calls_before}"}
        for _ in range(calls_before):
            assert line.call(body)[0] == 200
        whole = line.bytes_of(body)
        size = whole.index(b"\r\n\r\n") + 4
        line.send(whole[: size + 5])
        time.sleep(0.1)  # it has been let in by now
        assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 200
        line.send(whole[size + 5 :])
        status, _, answer = line.receive()
    assert (status, answer["error"]["code"]) == (401, "unauthorized")
    assert shared_gateway.get(f"/v1/calls?session_key=kept-back-{calls_before}")["count"] == calls_before


def test_another_head_on_the_same_connection_is_looked_at_afresh(
    hands: NodeProcess, shared_gateway: GatewayProcess, line: Line
) -> None:
    warm(line, read("mine"))
    good = line.bytes_of(read("mine"))
    line.send(good.replace(shared_gateway.token.encode(), b"x" * len(shared_gateway.token)))
    assert line.receive()[0] == 401
    line.send(good.replace(b"Host: 127.0.0.1:", b"Host: 127.0.0.evil:"))
    assert line.receive()[0] == 403


def test_calls_sent_before_the_last_was_answered_keep_their_order(hands: NodeProcess, line: Line) -> None:
    warm(line, read("a"))
    line.send(b"".join(line.bytes_of(read(letter)) for letter in "bcdefg"))
    assert [line.receive()[2]["result"]["output"] for _ in range(6)] == list("bcdefg")
    line.send(line.bytes_of(read("h")))
    line.send(line.bytes_of(read("i")))
    assert [line.receive()[2]["result"]["output"] for _ in range(2)] == ["h", "i"]


def test_a_request_may_come_in_pieces(hands: NodeProcess, line: Line) -> None:
    warm(line, read("whole"))
    whole = line.bytes_of(read("whole"))
    for cut in (1, 40, len(whole) - 5):
        line.send(whole[:cut])
        line.send(whole[cut:])
        assert line.receive()[2]["result"]["output"] == "whole"


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.2])
def test_a_body_may_come_behind_its_head(hands: NodeProcess, line: Line, pause: float) -> None:
    """As most clients in Python send it, from the first request on."""
    for number in range(6):
        whole = line.bytes_of(read(f"{number}"))
        size = whole.index(b"\r\n\r\n") + 4
        line.send(whole[:size])
        time.sleep(pause)
        line.send(whole[size:])
        status, headers, body = line.receive()
        assert (status, body["result"]["output"]) == (200, f"{number}")
        assert headers["x-request-id"] == body["request_id"]


def test_a_body_behind_its_head_may_come_in_pieces_and_be_followed(hands: NodeProcess, line: Line) -> None:
    warm(line, read("a"))
    whole = line.bytes_of(read("a"))
    size = whole.index(b"\r\n\r\n") + 4
    for piece in (
        whole[:size],
        whole[size:-3],
        whole[-3:] + whole[:size],
        whole[size:] + whole,
        whole[:size],
        whole[size:],
    ):
        line.send(piece)
        time.sleep(0.01)
    assert [line.receive()[2]["result"]["output"] for _ in range(4)] == ["a"] * 4


def test_a_bad_body_behind_its_head_is_refused_as_ever(hands: NodeProcess, line: Line) -> None:
    good = line.bytes_of(read("a"))
    warm(line, read("a"))
    size = good.index(b"\r\n\r\n") + 4
    for bad in (b"[" * (len(good) - size), b"\xff" * (len(good) - size)):
        line.send(good[:size])
        time.sleep(0.01)
        line.send(bad)
        status, _, answer = line.receive()
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert line.call(read("a"))[2]["result"]["output"] == "a"


def test_a_body_that_looks_like_a_request_is_a_body(
    hands: NodeProcess, shared_gateway: GatewayProcess, line: Line
) -> None:
    body = {**read("x"), "session_key": "connection-look-alike"}
    warm(line, body)
    listed = "/v1/calls?session_key=connection-look-alike"
    whole = line.bytes_of(body)
    size = whole.index(b"\r\n\r\n") + 4
    for alike in (whole, whole[:size]):
        other = line.bytes_of(alike)
        cut = other.index(b"\r\n\r\n") + 4
        line.send(other[:cut].replace(b"/v1/tools/invoke", b"/v1/there/is/not"))
        assert line.receive()[0] == 404
        line.send(other[cut:])
        time.sleep(0.02)
    line.send(b"POST /v1/there/is/not HTTP/1.1\r\nX-Note: ")  # and a header is a header
    time.sleep(0.02)
    line.send(whole)
    assert line.receive()[0] == 404
    assert line.call(body)[2]["result"]["output"] == "x"
    assert shared_gateway.get(listed)["count"] == 4


def test_a_key_is_honoured_on_a_connection_that_repeats_it(hands: NodeProcess, shared_gateway: GatewayProcess) -> None:
    with Line(shared_gateway, extra="Idempotency-Key: connection-key\r\n") as line:
        answers = [line.call({"tool": "hands__Bash", "args": {"command": "date +%N"}})[2] for _ in range(5)]
    assert len({answer["request_id"] for answer in answers}) == 1
    assert len({answer["result"]["output"] for answer in answers}) == 1


def test_hanging_up_cancels_the_call(hands: NodeProcess, shared_gateway: GatewayProcess, line: Line) -> None:
    body = {"tool": "hands__Bash", "args": {"command": "sleep 60 # 0"}, "session_key": "connection-hang-up"}
    quick = {"tool": "hands__Bash", "args": {"command": "true     # 0"}, "session_key": "connection-hang-up"}
    assert len(line.bytes_of(quick)) == len(line.bytes_of(body))
    warm(line, quick)
    line.send(line.bytes_of(body))
    listed = "/v1/calls?session_key=connection-hang-up&state="
    wait_until(lambda: shared_gateway.get(f"{listed}running")["count"] == 1, what="the call to run")
    line.close()
    wait_until(lambda: shared_gateway.get(f"{listed}cancelled")["count"] == 1, what="the call to be cancelled")


def test_a_call_that_is_open_when_the_gateway_stops_is_answered(gateway: GatewayProcess, tmp_path: Any) -> None:
    with NodeProcess(gateway, tmp_path, "hands"), Line(gateway) as line:
        body = {"tool": "hands__Bash", "args": {"command": "sleep 1; echo b"}}
        quick = {"tool": "hands__Bash", "args": {"command": "sleep 0; echo b"}}
        warm(line, quick)
        line.send(line.bytes_of(body))
        wait_until(lambda: gateway.get("/v1/calls?state=running")["count"] == 1, what="the call to run")
        gateway.stop()
        status, _, answer = line.receive()
        assert (status, answer["result"]["output"].strip()) == (200, "b")
        assert line.ended()


def test_trailing_blanks_of_a_header_value_are_not_part_of_it(
    hands: NodeProcess, shared_gateway: GatewayProcess
) -> None:
    ids = []
    for blanks in ("", " ", "\t", " \t "):
        with Line(shared_gateway, extra=f"Idempotency-Key: connection-blanks{blanks}\r\n") as line:
            whole = line.bytes_of(read("x"))
            host = f"Host: 127.0.0.1:{shared_gateway.port}".encode()
            line.send(whole.replace(host, host + blanks.encode()))
            status, _, answer = line.receive()
            assert status == 200
            ids.append(answer["request_id"])
    assert len(set(ids)) == 1
