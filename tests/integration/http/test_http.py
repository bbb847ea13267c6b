"""The HTTP doors: who is let in, what bad requests get, the live journal, and how the process starts and stops."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.harness import SHARED_TOKEN, Answer, GatewayProcess, PlainNode, Plugin, hello_frame, wait_until

PUBLIC = {
    *("/v1/pair/offer", "/join/{code}", "/join/{code}/{file}"),
    *("/healthz", "/readyz", "/version", "/v1/nodes/ws", "/v1/openapi.json", "/v1/pair", "/hooks/{hook_id}"),
    *("/signin", "/", "/assets/{name}", "/console.svg", "/icon-192.png", "/icon-512.png", "/manifest.webmanifest"),
    *("/docs", "/docs.js", "/docs.css"),
    "/v1/mcp/callback",
    *("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource/mcp"),
    *("/.well-known/oauth-authorization-server", "/oauth/register", "/oauth/token", "/oauth/revoke"),
    *("/oauth/authorize", "/oauth/consent.js", "/oauth/consent.css"),
}

PROTECTED = [
    ("GET", "/v1/health"),
    ("GET", "/v1/nodes"),
    ("DELETE", "/v1/nodes/x"),
    ("GET", "/v1/tools"),
    ("POST", "/v1/tools/invoke"),
    ("GET", "/v1/calls"),
    ("GET", "/v1/calls/x"),
    ("DELETE", "/v1/calls/x"),
    ("GET", "/v1/events"),
    ("GET", "/v1/tokens"),
    ("POST", "/v1/tokens"),
    ("DELETE", "/v1/tokens/x"),
    ("POST", "/v1/signin"),
    ("GET", "/v1/nothing"),
    ("GET", "/nothing"),
    ("PUT", "/v1/nodes"),
    ("OPTIONS", "/v1/nodes"),
]


@pytest.fixture(scope="module")
def worker(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    with Plugin(shared_gateway, tmp_path_factory.mktemp("worker"), "worker") as plugin:
        yield plugin


def raw(gateway: GatewayProcess, request: str | bytes, *, seconds: float = 10) -> bytes:
    """The bytes a hand-written request is answered with."""
    data = request if isinstance(request, bytes) else request.encode("latin-1")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=seconds) as client:
        client.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                answer += piece
        return answer


def get_with(gateway: GatewayProcess, *headers: str, path: str = "/v1/nodes") -> int:
    """The status of a GET with exactly these headers, the owner's token and nothing else."""
    lines = [
        f"GET {path} HTTP/1.1",
        *headers,
        f"Authorization: Bearer {gateway.token}",
        "Connection: close",
        "",
        "",
    ]
    return int(raw(gateway, "\r\n".join(lines)).split(b" ", 2)[1])


def problem(answer: Answer) -> dict[str, Any]:
    """The error object of an answer, which must have the shape of the interface."""
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"code", "message"} <= set(error) <= {"code", "message", "details"}
    assert error["code"] and error["message"] and "Traceback" not in error["message"]
    return dict(error)


# -- credentials -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_credentials(shared_gateway: GatewayProcess, path: str) -> None:
    assert shared_gateway.get(path, token=None) == {"ok": True}


def test_version_needs_no_credentials(shared_gateway: GatewayProcess) -> None:
    import farhand

    assert shared_gateway.get("/version", token=None) == {"version": farhand.__version__}


def test_v1_health(shared_gateway: GatewayProcess) -> None:
    health = shared_gateway.get("/v1/health")
    assert health["status"] == "ok" and health["version"] == shared_gateway.get("/version")["version"]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("token", [None, "wrong", ""])
def test_every_other_route_needs_credentials(
    shared_gateway: GatewayProcess, method: str, path: str, token: str | None
) -> None:
    answer = shared_gateway.request(method, path, {} if method == "POST" else None, token=token)
    assert answer.status == 401
    assert problem(answer)["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_no_route_skips_the_guard(shared_gateway: GatewayProcess) -> None:
    """The description is made from the routes, so that a route added later is tried too."""
    paths = shared_gateway.get("/v1/openapi.json")["paths"]
    assert len(paths) > 90
    for path, operations in paths.items():
        for method, operation in operations.items():
            if path in PUBLIC:
                assert operation["security"] == [], path
                continue
            assert "security" not in operation, path
            asked = "/".join("x" if part.startswith("{") else part for part in path.split("/"))
            assert shared_gateway.request(method.upper(), asked, token=None).status == 401, (method, path)
            assert "Needs the scope" in operation["description"], path


@pytest.mark.parametrize("form", ["Authorization: Bearer %s", "authorization: bearer %s", "X-API-Key: %s"])
def test_forms_of_the_token(shared_gateway: GatewayProcess, form: str) -> None:
    name, _, value = form.partition(": ")
    answer = shared_gateway.request("GET", "/v1/nodes", token=None, headers={name: value % shared_gateway.token})
    assert answer.status == 200


@pytest.mark.parametrize("query", ["token=%s", "access_token=%s", "api_key=%s"])
def test_token_in_the_query_is_not_taken(shared_gateway: GatewayProcess, query: str) -> None:
    assert shared_gateway.request("GET", f"/v1/nodes?{query % shared_gateway.token}", token=None).status == 401


def test_owner_token_and_home_are_private(shared_gateway: GatewayProcess) -> None:
    assert stat.S_IMODE(shared_gateway.home.stat().st_mode) == 0o700
    assert stat.S_IMODE((shared_gateway.home / "token").stat().st_mode) == 0o600


def new_token(gateway: GatewayProcess, **wanted: Any) -> dict[str, Any]:
    answer = gateway.request("POST", "/v1/tokens", wanted)
    assert answer.status == 201, answer
    return dict(answer.json())


def test_read_token_cannot_change_anything(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    token = new_token(shared_gateway, scopes=["read"])["token"]
    for path in ("/v1/nodes", "/v1/tools", "/v1/calls", "/v1/health"):
        assert shared_gateway.request("GET", path, token=token).status == 200
    for method, path, body in (
        ("POST", "/v1/tools/invoke", {"tool": "worker.effect"}),
        ("DELETE", "/v1/calls/x", None),
        ("POST", "/v1/tokens", {}),
        ("GET", "/v1/tokens", None),
        ("DELETE", "/v1/tokens/x", None),
        ("DELETE", "/v1/nodes/x", None),
    ):
        answer = shared_gateway.request(method, path, body, token=token)
        assert answer.status == 403 and problem(answer)["code"] == "forbidden", (method, path)


def test_caller_token_can_call_but_not_make_tokens(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    token = new_token(shared_gateway, label="agent")["token"]
    body = {"tool": "worker.echo", "args": {"text": "x"}}
    assert shared_gateway.request("POST", "/v1/tools/invoke", body, token=token).json()["ok"] is True
    assert shared_gateway.request("POST", "/v1/tokens", {"scopes": ["admin"]}, token=token).status == 403


@pytest.mark.parametrize(
    "wanted",
    [{"scopes": []}, {"scopes": ["everything"]}, {"scopes": "read"}, {"label": 5}, {"expires_seconds": 1e300}, []],
)
def test_token_request_that_cannot_be_is_400(shared_gateway: GatewayProcess, wanted: Any) -> None:
    answer = shared_gateway.request("POST", "/v1/tokens", wanted)
    assert answer.status == 400 and problem(answer)["code"] == "invalid_request"


def test_revoked_token_is_refused_at_once(shared_gateway: GatewayProcess) -> None:
    made = new_token(shared_gateway)
    assert shared_gateway.request("GET", "/v1/nodes", token=made["token"]).status == 200
    assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 200
    assert shared_gateway.request("GET", "/v1/nodes", token=made["token"]).status == 401
    assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 404


def test_revoked_token_stays_so_after_a_restart(gateway: GatewayProcess) -> None:
    kept, gone = new_token(gateway), new_token(gateway)
    gateway.request("DELETE", f"/v1/tokens/{gone['id']}")
    gateway.kill()
    gateway.start()
    assert gateway.request("GET", "/v1/nodes", token=kept["token"]).status == 200
    assert gateway.request("GET", "/v1/nodes", token=gone["token"]).status == 401


def test_revoking_a_node_token_disconnects_the_node(shared_gateway: GatewayProcess) -> None:
    made = new_token(shared_gateway, node_id="revoked")

    async def scenario() -> int:
        async with PlainNode.connect(shared_gateway, "revoked", ["revoked"], token=made["token"]) as node:
            await asyncio.to_thread(shared_gateway.request, "DELETE", f"/v1/tokens/{made['id']}")
            with pytest.raises(websockets.ConnectionClosed) as end:
                await asyncio.wait_for(node.socket.recv(), 10)
            assert end.value.rcvd is not None
            return int(end.value.rcvd.code)

    assert asyncio.run(scenario()) == 4401
    shared_gateway.wait_for_node("revoked", online=False)
    assert shared_gateway.upgrade(f"token={made['token']}&node_id=revoked").status == 401


def test_sign_in_link_works_once(shared_gateway: GatewayProcess) -> None:
    path = shared_gateway.request("POST", "/v1/signin", {}).json()["path"]
    answer = shared_gateway.request("GET", path, token=None)
    assert answer.status == 303 and answer.headers["location"].startswith("./#page=")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    page = answer.headers["location"].partition("=")[2]
    signed_in = {"Cookie": cookie.partition(";")[0], "X-Farhand-Page": page}
    assert shared_gateway.request("GET", "/v1/nodes", token=None, headers=signed_in).status == 200
    assert shared_gateway.request("GET", path, token=None).status == 401


def test_cookie_needs_json(shared_gateway: GatewayProcess) -> None:
    """A form on a foreign page can send the cookie, but not this content type."""
    signed_in = shared_gateway.sign_in()
    body = b'{"tool":"x"}'
    form = {**signed_in, "Content-Type": "text/plain"}
    assert shared_gateway.request("POST", "/v1/tools/invoke", body, token=None, headers=form).status == 415
    good = {**signed_in, "Content-Type": "application/json"}
    assert shared_gateway.request("POST", "/v1/tools/invoke", body, token=None, headers=good).status == 200


# -- every answer ------------------------------------------------------------------------------------------------


def test_every_answer_carries_a_request_id(shared_gateway: GatewayProcess) -> None:
    ask = shared_gateway.request
    answers = [
        ask("GET", "/healthz", token=None),
        ask("GET", "/v1/nodes"),
        ask("GET", "/v1/nodes", token=None),
        ask("GET", "/nothing"),
        ask("PUT", "/v1/nodes"),
        ask("POST", "/v1/tools/invoke", b"{"),
        ask("POST", "/v1/tools/invoke", {"tool": "no.such"}),
        ask("GET", "/v1/nodes", headers={"Host": "evil.example"}),
        ask("GET", "/v1/nodes", headers={"Origin": "http://evil.example"}),
        ask("GET", "/v1/nodes/ws"),
        shared_gateway.upgrade("token=wrong"),
        shared_gateway.upgrade("token=a&token=b"),
        shared_gateway.upgrade("", {"Origin": "http://evil.example"}),
    ]
    ids = [answer.headers.get("x-request-id") for answer in answers]
    assert all(ids), [(answer.status, answer.headers) for answer in answers if not answer.headers.get("x-request-id")]
    assert len(set(ids)) == len(ids)


def test_unknown_path_is_404(shared_gateway: GatewayProcess) -> None:
    answer = shared_gateway.request("GET", "/v1/no/such/thing")
    assert answer.status == 404 and problem(answer)["code"] == "not_found"


def test_wrong_method_is_405_with_allow(shared_gateway: GatewayProcess) -> None:
    answer = shared_gateway.request("GET", "/v1/tools/invoke")
    assert answer.status == 405 and problem(answer)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


def test_head_is_get_without_a_body(shared_gateway: GatewayProcess) -> None:
    answer = shared_gateway.request("HEAD", "/v1/nodes")
    assert answer.status == 200 and answer.body == b"" and int(answer.headers["content-length"]) > 0


# -- bad requests ------------------------------------------------------------------------------------------------

BAD_BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "cut off": b'{"tool":"worker.echo"',
    "not JSON": b"tool=worker.echo",
    "an array": b"[]",
    "null": b"null",
    "a number": b"42",
    "no tool": b'{"args":{}}',
    "tool is a number": b'{"tool":5}',
    "tool is null": b'{"tool":null}',
    "tool is empty": b'{"tool":""}',
    "background is a word": b'{"tool":"worker.echo","background":"yes"}',
    "session key is a number": b'{"tool":"worker.echo","session_key":5}',
    "timeout is an object": b'{"tool":"worker.echo","timeout_ms":{}}',
    "broken args": b'{"tool":"worker.echo","args":{"a":}}',
    "not a number": b'{"tool":"worker.echo","args":NaN}',
    "trailing words": b'{"tool":"worker.echo"} extra',
    "invalid UTF-8": b'{"tool":"\xff\xfe"}',
    "invalid UTF-8 in args": b'{"tool":"worker.echo","args":{"text":"\xc3("}}',
    "UTF-16": '{"tool":"worker.echo"}'.encode("utf-16"),
    "deep nesting": b'{"tool":"worker.echo","args":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep and cut off": b'{"tool":"worker.echo","args":' + b'{"a":' * 200_000,
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_body_is_400_with_a_clear_text(shared_gateway: GatewayProcess, worker: Plugin, body: bytes) -> None:
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body)
    assert answer.status == 400
    assert problem(answer)["code"] == "invalid_request"
    assert shared_gateway.invoke("worker.echo", {"text": "x"})["ok"] is True


@pytest.mark.parametrize("depth", [60, 500, 900, 980, 1000, 1100, 3000])
def test_nested_arguments_are_never_an_internal_error(
    shared_gateway: GatewayProcess, worker: Plugin, depth: int
) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"tool":"worker.echo","args":{"text":"x","count":1,"more":%b}}' % nested
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body)
    assert answer.status in (200, 400), answer
    if answer.status == 200:
        found = shared_gateway.request("GET", f"/v1/calls/{answer.json()['request_id']}")
        assert found.status == 200 and nested in found.body


@pytest.mark.parametrize("tool", ["a" * 100_000, "\x00", "a\nb", "ü.ü", "🦀", "..", "a b", "%s%n"])
def test_strange_tool_names_are_not_found(shared_gateway: GatewayProcess, tool: str) -> None:
    envelope = shared_gateway.invoke(tool, {})
    assert envelope["error"]["kind"] == "not_found"


def test_body_too_large_is_413_before_it_is_sent(shared_gateway: GatewayProcess) -> None:
    size = 16 * 1024 * 1024 + 1
    answer = raw(
        shared_gateway,
        f"POST /v1/tools/invoke HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shared_gateway.token}\r\n"
        f"Connection: close\r\nContent-Length: {size}\r\n\r\n",
    )
    assert b" 413 " in answer.split(b"\r\n")[0] and b'"too_large"' in answer


def test_chunked_body_too_large_is_413(shared_gateway: GatewayProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared_gateway.port, timeout=30)
    headers = {"Authorization": f"Bearer {shared_gateway.token}"}
    try:
        with contextlib.suppress(ConnectionError):
            pieces = (b"x" * 65536 for _ in range(300))
            connection.request("POST", "/v1/tools/invoke", pieces, headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "too_large"
    finally:
        connection.close()


@pytest.mark.parametrize(
    "request_text",
    [
        "GARBAGE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "POST /v1/tools/invoke HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        "POST /v1/tools/invoke HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        "POST /v1/tools/invoke HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "\x16\x03\x01\x02\x00\x01",
    ],
)
def test_requests_that_are_not_http_are_refused(shared_gateway: GatewayProcess, request_text: str) -> None:
    with contextlib.suppress(TimeoutError):
        answer = raw(shared_gateway, request_text, seconds=2)
        assert answer == b"" or answer.split(b" ")[1][:1] == b"4", answer[:200]
    assert shared_gateway.get("/healthz", token=None) == {"ok": True}


@pytest.mark.parametrize("query", ["limit=" + "9" * 5000, "limit=1e3", "limit=", "limit=--5", "limit=%FF"])
def test_absurd_numbers_are_400(shared_gateway: GatewayProcess, query: str) -> None:
    answer = shared_gateway.request("GET", f"/v1/calls?{query}")
    assert answer.status == 400 and problem(answer)["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/policy/replay", {"since": 10**30}), ("/v1/policy/replay", {"since": -(10**30)})],
)
def test_absurd_numbers_in_a_body_are_400(shared_gateway: GatewayProcess, path: str, body: Any) -> None:
    answer = shared_gateway.request("POST", path, body)
    assert answer.status == 400 and problem(answer)["code"] == "invalid_request"


# -- pages in a browser --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/nodes", "/healthz", "/"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:3210", "localhost.evil.example", "127.0.0.1.evil.example", "2130706433", ""]
)
def test_name_that_is_not_ours_is_403(shared_gateway: GatewayProcess, host: str, path: str) -> None:
    """A page that makes its own name point at this machine still sends that name."""
    answer = shared_gateway.request("GET", path, headers={"Host": host})
    assert answer.status == 403 and problem(answer)["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:%d", "127.0.0.1:%d", "[::1]:%d", "192.168.1.7"])
def test_names_and_addresses_that_are_ours(shared_gateway: GatewayProcess, host: str) -> None:
    named = host % shared_gateway.port if "%d" in host else host
    assert shared_gateway.request("GET", "/v1/nodes", headers={"Host": named}).status == 200


@pytest.mark.parametrize(
    "hosts", [("evil.example", "127.0.0.1"), ("127.0.0.1", "evil.example"), ("127.0.0.1", "127.0.0.1")]
)
def test_two_host_headers_are_400(shared_gateway: GatewayProcess, hosts: tuple[str, str]) -> None:
    assert get_with(shared_gateway, "Host: 127.0.0.1") == 200
    assert get_with(shared_gateway, *(f"Host: {host}" for host in hosts)) == 400


def test_node_socket_checks_the_name_too(shared_gateway: GatewayProcess) -> None:
    good = {"Authorization": f"Bearer {SHARED_TOKEN}"}
    assert shared_gateway.upgrade("", {**good, "Host": "evil.example"}).status == 403


ORIGINS = [
    "http://evil.example",
    "https://evil.example",
    "null",
    "",
    "file://",
    "https://127.0.0.1:%d",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    "http://127.0.0.1:%d.evil.example",
    "http://127.0.0.1:%d@evil.example",
]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("path", ["/v1/nodes", "/healthz"])
def test_foreign_origin_is_403_even_with_a_good_token(shared_gateway: GatewayProcess, path: str, origin: str) -> None:
    sent = origin % shared_gateway.port if "%d" in origin else origin
    answer = shared_gateway.request("GET", path, headers={"Origin": sent})
    assert answer.status == 403 and problem(answer)["code"] == "origin_not_allowed"
    assert not any(name.startswith("access-control-") for name in answer.headers)


@pytest.mark.parametrize("origin", ORIGINS)
def test_foreign_origin_gets_no_node_socket(shared_gateway: GatewayProcess, origin: str) -> None:
    sent = origin % shared_gateway.port if "%d" in origin else origin
    headers = {"Authorization": f"Bearer {SHARED_TOKEN}", "Origin": sent}
    assert shared_gateway.upgrade("", headers).status == 403


def test_preflight_of_a_foreign_page_is_refused(shared_gateway: GatewayProcess) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = shared_gateway.request("OPTIONS", "/v1/tools/invoke", token=None, headers=headers)
    assert answer.status == 403
    assert not any(name.startswith("access-control-") for name in answer.headers)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_same_origin_is_allowed(shared_gateway: GatewayProcess, name: str) -> None:
    place = f"{name}:{shared_gateway.port}"
    headers = {"Host": place, "Origin": f"http://{place}"}
    assert shared_gateway.request("GET", "/v1/nodes", headers=headers).status == 200
    node = {**headers, "Authorization": f"Bearer {SHARED_TOKEN}"}
    assert shared_gateway.upgrade("", node).status == 101


def test_open_gateway_still_refuses_pages_and_forms(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", "--open", env={"SA_NODE_TOKEN": None}) as gateway:
        page = {"Origin": "http://evil.example"}
        assert gateway.request("GET", "/v1/nodes", token=None, headers=page).status == 403
        assert gateway.upgrade("", page).status == 403
        assert gateway.request("GET", "/v1/nodes", token=None, headers={"Host": "evil.example"}).status == 403
        form = {"Content-Type": "text/plain"}
        answer = gateway.request("POST", "/v1/tools/invoke", b'{"tool":"x"}', token=None, headers=form)
        assert answer.status == 415


def test_names_and_pages_can_be_allowed(tmp_path: Path) -> None:
    env: dict[str, str | None] = {
        "FARHAND_GATEWAY_HOSTS": "hands.example",
        "FARHAND_GATEWAY_ORIGINS": "https://app.example",
    }
    with GatewayProcess(tmp_path / "home", env=env) as gateway:
        headers = {"Host": "hands.example", "Origin": "https://app.example"}
        assert gateway.request("GET", "/v1/nodes", headers=headers).status == 200
        assert gateway.request("GET", "/v1/nodes", headers={"Host": "other.example"}).status == 403
        assert gateway.request("GET", "/v1/nodes", headers={"Origin": "https://other.example"}).status == 403


# -- guessing ------------------------------------------------------------------------------------------------------


def test_ten_wrong_tokens_lock_an_address_out(gateway: GatewayProcess) -> None:
    far = {"X-Forwarded-For": "203.0.113.7"}
    for number in range(10):
        assert gateway.request("GET", "/v1/nodes", token=f"guess{number}", headers=far).status == 401
    locked = gateway.request("GET", "/v1/nodes", token="guess", headers=far)
    assert locked.status == 429 and problem(locked)["code"] == "too_many_failures"
    assert 1 <= int(locked.headers["retry-after"]) <= 301
    assert gateway.request("GET", "/v1/nodes", headers=far).status == 200, "others at the address have valid tokens"
    assert gateway.request("GET", "/v1/nodes", token="guess", headers=far).status == 429, "which do not lift the lock"
    assert gateway.request("GET", "/v1/nodes").status == 200, "others are not locked out"
    assert gateway.request("GET", "/healthz", token=None, headers=far).status == 200


def test_a_lockout_is_recorded_and_not_lifted_by_others(gateway: GatewayProcess) -> None:
    far = {"X-Forwarded-For": "203.0.113.7"}
    for _ in range(12):
        gateway.request("GET", "/v1/nodes", token="a-guess-of-a-token", headers=far)
    assert gateway.request("GET", "/v1/nodes").status == 200, "a program here, at the same address as the proxy"
    assert gateway.request("GET", "/v1/nodes", token="another-guess", headers=far).status == 429
    said = [line for line in gateway.log.read_text().splitlines() if "locked out" in line]
    assert len(said) == 1 and "127.0.0.1 is locked out for 300 s after 10 wrong tokens" in said[0]
    events = gateway.request("GET", "/v1/journal?limit=100").json()["events"]
    locked = [event for event in events if event["kind"] == "address.locked_out"]
    assert [(event["subject"], event["data"]["tries"], event["data"]["seconds"]) for event in locked] == [
        ("127.0.0.1", 10, 300)
    ]
    assert "a-guess-of-a-token" not in gateway.log.read_text() + str(events)


def test_ten_wrong_node_tokens_lock_an_address_out(gateway: GatewayProcess) -> None:
    far = {"X-Forwarded-For": "203.0.113.8"}
    for number in range(10):
        assert gateway.upgrade(f"token=guess{number}", far).status == 401
    locked = gateway.upgrade(f"token={SHARED_TOKEN}", far)
    assert locked.status == 429 and int(locked.headers["retry-after"]) >= 1
    assert gateway.upgrade(f"token={SHARED_TOKEN}").status == 101
    own = gateway.request("POST", "/v1/tokens", {"node_id": "far"}).json()["token"]
    assert gateway.upgrade(f"node_id=far&token={own}", far).status == 101, "it is too long to be guessed"


def test_what_is_valid_is_accepted_during_a_lockout(gateway: GatewayProcess) -> None:
    """Behind a proxy, one client that guesses must not lock out the others."""
    far = {"X-Forwarded-For": "203.0.113.7"}
    narrow = gateway.request("POST", "/v1/tokens", {"tools": ["gsv__ReadFile"]}).json()["token"]
    for number in range(10):
        gateway.request("GET", "/v1/nodes", token=f"guess{number}", headers=far)
    call = {"tool": "gsv__ReadFile", "args": {}}
    assert gateway.request("POST", "/v1/tools/invoke", call, token=narrow, headers=far).status == 200
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin}
    assert gateway.request("POST", "/mcp", message, token=narrow, headers=far).status == 200
    form = {**far, "Content-Type": "application/x-www-form-urlencoded"}
    assert gateway.request("POST", "/oauth/token", b"client_id=nobody", token=None, headers=form).status == 429
    client = gateway.request("POST", "/oauth/register", {"redirect_uris": ["https://a.example/"]}, token=None).json()
    refresh = f"grant_type=refresh_token&refresh_token=x&client_id={client['client_id']}".encode()
    assert gateway.request("POST", "/oauth/token", refresh, token=None, headers=form).status == 400
    assert gateway.request("POST", "/v1/pair", {"code": "AAAA-AAAA", "node_id": "x"}, headers=far).status == 429


def test_guesses_of_a_page_count(gateway: GatewayProcess) -> None:
    page = {"Origin": gateway.url, "Host": gateway.url.removeprefix("http://")}
    statuses = [gateway.request("GET", "/v1/nodes", token="guess", headers=page).status for _ in range(11)]
    assert statuses == [401] * 10 + [429]


def test_programs_on_this_machine_are_not_locked_out(gateway: GatewayProcess) -> None:
    for _ in range(30):
        assert gateway.request("GET", "/v1/nodes", token="guess").status == 401
    assert gateway.request("GET", "/v1/nodes").status == 200


def test_a_missing_token_does_not_count_as_a_guess(gateway: GatewayProcess) -> None:
    far = {"X-Forwarded-For": "203.0.113.9"}
    for _ in range(15):
        assert gateway.request("GET", "/v1/nodes", token=None, headers=far).status == 401
    assert gateway.request("GET", "/v1/nodes", headers=far).status == 200


# -- the live journal ------------------------------------------------------------------------------------------------


class Reader:
    """A client of `GET /v1/events`."""

    def __init__(self, gateway: GatewayProcess, last: int | None = None, *, follow: bool = True) -> None:
        headers = {"Authorization": f"Bearer {gateway.token}"}
        if last is not None:
            headers["Last-Event-ID"] = str(last)
        self._connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
        self._connection.request("GET", f"/v1/events{'' if follow else '?follow=0'}", headers=headers)
        self.response = self._connection.getresponse()
        assert self.response.status == 200
        assert self.response.headers["Content-Type"].startswith("text/event-stream")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        fields: dict[str, str] = {}
        for line in self.response:
            text = line.decode().rstrip("\n")
            if text:
                name, _, value = text.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield {"id": int(fields["id"]), "event": fields["event"], "data": json.loads(fields["data"])}
                fields = {}
            else:
                fields = {}

    def take(self, count: int) -> list[dict[str, Any]]:
        return [event for event, _ in zip(self, range(count), strict=False)]

    def until(self, call_id: str) -> list[dict[str, Any]]:
        """Events up to the end of a call."""
        found = []
        for event in self:
            found.append(event)
            if event["event"] == "call.ended" and event["data"]["subject"] == call_id:
                break
        return found


def journal(gateway: GatewayProcess, last: int = 0) -> list[dict[str, Any]]:
    with Reader(gateway, last, follow=False) as reader:
        return list(reader)


def test_events_come_live_and_in_order(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    with Reader(shared_gateway) as reader:
        calls = [shared_gateway.invoke("worker.effect", {})["request_id"] for _ in range(3)]
        events = reader.until(calls[-1])
    ids = [event["id"] for event in events]
    assert ids == sorted(set(ids))
    story = [(event["event"], event["data"]["subject"]) for event in events if event["event"].startswith("call.")]
    assert story == [(kind, call) for call in calls for kind in ("call.started", "call.ended")]
    assert events[-1]["data"]["id"] == events[-1]["id"]
    assert events[-1]["data"]["data"]["state"] == "ok"


def test_last_event_id_is_exclusive(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    shared_gateway.invoke("worker.effect", {})
    everything = journal(shared_gateway)
    middle = everything[len(everything) // 2]["id"]
    assert journal(shared_gateway, middle) == [event for event in everything if event["id"] > middle]
    assert journal(shared_gateway, everything[-1]["id"]) == []


def test_a_reader_that_is_ahead_of_the_journal_gets_what_is_new(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    """As after `farhand restore`: the ids it has seen are of another journal."""
    end = journal(shared_gateway)[-1]["id"]
    with Reader(shared_gateway, end + 1000) as reader:
        assert b"the journal ends before" in b"".join(reader.response.readline() for _ in range(3))
        call = shared_gateway.invoke("worker.effect", {})["request_id"]
        assert reader.until(call)[0]["id"] == end + 1
    assert journal(shared_gateway, end + 1000) == []


def test_no_event_is_lost_across_reconnects(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    last = begin = journal(shared_gateway)[-1]["id"]
    seen: list[dict[str, Any]] = []
    for _ in range(6):
        shared_gateway.invoke("worker.effect", {})
        with Reader(shared_gateway, last) as reader:
            shared_gateway.invoke("worker.effect", {})
            seen += reader.take(3)
        last = seen[-1]["id"]
    seen += journal(shared_gateway, last)
    assert [event["id"] for event in seen] == [event["id"] for event in journal(shared_gateway, begin)]
    assert len(seen) >= 24


def test_no_event_is_lost_when_the_gateway_is_killed(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w"):
        calls = [gateway.invoke("w.effect", {})["request_id"] for _ in range(3)]
        before = journal(gateway)
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("w")
        calls.append(gateway.invoke("w.effect", {})["request_id"])
        after = journal(gateway)
    assert after[: len(before)] == before
    assert [event["data"]["subject"] for event in after if event["event"] == "call.ended"] == calls


def test_nodes_and_tokens_are_in_the_journal(shared_gateway: GatewayProcess) -> None:
    begin = (journal(shared_gateway) or [{"id": 0}])[-1]["id"]

    async def scenario() -> None:
        async with PlainNode.connect(shared_gateway, "noted", ["noted"]):
            pass

    asyncio.run(scenario())
    shared_gateway.wait_for_node("noted", online=False)
    token_id = new_token(shared_gateway)["id"]
    shared_gateway.request("DELETE", f"/v1/tokens/{token_id}")

    def story() -> list[tuple[str, str]] | None:
        found = [(event["event"], event["data"]["subject"]) for event in journal(shared_gateway, begin)]
        return found if ("token.revoked", token_id) in found else None

    found = wait_until(story, 10, "the journal")
    wanted = [
        ("node.online", "noted"),
        ("node.offline", "noted"),
        ("token.created", token_id),
        ("token.revoked", token_id),
    ]
    assert [entry for entry in found if entry in wanted] == wanted


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "9" * 5000])
def test_last_event_id_that_cannot_be_is_400(shared_gateway: GatewayProcess, last: str) -> None:
    answer = shared_gateway.request("GET", "/v1/events?follow=0", headers={"Last-Event-ID": last})
    assert answer.status == 400 and "Last-Event-ID" in problem(answer)["message"]


def test_slow_reader_does_not_affect_others_and_misses_nothing(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    begin = (journal(shared_gateway) or [{"id": 0}])[-1]["id"]
    with Reader(shared_gateway, begin) as slow, Reader(shared_gateway, begin) as fast:
        for _ in range(120):
            shared_gateway.invoke("x" * 200_000)  # each leaves an entry of this length: 24 MB that are not read
        began = time.monotonic()
        last = shared_gateway.invoke("worker.effect", {})["request_id"]
        assert time.monotonic() - began < 60
        quick = [event["id"] for event in fast.until(last)]
        late = [event["id"] for event in slow.until(last)]
    assert quick == late == sorted(set(quick))
    assert len(quick) >= 122


# -- secrets and the log -------------------------------------------------------------------------------------------


def test_no_secret_in_any_log(tmp_path: Path) -> None:
    shared = "S3cret+node/token=="
    gateway = GatewayProcess(tmp_path / "home", "--log-level", "debug", env={"SA_NODE_TOKEN": shared})
    gateway.start(wait=False)
    process = gateway.process
    assert process is not None and process.stdout is not None
    output = process.stdout.readline()
    secrets = [shared, "S3cret%2Bnode%2Ftoken%3D%3D", base64.urlsafe_b64encode(shared.encode()).decode().rstrip("=")]
    try:
        node = new_token(gateway, node_id="logged")["token"]
        caller = new_token(gateway)["token"]
        code = gateway.request("POST", "/v1/signin", {}).json()["path"].partition("code=")[2]
        wrong = "wr0ng-gue55-for-the-log"
        secrets += [node, caller, gateway.token, code, wrong]

        async def scenario() -> None:
            for node_id, query, headers, protocols in (
                ("logged-1", f"?token={secrets[1]}&node_id=logged-1", {}, None),
                ("logged", f"?token={node}&node_id=logged", {}, None),
                ("logged", "", {"Authorization": f"Bearer {node}"}, None),
                ("logged-2", "", {}, [f"bearer.{secrets[2]}"]),
            ):
                async with websockets.connect(
                    gateway.ws_url + query, additional_headers=headers, subprotocols=protocols
                ) as socket_:
                    peer = PlainNode(socket_)
                    await peer.send(f'{{"type":"junk","token":"{node}"}}')
                    await peer.send(hello_frame(node_id, ["logged"]))
                    await peer.receive("gateway_welcome")
                    await peer.send(f'{{"type":"junk","token":"{node}"}}')
                    await peer.send({"type": "ping", "timestamp": 1})
                    await peer.receive("pong")

        asyncio.run(scenario())
        gateway.upgrade(f"token={wrong}&node_id=x")
        gateway.upgrade(f"token={wrong}&token={shared}")
        gateway.upgrade("", {"Sec-WebSocket-Protocol": f"bearer.{wrong}"})
        gateway.request("GET", f"/v1/nodes?token={caller}", token=wrong)
        gateway.request("GET", f"/v1/nothing?token={caller}")
        gateway.request("GET", "/v1/nodes", token=None, headers={"X-API-Key": caller})
        gateway.request("GET", f"/signin?code={code}", token=None)
        raw(gateway, f"GET /v1/nodes/ws?token={shared} HTTP/1.1\r\nbroken {shared}\r\n\r\n", seconds=2)
    finally:
        process.send_signal(signal.SIGTERM)
        output += process.stdout.read()
        gateway.stop()
    log = gateway.log.read_text()
    assert "node logged joined" in log, "the log says nothing at all"
    for secret in secrets:
        assert secret not in log and secret not in output, secret


# -- the process -----------------------------------------------------------------------------------------------------


def run_to_end(gateway: GatewayProcess) -> tuple[int, str, str]:
    """Status, output and log of a gateway that is expected to end by itself."""
    gateway.start(wait=False)
    assert gateway.process is not None
    output, _ = gateway.process.communicate(timeout=60)
    return gateway.process.returncode, output, gateway.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_line_and_clean_stop(tmp_path: Path, number: signal.Signals) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start(wait=False)
    assert gateway.process is not None and gateway.process.stdout is not None
    assert gateway.process.stdout.readline() == f"farhand ready on {gateway.url}\n"
    assert gateway.get("/healthz", token=None) == {"ok": True}, "ready means that it serves"
    assert gateway.stop(number) == 0
    assert "Traceback" not in gateway.log.read_text()
    assert not (gateway.home / "gateway.json").exists()


def test_stop_with_a_node_and_a_reader_connected(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w"), Reader(gateway):
        began = time.monotonic()
        assert gateway.stop() == 0
        assert time.monotonic() - began < 60
    assert "Traceback" not in gateway.log.read_text()


def test_second_signal_stops_at_once(gateway: GatewayProcess, tmp_path: Path) -> None:
    with (
        Plugin(gateway, tmp_path, "w") as plugin,
        subprocess.Popen(
            [
                "curl",
                "-s",
                "-H",
                f"Authorization: Bearer {gateway.token}",
                "-d",
                '{"tool":"w.hold","args":{"until":"x"}}',
                f"{gateway.url}/v1/tools/invoke",
            ],
            stdout=subprocess.DEVNULL,
        ) as client,
    ):
        plugin.started(1)
        assert gateway.process is not None
        began = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert gateway.process.poll() is None, "the first signal waits for the open call"
        assert gateway.stop() == 0
        assert time.monotonic() - began < 8
        client.kill()


def test_second_gateway_on_the_same_home_is_refused(gateway: GatewayProcess) -> None:
    second = GatewayProcess(gateway.home)
    second.log = gateway.home.parent / "second.log"
    status, output, log = run_to_end(second)
    assert status == 1 and "ready" not in output
    assert "already running" in log and "Traceback" not in log
    assert gateway.get("/healthz", token=None) == {"ok": True}
    assert (gateway.home / "gateway.json").exists(), "the second must not take the first one's address away"


def test_port_in_use_is_one_clear_line(gateway: GatewayProcess, tmp_path: Path) -> None:
    second = GatewayProcess(tmp_path / "other", port=gateway.port)
    status, output, log = run_to_end(second)
    assert status == 1 and "ready" not in output
    assert str(gateway.port) in log and "in use" in log and "Traceback" not in log
    assert len(log.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gateway\n", "farhand.toml"),
        ("[gateway]\nprot = 1\n", "prot"),
        ('[gateway]\nport = "x"\n', "port"),
        ("[gateway]\nport = 70000\n", "70000"),
        ("[gateway]\nport = -1\n", "-1"),
    ],
)
def test_broken_settings_are_one_clear_line(tmp_path: Path, text: str, named: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(text)
    status, _, log = run_to_end(GatewayProcess(home))
    assert status == 1
    assert named in log and "Traceback" not in log
    assert len(log.strip().splitlines()) == 1


def test_home_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gateway = GatewayProcess(tmp_path / "file" / "home")
    gateway.log = tmp_path / "log"
    gateway.home = tmp_path / "unused" / "home"  # only the command knows the impossible one
    status, _, log = run_to_end(gateway)
    assert status == 1
    assert str(tmp_path / "file") in log and "Traceback" not in log


def test_home_and_token_are_closed_to_others_at_birth(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with GatewayProcess(tmp_path / "home") as gateway:
            for path in (gateway.home, *gateway.home.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # a file of a backup that is being written
                    reachable = stat.S_IMODE(path.stat().st_mode) & 0o077 and path.parent == tmp_path
                    assert not reachable, path
            assert stat.S_IMODE((gateway.home / "token").stat().st_mode) == 0o600
    finally:
        os.umask(old)


# -- tokens that are not ASCII -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret", [b"\xff\xfe", "h\u00e9".encode(), "h\u00e9".encode("latin-1"), b"\xed\xa0\x80", b"\x80"]
)
def test_a_token_that_is_not_ascii_is_401_on_every_route(shared_gateway: GatewayProcess, secret: bytes) -> None:
    place = f"Host: 127.0.0.1:{shared_gateway.port}\r\nConnection: "
    upgrade = (
        "Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    for line in (b"Authorization: Bearer ", b"X-API-Key: "):
        for path in ("/v1/nodes", "/v1/events", "/mcp"):
            head = f"GET {path} HTTP/1.1\r\n{place}close\r\n".encode() + line + secret + b"\r\n\r\n"
            assert raw_status(shared_gateway, head) == 401, path
    for line in (b"Authorization: Bearer ", b"Authorization: Ed25519 ", b"Sec-WebSocket-Protocol: bearer."):
        head = f"GET /v1/nodes/ws HTTP/1.1\r\n{place}{upgrade}".encode() + line + secret + b"\r\n\r\n"
        assert raw_status(shared_gateway, head) in (400, 401), line
    for query in ("token=%FF%FE&node_id=x", "token=h%C3%A9", "token=x&node_id=%FF", "token=%ED%A0%80"):
        assert shared_gateway.upgrade(query).status == 401, query


def raw_status(gateway: GatewayProcess, data: bytes) -> int:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        connection.sendall(data)
        return int(connection.recv(4096).split(b" ", 2)[1])
