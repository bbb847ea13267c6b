"""OAuth for `/mcp`, driven by the official MCP client, by a browser, and by hand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest
from mcp import ClientSession
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken

from tests.integration.cli.conftest import Command
from tests.support.browser import ARGUMENTS, CHROMIUM
from tests.support.harness import GatewayProcess, NodeProcess

CALLBACK = "http://127.0.0.1:9/callback"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("oauth")
    with (
        GatewayProcess(folder / "home") as process,
        NodeProcess(process, folder / "laptop", "laptop"),
        NodeProcess(process, folder / "server", "server"),
    ):
        yield process


class Flow:
    """A client that speaks OAuth by hand. Without metadata of its own it is the same one in all tests of a gateway."""

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, gateway: GatewayProcess, **metadata: Any) -> None:
        self.gateway = gateway
        if metadata or gateway.url not in self.known:
            body = {"client_name": "Hand", "redirect_uris": [CALLBACK], **metadata}
            answer = gateway.request("POST", "/oauth/register", body, token=None)
            assert answer.status == 201, answer
            self.registered = answer.json()
            if not metadata:
                self.known[gateway.url] = self.registered
        else:
            self.registered = self.known[gateway.url]
        self.id = self.registered["client_id"]
        self.verifier = secrets.token_urlsafe(48)

    def query(self, **changes: Any) -> str:
        digest = hashlib.sha256(self.verifier.encode()).digest()
        fields = {
            "response_type": "code",
            "client_id": self.id,
            "redirect_uri": CALLBACK,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
            "state": "s t&te",
            "resource": f"{self.gateway.url}/mcp",
            **changes,
        }
        return urlencode({name: value for name, value in fields.items() if value is not None})

    def consent(self, query: str = "", *, token: str | None = "owner", **choice: Any) -> Any:
        body = {"request": query or self.query(), "allow": True, "nodes": ["laptop"], **choice}
        return self.gateway.request("POST", "/v1/oauth/consent", body, token=token)

    def code(self, **choice: Any) -> str:
        answer = self.consent(**choice)
        assert answer.status == 200, answer
        fields = parse_qs(urlsplit(answer.json()["redirect"]).query)
        assert fields["state"] == ["s t&te"] and fields["iss"] == [self.gateway.url]
        return fields["code"][0]

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        given = {"client_id": self.id, **fields}
        body = urlencode({name: value for name, value in given.items() if value is not None}).encode()
        return self.gateway.request("POST", path, body, token=None, headers={**FORM, **(headers or {})})

    def exchange(self, code: str, **changes: Any) -> Any:
        return self.post(
            "/oauth/token",
            **{
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": CALLBACK,
                "code_verifier": self.verifier,
                "resource": f"{self.gateway.url}/mcp",
                **changes,
            },
        )

    def tokens(self, **choice: Any) -> Any:
        answer = self.exchange(self.code(**choice))
        assert answer.status == 200, answer
        return answer.json()

    def refresh(self, token: str, **fields: Any) -> Any:
        return self.post("/oauth/token", grant_type="refresh_token", refresh_token=token, **fields)

    def works(self, access: str) -> bool:
        return self.gateway.request("POST", "/mcp", initialize(), token=access, headers=MCP).status == 200


MCP = {"Accept": "application/json, text/event-stream"}


def initialize() -> dict[str, Any]:
    info = {"name": "test", "version": "1"}
    parameters = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parameters}


def listed(gateway: GatewayProcess, client: str) -> Any:
    clients = gateway.get("/v1/oauth/clients")["clients"]
    return next((one for one in clients if one["client_id"] == client), None)


# -- the command -------------------------------------------------------------------------------------------------


def test_the_owner_lists_and_revokes_programs_at_the_prompt(gateway: GatewayProcess) -> None:
    flow = Flow(gateway, client_name="Notes\x1b[2J app")
    tokens = flow.tokens(nodes=["laptop"])
    command = Command(gateway.home)
    out = command("oauth", "list").out
    line = next(line for line in out.splitlines() if flow.id in line)
    assert "on laptop" in line and "Notes" in line and "\x1b" not in out
    assert flow.id in {one["client_id"] for one in command("oauth", "list", "--json").json()["clients"]}
    assert command("oauth", "revoke", flow.id).out == f"revoked: {flow.id}\n"
    assert not flow.works(tokens["access_token"]) and flow.refresh(tokens["refresh_token"]).status == 401
    assert flow.id not in command("oauth", "list").out
    again = command("oauth", "revoke", flow.id)
    assert again.status == 1 and flow.id in again.err


# -- what a client finds ------------------------------------------------------------------------------------------


def test_a_client_finds_its_way_from_a_refusal(gateway: GatewayProcess) -> None:
    refused = gateway.request("POST", "/mcp", initialize(), token=None, headers=MCP)
    assert refused.status == 401
    place = f"{gateway.url}/.well-known/oauth-protected-resource/mcp"
    assert refused.headers["www-authenticate"] == f'Bearer resource_metadata="{place}"'
    wrong = gateway.request("POST", "/mcp", initialize(), token="fha_wrong", headers=MCP)
    assert wrong.status == 401 and 'error="invalid_token"' in wrong.headers["www-authenticate"]
    assert gateway.request("GET", "/v1/nodes", token=None).headers["www-authenticate"] == "Bearer"
    for path in ("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource/mcp"):
        found = gateway.get(path, token=None)
        assert (found["resource"], found["authorization_servers"]) == (f"{gateway.url}/mcp", [gateway.url])
    server = gateway.get("/.well-known/oauth-authorization-server", token=None)
    assert server["issuer"] == gateway.url and server["code_challenge_methods_supported"] == ["S256"]
    for path in (
        "/.well-known/openid-configuration",
        "/.well-known/nothing",
        "/.well-known/oauth-protected-resource/x",
    ):
        assert gateway.request("GET", path, token=None).status == 404, path


def test_the_public_address_is_used_behind_a_proxy(tmp_path: Path) -> None:
    settings = {"FARHAND_GATEWAY_PUBLIC_URL": "https://hands.example/far/", "FARHAND_GATEWAY_HOSTS": "hands.example"}
    with GatewayProcess(tmp_path / "home", env=settings) as process:
        path = "/.well-known/oauth-protected-resource"
        behind = process.get(path, token=None, headers={"Host": "hands.example"})
        assert behind["resource"] == "https://hands.example/far/mcp"
        assert process.get(path, token=None)["resource"] == f"{process.url}/mcp"


# -- the flow, by hand --------------------------------------------------------------------------------------------


def test_an_access_token_is_good_for_mcp_alone_and_for_what_was_granted(gateway: GatewayProcess) -> None:
    flow = Flow(gateway, client_name="Narrow")
    tokens = flow.tokens(scope="tools.read", tools=["Read", "Bash"], expires_seconds=3600)
    assert (tokens["token_type"], tokens["expires_in"], tokens["scope"]) == ("Bearer", 3600, "tools.read")
    access = tokens["access_token"]
    assert flow.works(access)
    for method, path in (
        ("GET", "/v1/tools"),
        ("GET", "/v1/nodes"),
        ("POST", "/v1/tools/invoke"),
        ("GET", "/v1/tokens"),
    ):
        assert gateway.request(method, path, None if method == "GET" else {}, token=access).status == 401, path
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    modern = {**MCP, "Mcp-Protocol-Version": "2025-06-18"}
    session = gateway.request("POST", "/mcp", initialize(), token=access, headers=modern).headers["mcp-session-id"]
    modern["Mcp-Session-Id"] = session
    names = [
        tool["name"]
        for tool in gateway.request("POST", "/mcp", call, token=access, headers=modern).json()["result"]["tools"]
    ]
    assert "laptop__Read" in names and not any(name.startswith("server__") or "Write" in name for name in names), names
    grant = listed(gateway, flow.id)["grants"][0]
    assert (grant["nodes"], grant["tools"]) == (["laptop"], ["laptop__Read", "laptop__Bash"])
    assert grant["scopes"] == ["tools.read"] and grant["made_by"] == "owner" and grant["last_used_at"]
    assert gateway.request("DELETE", f"/v1/oauth/clients/{flow.id}").json() == {"revoked": flow.id, "grants": 1}
    assert not flow.works(access) and listed(gateway, flow.id) is None
    assert flow.refresh(tokens["refresh_token"]).status == 401  # the client itself is no longer known


def test_a_grant_ends_with_the_token_that_consented(gateway: GatewayProcess) -> None:
    made = gateway.request("POST", "/v1/tokens", {"label": "boss", "scopes": ["admin"]}).json()
    flow = Flow(gateway)
    tokens = flow.tokens(token=made["token"])
    assert flow.works(tokens["access_token"])
    gateway.request("DELETE", f"/v1/tokens/{made['id']}")
    assert not flow.works(tokens["access_token"])
    refused = flow.refresh(tokens["refresh_token"])
    assert (refused.status, refused.json()["error"]) == (400, "invalid_grant")


def test_refresh_tokens_rotate_and_reuse_revokes(gateway: GatewayProcess) -> None:
    flow = Flow(gateway)
    first = flow.tokens()
    second = flow.refresh(first["refresh_token"], resource=f"{gateway.url}/mcp").json()
    assert second["refresh_token"] != first["refresh_token"] and flow.works(second["access_token"])
    wider = flow.refresh(second["refresh_token"], scope="admin")
    assert wider.json()["error"] == "invalid_scope"
    again = flow.refresh(first["refresh_token"])
    assert (again.status, again.json()["error"]) == (400, "invalid_grant")
    assert not flow.works(second["access_token"]) and not flow.works(first["access_token"])
    assert flow.refresh(second["refresh_token"]).json()["error"] == "invalid_grant"


def test_a_code_works_once_and_reuse_revokes(gateway: GatewayProcess) -> None:
    flow = Flow(gateway)
    code = flow.code()
    tokens = flow.exchange(code).json()
    assert flow.works(tokens["access_token"])
    assert flow.exchange(code).json()["error"] == "invalid_grant"
    assert not flow.works(tokens["access_token"])
    code = flow.code()
    with contextlib.ExitStack() as stack:
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(flow.exchange(code))) for _ in range(6)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
    good = [answer.json()["access_token"] for answer in answers if answer.status == 200]
    assert len(answers) == 6 and len(good) <= 1 and not any(flow.works(access) for access in good)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"code_verifier": "x" * 50}, "invalid_grant"),
        ({"code_verifier": None}, "invalid_grant"),
        ({"redirect_uri": "http://127.0.0.1:9/other"}, "invalid_grant"),
        ({"resource": "https://elsewhere.example/mcp"}, "invalid_target"),
        ({"code": "wrong"}, "invalid_grant"),
        ({"code": ""}, "invalid_grant"),
        ({"code": "x" * 10_000}, "invalid_grant"),
        ({"grant_type": "password"}, "unsupported_grant_type"),
        ({"grant_type": None}, "unsupported_grant_type"),
        ({"client_id": "mcp_0000000000000000"}, "invalid_client"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_code_is_bound_to_its_request(gateway: GatewayProcess, changes: Any, error: str) -> None:
    flow = Flow(gateway)
    code = flow.code()
    answer = flow.exchange(changes.get("code", code), **{k: v for k, v in changes.items() if k != "code"})
    assert answer.json()["error"] == error and answer.status == (401 if error == "invalid_client" else 400)


def test_a_code_or_token_of_one_client_is_useless_to_another(gateway: GatewayProcess) -> None:
    flow, other = Flow(gateway), Flow(gateway, client_name="Other")
    assert (
        flow.post("/oauth/token", client_id=other.id, grant_type="authorization_code", code=flow.code()).status == 400
    )
    tokens = flow.tokens()
    assert other.refresh(tokens["refresh_token"]).json()["error"] == "invalid_grant"
    assert other.post("/oauth/revoke", token=tokens["refresh_token"]).status == 200 and flow.works(
        tokens["access_token"]
    )
    assert flow.post("/oauth/revoke", token="unknown").status == 200 and flow.works(tokens["access_token"])
    assert flow.post("/oauth/revoke", token=tokens["refresh_token"]).status == 200
    assert not flow.works(tokens["access_token"])


@pytest.mark.parametrize("method", ["client_secret_post", "client_secret_basic"])
def test_a_client_with_a_secret_needs_it(gateway: GatewayProcess, method: str) -> None:
    flow = Flow(gateway, token_endpoint_auth_method=method)
    secret = flow.registered["client_secret"]
    code = flow.code()
    assert flow.exchange(code).status == 401 and flow.exchange(code, client_secret="wrong").status == 401
    if method == "client_secret_post":
        answer = flow.exchange(code, client_secret=secret)
    else:
        basic = base64.b64encode(f"{flow.id}:{secret}".encode()).decode()
        answer = flow.exchange(code, client_id=None, headers={"Authorization": f"Basic {basic}"})
    assert answer.status == 200 and flow.works(answer.json()["access_token"])


# -- consent --------------------------------------------------------------------------------------------------------


def test_only_an_owner_consents(gateway: GatewayProcess) -> None:
    flow = Flow(gateway)
    narrow = gateway.request("POST", "/v1/tokens", {"scopes": ["read", "chat", "tools.exec", "approve"]}).json()[
        "token"
    ]
    assert flow.consent(token=None).status == 401 and flow.consent(token=narrow).status == 403
    session = gateway.sign_in()
    cookie = {"Cookie": session["Cookie"]}
    body = {"request": flow.query(), "allow": True}
    # A cookie alone, as a form on another page would send it, decides nothing.
    assert gateway.request("POST", "/v1/oauth/consent", body, token=None, headers=cookie).status == 401
    elsewhere = {**session, "Origin": "https://evil.example"}
    assert gateway.request("POST", "/v1/oauth/consent", body, token=None, headers=elsewhere).status == 403
    assert gateway.request("POST", "/v1/oauth/consent", body, token=None, headers=session).status == 200
    tokens = flow.tokens()
    assert gateway.request("POST", "/v1/oauth/consent", body, token=tokens["access_token"]).status == 401


@pytest.mark.parametrize(
    "redirect",
    [
        "https://evil.example/callback",
        "http://127.0.0.1:9/callback/../x",
        "http://127.0.0.1:9/callback?x=1",
        "http://localhost:9/callback",
        "http://127.0.0.1@evil.example/callback",
        "http://127.0.0.1.evil.example/callback",
        "//evil.example",
        "javascript:alert(1)",
        "",
    ],
)
def test_codes_go_to_registered_addresses_alone(gateway: GatewayProcess, redirect: str) -> None:
    flow = Flow(gateway, redirect_uris=[CALLBACK, "https://client.example/back"])
    for allow in (True, False):
        answer = flow.consent(flow.query(redirect_uri=redirect), allow=allow)
        assert answer.status == 400 and answer.json()["error"]["code"] == "invalid_request", answer
    shown = gateway.request("GET", f"/v1/oauth/consent?{flow.query(redirect_uri=redirect)}")
    assert shown.status == 400


def test_the_port_on_the_clients_own_machine_may_differ(gateway: GatewayProcess) -> None:
    flow = Flow(gateway)
    answer = flow.consent(flow.query(redirect_uri="http://127.0.0.1:51234/callback"))
    assert answer.json()["redirect"].startswith("http://127.0.0.1:51234/callback?code=")
    refused = flow.consent(flow.query(), allow=False).json()["redirect"]
    assert dict(parse_qsl(urlsplit(refused).query))["error"] == "access_denied"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"response_type": "token"}, "unsupported_response_type"),
        ({"code_challenge": None}, "invalid_request"),
        ({"code_challenge_method": "plain"}, "invalid_request"),
        ({"code_challenge_method": None}, "invalid_request"),
        ({"resource": "https://elsewhere.example/mcp"}, "invalid_target"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_are_sent_to_the_client(gateway: GatewayProcess, changes: Any, error: str) -> None:
    flow = Flow(gateway)
    shown = gateway.get(f"/v1/oauth/consent?{flow.query(**changes)}")
    assert shown["error"] and shown["redirect_host"] == urlsplit(CALLBACK).netloc
    fields = dict(parse_qsl(urlsplit(shown["redirect"]).query))
    assert (fields["error"], fields["state"]) == (error, "s t&te") and "code" not in fields


@pytest.mark.parametrize(
    "choice",
    [
        {"nodes": []},
        {"tools": []},
        {"nodes": ["nowhere"]},
        {"scope": "admin"},
        {"scope": "chat"},
        {"expires_seconds": -5},
        {"nodes": "laptop"},
        {"allow": "yes"},
        {"more": 1},
    ],
    ids=lambda value: str(value)[:60],
)
def test_choices_that_cannot_be_granted(gateway: GatewayProcess, choice: Any) -> None:
    flow = Flow(gateway)
    assert flow.consent(flow.query(scope="tools.write"), **choice).status == 400
    assert flow.consent(flow.query(scope="tools.read"), scope="tools.exec").json()["error"]["code"] == "invalid_scope"


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["http://client.example/cb"],
        ["javascript:alert(1)"],
        ["data:text/html,x"],
        ["https://client.example/cb#x"],
        ["https://user@client.example/cb"],
        ["https://client.example/a b"],
        ["relative"],
        ["https://client.example/cb"] * 11,
        ["https://client.example/" + "x" * 3000],
        "https://client.example",
        [5],
    ],
    ids=lambda uris: str(uris)[:40],
)
def test_redirect_addresses_that_cannot_be_registered(gateway: GatewayProcess, uris: Any) -> None:
    answer = gateway.request("POST", "/oauth/register", {"redirect_uris": uris}, token=None)
    assert answer.status in (400, 429), answer


def test_a_client_document_on_this_machine_or_network_is_not_fetched(gateway: GatewayProcess) -> None:
    for host in ("127.0.0.1:1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]", "192.168.1.1", "0.0.0.0"):
        query = urlencode({"client_id": f"https://{host}/client.json", "redirect_uri": CALLBACK})
        answer = gateway.request("GET", f"/v1/oauth/consent?{query}")
        assert answer.status == 400 and "not a public address" in answer.json()["error"]["message"], answer


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as process:
        flow = Flow(process)
        tokens = flow.tokens(nodes=None)
        code = flow.code(nodes=None)
        process.kill()
        process.start()
        assert flow.works(tokens["access_token"])
        assert flow.works(flow.refresh(tokens["refresh_token"]).json()["access_token"])
        assert flow.works(flow.exchange(code).json()["access_token"])
        assert flow.exchange(code).status == 400
        found = process.home.joinpath("farhand.db")
        stored = found.read_bytes() if found.exists() else b""
        assert tokens["access_token"].encode() not in stored and code.encode() not in stored


def test_registrations_are_limited(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as process:
        body, far = {"redirect_uris": [CALLBACK]}, {"X-Forwarded-For": "203.0.113.7"}
        answers = [process.request("POST", "/oauth/register", body, token=None, headers=far) for _ in range(40)]
        assert answers[0].status == 201 and answers[-1].status == 429 and answers[-1].headers["retry-after"]
        assert process.request("POST", "/oauth/register", body, token=None).status == 201, "others are not refused"
        assert process.get("/v1/oauth/clients") == {"clients": [], "count": 0}


# -- the official client and a browser --------------------------------------------------------------------------


class Memory:
    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Callbacks:
    """The client's own server, to which the browser comes back."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.query = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if urlsplit(self.path).path == "/callback":
                    outer.query = urlsplit(self.path).query
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(b"<title>Back</title>You may close this page.")
                if outer.query:
                    outer.came.set()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}/callback"

    def __enter__(self) -> Callbacks:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.asynccontextmanager
async def connected(
    gateway: GatewayProcess, memory: Memory, callbacks: Callbacks, browse: Callable[[str], None]
) -> AsyncIterator[tuple[ClientSession, OAuthClientProvider]]:
    async def go(address: str) -> None:
        await asyncio.to_thread(browse, address)

    async def come_back() -> AuthorizationCodeResult:
        assert await asyncio.to_thread(callbacks.came.wait, 60), "the browser did not come back"
        fields = dict(parse_qsl(callbacks.query))
        return AuthorizationCodeResult(code=fields["code"], state=fields["state"], iss=fields["iss"])

    metadata = OAuthClientMetadata(client_name="The <b>official</b> client", redirect_uris=[callbacks.uri])  # type: ignore[list-item]
    provider = OAuthClientProvider(f"{gateway.url}/mcp", metadata, memory, go, come_back)
    async with (
        create_mcp_http_client(auth=provider) as http,
        streamable_http_client(f"{gateway.url}/mcp", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        yield session, provider


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium")
def test_the_official_client_gets_access_through_a_browser(gateway: GatewayProcess) -> None:
    from playwright.sync_api import expect, sync_playwright

    complaints: list[str] = []

    def browse(address: str) -> None:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            try:
                page = browser.new_page()
                page.set_default_timeout(30_000)
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.goto(address)
                # Not signed in yet: the page asks for a sign-in link and comes back by itself.
                link = gateway.url + gateway.request("POST", "/v1/signin", {}).json()["path"]
                page.get_by_label("Sign-in link").fill(link)
                page.get_by_role("button", name="Sign in").click()
                expect(page.locator("#name")).to_have_text("The <b>official</b> client")
                expect(page.locator("#host")).to_contain_text("127.0.0.1:")
                assert "page=" not in page.url
                page.get_by_label("server").uncheck()
                page.get_by_label("only these tools").check()
                page.locator("#tools").get_by_label("Write", exact=True).uncheck()
                page.locator("#tools").get_by_label("Edit", exact=True).uncheck()
                expect(page.locator("#summary")).to_contain_text("on laptop, with Bash")
                page.get_by_role("button", name="Give access").click()
                expect(page).to_have_title("Back")
            finally:
                browser.close()

    memory = Memory()

    async def use() -> None:
        with Callbacks() as callbacks:
            async with connected(gateway, memory, callbacks, browse) as (session, provider):
                names = {tool.name for tool in (await session.list_tools()).tools}
                assert "laptop__Bash" in names and "laptop__Write" not in names, names
                assert not any(name.startswith(("server__", "gsv__")) for name in names), names
                done = await session.call_tool("laptop__Bash", {"command": "echo through-oauth"})
                assert "through-oauth" in json.dumps(done.model_dump(mode="json"))
                refused = await session.call_tool("server__Bash", {"command": "echo no"})
                assert "through-oauth" not in str(refused)
                before = memory.tokens
                provider.context.token_expiry_time = 1.0  # as if an hour had passed
                assert (await session.list_tools()).tools
                assert before is not None and memory.tokens is not None
                assert memory.tokens.access_token != before.access_token
                assert memory.tokens.refresh_token != before.refresh_token

    asyncio.run(asyncio.wait_for(use(), 120))
    assert not complaints and memory.client is not None and memory.tokens is not None
    given = listed(gateway, memory.client.client_id)
    assert given["grants"][0]["nodes"] == ["laptop"] and "laptop__Write" not in given["grants"][0]["tools"]
    calls = gateway.get("/v1/calls?limit=5")["calls"]
    assert any(call["credential"] == given["grants"][0]["token_id"] for call in calls)


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium")
def test_a_signed_in_tab_is_enough_and_the_page_cannot_be_framed(gateway: GatewayProcess) -> None:
    from playwright.sync_api import expect, sync_playwright

    flow = Flow(gateway, client_name="Framed")
    answer = gateway.request("GET", f"/oauth/authorize?{flow.query()}", token=None)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY" and b"Framed" not in answer.body
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            context = browser.new_context()
            first = context.new_page()
            path = gateway.request("POST", "/v1/signin", {}).json()["path"]
            first.goto(f"{gateway.url}{path}&{urlencode({'next': f'oauth/authorize?{flow.query()}'})}")
            expect(first.locator("#name")).to_have_text("Framed")
            page = context.new_page()
            # An invalid request leads nowhere by itself.
            away: list[str] = []
            page.on("request", lambda request: away.append(request.url) if request.url.startswith(CALLBACK) else None)
            page.goto(f"{gateway.url}/oauth/authorize?{flow.query(response_type='token')}")
            expect(page.locator("#status")).to_contain_text("made a mistake")
            expect(page.locator("#back")).to_have_attribute("href", re.compile("error=unsupported_response_type"))
            assert not away
            page.goto(f"{gateway.url}/oauth/authorize?{flow.query()}")
            expect(page.locator("#name")).to_have_text("Framed")
            with page.expect_request(lambda request: request.url.startswith(CALLBACK)) as gone:
                page.get_by_role("button", name="Refuse").click()
            assert "error=access_denied" in gone.value.url
        finally:
            browser.close()


@pytest.mark.parametrize(
    "page",
    ["https://evil.example", "//evil.example", "oauth/authorize", "oauth/../x?y", "oauth/authorize?a\r\nb: c", "v1"],
)
def test_signing_in_leads_to_no_other_page(gateway: GatewayProcess, page: str) -> None:
    path = gateway.request("POST", "/v1/signin", {}).json()["path"]
    answer = gateway.request("GET", f"{path}&{urlencode({'next': page})}", token=None)
    assert answer.status == 303 and answer.headers["location"].startswith("./#page=")
