"""Attempts of one token on the chats and sessions of another."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.model_server import text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("chats") / "home")


def token(house: House, *scopes: str) -> str:
    return str(house.gateway.request("POST", "/v1/tokens", {"scopes": list(scopes)}).json()["token"])


def process(house: House, secret: str, name: str, said: str, **more: Any) -> Any:
    content = [{"role": "user", "content": said}]
    body = {"session_id": name, "user_id": "u", "input": content, **more}
    return house.gateway.request("POST", "/agent/process", body, token=secret, timeout=60)


TOOL = {"biz_params": {"tool": {"name": "shell", "input": {"command": "true"}}}}


@pytest.mark.parametrize("way", ["after a new beginning", "by a tool", "by a refused message"])
def test_a_credential_cannot_take_over_the_chat_of_another(house: House, way: str) -> None:
    """A token that puts its name on a chat does not thereby end what the agent does there for another."""
    first, other = token(house, "chat", "tools.exec"), token(house, "chat", "tools.exec")
    name = f"c-{uuid.uuid4().hex[:8]}"
    house.script(name, text("one"))
    if way == "by a tool":
        assert process(house, other, name, "x", **TOOL).status == 200
    assert process(house, first, name, f"{name} secret words").status == 200
    if way != "by a tool":
        assert process(house, first, name, "/new").status == 200
    if way == "by a refused message":
        assert process(house, other, name, f"{name} let me").status == 403
    house.script(name, text("two"), text("three"))
    assert process(house, first, name, f"{name} kept words").status == 200
    refused = process(house, other, name, "/new")
    assert refused.status == 403, refused
    assert process(house, first, name, f"{name} what did I say?").status == 200
    assert "kept words" in str(house.asked(name)[-1].messages)


def echo(words: str) -> dict[str, Any]:
    return {"biz_params": {"tool": {"name": "shell", "input": {"command": f"echo {words}"}}}}


def test_the_agent_knows_what_tools_said_in_its_own_chat_only(house: House) -> None:
    """A chat is one conversation, but what tools said to one credential does not reach the agent of another."""
    first, other = token(house, "chat", "tools.exec"), token(house, "chat", "tools.exec")
    name = f"c-{uuid.uuid4().hex[:8]}"
    house.script(name, text("one"), text("two"), text("three"))

    def seen() -> str:
        return str(house.asked(name)[-1].messages)

    assert process(house, other, name, "look", **echo("words-of-other")).status == 200
    assert process(house, first, name, f"{name} hello").status == 200
    assert "words-of-other" not in seen()
    assert process(house, other, name, "look", **echo("words-of-other")).status == 200
    assert process(house, "owner", name, "look", **echo("words-of-owner")).status == 200
    assert process(house, first, name, f"{name} again").status == 200
    assert "words-of-other" not in seen() and "words-of-owner" not in seen() and "hello" in seen()

    assert process(house, "owner", name, "/new").status == 200
    assert process(house, "owner", name, "look", **echo("words-of-owner")).status == 200
    assert process(house, "owner", name, f"{name} what was it?").status == 200
    assert "words-of-owner" in seen() and "hello" not in seen()
    (chat,) = house.gateway.get(f"/chats?session_id={name}")
    said = [one["content"][0]["text"] for one in house.gateway.get(f"/chats/{chat['id']}")["messages"]]
    assert said[0] == "look" and "words-of-owner" in said[1] and said[2:] == [f"{name} what was it?", "three"]


@pytest.mark.parametrize("header", [True, False])
def test_chat_completions_do_not_enter_another_s_session(house: House, header: bool) -> None:
    first, other = token(house, "chat"), token(house, "chat")
    session = house.session(text("one"), text("two"))
    session.send("secret words", token=first)
    for key in (session.key, f" {session.key} ", "main"):
        if key == "main":
            house.script("owner-words", text("ok"))
            house.gateway.request("POST", "/v1/sessions/main/messages", {"message": "owner-words", "wait_seconds": 20})
        result = {"role": "tool", "tool_call_id": "x", "content": "y"}
        for message in ({"role": "user", "content": session.key}, result):
            body: dict[str, Any] = {"messages": [message]}
            headers = {"X-Session-Key": key} if header else {}
            if not header:
                body["user"] = key
            said = house.gateway.request("POST", "/v1/chat/completions", body, token=other, headers=headers)
            assert said.status in (400, 403), said
            assert "secret words" not in said.body.decode()
