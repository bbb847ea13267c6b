"""Attacks by a token through what it makes: tokens, sign-in links and console sessions act as it, and end with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.integration.calls.test_principal import revoke, token
from tests.support.harness import GatewayProcess, wait_until

ASK = """
[[policy.rules]]
name = "marked commands are asked about"
decision = "ask"
args = { command = "*ask-me*" }
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("makers") / "home"
    write_policy(home, ASK)
    with GatewayProcess(home) as gateway:
        yield gateway


def sign_in(gateway: GatewayProcess, secret: str) -> dict[str, str]:
    made = gateway.request("POST", "/v1/signin", {}, token=secret)
    assert made.status == 201, made
    found = gateway.request("GET", made.json()["path"], token=None)
    page = found.headers["location"].partition("#page=")[2]
    return {"Cookie": found.headers["set-cookie"].partition(";")[0], "X-Farhand-Page": page}


def make_token(gateway: GatewayProcess, maker: str, **wanted: Any) -> Any:
    made = gateway.request("POST", "/v1/tokens", wanted, token=maker)
    assert made.status == 201, made
    return made.json()


def status(gateway: GatewayProcess, secret: str) -> int:
    return gateway.request("GET", "/v1/tokens", token=secret).status


def test_an_admin_token_cannot_approve_its_own_call_in_a_browser(gateway: GatewayProcess) -> None:
    _, admin = token(gateway, "admin")
    body = {"tool": "exec", "args": {"command": "echo ask-me"}, "background": True}
    begun = gateway.request("POST", "/v1/tools/invoke", body, token=admin).json()
    approval = asked(gateway, begun["request_id"])
    assert answer(gateway, approval, token=admin).status == 403
    decision = {"decision": "approve", "hash": approval["hash"]}
    page = sign_in(gateway, admin)
    answered = gateway.request("POST", f"/v1/approvals/{approval['id']}", decision, token=None, headers=page)
    assert answered.status == 403, answered
    assert answer(gateway, approval).status == 200


def test_a_console_session_acts_as_the_token_that_made_its_link(gateway: GatewayProcess) -> None:
    name, admin = token(gateway, "admin")
    page = sign_in(gateway, admin)
    made = gateway.request("POST", "/v1/tokens", {"scopes": ["read"]}, token=None, headers=page).json()
    assert made["made_by"] == name
    listed = gateway.request("GET", "/v1/console/sessions", token=None, headers=page).json()["sessions"]
    assert [one["credential"] for one in listed if one["current"]] == [name]


def test_a_console_session_ends_with_the_token_that_made_its_link(gateway: GatewayProcess) -> None:
    name, admin = token(gateway, "admin")
    page = sign_in(gateway, admin)
    link = gateway.request("POST", "/v1/signin", {}, token=admin).json()["path"]
    revoke(gateway, name)
    made = gateway.request("POST", "/v1/tokens", {"scopes": ["admin"]}, token=None, headers=page)
    assert made.status == 401, made
    assert gateway.request("GET", link, token=None).status == 401
    assert name not in [one["credential"] for one in gateway.get("/v1/console/sessions")["sessions"]]


def test_a_console_session_ends_when_the_token_that_made_its_link_expires(gateway: GatewayProcess) -> None:
    _, admin = token(gateway, "admin", expires_seconds=1.5)
    page = sign_in(gateway, admin)
    time.sleep(1.6)
    assert gateway.request("GET", "/v1/tokens", token=None, headers=page).status == 401


def test_a_token_expires_with_the_token_that_made_it_at_the_latest(gateway: GatewayProcess) -> None:
    _, admin = token(gateway, "admin", expires_seconds=1.5)
    made = [
        make_token(gateway, admin, scopes=["admin"]),
        make_token(gateway, admin, scopes=["admin"], expires_seconds=99),
    ]
    time.sleep(1.6)
    assert status(gateway, admin) == 401
    assert [status(gateway, one["token"]) for one in made] == [401, 401]


def test_revoking_a_token_revokes_what_it_made_for_good(gateway: GatewayProcess) -> None:
    name, admin = token(gateway, "admin")
    child = make_token(gateway, admin, scopes=["admin"])
    grandchild = make_token(gateway, child["token"], scopes=["admin"])
    machine = make_token(gateway, child["token"], node_id="made-by-a-token")
    other = make_token(gateway, "owner", scopes=["admin"])
    answered = gateway.request("DELETE", f"/v1/tokens/{name}").json()
    assert sorted(answered["also"]) == sorted([child["id"], grandchild["id"], machine["id"]])
    for _ in range(2):
        assert [status(gateway, one["token"]) for one in (child, grandchild)] == [401, 401]
        assert status(gateway, other["token"]) == 200
        revoked = {one["id"] for one in gateway.get("/v1/tokens")["tokens"] if one["revoked_at"] is not None}
        assert {name, child["id"], grandchild["id"], machine["id"]} <= revoked and other["id"] not in revoked
        gateway.stop()
        gateway.start()
        wait_until(lambda: gateway.request("GET", "/readyz", token=None).status == 200, 20, "the gateway")


def test_rules_that_stop_a_token_stop_the_tokens_it_makes(gateway: GatewayProcess) -> None:
    name, admin = token(gateway, "admin")
    child = make_token(gateway, admin, scopes=["tools.exec"])["token"]

    def state(secret: str) -> str:
        body = {"tool": "exec", "args": {"command": "true"}}
        return str(gateway.request("POST", "/v1/tools/invoke", body, token=secret).json()["state"])

    assert state(child) == "ok"
    write_policy(gateway.home, f'\n[[policy.rules]]\ndecision = "deny"\ncredential = "{name}"\ntool = "exec"\n')
    wait_until(lambda: state(admin) == "denied", 20, "the new rule")
    assert state(child) == "denied"
