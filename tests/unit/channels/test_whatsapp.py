"""WhatsApp, against a server that speaks as Meta's Graph API does."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.channel_servers import WhatsAppServer
from tests.support.harness import GatewayProcess, wait_until

House = Callable[[str], GatewayProcess]


@pytest.fixture
def whatsapp() -> Iterator[WhatsAppServer]:
    with WhatsAppServer() as server:
        yield server


@pytest.fixture
def gateway(whatsapp: WhatsAppServer, house: House) -> GatewayProcess:
    return house(
        f"""[channels.whatsapp]
phone_id = "{whatsapp.PHONE}"
token = "{whatsapp.TOKEN}"
app_secret = "{whatsapp.APP_SECRET}"
verify_token = "{whatsapp.VERIFY}"
url = "{whatsapp.url}"
policy = "allowlist"
allow = ["+49 170 1234567"]
"""
    )


def written(text: str, number: int = 1, sender: str = "491701234567") -> dict[str, Any]:
    return {"from": sender, "id": f"wamid.in{number}", "type": "text", "text": {"body": text}}


def test_meta_is_answered_its_question(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    asked = f"/hooks/whatsapp?hub.mode=subscribe&hub.challenge=1158&hub.verify_token={whatsapp.VERIFY}"
    answer = gateway.request("GET", asked, token=None)
    assert (answer.status, answer.body) == (200, b"1158")
    assert gateway.request("GET", asked + "x", token=None).status == 403


def test_a_person_who_writes_is_answered_once(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    for _ in range(2):  # Meta repeats what it is not sure of
        assert whatsapp.post(gateway, written("hi")).status == 200
    assert whatsapp.post(gateway, written("let me in", 2, "4999999999999")).status == 200
    assert whatsapp.post(gateway, written("and now?", 3)).status == 200
    wait_until(lambda: any("and now?" in one.text for one in whatsapp.said), 30)
    assert {one.to for one in whatsapp.said} == {"491701234567"}
    assert sum(one.text == "echo: [whatsapp · Wanda] hi" for one in whatsapp.said) == 1
    for number in range(4, 10):  # with an answer that comes at once there may be no time to type
        whatsapp.post(gateway, written("more", number))
        wait_until(lambda number=number: len(whatsapp.said) >= number - 1, 30)
    assert whatsapp.typed


def test_a_post_that_meta_did_not_sign_is_refused(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    assert whatsapp.post(gateway, written("hi"), secret="guess").status == 401
    assert gateway.request("POST", "/hooks/whatsapp", b"{}", token=None).status == 401
    assert not whatsapp.said


def test_files_come_and_go(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    whatsapp.files["m1"] = b"\x89PNG"
    picture = {"id": "m1", "mime_type": "image/png", "caption": "look"}
    assert whatsapp.post(gateway, {**written(""), "type": "image", "image": picture}).status == 200
    wait_until(lambda: whatsapp.said, 30)
    path = whatsapp.said[0].text.split("[attached: ")[1].split(" ")[0]
    assert gateway.request("GET", f"/v1/workspace/main/{path}").body == b"\x89PNG"
    args = {"text": "back", "channel": "whatsapp", "to": "+491701234567", "media": [path], "replyToId": "wamid.in1"}
    assert gateway.invoke("gsv__Message", args)["ok"]
    wait_until(lambda: len(whatsapp.said) == 3, 20)
    assert whatsapp.said[1].more["context"] == {"message_id": "wamid.in1"}
    assert whatsapp.said[2].more["image"]["id"] == "up0" and whatsapp.uploads["up0"][1] == b"\x89PNG"


def test_no_file_of_a_stranger_is_downloaded(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    whatsapp.files["m1"] = b"\x89PNG"
    sent = {"type": "image", "image": {"id": "m1", "mime_type": "image/png", "caption": "look"}}
    assert whatsapp.post(gateway, {**written("", 1, "4999999999999"), **sent}).status == 200
    assert not [one for one in whatsapp.requests if one.method == "GET"]
    assert whatsapp.post(gateway, {**written("", 2), **sent}).status == 200
    assert [one.path for one in whatsapp.requests if one.method == "GET"] == ["/m1", "/lookaside/m1"]


def test_a_signed_post_that_is_not_a_notification_is_refused(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    for body, status in ((b"[]", 400), (b"nonsense", 400), (b'{"entry": []}', 200)):
        headers = {"X-Hub-Signature-256": "sha256=" + hmac.new(b"app-secret", body, hashlib.sha256).hexdigest()}
        assert gateway.request("POST", "/hooks/whatsapp", body, token=None, headers=headers).status == status


def test_what_meta_does_not_take(gateway: GatewayProcess, whatsapp: WhatsAppServer) -> None:
    unreachable = {"error": {"code": 131026, "message": "Message undeliverable", "error_data": {"details": "no"}}}
    limited = {"error": {"code": 130429, "message": "Rate limit hit"}}
    whatsapp.failures = [(400, unreachable), None, (429, limited)]
    send = lambda text: gateway.invoke("gsv__Message", {"text": text, "channel": "whatsapp", "to": "+491701234567"})  # noqa: E731
    assert "Channel send failed" in str(send("refused")["error"])
    assert "outcome unknown:" in str(send("lost")["error"])
    send("later")
    wait_until(lambda: [one.text for one in whatsapp.said] == ["later"], 20)
    assert whatsapp.TOKEN not in gateway.log.read_text()
