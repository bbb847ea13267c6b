"""Telegram, against a server that speaks the Bot API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.gateway.sessions.sessions import MAX_QUEUED
from tests.support.channel_servers import TelegramServer
from tests.support.harness import GatewayProcess, wait_until
from tests.support.model_server import ModelServer, Reply, text
from tests.unit.channels.conftest import last_said

House = Callable[[str], GatewayProcess]
GROUP = {"id": -100200, "type": "supergroup", "title": "Team"}


@pytest.fixture
def telegram() -> Iterator[TelegramServer]:
    with TelegramServer() as server:
        yield server


def settings(telegram: TelegramServer, more: str = 'policy = "open"') -> str:
    return f'[channels.telegram]\ntoken = "{telegram.TOKEN}"\nurl = "{telegram.url}"\n{more}\n'


def send(gateway: GatewayProcess, text: str, to: str = "7", **more: object) -> dict[str, object]:
    answer: dict[str, object] = gateway.invoke("gsv__Message", {"text": text, "channel": "telegram", "to": to, **more})
    return answer


def test_a_person_who_writes_is_answered_and_sees_typing(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    telegram.write(7, "good morning")
    wait_until(lambda: telegram.said, 30)
    assert (telegram.said[0].to, telegram.said[0].text) == ("7", "echo: [telegram · P7] good morning")
    assert "reply_parameters" not in telegram.said[0].more
    assert "7" in telegram.typed
    assert telegram.TOKEN not in gateway.log.read_text()


def test_in_a_group_only_a_mention_is_heard_and_answered_as_a_reply(telegram: TelegramServer, house: House) -> None:
    house(settings(telegram))
    telegram.write(7, "chatter", chat=GROUP)
    telegram.write(8, "@farhand_bot what now?", chat=GROUP)
    wait_until(lambda: telegram.said, 30)
    (said,) = telegram.said
    assert (said.to, said.text) == ("-100200", "echo: [telegram · P8] what now?")
    assert said.more["reply_parameters"]["message_id"] == 102


def test_messages_that_are_refused_hold_up_nobody_else(telegram: TelegramServer, tmp_path: Path) -> None:
    """Of a stranger whose hundred messages wait for the model, the next one was fetched again and again."""
    release = threading.Event()

    def answer(request: Any) -> Reply:
        said = last_said(request)
        return text(f"echo: {said}", gate=release if "flood" in said else None)

    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(settings(telegram))
    with ModelServer(answer=answer) as model, GatewayProcess(home, env=model.environment) as gateway:
        try:
            for number in range(MAX_QUEUED + 3):
                telegram.write(7, f"flood {number}")
            telegram.write(8, "hello")
            wait_until(lambda: [one for one in telegram.said if one.to == "8"], 60, "an answer to somebody else")
            assert "dropped a message on telegram from '7'" in gateway.log.read_text()
        finally:
            release.set()


def test_files_of_people_who_may_not_talk_are_not_downloaded(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram, 'policy = "allowlist"\nallow = ["8"]'))
    document = {"file_id": "doc1", "file_unique_id": "u", "file_name": "x.txt", "mime_type": "text/plain"}
    telegram.files["doc1"] = b"content"
    telegram.write(7, "", caption="for you", document=document)
    telegram.write(9, "", caption="not for the bot", document=document, chat=GROUP)
    telegram.write(8, "hello")
    wait_until(lambda: telegram.said, 30)
    asked = [request.path.rpartition("/")[2] for request in telegram.requests]
    assert [one.to for one in telegram.said] == ["8"] and "getFile" not in asked, gateway.log.read_text()


def test_a_long_text_comes_in_pieces_in_order(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    text = "\n".join(f"line {number} 😀" for number in range(900))
    assert send(gateway, text)["ok"]
    wait_until(lambda: "line 899" in telegram.said[-1].text, 30)
    assert len(telegram.said) >= 3
    assert "\n".join(one.text for one in telegram.said).split() == text.split()


def test_too_many_requests_are_waited_out(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    slow = {"ok": False, "error_code": 429, "description": "Too Many Requests", "parameters": {"retry_after": 1}}
    telegram.failures = [(429, slow), (500, {"ok": False})]
    send(gateway, "patient")
    wait_until(lambda: telegram.said, 30)
    assert [one.text for one in telegram.said] == ["patient"]


def test_a_blocked_bot_is_reported_at_once(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    telegram.failures = [
        (403, {"ok": False, "error_code": 403, "description": "Forbidden: bot was blocked by the user"})
    ]
    answer = send(gateway, "hello?")
    assert "Channel send failed" in str(answer["error"]) and "blocked" in str(answer["error"])
    assert telegram.TOKEN not in str(answer)


def test_a_message_with_an_unknown_outcome_is_not_sent_again(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    telegram.failures = [None]
    answer = send(gateway, "once")
    assert "outcome unknown:" in str(answer["error"])
    assert send(gateway, "after")["ok"]
    assert [one.text for one in telegram.said] == ["after"]
    (unknown,) = gateway.get("/v1/messages?state=unknown")["messages"]
    assert gateway.request("POST", f"/v1/messages/{unknown['id']}/retry", {}).status == 202
    wait_until(lambda: [one.text for one in telegram.said] == ["after", "once"], 20)


def test_files_come_and_go(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    telegram.files["f1"] = b"%PDF-1"
    document = {
        "file_id": "f1",
        "file_unique_id": "u1",
        "file_name": "a.pdf",
        "mime_type": "application/pdf",
        "file_size": 6,
    }
    telegram.write(7, "", caption="read this", document=document)
    wait_until(lambda: telegram.said, 30)
    path = telegram.said[0].text.split("[attached: ")[1].split(" ")[0]
    assert gateway.request("GET", f"/v1/workspace/main/{path}").body == b"%PDF-1"
    assert send(gateway, "here", media=[path])["ok"]
    wait_until(lambda: len(telegram.said) == 3, 20)
    assert telegram.said[1].text == "here"
    assert telegram.said[2].more["file"][1] == b"%PDF-1"


def test_a_missing_file_does_not_delay_the_rest(telegram: TelegramServer, house: House) -> None:
    house(settings(telegram))
    telegram.write(7, "", caption="look", document={"file_id": "gone", "file_unique_id": "u", "file_name": "x"})
    telegram.write(7, "next")
    wait_until(lambda: len(telegram.said) >= 1 and any("next" in one.text for one in telegram.said), 30)


def test_an_unknown_update_does_not_delay_the_rest(telegram: TelegramServer, house: House) -> None:
    house(settings(telegram))
    telegram.write(7, "odd", chat={"nothing": 1})
    telegram.write(7, "even")
    wait_until(lambda: telegram.said, 30)
    assert "even" in telegram.said[0].text


def test_a_stranger_has_to_be_paired(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram, ""))
    telegram.write(7, "hello")
    wait_until(lambda: telegram.said, 30)
    (pairing,) = gateway.get("/v1/channels/pairings")["pairings"]
    assert pairing["code"] in telegram.said[0].text and pairing["channel"] == "telegram"


def test_a_message_sent_while_the_gateway_is_down_is_received_once(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    telegram.write(7, "before")
    wait_until(lambda: len(telegram.said) == 1, 30)
    gateway.kill()
    telegram.write(7, "meanwhile")
    gateway.start()
    wait_until(lambda: len(telegram.said) == 2, 30)
    assert [one.text.partition("] ")[2] for one in telegram.said] == ["before", "meanwhile"]


def test_an_invalid_id_is_refused(telegram: TelegramServer, house: House) -> None:
    gateway = house(settings(telegram))
    assert "not an id of Telegram" in str(send(gateway, "x", to="alice")["error"])


def test_the_error_of_a_channel_is_shown_until_it_works(telegram: TelegramServer, house: House) -> None:
    telegram.down()
    gateway = house(settings(telegram))

    def trouble() -> object:
        shown = gateway.get("/v1/channels")["channels"]
        return next(one["trouble"] for one in shown if one["name"] == "telegram")

    assert "cannot be reached" in str(wait_until(trouble, 20))
    telegram.up()
    wait_until(lambda: trouble() is None, 30)
