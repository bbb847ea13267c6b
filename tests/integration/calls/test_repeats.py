"""An `Idempotency-Key` on any POST: what it does is done once, for a day."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess


@pytest.fixture
def gateway(tmp_path: Path) -> Any:
    one = GatewayProcess(tmp_path / "home")
    one.start()
    yield one
    one.stop()


def make(gateway: GatewayProcess, key: str, label: str = "a", **more: Any) -> Any:
    body = {"label": label, "scopes": ["read"], **more}
    return gateway.request("POST", "/v1/tokens", body, headers={"Idempotency-Key": key})


def made(gateway: GatewayProcess) -> int:
    return len(gateway.request("GET", "/v1/tokens").json()["tokens"])


def test_a_token_is_created_once_and_shown_again_to_a_repeated_request(gateway: GatewayProcess) -> None:
    first, again = make(gateway, "k"), make(gateway, "k")
    assert (first.status, again.status) == (201, 201) and first.json() == again.json()
    assert gateway.request("GET", "/v1/nodes", token=again.json()["token"]).status == 200
    other = make(gateway, "k", "b")
    assert (other.status, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    elsewhere = gateway.request("POST", "/v1/pairings", {}, headers={"Idempotency-Key": "k"})
    assert elsewhere.status == 409, "a key stands for one request"
    assert make(gateway, "k2").json()["id"] != first.json()["id"] and made(gateway) == 2


def test_the_same_json_in_another_form_is_the_same_request(gateway: GatewayProcess) -> None:
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    texts = (b'{"label":"a","scopes":["read"]}', b'{ "scopes" : ["read"], "label": "\\u0061" }')
    first, again = (gateway.request("POST", "/v1/tokens", text, headers=headers) for text in texts)
    assert (first.status, again.status) == (201, 201) and first.json() == again.json() and made(gateway) == 1


def test_only_one_of_many_concurrent_requests_is_carried_out(gateway: GatewayProcess) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: make(gateway, "same").json()["id"], range(20)))
    print(f"requests with one key at once: {len(answers)} tried, {len(answers) if len(set(answers)) == 1 else 0} held")
    assert len(set(answers)) == 1 and made(gateway) == 1


def test_a_refused_request_does_not_use_up_its_key(gateway: GatewayProcess) -> None:
    assert make(gateway, "k", scopes=[]).status == 400
    assert make(gateway, "k", expires_seconds=-1).status == 400
    assert make(gateway, "k").status == 201 and made(gateway) == 1
    assert make(gateway, "x" * 257).status == 400


@pytest.mark.parametrize("killed", [False, True])
def test_it_is_not_repeated_after_a_restart_although_the_answer_is_lost(gateway: GatewayProcess, killed: bool) -> None:
    assert make(gateway, "k").status == 201
    gateway.kill() if killed else gateway.stop()
    gateway.start()
    again = make(gateway, "k")
    assert (again.status, again.json()["error"]["code"]) == (409, "already_done") and made(gateway) == 1
    assert make(gateway, "k", "b").json()["error"]["code"] == "idempotency_conflict"


def test_every_post_of_the_table_takes_one(gateway: GatewayProcess) -> None:
    paths = gateway.request("GET", "/v1/openapi.json").json()["paths"]
    posts = {path: ways["post"] for path, ways in paths.items() if "post" in ways}
    without = [
        path
        for path, operation in posts.items()
        if not any(one["name"] == "Idempotency-Key" for one in operation.get("parameters", ()))
    ]
    assert set(without) == {
        "/mcp",  # it has ids of its own
        "/v1/calls/{call_id}/input",  # a stream, which cannot be compared with an earlier one
        # Without a credential, a key has no owner. A pairing code is good once, an offer changes
        # nothing, and the OAuth standards have their own rules for repeats.
        *("/v1/pair", "/v1/pair/offer", "/oauth/register", "/oauth/token", "/oauth/revoke"),
    }
    assert len(posts) > 20
