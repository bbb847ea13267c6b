"""Attacks on the HTTP routes and the policy by unusual requests and names; each must fail."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.integration.calls.test_principal import token
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

RULES = """
[[policy.rules]]
name = "no etc"
decision = "deny"
args = { path = "/etc/*" }

[[policy.rules]]
name = "marked content is asked about"
decision = "ask"
args = { content = "*ask-me*" }

[[policy.rules]]
name = "marked commands are asked about"
decision = "ask"
args = { command = "*ask-me*" }
"""


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    home = tmp_path_factory.mktemp("held") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node


def raw(gateway: GatewayProcess, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", gateway.port), 10) as connection:
        connection.settimeout(2)
        connection.sendall(data)
        got = b""
        try:
            while len(got) < 100_000 and (piece := connection.recv(65536)):
                got += piece
        except TimeoutError:
            pass
        return got


HEADS = {
    "lower method": (b"get /v1/tokens HTTP/1.1\r\n", b"", b""),
    "doubled slash": (b"GET //v1/tokens HTTP/1.1\r\n", b"", b""),
    "dot segments": (b"GET /v1/nodes/../tokens HTTP/1.1\r\n", b"", b""),
    "trailing slash": (b"GET /v1/tokens/ HTTP/1.1\r\n", b"", b""),
    "parameter": (b"GET /v1/tokens;x HTTP/1.1\r\n", b"", b""),
    "quoted": (b"GET /v1/%74okens HTTP/1.1\r\n", b"", b""),
    "quoted NUL": (b"GET /v1/tokens%00 HTTP/1.1\r\n", b"", b""),
    "absolute with another host": (b"GET http://evil.example/v1/nodes HTTP/1.1\r\n", b"", b""),
    "absolute with another port": (b"GET http://127.0.0.1:1/v1/nodes HTTP/1.1\r\n", b"", b""),
    "compressed chunks": (
        b"POST /v1/policy/explain HTTP/1.1\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"0\r\n\r\n",
    ),
    "absolute": (b"GET http://127.0.0.1/v1/tokens HTTP/1.1\r\n", b"", b""),
    "both lengths": (
        b"POST /v1/policy/explain HTTP/1.1\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"0\r\n\r\n",
    ),
    "unknown coding": (b"POST /v1/policy/explain HTTP/1.1\r\n", b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
    "two codings": (
        b"POST /v1/policy/explain HTTP/1.1\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"0\r\n\r\n",
    ),
    "signed length": (b"POST /v1/policy/explain HTTP/1.1\r\n", b"Content-Length: +2\r\n", b"{}"),
    "listed length": (b"POST /v1/policy/explain HTTP/1.1\r\n", b"Content-Length: 2, 2\r\n", b"{}"),
    "grouped length": (b"POST /v1/policy/explain HTTP/1.1\r\n", b"Content-Length: 1_0\r\n", b"{}"),
    "blank before colon": (b"GET /v1/tokens HTTP/1.1\r\n", b"X-A : b\r\n", b""),
    "folded": (b"GET /v1/tokens HTTP/1.1\r\n", b"X-A: b\r\n c\r\n", b""),
    "bare CR": (b"GET /v1/tokens HTTP/1.1\r\n", b"X-A: b\rX-API-Key: x\r\n", b""),
    "hex chunk": (
        b"POST /v1/policy/explain HTTP/1.1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"0x2\r\n{}\r\n0\r\n\r\n",
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n", b"", b"SM\r\n\r\n"),
    "method override": (b"POST /v1/tokens HTTP/1.1\r\n", b"X-HTTP-Method-Override: GET\r\nContent-Length: 0\r\n", b""),
}


@pytest.mark.parametrize("name", HEADS)
def test_no_spelling_of_a_request_gets_a_reader_further(hands: NodeProcess, name: str) -> None:
    gateway = hands.gateway
    _, reader = token(gateway, "read")
    line, headers, body = HEADS[name]
    host = f"Host: 127.0.0.1:{gateway.port}\r\nContent-Type: application/json\r\n".encode()
    hidden = b"GET /v1/tokens HTTP/1.1\r\n" + host + f"Authorization: Bearer {gateway.token}\r\n\r\n".encode()
    once = f"Authorization: Bearer {reader}\r\nConnection: close\r\n".encode()
    got = raw(gateway, line + host + once + headers + b"\r\n" + body)
    assert re.match(rb"HTTP/1\.1 40[034] ", got), got[:200]
    if b"Transfer-Encoding" in headers:
        smuggled = raw(
            gateway, line + host + f"Authorization: Bearer {reader}\r\n".encode() + headers + b"\r\n" + body + hidden
        )
        assert b"made_by" not in smuggled, smuggled[:300]


@pytest.mark.parametrize(
    "host", ["localhost@evil.example", "localhost.", "0177.0.0.1", "x.localhost", "evil.example", ""]
)
def test_another_host_is_refused(hands: NodeProcess, host: str) -> None:
    got = raw(hands.gateway, f"GET /v1/nodes HTTP/1.1\r\nHost: {host}\r\nX-Forwarded-Host: localhost\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.1 403 "), got[:200]


def test_a_page_needs_its_own_two_secrets(hands: NodeProcess) -> None:
    gateway = hands.gateway
    mine, other = gateway.sign_in(), gateway.sign_in()

    def status(headers: dict[str, str], method: str = "GET", path: str = "/v1/tokens", body: Any = None) -> int:
        return gateway.request(method, path, body, token=None, headers=headers).status

    assert status(mine) == 200
    assert status({**mine, "X-Farhand-Page": other["X-Farhand-Page"]}) == 401
    assert status({**mine, "Origin": "http://127.0.0.1:1"}) == 403
    assert status({**mine, "Authorization": "Bearer wrong"}) == 401
    assert status({**mine, "Cookie": f"farhand_session_{gateway.port}=x; {mine['Cookie']}"}) == 401
    assert status({"Cookie": mine["Cookie"]}, path=f"/v1/tokens?page={mine['X-Farhand-Page']}") == 401
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert status({**mine, "Content-Type": kind}, "POST", "/v1/thaw", b"") == 415


PATHS = [
    "/etc/hostname", "//etc/hostname", "/./etc/hostname", "/tmp/../etc/hostname", "/etc//hostname",
    "/proc/self/root/etc/hostname", "/proc/thread-self/root/etc/hostname", "/proc/1/root/etc/hostname",
    "/proc/self/./root/etc/hostname", "/proc/self/task/../root/etc/hostname", "/proc/self/fd/../root/etc/hostname",
    "/proc/1/cwd/etc/hostname", "/proc/self/cwd/etc/hostname", "/dev/fd/../root/etc/hostname",
    "/proc/net/../root/etc/hostname",
    "../../../../../../../../etc/hostname", "~root/../etc/hostname", "file:///etc/hostname",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tool", ["hands__Read", "hands__READ"])
def test_a_denied_path_is_not_read(hands: NodeProcess, tool: str, path: str) -> None:
    assert not hands.gateway.invoke(tool, {"path": path})["ok"]


@pytest.mark.parametrize("name", ["HANDS__Read", "hands__Read ", "hands__Re\u0430d", "hands___Read", "Read"])
def test_another_name_finds_no_tool(hands: NodeProcess, name: str) -> None:
    assert hands.gateway.invoke(name, {"path": "/etc/hostname"})["error"]["kind"] == "not_found"


def test_a_name_that_comes_twice_is_judged_and_run_alike(hands: NodeProcess) -> None:
    (hands.workspace / "f").write_text("x")
    body = b'{"tool":"hands__Read","args":{"path":"f","path":"/etc/hostname"}}'
    assert hands.gateway.request("POST", "/v1/tools/invoke", body).json()["state"] == "denied"


@pytest.mark.parametrize("swap", ["file", "folder", "workdir"])
def test_a_path_that_became_a_link_since_the_preview_is_refused(hands: NodeProcess, tmp_path: Path, swap: str) -> None:
    place = hands.workspace / f"swap-{swap}"
    if swap == "file":
        place.write_text("t\n")
        (tmp_path / "t").write_text("t\n")
        call, target = ("hands__Write", {"path": str(place), "content": "ask-me"}), tmp_path / "t"
    else:
        place.mkdir()
        call = ("hands__Write", {"path": str(place / "new"), "content": "ask-me"})
        call = ("hands__Bash", {"command": "echo ask-me", "workdir": str(place)}) if swap == "workdir" else call
        target = tmp_path
    begun = hands.gateway.invoke(*call, background=True)
    approval = asked(hands.gateway, begun["request_id"])
    place.unlink() if swap == "file" else place.rmdir()
    os.symlink(target, place)
    assert answer(hands.gateway, approval).status == 200
    ended = wait_until(
        lambda: (
            (found := hands.gateway.get(f"/v1/calls/{approval['call_id']}"))["state"] not in ("waiting", "running")
            and found
        )
    )
    assert ended["state"] == "denied" and not (tmp_path / "new").exists(), ended


@pytest.mark.parametrize("agent", ["..", "../../x", "main/../x", ".", "helper%2f..", "a" * 70])
def test_an_agent_name_is_not_a_path(hands: NodeProcess, agent: str) -> None:
    read = hands.gateway.invoke("gsv__ReadFile", {"path": "x"}, agent_id=agent)
    assert read["error"]["kind"] == "invalid_args", read


def test_a_claimed_session_shows_nothing(hands: NodeProcess) -> None:
    _, reader = token(hands.gateway, "tools.read")
    for key in ("main", "agent:main:main", "agent::", " main"):
        for tool in ("sessions_history", "sessions_status"):
            body = {"tool": tool, "args": {"session_id": key}, "session_key": key}
            said = hands.gateway.request("POST", "/v1/tools/invoke", body, token=reader).json()
            assert not said["ok"], said


def test_a_session_of_mcp_and_its_streams_are_their_credentials(hands: NodeProcess) -> None:
    gateway = hands.gateway
    _, one = token(gateway, "tools.exec")
    _, other = token(gateway, "tools.exec")
    accept = {"Accept": "application/json, text/event-stream"}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    session = gateway.request("POST", "/mcp", hello, token=one, headers=accept).headers["mcp-session-id"]
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    for stranger in (other, "owner"):
        foreign = gateway.request(
            "POST", "/mcp", listing, token=stranger, headers={**accept, "Mcp-Session-Id": session}
        )
        assert foreign.status == 404, foreign
    made = gateway.invoke("exec", {"command": "echo owner"})["request_id"]
    place = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": f"call:{made}:{b'1'.hex()}"}
    assert gateway.request("GET", "/mcp", token=one, headers=place).status == 404


NAMES = [
    "HEARTBEAT.md",
    "heartbeat.md",
    "HEARTBEAT.md.",
    "HEARTBEAT.md ",
    "./HEARTBEAT.md",
    "\uff28EARTBEAT.md",
    "SKILLS/x/SKILL.md",
    "sub/../SOUL.md",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_route_writes_a_steering_file_for_a_writer(hands: NodeProcess, name: str) -> None:
    gateway = hands.gateway
    _, writer = token(gateway, "tools.write")
    kind = {"Content-Type": "text/plain"}
    for path in (f"/v1/transfers/content?destination={quote('gsv:' + name)}", f"/v1/workspace/main/{quote(name)}"):
        assert gateway.request("PUT", path, b"x", token=writer, headers=kind).status == 403
    for tool in ("gsv__WriteFile", "write"):
        body = {"tool": tool, "args": {"path": name, "content": "x"}}
        assert not gateway.request("POST", "/v1/tools/invoke", body, token=writer).json()["ok"]
