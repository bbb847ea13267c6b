"""`PUT /v1/policy`: the owner writes the policy into farhand.toml, unless it changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harness import Answer, GatewayProcess

NO_LS = {"name": "no ls", "decision": "deny", "tool": "exec", "args": {"command": "ls*"}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("policy") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text("# mine\n[policy]\n")
    with GatewayProcess(home) as started:
        yield started


def etag(gateway: GatewayProcess) -> str:
    return gateway.request("GET", "/v1/policy").headers["etag"]


def save(gateway: GatewayProcess, policy: Any, match: str | None = "", **options: Any) -> Answer:
    headers = {} if match is None else {"If-Match": match or etag(gateway)}
    return gateway.request("PUT", "/v1/policy", policy, headers=headers, **options)


def test_a_saved_policy_is_in_force_at_once_and_stays(gateway: GatewayProcess) -> None:
    assert gateway.invoke("exec", {"command": "ls"})["ok"] is True
    draft = {"rules": [NO_LS]}
    tried = gateway.request("POST", "/v1/policy/explain", {"tool": "exec", "args": {"command": "ls"}, "policy": draft})
    assert (tried.json()["decision"], tried.json()["rule"]) == ("deny", "no ls")
    answer = save(gateway, draft)
    assert answer.status == 200 and answer.json()["rules"][0]["name"] == "no ls"
    assert answer.headers["etag"] == etag(gateway)
    assert gateway.invoke("exec", {"command": "ls"})["error"]["kind"] == "not_allowed"
    assert (gateway.home / "farhand.toml").read_text().startswith("# mine\n[policy]\n")
    [saved] = gateway.get("/v1/journal?kind=policy.saved")["events"]
    assert saved["data"]["by"] == "owner" and saved["data"]["policy"]["rules"][0]["name"] == "no ls"
    gateway.stop()
    gateway.start()
    assert gateway.get("/v1/policy")["rules"][0]["name"] == "no ls"
    assert save(gateway, {}).status == 200
    assert gateway.invoke("exec", {"command": "ls"})["ok"] is True


def test_a_change_from_elsewhere_is_not_overwritten(gateway: GatewayProcess) -> None:
    before = etag(gateway)
    file = gateway.home / "farhand.toml"
    file.write_text('[policy]\ndefault = "ask"\n')
    stale = save(gateway, {"rules": [NO_LS]}, before)
    assert (stale.status, stale.json()["error"]["code"]) == (412, "precondition_failed")
    assert file.read_text() == '[policy]\ndefault = "ask"\n'
    assert save(gateway, {"rules": [NO_LS]}, None).status == 428
    assert save(gateway, {"default": "allow"}, etag(gateway)).status == 200


@pytest.mark.parametrize(
    "policy",
    [
        {"rules": [{"decision": "maybe"}]},
        {"rules": [{"decision": "deny", "args": {"command": "re:("}}]},
        {"rules": [{"decision": "deny", "toool": "x"}]},
        {"default": "trial"},
        {"approval_seconds": -1},
        {"rules": [{"decision": "ask", "route": "nowhere"}]},
        {"rules": "none"},
        [],
        None,
    ],
)
def test_an_invalid_policy_is_not_saved(gateway: GatewayProcess, policy: Any) -> None:
    before = (gateway.home / "farhand.toml").read_text()
    answer = save(gateway, policy)
    assert answer.status == 400, answer
    assert (gateway.home / "farhand.toml").read_text() == before


def test_only_the_owner_saves(gateway: GatewayProcess) -> None:
    for scopes, status in ((["admin"], 403), (["read"], 403)):
        token = gateway.request("POST", "/v1/tokens", {"label": "other", "scopes": scopes}).json()["token"]
        assert save(gateway, {}, token=token).status == status
    reader = gateway.request("POST", "/v1/tokens", {"label": "reader", "scopes": ["read"]}).json()["token"]
    asked = {"tool": "exec", "args": {}, "policy": {}}
    assert gateway.request("POST", "/v1/policy/explain", asked, token=reader).status == 403
    assert save(gateway, {}, token=None).status == 401


def test_a_file_that_cannot_be_written_is_reported(gateway: GatewayProcess) -> None:
    beside = gateway.home / "farhand.toml.new"
    beside.mkdir()  # where the new file would be written
    try:
        answer = save(gateway, {"default": "deny"})
    finally:
        beside.rmdir()
    assert (answer.status, answer.json()["error"]["code"]) == (409, "conflict")
    assert gateway.get("/v1/policy")["default"] == "allow"


def test_a_variable_that_overrides_the_file_is_reported(tmp_path: Any) -> None:
    with GatewayProcess(tmp_path / "home", env={"FARHAND_POLICY_DEFAULT": "ask"}) as started:
        answer = save(started, {"default": "allow"})
        assert answer.status == 409 and "FARHAND_POLICY_DEFAULT" in answer.json()["error"]["message"]
