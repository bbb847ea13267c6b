"""Attempts of an attacker that the gateway withstands: hooks, sign-in, OAuth, pairing, sessions, fan-outs and keys."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.http.test_attacks_doors import made, token
from tests.integration.http.test_oauth import CALLBACK, FORM, Flow
from tests.support.harness import Answer, GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import text

# What a token may store in a day.
BUDGET = 20_000
LONG = "A" * 900_000
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


class Ground:
    """A gateway with a scripted model, the nodes `laptop` and `free`, and `hidden-vault`, which is offline."""

    def __init__(self, house: House) -> None:
        self.house, self.gateway = house, house.gateway

    def ask(self, method: str, path: str, body: Any = None, who: str | None = "owner", **headers: str) -> Answer:
        return self.gateway.request(method, path, body, token=who, headers=headers)

    def form(self, path: str, **fields: str) -> Answer:
        return self.gateway.request("POST", path, urlencode(fields).encode(), headers=FORM, token=None)

    def at_once(self, count: int, **fields: str) -> list[Answer]:
        """The answers to the same request for tokens, sent several times at once."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: self.form("/oauth/token", **fields), range(count)))

    def accepted(self, access_token: str) -> bool:
        return self.ask("POST", "/mcp", LIST, access_token).status != 401

    def events(self, kind: str) -> list[Any]:
        lines = self.ask("GET", "/v1/events?follow=0&last_event_id=0").body.decode().splitlines()
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        return [event for event in found if event.get("kind") == kind]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("round-ten")
    limits = {
        "FARHAND_RETENTION_MESSAGE_BYTES_PER_CREDENTIAL": str(BUDGET),
        "FARHAND_RETENTION_KEYED_BYTES_PER_CREDENTIAL": str(BUDGET),
    }
    with (
        contextlib.contextmanager(open_house)(folder / "home", **limits) as house,
        NodeProcess(house.gateway, folder / "laptop", "laptop"),
        NodeProcess(house.gateway, folder / "free", "free", "--tag", "prod"),
        NodeProcess(house.gateway, folder / "vault", "hidden-vault", "--tag", "prod") as vault,
    ):
        vault.kill()
        wait_until(lambda: not next(n for n in _nodes(house.gateway) if n["node_id"] == "hidden-vault")["online"])
        yield Ground(house)


def _nodes(gateway: GatewayProcess) -> list[Any]:
    return list(gateway.get("/v1/nodes")["nodes"])


# -- what a token can store -----------------------------------------------------------------------------------------


def test_a_fan_out_stores_no_name_that_no_tool_has(ground: Ground) -> None:
    """Sixty requests of a read-only token took 114 MB, half of them in a table without a limit."""
    reader = token(ground.gateway, "tools.read")
    body = {"tool": LONG, "args": {}, "nodes": ["hidden-vault"]}
    assert ground.ask("POST", "/v1/tools/fanout", body, reader).status == 400


def test_fan_outs_count_against_what_a_token_may_store(ground: Ground) -> None:
    reader = token(ground.gateway, "tools.read")
    body = {"tool": "Read", "args": {"path": "x"}, "nodes": ["hidden-vault"]}
    statuses = [ground.ask("POST", "/v1/tools/fanout", body, reader).status for _ in range(BUDGET // 512 + 1)]
    assert statuses[0] == 200 and statuses[-1] == 429
    assert ground.ask("POST", "/v1/tools/fanout", body).status == 200, "the owner is not limited"


def test_a_chat_without_a_word_counts_against_what_a_token_may_store(ground: Ground) -> None:
    """Each new name made a session and a chat, which are kept for good."""
    reader = token(ground.gateway, "tools.read")

    def begun(number: int) -> int:
        names = {"session_id": f"{number}".ljust(256, "s"), "user_id": "u" * 256}
        body = {**names, "input": [], "biz_params": {"tool": {"name": "nonsense"}}}
        return ground.ask("POST", "/agent/process", body, reader).status

    statuses = [begun(number) for number in range(BUDGET // 512 + 1)]
    assert statuses[0] == 404 and statuses[-1] == 429


@pytest.mark.parametrize("path", ["/v1/pairings", "/v1/tokens"])
def test_a_label_is_short(ground: Ground, path: str) -> None:
    """It is stored with each token that a code is exchanged for, and read at each start."""
    pairing = token(ground.gateway, "pair") if path == "/v1/pairings" else "owner"
    assert ground.ask("POST", path, {"label": LONG}, pairing).status == 400
    assert ground.ask("POST", path, {"label": "A" * 200}, pairing).status == 201


# -- what a token can spend -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/check", {}),
        ("/v1/models/check", {"model": "other-model"}),
        ("/v1/sessions/{key}/messages", {"message": "/compact", "wait_seconds": 20}),
        ("/v1/sessions/{key}/messages", {"message": "impala", "wait_seconds": 20}),
        ("/v1/chat/completions", {"model": "farhand", "messages": [{"role": "user", "content": "impala"}]}),
    ],
)
def test_no_route_asks_a_model_beyond_the_budget(ground: Ground, path: str, body: dict[str, Any]) -> None:
    spender = made(ground.gateway, "chat")
    key = f"spent-{spender['id']}"
    ground.house.script("impala", text("one"), text("two"))
    for _ in range(2):
        said = {"message": f"impala {'word ' * 300}", "wait_seconds": 20}
        assert ground.ask("POST", f"/v1/sessions/{key}/messages", said, spender["token"]).json()["state"] == "ok"
    limits = {"subject": f"token:{spender['id']}", "limits": [{"unit": "tokens", "amount": 1}]}
    assert ground.ask("PUT", "/v1/budgets", limits).status == 200
    asked = len(ground.house.model.requests)
    ground.ask("POST", path.format(key=key), body, spender["token"])
    assert len(ground.house.model.requests) == asked


# -- what a narrow token learns ---------------------------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "node": {"nodes": ["laptop"]},
    "tools": {"tools": ["laptop__*"]},
    "own tool": {"tools": ["exec"]},
}
NAMES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/tools/fanout", {"tool": "Read", "nodes": ["tag:prod"]}),
    ("/v1/tools/fanout", {"tool": "Read", "nodes": ["hidden-vault"]}),
    ("/v1/tools/fanout", {"tool": "Read", "nodes": ["hiden-vault"]}),
    ("/v1/tools/fanout", {"tool": "Read", "nodes": ["hidden vault"]}),
    ("/v1/tools/invoke", {"tool": "hidden-vault__Read"}),
    ("/v1/tools/invoke", {"tool": "hiden-vault__Read"}),
    ("/v1/tools/invoke", {"tool": "hiden-vault__Read", "when_online": True}),
    ("/v1/tools/invoke", {"tool": "HIDDEN-VAULT__Read"}),
    ("/v1/tools/invoke", {"tool": "node_read", "args": {"node": "hiden-vault", "path": "x"}}),
    ("/v1/terminals", {"node": "hiden-vault"}),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_a_narrow_token_learns_nothing_about_other_machines(ground: Ground, limits: str) -> None:
    """Neither which there are, nor when they were last seen."""
    narrow = token(ground.gateway, "tools.exec", **LIMITS[limits])
    for path, body in NAMES:
        answer = ground.ask("POST", path, body, narrow)
        said = answer.body.decode()
        asked = json.dumps(body)
        assert "last seen" not in said and "did you mean" not in said, (body, said)
        assert ("hidden-vault" in asked or "hidden-vault" not in said) and '"free"' not in said, (body, said)


def test_a_token_learns_about_the_machines_that_it_may_use(ground: Ground) -> None:
    for limits in ({"nodes": ["hidden-vault"]}, {"tools": ["*__Read"]}, {"tools": ["hidden-*__Re*"]}, {}):
        some = token(ground.gateway, "tools.exec", **limits)
        body = {"tool": "Read", "args": {"path": "x"}, "nodes": ["hidden-vault"]}
        [row] = ground.ask("POST", "/v1/tools/fanout", body, some).json()["results"]
        assert row["state"] == "offline" and "last seen" in row["error"]["message"]
        called = ground.ask("POST", "/v1/tools/invoke", {"tool": "hidden-vault__Read", "args": {"path": "x"}}, some)
        assert "last seen" in called.json()["error"]["message"]


# -- sessions, responses and chats of others --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(ground: Ground) -> str:
    """The key of a fork of one of the owner's sessions, in which nothing has run."""
    ground.house.script("okapi", text("the secret of the okapi"))
    body = {"message": "okapi", "wait_seconds": 20}
    assert ground.ask("POST", "/v1/sessions/plan/messages", body).json()["state"] == "ok"
    assert ground.ask("POST", "/v1/sessions/plan/fork", {"to": "copy"}).status == 201
    return "copy"


@pytest.mark.parametrize(
    "key",
    [
        "copy",
        "plan",
        " copy ",
        "main",
        "agent:main",
        "agent:MAIN:main",
        "agent::main",
        "agent:main:dm:x",
        "agent:main:",
    ],
)
def test_a_chat_token_is_in_no_session_of_another(ground: Ground, plan: str, key: str) -> None:
    chat = token(ground.gateway, "chat")
    said = [{"role": "user", "content": "okapi"}]
    for path, body, headers in (
        (f"/v1/sessions/{quote(key)}/messages", {"message": "okapi"}, {}),
        (f"/v1/sessions/{quote(key)}/messages", {"message": "/new"}, {}),
        (f"/v1/sessions/{quote(key)}/messages", {"message": "/status"}, {}),
        (f"/v1/sessions/{quote(key)}/fork", {"to": "mine"}, {}),
        ("/v1/chat/completions", {"model": "farhand", "messages": said, "user": key}, {}),
        ("/v1/chat/completions", {"model": "farhand", "messages": said}, {"X-Session-Key": key}),
        ("/v1/responses", {"model": "farhand", "input": "okapi"}, {"X-Session-Key": key}),
    ):
        assert ground.ask("POST", path, body, chat, **headers).status == 403, path


def test_a_response_is_for_its_credential_alone(ground: Ground) -> None:
    first, second = token(ground.gateway, "chat"), token(ground.gateway, "chat", "read")
    ground.house.script("zebra", text("striped"), text("plain"))
    body = {"model": "farhand", "input": "zebra"}
    headers = {"Idempotency-Key": "round-ten"}
    name = ground.ask("POST", "/v1/responses", body, first, **headers).json()["id"]
    other = ground.ask("POST", "/v1/responses", body, second, **headers).json()
    assert other["id"] != name and "striped" not in json.dumps(other), "a key belongs to its credential"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        sent = {} if method == "POST" else None
        for given in (name, name[:12], name.upper()):
            assert ground.ask(method, f"/v1/responses/{given}{path}", sent, second).status == 404
    continued = ground.ask("POST", "/v1/responses", {**body, "previous_response_id": name}, second)
    assert continued.status == 400 and "striped" not in continued.body.decode()


def test_a_chat_is_not_entered_by_another(ground: Ground) -> None:
    first, second = token(ground.gateway, "chat"), token(ground.gateway, "chat", "tools.read")
    ground.house.script("gnu", text("a gnu"))
    body = {"session_id": "s", "user_id": "u", "input": [{"role": "user", "content": "gnu"}]}
    assert ground.ask("POST", "/agent/process", body, first).status == 200
    for words in ("gnu", "/new", " /NEW "):
        said = {**body, "input": [{"role": "user", "content": words}]}
        assert ground.ask("POST", "/agent/process", said, second).status == 403
    [chat] = ground.gateway.get("/chats?session_id=s&user_id=u")
    assert ground.ask("DELETE", f"/chats/{chat['id']}", None, second).status == 403


@pytest.mark.parametrize("given", ["9" * 5000, "-1", "1e5", "0x1", "\xb2", "9" * 20])
def test_no_id_of_an_event_makes_a_stream_fail(ground: Ground, given: str) -> None:
    assert ground.ask("GET", "/v1/events?follow=0", **{"Last-Event-ID": given}).status == 400


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "cron", "expr": "0 0 31 2 *"},
        {"kind": "every", "everyMs": 1},
        {"kind": "cron", "expr": "0 0 1 1 *", "tz": "../../../etc/passwd"},
        {"kind": "cron", "expr": "* " * 10_000},
    ],
)
def test_no_schedule_occupies_the_gateway(ground: Ground, schedule: dict[str, Any]) -> None:
    reader = token(ground.gateway, "read")
    body = {"schedule": schedule, "count": 10**9}
    assert ground.ask("POST", "/v1/cron/preview", body, reader).status == 400


# -- hooks -------------------------------------------------------------------------------------------------------------

KEY, POST = "k" * 32, b'{"a":1}'
SIGNED = hmac.new(KEY.encode(), POST, hashlib.sha256).hexdigest()
FORGED: list[tuple[str | None, bytes]] = [
    (None, POST),
    ("", POST),
    ("sha256=", POST),
    (f"sha256={SIGNED[:-1]}", POST),
    (f"sha1={SIGNED}", POST),
    (SIGNED, POST),
    (f"sha256={SIGNED}", POST + b" "),
    (f"sha256={SIGNED}", b'{"a":2}'),
    (f"sha256={SIGNED}\xe9", POST),
    ("sha256=" + hmac.new(b"", POST, hashlib.sha256).hexdigest(), POST),
]


def test_a_post_is_signed_as_it_is(ground: Ground) -> None:
    assert ground.ask("PUT", "/v1/hooks/signed", {"secret": KEY, "format": "json"}).status == 201
    for given, body in FORGED:
        headers = {} if given is None else {"X-Webhook-Signature": given}
        assert ground.ask("POST", "/hooks/signed", body, None, **headers).status == 401, given
    assert not [event for event in ground.events("hook.posted") if event["subject"] == "signed"]


def test_a_hook_ends_with_the_token_that_made_it(ground: Ground) -> None:
    maker = made(ground.gateway, "admin")
    assert ground.ask("PUT", "/v1/hooks/lent", {"secret": "", "tools": "none"}, maker["token"]).status == 201
    assert ground.ask("DELETE", f"/v1/tokens/{maker['id']}").status == 200
    assert ground.ask("POST", "/hooks/lent", b"hello", None).status == 403


# -- signing in --------------------------------------------------------------------------------------------------------


def test_a_sign_in_link_is_used_once_and_ends_with_its_maker(ground: Ground) -> None:
    link = ground.ask("POST", "/v1/signin", {}).json()["path"]
    assert ground.ask("HEAD", link, None, None).status == 401, "a program that looks at it gets nothing"
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: ground.ask("GET", link, None, None).status, range(8)))
    assert sorted(statuses) == [303, *[401] * 7]
    maker = made(ground.gateway, "admin")
    link = ground.ask("POST", "/v1/signin", {}, maker["token"]).json()["path"]
    ground.ask("DELETE", f"/v1/tokens/{maker['id']}")
    assert ground.ask("GET", link, None, None).status == 401


@pytest.mark.parametrize(
    "page",
    [
        "//evil.example/oauth/authorize?",
        "https://evil.example",
        "oauth/authorize?\r\nSet-Cookie: a=b",
        "oauth/authorize?a#page=x",
        "oauth/authorize/../../x?",
        "/oauth/authorize?x",
    ],
)
def test_signing_in_leads_nowhere_else(ground: Ground, page: str) -> None:
    link = ground.ask("POST", "/v1/signin", {}).json()["path"]
    answer = ground.ask("GET", f"{link}&next={quote(page)}", None, None)
    assert answer.headers["location"].startswith("./#page=")
    assert len([name for name in answer.headers if name.lower() == "set-cookie"]) == 1


def test_a_session_needs_json_and_its_own_origin(ground: Ground) -> None:
    both = ground.gateway.sign_in()
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "text/plain; application/json"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Origin": "http://127.0.0.1:9"},
        {"Origin": "null"},
    ):
        answer = ground.gateway.request("POST", "/v1/signin", b"{}", token=None, headers={**both, **headers})
        assert answer.status in (403, 415), headers
    assert ground.ask("POST", "/v1/signout", {}, None, **both).status == 200
    assert ground.ask("GET", "/v1/nodes", None, None, **both).status == 401


# -- OAuth -------------------------------------------------------------------------------------------------------------


def _code(flow: Flow, **choice: Any) -> dict[str, str]:
    """The form that exchanges the code of a consent."""
    answer = flow.consent(**choice)
    code = parse_qs(urlsplit(answer.json()["redirect"]).query)["code"][0]
    fields = {"client_id": flow.id, "code": code, "redirect_uri": CALLBACK, "code_verifier": flow.verifier}
    return {"grant_type": "authorization_code", **fields}


def test_a_code_or_refresh_token_that_is_used_twice_at_once_gives_nothing(ground: Ground) -> None:
    flow = Flow(ground.gateway)
    answers = ground.at_once(8, **_code(flow))
    given = [answer.json()["access_token"] for answer in answers if answer.status == 200]
    assert len(given) <= 1 and not any(ground.accepted(one) for one in given)
    pair = ground.form("/oauth/token", **_code(flow)).json()
    assert ground.accepted(pair["access_token"])
    form = {"grant_type": "refresh_token", "client_id": flow.id, "refresh_token": pair["refresh_token"]}
    answers = ground.at_once(8, **form)
    given = [pair["access_token"], *(answer.json()["access_token"] for answer in answers if answer.status == 200)]
    assert len(given) <= 2 and not any(ground.accepted(one) for one in given)


def test_a_token_of_a_client_is_for_that_client_and_mcp_alone(ground: Ground) -> None:
    flow, other = Flow(ground.gateway), Flow(ground.gateway, client_name="other")
    form = _code(flow, scope="tools.read")
    assert ground.form("/oauth/token", **{**form, "client_id": other.id}).status == 400
    pair = ground.form("/oauth/token", **form).json()
    assert pair["scope"] == "tools.read"
    refresh = {"grant_type": "refresh_token", "refresh_token": pair["refresh_token"]}
    assert ground.form("/oauth/token", client_id=other.id, **refresh).status == 400
    assert ground.form("/oauth/token", client_id=flow.id, scope="tools.exec", **refresh).status == 400
    ground.form("/oauth/revoke", client_id=other.id, token=pair["access_token"])
    assert ground.accepted(pair["access_token"]) and not ground.accepted(pair["refresh_token"])
    for path in ("/v1/tools/invoke", "/v1/tools/fanout", "/agent/process", "/v1/signin"):
        assert ground.ask("POST", path, {}, pair["access_token"]).status == 401


def test_a_code_ends_with_the_token_that_consented(ground: Ground) -> None:
    maker = made(ground.gateway, "admin")
    form = _code(Flow(ground.gateway), token=maker["token"])
    ground.ask("DELETE", f"/v1/tokens/{maker['id']}")
    assert ground.form("/oauth/token", **form).status == 400


@pytest.mark.parametrize(
    "changes",
    [
        {"code_challenge_method": "plain"},
        {"code_challenge_method": None},
        {"code_challenge": None},
        {"redirect_uri": f"{CALLBACK}/../x"},
        {"redirect_uri": f"{CALLBACK}#x"},
        {"redirect_uri": f"{CALLBACK}?x=1"},
        {"redirect_uri": "http://127.0.0.1:9@evil.example/callback"},
        {"client_id": "https://127.0.0.1/client"},
        {"client_id": "https://127.1/client"},
        {"client_id": "https://0x7f000001/client"},
        {"client_id": "https://2130706433/client"},
        {"client_id": "https://[::ffff:127.0.0.1]/client"},
        {"client_id": "https://169.254.169.254/latest"},
        {"client_id": "https://localhost/client"},
    ],
    ids=str,
)
def test_no_such_request_of_a_client_gets_a_code(ground: Ground, changes: dict[str, Any]) -> None:
    flow = Flow(ground.gateway)
    answer = flow.consent(flow.query(**changes))
    assert answer.status == 400 or "code" not in parse_qs(urlsplit(answer.json()["redirect"]).query)


# -- pairing -----------------------------------------------------------------------------------------------------------


def test_a_code_adds_one_machine_and_replaces_none(ground: Ground) -> None:
    pairing = token(ground.gateway, "pair")
    code = ground.ask("POST", "/v1/pairings", {}, pairing).json()["code"]
    for name in ("laptop", "LAPTOP", "hidden-vault", "laptop:x", "gsv", "l\u0430ptop", "a" * 200, "a__b"):
        assert ground.ask("POST", "/v1/pair", {"code": code, "node_id": name}, None).status in (400, 409), name
    with ThreadPoolExecutor(8) as pool:
        asked = [{"code": code, "node_id": f"race-{number}"} for number in range(8)]
        statuses = list(pool.map(lambda body: ground.ask("POST", "/v1/pair", body, None).status, asked))
    assert sorted(statuses) == [201, *[401] * 7]
    for path in (f"/join/{code}", f"/join/{code}/farhand.whl"):
        assert ground.ask("GET", path, None, None).status == 401


@pytest.mark.parametrize("name", ["../token", "..%2ftoken", "%2e%2e%2ftoken", "token", "farhand.whl%00", "FARHAND.WHL"])
def test_a_code_gives_no_file_but_those_to_install(ground: Ground, name: str) -> None:
    code = ground.ask("POST", "/v1/pairings", {}).json()["code"]
    answer = ground.ask("GET", f"/join/{code}/{name}", None, None)
    assert answer.status in (400, 401, 404) and ground.gateway.token not in answer.body.decode(errors="replace")


def test_a_code_ends_with_the_token_that_made_it(ground: Ground) -> None:
    maker = made(ground.gateway, "pair")
    code = ground.ask("POST", "/v1/pairings", {}, maker["token"]).json()["code"]
    assert ground.ask("GET", f"/join/{code}", None, None).status == 200
    ground.ask("DELETE", f"/v1/tokens/{maker['id']}")
    assert ground.ask("GET", f"/join/{code}", None, None).status == 401
    assert ground.ask("POST", "/v1/pair", {"code": code, "node_id": "late"}, None).status == 401
