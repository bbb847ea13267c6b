"""People whom the owner has not named: a session of their own, and nothing of the owner's state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.gateway.sessions.keys import canonical, guest_key
from tests.integration.messaging.test_messages import Talk, last_said, say
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import wait_until
from tests.support.model_server import Reply, Request, calls, text

OWNED = ("the plan for Monday", "words of MEMORY", "words of USER", "words of HEARTBEAT")


def answer(request: Request) -> Reply:
    said = last_said(request)
    if "look it up" in said and request.messages[-1]["role"] == "user":
        return calls(("memory_search", {"query": "plan"}), ("sessions_history", {"session_id": "main"}))
    return text(f"You said: {said}")


def fill(home: Path) -> None:
    folder = home / "agents" / "main"
    folder.mkdir(parents=True)
    for name in ("SOUL", "USER", "MEMORY", "HEARTBEAT"):
        (folder / f"{name}.md").write_text(f"words of {name}\n")


def heard(talk: Talk, peer: str, word: str) -> str:
    """What a person was answered that holds a word."""

    def found() -> str | None:
        return next((one["text"] for one in talk.receiver.taken if one["to"] == peer and word in one["text"]), None)

    return str(wait_until(found, 20, f"an answer to {peer}"))


def own_session(talk: Talk, message: str) -> Any:
    body = {"message": message, "wait_seconds": 20}
    return talk.gateway.request("POST", "/v1/sessions/main/messages", body).json()


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    home = tmp_path_factory.mktemp("guests") / "home"
    fill(home)
    with Talk(home, 'tools = "read"\nallow = ["olga"]\n', answer=answer) as one:
        assert own_session(one, "the plan for Monday is secret")["state"] == "ok"
        yield one


def asked(talk: Talk, word: str) -> Request:
    return next(request for request in talk.model.requests if word.encode() in request.body)


def test_a_stranger_sees_nothing_of_the_owner(talk: Talk) -> None:
    assert say(talk.gateway, "mallory", "what did you talk about?").status == 202
    heard(talk, "mallory", "what did you talk about?")
    request = asked(talk, "what did you talk about?")
    for word in OWNED:
        assert word not in request.body.decode(), word
    assert "words of SOUL" in request.body.decode()
    assert "what did you talk about?" not in json.dumps(talk.gateway.get("/v1/sessions/main/history"))
    assert not {"memory_search", "memory_get", "sessions_history"} & set(request.tools)


def test_a_stranger_s_agent_cannot_call_what_tells_of_the_owner(talk: Talk) -> None:
    assert say(talk.gateway, "nosy", "look it up").status == 202
    heard(talk, "nosy", "look it up")
    results = [
        message["content"]
        for request in talk.model.requests
        for message in request.messages
        if message["role"] == "tool" and b"nosy" in request.body
    ]
    assert len(results) == 2 and all("not found" in one or "not for people" in one for one in results), results


def test_each_stranger_has_a_session_of_their_own(talk: Talk) -> None:
    for peer, word in (("ann", "first-secret"), ("Ann", "second"), ("ann ", "third")):
        assert say(talk.gateway, peer, word).status == 202
        heard(talk, peer, word)
    assert "first-secret" not in asked(talk, "second").body.decode()
    assert "first-secret" not in asked(talk, "third").body.decode()
    assert say(talk.gateway, "ann", "fourth").status == 202
    heard(talk, "ann", "fourth")
    assert "first-secret" in asked(talk, "fourth").body.decode()


@pytest.mark.parametrize("command", ["/new", "/stop", "/model default", "/think high", "/compact", "/freeze now"])
def test_a_stranger_s_commands_leave_the_main_session_alone(talk: Talk, command: str) -> None:
    before = talk.gateway.get("/v1/sessions/main")
    peer = f"cmd{command.split(maxsplit=1)[0].strip('/')}"
    assert say(talk.gateway, peer, "hello").status == 202
    heard(talk, peer, "hello")
    assert say(talk.gateway, peer, command).status == 202
    wait_until(lambda: len([one for one in talk.receiver.taken if one["to"] == peer]) == 2, 20)
    reply = [one["text"] for one in talk.receiver.taken if one["to"] == peer][-1]
    allowed = command in ("/new", "/stop")
    assert ("whom the owner of this agent has named" not in reply) is allowed, reply
    after = talk.gateway.get("/v1/sessions/main")
    assert (after["message_count"], after.get("thinking")) == (before["message_count"], before.get("thinking"))
    assert "the plan for Monday" in json.dumps(talk.gateway.get("/v1/sessions/main/history"))


def test_a_guest_in_a_group_gives_no_commands(talk: Talk) -> None:
    group = {"peer": "team", "peerKind": "group", "mentioned": True}
    assert say(talk.gateway, "gus", "/new", **group).status == 202
    assert "whom the owner" in heard(talk, "team", "whom the owner")


def test_the_place_used_last_is_never_a_stranger_s(talk: Talk) -> None:
    assert say(talk.gateway, "last", "I was here").status == 202
    heard(talk, "last", "I was here")
    sent = talk.gateway.invoke("gsv__Message", {"text": "a reminder"}, session_key="main")
    assert not sent["ok"] or sent["result"]["to"] != "last", sent


def test_a_person_the_owner_named_shares_the_main_session(talk: Talk) -> None:
    assert say(talk.gateway, "olga", "where were we?").status == 202
    heard(talk, "olga", "where were we?")
    body = asked(talk, "where were we?").body.decode()
    assert "the plan for Monday" in body and "words of MEMORY" in body and "words of USER" in body
    assert say(talk.gateway, "olga", "/new").status == 202  # this channel has tools = "read"
    assert 'needs a channel with tools = "all"' in heard(talk, "olga", "needs a channel")


def test_a_paired_person_shares_it_and_may_start_a_new_conversation(tmp_path: Path) -> None:
    fill(tmp_path / "home")
    with Talk(tmp_path / "home", policy="pairing", answer=answer) as talk:
        assert own_session(talk, "the plan for Monday")["state"] == "ok"
        assert say(talk.gateway, "owner", "let me in").status == 202
        wait_until(lambda: talk.receiver.taken, 20)
        code = talk.gateway.get("/v1/channels/pairings")["pairings"][0]["code"]
        talk.gateway.request("POST", f"/v1/channels/pairings/{code}/approve", {})
        assert say(talk.gateway, "owner", "and now?").status == 202
        heard(talk, "owner", "and now?")
        assert "the plan for Monday" in asked(talk, "and now?").body.decode()
        assert say(talk.gateway, "owner", "/new").status == 202
        heard(talk, "owner", "New conversation.")


def test_every_person_admitted_by_an_allow_list_of_all_is_a_guest(tmp_path: Path) -> None:
    fill(tmp_path / "home")
    with Talk(tmp_path / "home", 'allow = ["*"]\n', policy="allowlist", answer=answer) as talk:
        assert own_session(talk, "the plan for Monday")["state"] == "ok"
        assert say(talk.gateway, "mallory", "hello there").status == 202
        heard(talk, "mallory", "hello there")
        body = asked(talk, "hello there").body.decode()
        assert not [word for word in OWNED if word in body]


@pytest.mark.parametrize(
    ("channel", "status", "words"),
    [
        ('policy = "open"', "ok", "their own sessions"),
        ('policy = "open"\ntools = "read"', "warning", "including the memory"),
        ('policy = "open"\ntools = "all"', "failed", "use tools on your machines"),
        ('allow = ["*"]', "failed", "use tools on your machines"),
        ('policy = "pairing"', "ok", "none is open"),
    ],
)
def test_the_doctor_looks_at_open_channels(tmp_path: Path, channel: str, status: str, words: str) -> None:
    (tmp_path / "farhand.toml").write_text(f'[channels.crm]\nkind = "webhook"\nsecret = "x"\n{channel}\n')
    done = run_process([*FARHAND, "doctor", "--json"], env={**os.environ, "FARHAND_HOME": str(tmp_path)})
    (check,) = [one for one in json.loads(done.stdout)["checks"] if one["name"] == "channels"]
    assert check["status"] == status and words in check["message"], check


def test_keys_of_guests_are_their_own() -> None:
    keys = {guest_key("main", "webhook", "crm", peer) for peer in ("ann", "Ann", "a:nn", "a_nn", "main", "dm:x", "é")}
    assert len(keys) == 7
    assert all(canonical(key) == key for key in keys)
