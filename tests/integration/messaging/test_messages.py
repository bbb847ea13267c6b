"""Messages to people and from them: one test for each promise, with a webhook channel as the service."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.channel_servers import Answer, Request, WebhookReceiver
from tests.support.harness import GatewayProcess, wait_until
from tests.support.model_server import ModelServer, calls, text

SECRET = "a secret of both"


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    return {"X-Webhook-Signature": "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}


def configure(home: Path, url: str, more: str = "", *, policy: str = "open") -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "farhand.toml").write_text(
        f'[channels.crm]\nkind = "webhook"\nurl = "{url}"\nsecret = "{SECRET}"\npolicy = "{policy}"\n{more}'
    )


def say(gateway: GatewayProcess, sender: str, said: str, **more: Any) -> Any:
    body = json.dumps({"id": uuid.uuid4().hex, "sender": sender, "text": said, **more}).encode()
    return gateway.request("POST", "/hooks/crm", body, token=None, headers=signed(body))


class Talk:
    """A gateway whose channel `crm` posts to `receiver`, and whose model answers by `answer`."""

    def __init__(self, home: Path, more: str = "", *, policy: str = "open", script: Any = None, answer: Any = None):
        self.receiver = WebhookReceiver(script)
        self.model = ModelServer(answer=answer or (lambda request: text("You said: " + last_said(request))))
        self.home = home
        self.more = more
        self.policy = policy

    def __enter__(self) -> Talk:
        self.receiver.up()
        self.model.__enter__()
        configure(self.home, self.receiver.url + "/in", self.more, policy=self.policy)
        env = {"OPENAI_BASE_URL": self.model.url, "OPENAI_API_KEY": "k", "FARHAND_MODEL": "scripted"}
        self.gateway = GatewayProcess(self.home, env=env)
        self.gateway.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.gateway.process is not None and self.gateway.process.poll() is None:
            self.gateway.stop()
        self.model.__exit__(None, None, None)
        self.receiver.down()


def last_said(request: Any) -> str:
    content = [message for message in request.messages if message["role"] == "user"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    more = 'allow = ["bob", "dup", "boss", "eve", "team"]\n'  # the others are guests
    more += '[sessions]\ndm_scope = "per-peer"\n[sessions.identity_links]\nalice = ["webhook:al", "webhook:alicia"]\n'
    more += '[[bindings]]\nagent = "helper"\nchannel = "webhook"\npeer = "boss"\n'
    with Talk(tmp_path_factory.mktemp("talk") / "home", more) as one:
        yield one


def sends(talk: Talk, args: dict[str, Any], **options: Any) -> Any:
    return talk.gateway.invoke("gsv__Message", args, **options)


# -- the tools ----------------------------------------------------------------------------------------------


def test_a_message_reaches_its_peer(talk: Talk) -> None:
    answer = sends(talk, {"text": "hello", "channel": "crm", "to": "tom", "replyToId": "m7"})
    assert answer["ok"] and answer["route"]["kind"] == "native", answer
    result = answer["result"]
    assert result["sent"] is True and result["messageId"]
    assert (result["channel"], result["to"], result["peerKind"], result["accountId"]) == ("webhook", "tom", "dm", "crm")
    (got,) = [one for one in talk.receiver.taken if one["to"] == "tom"]
    assert (got["text"], got["replyToId"], got["peerKind"]) == ("hello", "m7", "dm")
    (request,) = [one for one in talk.receiver.requests if one.json["to"] == "tom"]
    assert request.headers["x-webhook-signature"] == signed(request.body)["X-Webhook-Signature"]


def test_peer_kind_and_account_are_honoured(talk: Talk) -> None:
    args = {"text": "x", "channel": "webhook", "accountId": "crm", "to": "room", "peerKind": "group"}
    assert sends(talk, args)["result"]["peerKind"] == "group"
    assert [one["peerKind"] for one in talk.receiver.taken if one["to"] == "room"] == ["group"]


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        ({"channel": "crm", "to": "x"}, "invalid_args", "text"),
        ({"text": "  ", "channel": "crm", "to": "x"}, "invalid_args", "text is required"),
        (
            {"text": "x", "to": "y", "channel": "pager"},
            "not_found",
            'Channel "pager" (account: default) is not connected',
        ),
        ({"text": "x", "to": "y", "channel": "crm", "accountId": "no"}, "not_found", "(account: no) is not connected"),
        ({"text": "x", "channel": "console"}, "invalid_args", "to (peer ID) is required (no current peer context"),
        ({"text": "x", "channel": "crm", "to": "y", "media": ["no.txt"]}, "not_found", "no.txt"),
    ],
)
def test_an_invalid_message_is_refused_with_the_reason(talk: Talk, args: dict[str, Any], kind: str, words: str) -> None:
    answer = sends(talk, args)
    assert not answer["ok"] and answer["error"]["kind"] == kind, answer
    assert words in answer["error"]["message"], answer


def test_a_wrong_peer_kind_is_named(talk: Talk) -> None:
    answer = sends(talk, {"text": "x", "channel": "crm", "to": "y", "peerKind": "crowd"})
    assert answer["error"]["kind"] == "invalid_args", answer
    assert answer["error"]["message"] == "Invalid peerKind: crowd. Must be dm, group, channel, or thread."


def test_without_a_conversation_channel_and_peer_must_be_named(gateway: GatewayProcess) -> None:
    answer = gateway.invoke("gsv__Message", {"text": "x"})
    assert answer["error"]["kind"] == "invalid_args"
    assert answer["error"]["message"] == "channel is required (no current channel context available)"
    answer = gateway.invoke("gsv__Message", {"text": "x", "channel": "console"})
    assert answer["error"]["message"] == "to (peer ID) is required (no current peer context available)"


def test_the_console_is_always_there(gateway: GatewayProcess) -> None:
    assert gateway.invoke("gsv__Message", {"text": "look here", "channel": "console", "to": "me"})["result"]["sent"]
    (one,) = gateway.get("/v1/messages?channel=console")["messages"]
    assert (one["text"], one["to"], one["state"]) == ("look here", "me", "sent")


def test_the_agent_tool_takes_a_target_with_its_channel(talk: Talk) -> None:
    answer = talk.gateway.invoke("message", {"to": "crm:ann", "content": "from the agent"})
    assert answer["result"]["content"] == "message sent to crm:ann", answer
    assert [one["text"] for one in talk.receiver.taken if one["to"] == "ann"] == ["from the agent"]
    assert talk.gateway.invoke("message", {"to": "crm:group:g1", "content": "all"})["ok"]
    assert [one["peerKind"] for one in talk.receiver.taken if one["to"] == "g1"] == ["group"]
    assert "to" in talk.gateway.invoke("message", {"content": "x"})["error"]["message"]
    assert talk.gateway.invoke("message", {"to": "crm:x"})["error"]["kind"] == "invalid_args"


def test_one_call_is_one_message_however_often_it_comes(talk: Talk) -> None:
    args = {"text": "only once", "channel": "crm", "to": "una"}
    first, second = (sends(talk, args, headers={"Idempotency-Key": "once-1"}) for _ in range(2))
    assert first["result"] == second["result"]
    assert [one["text"] for one in talk.receiver.taken if one["to"] == "una"] == ["only once"]


def test_a_workspace_file_goes_along(talk: Talk) -> None:
    assert talk.gateway.invoke("gsv__WriteFile", {"path": "out/report.txt", "content": "numbers"})["ok"]
    assert sends(talk, {"text": "here", "channel": "crm", "to": "fay", "media": ["out/report.txt"]})["ok"]
    (got,) = [one for one in talk.receiver.taken if one["to"] == "fay"]
    assert got["media"] == [{"name": "report.txt", "contentType": "text/plain", "data": "bnVtYmVycw=="}]


# -- people talk to the agent -------------------------------------------------------------------------------


def test_a_person_is_answered_where_they_wrote(talk: Talk) -> None:
    assert say(talk.gateway, "bob", "good morning", senderName="Bob").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "bob"], 20)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "bob"]
    assert got["text"] == "You said: [webhook · Bob] good morning"
    assert talk.gateway.get("/v1/sessions/agent:main:dm:bob")["agent_id"] == "main"


def test_a_message_that_comes_twice_is_heard_once(talk: Talk) -> None:
    for _ in range(2):
        assert say(talk.gateway, "dup", "again", id="same-id").status == 202
    assert say(talk.gateway, "dup", "end").status == 202
    wait_until(lambda: any("end" in one["text"] for one in talk.receiver.taken if one["to"] == "dup"), 20)
    history = talk.gateway.get("/v1/sessions/agent:main:dm:dup/history")["messages"]
    assert sum("again" in json.dumps(one) for one in history if one["role"] == "user") == 1


def test_one_person_with_two_addresses_has_one_session(talk: Talk) -> None:
    assert say(talk.gateway, "al", "first").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "al"], 20)
    assert say(talk.gateway, "alicia", "second").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "alicia"], 20)
    history = json.dumps(talk.gateway.get("/v1/sessions/agent:main:dm:alice/history"))
    assert "first" in history and "second" in history


def test_a_binding_gives_a_peer_another_agent(talk: Talk) -> None:
    assert say(talk.gateway, "boss", "report").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "boss"], 20)
    assert talk.gateway.get("/v1/sessions/agent:helper:dm:boss")["agent_id"] == "helper"


def test_a_message_without_channel_and_peer_goes_to_the_session_s_own(talk: Talk) -> None:
    assert say(talk.gateway, "eve", "hi").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "eve"], 20)
    answer = sends(talk, {"text": "by the way"}, session_key="agent:main:dm:eve")
    assert (answer["result"]["to"], answer["result"]["channel"]) == ("eve", "webhook"), answer
    assert [one["text"] for one in talk.receiver.taken if one["to"] == "eve"][-1] == "by the way"


@pytest.mark.parametrize(
    ("scope", "key"),
    [("per-channel-peer", "agent:main:webhook:dm:ann"), ("per-account-channel-peer", "agent:main:webhook:crm:dm:ann")],
)
def test_a_person_s_session_follows_the_scope(tmp_path: Path, scope: str, key: str) -> None:
    with Talk(tmp_path / "home", f'allow = ["ann"]\n[sessions]\ndm_scope = "{scope}"\n') as talk:
        assert say(talk.gateway, "ann", "hello").status == 202
        wait_until(lambda: talk.receiver.taken, 30)
        assert key in [one["key"] for one in talk.gateway.get("/v1/sessions")["sessions"]]


def test_groups_have_a_session_of_their_own_and_are_heard_when_they_ask(talk: Talk) -> None:
    group = {"peer": "team", "peerKind": "group"}
    assert say(talk.gateway, "gus", "just chatting", mentioned=False, **group).status == 202
    assert say(talk.gateway, "gus", "agent, help", **group).status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "team"], 20)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "team"]
    assert "agent, help" in got["text"] and got["peerKind"] == "group" and got["replyToId"]
    assert "just chatting" not in json.dumps(talk.gateway.get("/v1/sessions/agent:main:webhook:group:team/history"))


def test_files_that_come_are_in_the_workspace(talk: Talk) -> None:
    media = [{"name": "../../photo.txt", "contentType": "text/plain", "data": "cGl4ZWxz"}]
    assert say(talk.gateway, "pia", "look", media=media).status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "pia"], 20)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "pia"]
    path = got["text"].split("[attached: ")[1].split(" ")[0]
    assert path.startswith("media/") and path.endswith("-photo.txt")
    assert talk.gateway.request("GET", f"/v1/workspace/main/{path}").body == b"pixels"


def test_strangers_on_an_open_channel_have_no_tools(talk: Talk) -> None:
    assert say(talk.gateway, "mal", "run a command").status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "mal"], 20)
    (asked,) = [one for one in talk.model.requests if b"run a command" in one.body]
    assert not {"exec", "write", "read", "gsv__WriteFile"} & set(asked.tools)


@pytest.mark.parametrize("headers", [{}, {"X-Webhook-Signature": "sha256=00"}, {"X-Webhook-Signature": "nonsense"}])
def test_an_unsigned_post_is_refused(talk: Talk, headers: dict[str, str]) -> None:
    body = json.dumps({"id": "1", "sender": "mallory", "text": "let me in"}).encode()
    answer = talk.gateway.request("POST", "/hooks/crm", body, token=None, headers=headers)
    assert answer.status == 401, answer
    assert "mallory" not in json.dumps(talk.gateway.get("/v1/sessions"))


def test_a_signed_post_that_is_not_a_message_is_refused(talk: Talk) -> None:
    for body in (b"not json", b"[]", b'{"id": "1"}', b'{"id":"1","sender":"x","text":5}'):
        answer = talk.gateway.request("POST", "/hooks/crm", body, token=None, headers=signed(body))
        assert answer.status == 400, answer


# -- hooks ----------------------------------------------------------------------------------------------------


def test_a_hook_takes_posts_at_once_and_in_order(talk: Talk) -> None:
    made = talk.gateway.request("PUT", "/v1/hooks/ci", {}).json()
    assert made["path"] == "/hooks/ci" and made["secret"]
    for number in range(12):
        body = f"build {number}".encode()
        answer = talk.gateway.request("POST", "/hooks/ci", body, token=None, headers=signed(body, made["secret"]))
        assert answer.status == 202, answer

    def heard() -> list[str]:
        history = talk.gateway.request("GET", "/v1/sessions/agent:main:hook:ci/history?limit=100")
        if history.status != 200:
            return []
        said = [one for one in history.json()["messages"] if one["role"] == "user"]
        return [part for one in said for part in json.dumps(one).split("[webhook:ci] ")[1:]]

    wait_until(lambda: len(heard()) == 12, 30)
    assert [one.split('"')[0] for one in heard()] == [f"build {number}" for number in range(12)]


def test_a_hook_that_is_not_there_or_not_signed_for(talk: Talk) -> None:
    assert talk.gateway.request("POST", "/hooks/nowhere", b"x", token=None).status == 404
    made = talk.gateway.request("PUT", "/v1/hooks/door", {"secret": "knock"}).json()
    assert made["secret"] == "knock"
    for headers in ({}, signed(b"y", "knock"), signed(b"x", "other")):
        assert talk.gateway.request("POST", "/hooks/door", b"x", token=None, headers=headers).status == 401
    assert talk.gateway.request("POST", "/hooks/door", b"x", token=None, headers=signed(b"x", "knock")).status == 202
    assert talk.gateway.request("GET", "/hooks/door", token=None).status == 405
    assert talk.gateway.request("DELETE", "/v1/hooks/door").status == 200
    assert talk.gateway.request("POST", "/hooks/door", b"x", token=None, headers=signed(b"x", "knock")).status == 404


def test_a_hook_s_answers_can_be_delivered(talk: Talk) -> None:
    assert talk.gateway.request("PUT", "/v1/hooks/alarm", {"secret": "", "deliver": "crm:oncall"}).status == 201
    assert talk.gateway.request("POST", "/hooks/alarm", b"disk full", token=None).status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "oncall"], 20)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "oncall"]
    assert got["text"] == "You said: [webhook:alarm] disk full"


def test_a_json_hook_shows_json_and_takes_nothing_else(talk: Talk) -> None:
    wanted = {"secret": "", "format": "json", "deliver": "crm:json"}
    assert talk.gateway.request("PUT", "/v1/hooks/shape", wanted).status == 201
    assert talk.gateway.request("POST", "/hooks/shape", b"{nope", token=None).status == 400
    assert talk.gateway.request("POST", "/hooks/shape", b'{"a":[1]}', token=None).status == 202
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "json"], 20)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "json"]
    assert '"a": [' in got["text"]


def test_a_payload_cannot_choose_its_session(talk: Talk) -> None:
    assert talk.gateway.request("PUT", "/v1/hooks/sly", {"secret": ""}).status == 201
    body = b'{"session_key": "main", "session": "agent:main:main", "x": "sly-payload"}'
    assert talk.gateway.request("POST", "/hooks/sly?session_key=main", body, token=None).status == 202
    wait_until(lambda: talk.gateway.request("GET", "/v1/sessions/agent:main:hook:sly/history").status == 200)
    assert "sly-payload" not in json.dumps(talk.gateway.get("/v1/sessions/main/history"))


def test_a_post_with_the_same_key_is_one_post(talk: Talk) -> None:
    assert talk.gateway.request("PUT", "/v1/hooks/twice", {"secret": "", "deliver": "crm:twice"}).status == 201
    for _ in range(3):
        headers = {"Idempotency-Key": "k1"}
        assert talk.gateway.request("POST", "/hooks/twice", b"one", token=None, headers=headers).status == 202
    assert talk.gateway.request("POST", "/hooks/twice", b"two", token=None).status == 202
    wait_until(lambda: any("two" in one["text"] for one in talk.receiver.taken if one["to"] == "twice"), 20)
    assert sum("one" in one["text"] for one in talk.receiver.taken if one["to"] == "twice") == 1


# -- the outbox -----------------------------------------------------------------------------------------------


def test_accepted_messages_are_delivered_in_order_when_the_service_is_back(tmp_path: Path) -> None:
    with Talk(tmp_path / "home") as talk:
        talk.receiver.down()
        for number in range(3):
            answer = sends(talk, {"text": f"n{number}", "channel": "crm", "to": "tom"}, background=True)
            assert answer.get("ok", True), answer
        wait_until(lambda: len(talk.gateway.get("/v1/messages?to=tom")["messages"]) == 3)
        assert {one["state"] for one in talk.gateway.get("/v1/messages?to=tom")["messages"]} != {"sent"}
        talk.receiver.up()
        wait_until(lambda: len(talk.receiver.taken) == 3, 30)
        assert talk.receiver.texts == ["n0", "n1", "n2"]
        wait_until(lambda: len(talk.gateway.get("/v1/messages?state=sent")["messages"]) == 3)


def test_a_caller_learns_that_a_message_waits(tmp_path: Path) -> None:
    with Talk(tmp_path / "home") as talk:
        talk.receiver.down()
        answer = sends(talk, {"text": "later", "channel": "crm", "to": "tom"})
        assert answer["ok"] and answer["result"]["sent"] is False and answer["result"]["queued"] is True, answer
        assert "cannot be reached" in answer["result"]["note"]


def test_the_outbox_survives_a_kill(tmp_path: Path) -> None:
    with Talk(tmp_path / "home") as talk:
        talk.receiver.down()
        for number in range(3):
            args = {"text": f"k{number}", "channel": "crm", "to": "tom"}
            sends(talk, args, background=True)
            # Background calls run beside each other: the next one follows once this message is stored.
            wait_until(lambda: len(talk.gateway.get("/v1/messages?to=tom")["messages"]) == number + 1)  # noqa: B023
        ids = [one["id"] for one in talk.gateway.get("/v1/messages?to=tom")["messages"]]
        talk.gateway.kill()
        talk.receiver.up()
        talk.gateway.start()
        wait_until(lambda: len(talk.receiver.taken) == 3, 30)
        assert talk.receiver.texts == ["k0", "k1", "k2"]
        assert sorted(one["id"] for one in talk.receiver.taken) == sorted(ids)


def test_a_reply_that_was_owed_is_delivered_after_a_kill(tmp_path: Path) -> None:
    gate = threading.Event()
    with Talk(tmp_path / "home", answer=lambda request: text("at last", gate=gate)) as talk:
        assert say(talk.gateway, "bob", "slow one").status == 202
        wait_until(lambda: talk.model.requests, 20)
        talk.gateway.kill()
        gate.set()
        talk.gateway.start()
        wait_until(lambda: talk.receiver.taken, 30)
        assert talk.receiver.texts == ["at last"]


def test_a_message_being_taken_at_the_kill_is_repeated_with_its_id_only(tmp_path: Path) -> None:
    held = threading.Event()

    def script(request: Request) -> Answer | str:
        if not held.is_set():
            held.wait(20)
            return None
        return "take"

    with Talk(tmp_path / "home", script=script) as talk:
        sends(talk, {"text": "precious", "channel": "crm", "to": "tom"}, background=True)
        wait_until(lambda: talk.receiver.requests, 20)
        talk.gateway.kill()
        held.set()
        talk.gateway.start()
        wait_until(lambda: talk.receiver.taken, 30)
        assert len({one.json["id"] for one in talk.receiver.requests}) == 1
        assert talk.receiver.texts == ["precious"]


def test_a_service_that_stumbles_is_tried_again(tmp_path: Path) -> None:
    answers: list[Answer] = [(500, {}), (429, {"retry_after": 0.1}), None, (404, {})]
    with Talk(tmp_path / "home", script=lambda request: answers.pop(0) if answers else "take") as talk:
        sends(talk, {"text": "stubborn", "channel": "crm", "to": "tom"}, background=True)
        wait_until(lambda: talk.receiver.taken, 40)
        assert talk.receiver.texts == ["stubborn"] and len(talk.receiver.requests) == 5


def test_one_peer_that_waits_does_not_block_others(tmp_path: Path) -> None:
    def script(request: Request) -> Answer | str:
        return (503, {}) if request.json["to"] == "stuck" else "take"

    with Talk(tmp_path / "home", script=script) as talk:
        for number in range(2):
            sends(talk, {"text": f"s{number}", "channel": "crm", "to": "stuck"}, background=True)
            # Background calls run side by side: the first message is accepted before the second is sent.
            wait_until(lambda: talk.receiver.requests, 20, "the first attempt")
        assert sends(talk, {"text": "free", "channel": "crm", "to": "tom"})["result"]["sent"]
        assert {one.json["text"] for one in talk.receiver.requests if one.json["to"] == "stuck"} == {"s0"}


def test_an_agent_that_sends_from_a_run_reaches_the_one_who_wrote(tmp_path: Path) -> None:
    def answer(request: Any) -> Any:
        if any(message["role"] == "tool" for message in request.messages):
            return text("done")
        return calls(("gsv__Message", {"text": "working on it"}))

    more = 'tools = "all"\n'
    with Talk(tmp_path / "home", more, answer=answer) as talk:
        assert say(talk.gateway, "bob", "please").status == 202
        wait_until(lambda: len(talk.receiver.taken) == 2, 30)
        assert [(one["to"], one["text"]) for one in talk.receiver.taken] == [("bob", "working on it"), ("bob", "done")]


# -- who may talk -----------------------------------------------------------------------------------------------


def test_only_those_in_the_list_are_heard(tmp_path: Path) -> None:
    with Talk(tmp_path / "home", 'allow = ["ann", "+49 170 1234567"]\n', policy="allowlist") as talk:
        assert say(talk.gateway, "stranger", "hello?").status == 202
        assert say(talk.gateway, "+491701234567", "it is me").status == 202
        wait_until(lambda: talk.receiver.taken, 20)
        assert [one["to"] for one in talk.receiver.taken] == ["+491701234567"]
        assert len(talk.model.requests) == 1


def test_a_stranger_is_paired_by_the_owner(tmp_path: Path) -> None:
    with Talk(tmp_path / "home", policy="pairing") as talk:
        for _ in range(2):
            assert say(talk.gateway, "newbie", "hello?", senderName="New Bie").status == 202
        wait_until(lambda: talk.receiver.taken, 20)
        (pairing,) = talk.gateway.get("/v1/channels/pairings")["pairings"]
        assert (pairing["sender"], pairing["name"], pairing["state"]) == ("newbie", "New Bie", "pending")
        assert pairing["code"] in talk.receiver.texts[0] and not talk.model.requests
        answer = talk.gateway.request("POST", f"/v1/channels/pairings/{pairing['code']}/approve", {})
        assert answer.status == 200, answer
        assert say(talk.gateway, "newbie", "now?").status == 202
        wait_until(lambda: any("now?" in one for one in talk.receiver.texts), 20)
        assert len([one for one in talk.receiver.texts if "do not know you" in one]) == 1
        assert talk.gateway.request("DELETE", f"/v1/channels/pairings/{pairing['code']}").status == 200
        assert say(talk.gateway, "newbie", "still?").status == 202
        wait_until(lambda: len([one for one in talk.receiver.texts if "do not know you" in one]) == 2, 20)
        assert len(talk.model.requests) == 1


def test_a_rejected_stranger_stays_out(tmp_path: Path) -> None:
    with Talk(tmp_path / "home", policy="pairing") as talk:
        assert say(talk.gateway, "pest", "hello?").status == 202
        wait_until(lambda: talk.receiver.taken, 20)
        assert talk.gateway.request("POST", "/v1/channels/pairings/pest/reject", {}).status == 200
        assert say(talk.gateway, "pest", "hello??").status == 202
        assert talk.gateway.request("POST", "/v1/channels/pairings/nobody/approve", {}).status == 404
        assert not talk.model.requests and len(talk.receiver.taken) == 1


# -- schedules -----------------------------------------------------------------------------------------------------


def test_what_a_schedule_says_is_delivered(talk: Talk) -> None:
    spec = {"mode": "task", "message": "morning report", "deliver": True, "channel": "crm", "to": "sched"}
    job = {"name": "report", "schedule": {"kind": "cron", "expr": "0 0 1 1 *"}, "spec": spec}
    added = talk.gateway.invoke("gsv__Cron", {"action": "add", "job": job})
    assert added["ok"], added
    ran = talk.gateway.invoke("gsv__Cron", {"action": "run", "id": added["result"]["job"]["id"], "mode": "force"})
    assert ran["ok"], ran
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "sched"], 30)
    (got,) = [one for one in talk.receiver.taken if one["to"] == "sched"]
    assert "morning report" in got["text"]


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[channels.carrier-pigeon]\n", "carrier-pigeon"),
        ('[channels.crm]\nkind = "webhook"\nsecret = "x"\nurll = "y"\n', "urll"),
        ('[channels.crm]\nkind = "webhook"\n', "secret"),
        (
            '[channels.a]\nkind="webhook"\nsecret="x"\naccount="z"\n[channels.b]\nkind="webhook"\nsecret="x"\naccount="z"\n',
            "same account",
        ),
        ('[channels.crm]\nkind="webhook"\nsecret="x"\npolicy="maybe"\n', "policy"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(tmp_path: Path, table: str, words: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(table)
    gateway = GatewayProcess(home)
    gateway.start(wait=False)
    assert gateway.process is not None
    assert gateway.process.wait(60) != 0
    assert words in gateway.log.read_text(), gateway.log.read_text()[-2000:]


def test_secrets_of_channels_are_masked(talk: Talk) -> None:
    shown = talk.gateway.invoke("gsv__ConfigGet", {})
    assert SECRET not in json.dumps(shown) and "***" in json.dumps(shown)
