"""Attacks on the doors: every route with every kind of credential, malformed requests, and budgets of one token."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.harness import SHARED_TOKEN, GatewayProcess, wait_until

MIB = 1024 * 1024
# Routes that need no credential, or take a secret of their own.
PUBLIC = {
    *("/v1/pair/offer", "/join/{code}", "/join/{code}/{file}"),
    *("/healthz", "/readyz", "/version", "/v1/openapi.json", "/signin", "/v1/pair", "/v1/nodes/ws"),
    *("/", "/assets/{name}", "/console.svg", "/icon-192.png", "/icon-512.png", "/manifest.webmanifest"),
    *("/docs", "/docs.js", "/docs.css", "/hooks/{hook_id}", "/v1/mcp/callback"),
    *("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource/mcp"),
    *(
        "/.well-known/oauth-authorization-server",
        "/oauth/register",
        "/oauth/authorize",
        "/oauth/token",
        "/oauth/revoke",
    ),
}
PUBLIC |= {"/oauth/consent.js", "/oauth/consent.css"}
SCOPES = ("read", "chat", "tools.read", "tools.write", "tools.exec", "approve", "pair", "freeze")
# What each scope opens, by the beginning of "METHOD path"; everything else is refused.
CALLS = (
    *("POST /v1/tools/invoke", "POST /v1/tools/fanout", "POST /mcp", "GET /mcp", "DELETE /mcp", "POST /agent/process"),
    *("GET /v1/workspace", "GET /v1/transfers/content", "GET /v1/transfers/manifest", "GET /v1/memory/"),
)
WRITES = (*CALLS, "PUT /v1/workspace", "DELETE /v1/workspace", "POST /v1/transfers", "PUT /v1/transfers")
WRITES += ("DELETE /v1/transfers", "POST /v1/memory/reindex", "POST /v1/calls/{call_id}/undo")
WRITES += ("GET /v1/trials", "POST /v1/trials", "POST /v1/runs/{run_id}/undo")
OPENS: dict[str, tuple[str, ...]] = {
    "chat": (
        *("POST /v1/sessions/", "GET /v1/runs/{run_id}/events", "POST /v1/chat/", "GET /v1/models", "DELETE /chats"),
        *("POST /agent/process", "POST /v1/responses", "GET /v1/responses", "DELETE /v1/responses"),
        "POST /v1/models/check",
    ),
    "tools.read": CALLS,
    "tools.write": WRITES,
    "tools.exec": (
        *(*WRITES, "DELETE /v1/calls/{call_id}", "POST /v1/messages/", "POST /v1/cron", "PATCH /v1/cron"),
        *("DELETE /v1/cron", "POST /v1/calls/{call_id}/input", "GET /v1/calls/{call_id}/output"),
        *("POST /v1/terminals", "DELETE /v1/terminals", "GET /v1/terminals/{terminal_id}/ws"),
    ),
    "approve": ("GET /v1/approvals", "POST /v1/approvals", "GET /v1/policy/always"),
    "pair": ("POST /v1/pairings", "GET /v1/channels/pairings", "POST /v1/channels/p", "DELETE /v1/channels/p"),
    "freeze": ("GET /v1/freeze", "POST /v1/freeze"),
}
# Opened by a scope although other routes begin alike.
ALSO = {
    scope: {"GET /v1/tools", "GET /v1/budgets", "GET /v1/calls/{call_id}/receipt"}
    for scope in ("tools.read", "tools.write", "tools.exec")
}
ALSO["chat"] = {"GET /v1/budgets"}
ASKS = ("POST /v1/nodes/{node_id}/probe", "POST /v1/policy/", "POST /v1/cron/preview")
NOT_READ = ("/mcp", "/v1/tokens", "/v1/console", "/v1/hooks", "/v1/models", "/v1/workspace", "/v1/memory/")
NOT_READ += ("/v1/transfers/content", "/v1/transfers/manifest", "/v1/runs/{run_id}/events")
NOT_READ += ("/v1/mcp/servers", "/v1/oauth", "/v1/responses", "/v1/secrets", "/v1/trials")
NOT_READ += ("/v1/terminals/{terminal_id}/ws",)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    env: dict[str, str | None] = {"FARHAND_RETENTION_MESSAGE_BYTES_PER_CREDENTIAL": str(20 * MIB)}
    with GatewayProcess(tmp_path_factory.mktemp("doors") / "home", env=env) as process:
        yield process


def made(gateway: GatewayProcess, *scopes: str, **fields: Any) -> dict[str, Any]:
    answer = gateway.request("POST", "/v1/tokens", {"scopes": list(scopes), **fields})
    assert answer.status == 201, answer
    return dict(answer.json())


def token(gateway: GatewayProcess, *scopes: str, **fields: Any) -> str:
    return str(made(gateway, *scopes, **fields)["token"])


def routes(gateway: GatewayProcess) -> list[tuple[str, str]]:
    paths = gateway.get("/v1/openapi.json")["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods if path not in PUBLIC]


def ask(connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request that does nothing where it is let in: its body and its names are nonsense."""
    body = None if method == "GET" else b"%"
    sent = {"Content-Type": "application/json", **headers}
    path = path.replace("{", "no-").replace("}", "").replace("...", "")
    # What is let in and would never end, or would change the gateway for the other tests, is not asked for.
    connection.request(method, f"{path}?follow=0&wait=0", body, sent)
    response = connection.getresponse()
    if response.status == 200 and "event-stream" in (response.getheader("Content-Type") or ""):
        connection.close()
    else:
        response.read()
    return response.status


def statuses(gateway: GatewayProcess, headers: dict[str, str], skip: tuple[str, ...] = ()) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    with contextlib.closing(connection):
        return {
            f"{method} {path}": ask(connection, method, path, headers)
            for method, path in routes(gateway)
            if not f"{method} {path}".startswith(skip or "-")
        }


# -- routes and credentials -------------------------------------------------------------------------------------------


def test_no_route_accepts_an_invalid_credential(gateway: GatewayProcess) -> None:
    page = gateway.sign_in()
    ended = gateway.sign_in()
    assert gateway.request("POST", "/v1/signout", {}, token=None, headers=ended).status == 200
    revoked = made(gateway, "admin")
    assert gateway.request("DELETE", f"/v1/tokens/{revoked['id']}").status == 200
    expired = token(gateway, "admin", expires_seconds=0.05)
    node = token(gateway, "tools.exec", node_id="some-node")
    code = gateway.request("POST", "/v1/pairings", {"node_id": "other-node"}).json()
    wait_until(lambda: gateway.request("GET", "/v1/health", token=expired).status == 401)
    bearers = [node, SHARED_TOKEN, str(code.get("code", "code")), revoked["token"], expired, "", "x" * 5000, "fho_"]
    for headers in (
        {},
        *({"Authorization": f"Bearer {secret}"} for secret in bearers),
        {"Authorization": f"Basic {gateway.token}"},
        {"X-API-Key": node},
        {"Cookie": page["Cookie"]},
        {"X-Farhand-Page": page["X-Farhand-Page"]},
        {"Cookie": page["Cookie"], "X-Farhand-Page": ended["X-Farhand-Page"]},
        {"Cookie": ended["Cookie"], "X-Farhand-Page": page["X-Farhand-Page"]},
        ended,
    ):
        found = statuses(gateway, headers)
        assert len(found) > 90 and set(found.values()) == {401}, (headers, {k: v for k, v in found.items() if v != 401})
    assert gateway.request("GET", "/v1/tokens", token=None, headers=page).status == 200


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_opens_its_routes_alone(gateway: GatewayProcess, scope: str) -> None:
    found = statuses(gateway, {"Authorization": f"Bearer {token(gateway, scope)}"}, ("POST /v1/freeze", "GET /mcp"))
    for route, status in found.items():
        method, _, path = route.partition(" ")
        if scope == "read":
            opened = route.startswith(ASKS) or (method == "GET" and not path.startswith(NOT_READ))
        else:
            opened = route.startswith(OPENS[scope]) and not route.startswith(ASKS)
            opened = opened or route in ALSO.get(scope, ())
        assert (status == 403) is not opened and status not in (401, 500), (scope, route, status)


def test_a_narrowed_token_reaches_tools_alone(gateway: GatewayProcess) -> None:
    for narrowed in ({"tools": ["glob"]}, {"nodes": ["laptop"]}):
        for scope in ("chat", "approve", "pair", "freeze", "admin"):
            assert gateway.request("POST", "/v1/tokens", {"scopes": [scope], **narrowed}).status == 400
        found = statuses(
            gateway, {"Authorization": f"Bearer {token(gateway, 'tools.exec', **narrowed)}"}, ("GET /mcp",)
        )
        open_ = {route for route, status in found.items() if status != 403}
        assert open_ <= {
            *("POST /v1/tools/invoke", "POST /v1/tools/fanout", "POST /mcp", "DELETE /mcp", "POST /agent/process"),
            *("POST /v1/calls/{call_id}/undo", "POST /v1/runs/{run_id}/undo", "GET /v1/tools"),
            *("GET /v1/budgets", "GET /v1/calls/{call_id}/receipt"),  # its own
            # Of the caller's own calls, or as calls that pass the gate.
            *("GET /v1/calls/{call_id}/output", "POST /v1/calls/{call_id}/input"),
            *("POST /v1/terminals", "DELETE /v1/terminals/{terminal_id}", "GET /v1/terminals/{terminal_id}/ws"),
            *("GET /v1/trials/{trial_id}", "POST /v1/trials/{trial_id}/keep", "POST /v1/trials/{trial_id}/discard"),
        }, (narrowed, open_)


def test_a_cookie_needs_its_page_after_a_restart_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    with GatewayProcess(tmp_path_factory.mktemp("restarted") / "home") as process:
        page, ended = process.sign_in(), process.sign_in()
        process.request("POST", "/v1/signout", {}, token=None, headers=ended)
        process.stop()
        process.start()
        assert process.request("GET", "/v1/tokens", token=None, headers=page).status == 200
        for headers in (ended, {"Cookie": page["Cookie"]}, {"X-Farhand-Page": page["X-Farhand-Page"]}):
            assert process.request("GET", "/v1/tokens", token=None, headers=headers).status == 401


def test_a_sign_in_link_works_once_however_many_use_it_at_once(gateway: GatewayProcess) -> None:
    path = gateway.request("POST", "/v1/signin", {}).json()["path"]
    assert gateway.request("HEAD", path, token=None).status == 401
    fixed = {"Cookie": f"farhand_session_{gateway.port}=chosen-by-the-attacker"}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: gateway.request("GET", path, token=None, headers=fixed), range(16)))
    assert sorted(answer.status for answer in answers) == [303] + [401] * 15
    signed_in = next(answer for answer in answers if answer.status == 303)
    assert "chosen-by-the-attacker" not in signed_in.headers["set-cookie"]


def test_an_idempotency_key_belongs_to_its_credential(gateway: GatewayProcess) -> None:
    """Another token with the same key and body is answered for itself."""
    headers = {"Idempotency-Key": "the-same"}
    ids = set()
    for secret in (gateway.token, token(gateway, "tools.read"), token(gateway, "tools.read")):
        body = {"tool": "glob", "args": {"pattern": "*"}}
        answers = [gateway.request("POST", "/v1/tools/invoke", body, token=secret, headers=headers) for _ in range(2)]
        assert answers[0].json()["request_id"] == answers[1].json()["request_id"], answers
        ids.add(answers[0].json()["request_id"])
    assert len(ids) == 3
    first = gateway.request("POST", "/v1/tokens", {"scopes": ["read"]}, headers={"Idempotency-Key": "make"}).json()
    pairer = token(gateway, "admin")
    answer = gateway.request(
        "POST", "/v1/tokens", {"scopes": ["read"]}, token=pairer, headers={"Idempotency-Key": "make"}
    )
    assert answer.status == 201 and answer.json()["token"] != first["token"]


# -- malformed requests -----------------------------------------------------------------------------------------------

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/tools/invoke HTTP/1.1\r\n" + HOST
MALFORMED = {
    "obsolete line folding": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "space before the colon": b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "bare line feeds": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "bare carriage return": b"GET /healthz HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n",
    "null byte": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked is not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "empty length": POST + b"Content-Length: \r\n\r\n{}",
    "length beyond 64 bits": POST + b"Content-Length: 18446744073709551617\r\n\r\n{}",
    "unknown version": b"GET /healthz HTTP/1.2\r\n" + HOST + b"\r\n",
    "unknown method": b"FOO /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "lower-case method": b"get /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
}


def exchange(gateway: GatewayProcess, data: bytes) -> bytes:
    """Everything that is answered until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as peer:
        peer.sendall(data + b"GET /version HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                answer += data
        return answer


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_head_is_refused(gateway: GatewayProcess, name: str) -> None:
    answer = exchange(gateway, MALFORMED[name])
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    # Two hosts are well-formed HTTP: that request is refused, and the next one answered.
    assert answer.count(b"\r\ncontent-length: ") == (2 if name == "two hosts" else 1), answer


@pytest.mark.parametrize("rest", [b"X: ", b"", b"2;"], ids=["trailer value", "trailer name", "chunk extension"])
@pytest.mark.parametrize("authenticated", [True, False])
def test_trailers_and_chunk_extensions_are_bounded(gateway: GatewayProcess, rest: bytes, authenticated: bool) -> None:
    """They were collected without a limit, in quadratic time, also from peers without a token."""
    head = POST + b"Transfer-Encoding: chunked\r\n"
    if authenticated:
        head += f"Authorization: Bearer {token(gateway, 'tools.read')}\r\n".encode()
    begun = b"\r\n2\r\n{}\r\n" + (b"" if rest == b"2;" else b"0\r\n") + rest
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as peer:
        peer.sendall(head + begun)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64:
                peer.sendall(b"a" * MIB)
                sent += 1
    assert sent < 64


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        *(("tools.read", path) for path in ("/v1/tools/invoke", "/v1/tools/fanout", "/mcp", "/agent/process")),
        *(("read", path) for path in ("/v1/policy/explain", "/v1/policy/replay", "/v1/cron/preview")),
        *(("approve", "/v1/approvals/x"), ("freeze", "/v1/freeze"), ("pair", "/v1/pairings")),
        *(("chat", "/v1/sessions/s/stop"), ("chat", "/v1/sessions/s/fork"), ("admin", "/v1/tokens")),
    ],
)
def test_only_content_may_be_long(gateway: GatewayProcess, scope: str, path: str) -> None:
    """Bodies of 16 MiB held the event loop for up to two seconds each."""
    body = b'{"a":"' + b"a" * MIB + b'"}'
    answer = gateway.request("POST", path, body, token=token(gateway, scope), headers={"Accept": "*/*"})
    assert (answer.status, answer.json()["error"]["code"]) == (413, "too_large"), answer


@pytest.mark.parametrize("scope", ["chat", "tools.write"])
def test_content_may_be_long_for_those_who_may_send_it(gateway: GatewayProcess, scope: str) -> None:
    path = "/v1/sessions/long/messages" if scope == "chat" else "/v1/tools/invoke"
    answer = gateway.request("POST", path, b'{"a":"' + b"a" * MIB + b'"}', token=token(gateway, scope))
    assert answer.status == 400, answer


def test_a_query_has_few_parameters(gateway: GatewayProcess) -> None:
    """Each of the eight parameters of a list of calls was looked for in 30 000 others, on the event loop."""
    reader = token(gateway, "read")
    for path in ("/v1/calls", "/v1/sessions", "/v1/journal", "/v1/messages", "/chats"):
        assert gateway.request("GET", f"{path}?{'a&' * 30_000}", token=reader).status == 400
        assert gateway.request("GET", f"{path}?{'a&' * 50}limit=1", token=reader).status == 200


def test_the_open_requests_of_a_token_are_limited(gateway: GatewayProcess) -> None:
    """One token could take every connection of the gateway by streams that never end."""
    reader = token(gateway, "read")
    head = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {reader}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=60)) for _ in range(257)
        ]
        for one in streams:
            one.sendall(head)
        answers = [one.recv(65536).split(b"\r\n")[0] for one in streams]
        assert sorted(set(answers)) == [b"HTTP/1.1 200 OK", b"HTTP/1.1 429 Too Many Requests"], set(answers)
        assert answers.count(b"HTTP/1.1 200 OK") == 256
        assert gateway.request("GET", "/v1/health", token=reader).status == 429
        assert gateway.request("GET", "/v1/health").status == 200
        assert gateway.request("GET", "/v1/health", token=token(gateway, "read")).status == 200
    wait_until(lambda: gateway.request("GET", "/v1/health", token=reader).status == 200)


def test_keys_of_requests_that_change_nothing_are_not_stored(gateway: GatewayProcess) -> None:
    reader = token(gateway, "read")
    body = {"tool": "glob", "args": {}}
    for explained in (body, {**body, "args": {"pattern": "*"}}):
        headers = {"Idempotency-Key": "again"}
        answer = gateway.request("POST", "/v1/policy/explain", explained, token=reader, headers=headers)
        assert answer.status == 200, answer


def test_a_reader_replays_the_policy_in_force_alone(gateway: GatewayProcess) -> None:
    """A policy of 5000 rules over 500 calls held the event loop for 14 s."""
    gateway.invoke("glob", {"pattern": "*"}, headers={"Idempotency-Key": "replayed"})
    policy = {"since": 0, "policy": {"default": "deny", "rules": [{"decision": "allow", "tool": "no*"}] * 2000}}
    reader = token(gateway, "read")
    assert gateway.request("POST", "/v1/policy/replay", policy, token=reader).status == 403
    assert gateway.request("POST", "/v1/policy/replay", {"since": 0}, token=reader).json()["deny"] == 0
    replayed = gateway.request("POST", "/v1/policy/replay", policy).json()
    assert replayed["calls"] == replayed["deny"] > 0, replayed


def test_a_token_has_a_budget_for_what_it_says(gateway: GatewayProcess) -> None:
    """Sessions and chats are kept for good, so `chat` alone could fill the disk; reading them could fill the memory."""
    chatter = token(gateway, "chat")

    def say(path: str, body: dict[str, Any], secret: str) -> int:
        return gateway.request("POST", path, body, token=secret).status

    text = "a" * (9 * MIB)
    said = {"session_id": "budget", "user_id": "u", "input": [{"role": "user", "content": text}]}
    statuses_ = [say("/v1/sessions/budget/messages", {"message": text}, chatter) for _ in range(3)]
    assert statuses_ == [200, 200, 429], statuses_
    assert say("/v1/sessions/other/messages", {"message": text}, chatter) == 429
    assert say("/agent/process", said, chatter) == 429
    assert say("/v1/sessions/other/messages", {"message": "little"}, chatter) == 200
    assert say("/v1/sessions/budget/messages", {"message": text}, gateway.token) == 200
    for _ in range(3):
        say("/agent/process", said, gateway.token)
    wait_until(lambda: gateway.get("/v1/sessions/budget")["message_count"] >= 3)
    page = gateway.request("GET", "/v1/sessions/budget/history?limit=1000")
    assert len(page.body) < 20 * MIB and page.json()["before"] is not None
    chat = gateway.get("/chats?session_id=budget")[0]["id"]
    assert len(gateway.request("GET", f"/chats/{chat}").body) < 20 * MIB


# -- chats of the direct door -----------------------------------------------------------------------------------------


def test_a_chat_is_changed_by_who_began_it(gateway: GatewayProcess) -> None:
    """Any token with `chat` could remove the owner's chats, and one for a single tool write messages into them."""

    def post(secret: str, text: str, *, tool: bool) -> int:
        body: dict[str, Any] = {"session_id": "s", "user_id": "u", "input": [{"role": "user", "content": text}]}
        if tool:
            body["input"].insert(0, {"role": "assistant", "content": "what the agent never said"})
            body["biz_params"] = {"tool": {"name": "list_files", "input": {"path": "."}}}
        return gateway.request("POST", "/agent/process", body, token=secret).status

    chatter = token(gateway, "chat")
    post(gateway.token, "the owner's words", tool=True)
    post(gateway.token, "to the agent", tool=False)
    chat = gateway.get("/chats?session_id=s")[0]["id"]
    before = gateway.get(f"/chats/{chat}")["messages"]
    assert len(before) >= 3
    for secret in (token(gateway, "tools.read"), token(gateway, "tools.read", tools=["glob"]), chatter):
        post(secret, "injected", tool=True)
    assert post(chatter, "injected", tool=False) == 403
    assert post(chatter, "/new", tool=False) == 403
    assert gateway.request("DELETE", f"/chats/{chat}", token=chatter).status == 403
    assert gateway.get(f"/chats/{chat}")["messages"] == before
    assert gateway.request("DELETE", f"/chats/{chat}").status == 200


# -- credentials that end during a request ----------------------------------------------------------------------------


def test_a_request_ends_with_its_token(gateway: GatewayProcess) -> None:
    """A stream ends, and a body that arrives afterwards is not acted upon."""
    for way in ("revoked", "expired"):
        one = made(gateway, "read", "tools.write", **({"expires_seconds": 1.0} if way == "expired" else {}))
        head = f"Host: localhost\r\nAuthorization: Bearer {one['token']}\r\n"
        address = ("127.0.0.1", gateway.port)
        with socket.create_connection(address, 60) as stream, socket.create_connection(address, 60) as upload:
            stream.sendall(f"GET /v1/events HTTP/1.1\r\n{head}\r\n".encode())
            upload.sendall(f"PUT /v1/workspace/main/late-{way} HTTP/1.1\r\n{head}Content-Length: 4\r\n\r\nla".encode())
            assert stream.recv(65536).startswith(b"HTTP/1.1 200")
            if way == "revoked":
                assert gateway.request("DELETE", f"/v1/tokens/{one['id']}").status == 200
            wait_until(lambda: gateway.request("GET", "/v1/health", token=one["token"]).status == 401)  # noqa: B023
            rest = b""
            while data := stream.recv(65536):
                rest += data
                if rest.endswith(b"0\r\n\r\n"):
                    break
            assert rest.endswith(b"0\r\n\r\n")
            upload.sendall(b"te")
            assert upload.recv(65536).startswith(b"HTTP/1.1 401"), way
        assert gateway.request("GET", f"/v1/workspace/main/late-{way}").status == 404
