"""Telegram, against a server that speaks the Bot API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.channel_servers import TelegramServer
from tests.support.harness import GatewayProcess, wait_until

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
