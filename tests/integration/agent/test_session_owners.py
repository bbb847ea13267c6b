"""Owners of sessions: a token can end and reset only the sessions that it began."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.model_server import text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("owners") / "home")


def token(house: House, *scopes: str) -> str:
    return str(house.gateway.request("POST", "/v1/tokens", {"scopes": list(scopes)}).json()["token"])


def say(house: House, key: str, said: str, token: str) -> Any:
    body = {"message": said, "wait_seconds": 30}
    return house.gateway.request("POST", f"/v1/sessions/{key}/messages", body, token=token)


def test_a_session_is_ended_and_renewed_by_who_began_it(house: House) -> None:
    first, other = token(house, "chat"), token(house, "chat")
    session = house.session(text("hello"), text("hello again"))
    begun = say(house, session.key, f"[{session.key}] hi", first)
    assert begun.json()["reply"] == "hello", begun
    run = begun.json()["run_id"]
    refused = [
        house.gateway.request("POST", f"/v1/sessions/{session.key}/stop", {}, token=other),
        *(say(house, session.key, command, other) for command in ("/new", "/reset", "/stop", "/compact", "/model x")),
        house.gateway.request("GET", f"/v1/runs/{run}/events", token=other),
    ]
    print(f"strangers at a session: {len(refused)} tried, {sum(one.status == 403 for one in refused)} held")
    assert [one.status for one in refused] == [403] * len(refused), refused
    assert "admin" in refused[0].json()["error"]["message"]
    assert say(house, session.key, "/status", other).status == 403, "it shows what another began"
    assert house.gateway.request("GET", f"/v1/runs/{run}/events", token=first).status == 200
    assert house.gateway.request("POST", f"/v1/sessions/{session.key}/stop", {}, token=first).status == 200
    assert say(house, session.key, "/new", first).json()["reply"] == "New conversation."
    reader = token(house, "chat", "read")
    assert say(house, session.key, "/new", reader).status == 403
    assert say(house, session.key, "/status", reader).status == 200, "it changes nothing"
    assert say(house, session.key, "/new", house.gateway.token).status == 200, "the owner may anything"


def test_any_token_may_begin_a_new_session(house: House) -> None:
    assert say(house, f"fresh-{uuid.uuid4().hex[:8]}", "/new", token(house, "chat")).status == 200
