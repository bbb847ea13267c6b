"""Signal, against a server that speaks as the daemon of signal-cli does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.channel_servers import SignalServer
from tests.support.harness import GatewayProcess, wait_until

House = Callable[[str], GatewayProcess]
ANN = "+15551112222"


@pytest.fixture
def signal() -> Iterator[SignalServer]:
    with SignalServer() as server:
        yield server


def settings(signal: SignalServer, more: str = 'policy = "open"') -> str:
    return f'[channels.signal]\nnumber = "{signal.NUMBER}"\nurl = "{signal.url}"\n{more}\n'


def test_a_person_who_writes_is_answered(signal: SignalServer, house: House) -> None:
    house(settings(signal))
    signal.raw({"envelope": {"source": ANN, "receiptMessage": {}}})
    signal.raw("nonsense")
    signal.write(signal.NUMBER, "my own words")
    signal.write(ANN, "hi")
    wait_until(lambda: signal.said, 30)
    (said,) = signal.said
    assert (said.to, said.text) == (ANN, "echo: [signal · Name 22] hi")
    assert ANN in signal.typed


def test_a_bare_envelope_is_read_as_well(signal: SignalServer, house: House) -> None:
    house(settings(signal))
    signal.raw({"sourceNumber": ANN, "timestamp": 5, "dataMessage": {"timestamp": 5, "message": "bare"}})
    wait_until(lambda: signal.said, 30)
    assert "bare" in signal.said[0].text


def test_groups_are_answered_when_they_mention_the_agent(signal: SignalServer, house: House) -> None:
    house(settings(signal))
    group = {"groupInfo": {"groupId": "Z3JvdXA="}}
    signal.write(ANN, "chatter", **group)
    signal.write(ANN, "\ufffc please", mentions=[{"number": signal.NUMBER, "start": 0, "length": 1}], **group)
    wait_until(lambda: signal.said, 30)
    (said,) = signal.said
    assert said.to == "Z3JvdXA=" and said.more["groupId"] == "Z3JvdXA=" and said.text.endswith("] please")
    assert said.more["quoteAuthor"] == ANN


def test_errors_of_the_daemon(signal: SignalServer, house: House) -> None:
    gateway = house(settings(signal))
    signal.errors = [{"code": -3, "message": "connection lost"}]
    assert gateway.invoke("message", {"to": f"signal:{ANN}", "content": "again"})["ok"]
    wait_until(lambda: signal.said, 20)
    signal.errors = [{"code": -1, "message": "Unregistered user"}]
    answer = gateway.invoke("message", {"to": "signal:+15559999999", "content": "x"})
    assert answer["error"]["kind"] == "failed" and "Unregistered user" in answer["error"]["message"]


def test_files_come_and_go(signal: SignalServer, house: House) -> None:
    gateway = house(settings(signal))
    signal.files["att1"] = b"pixels"
    signal.write(ANN, "photo", attachments=[{"id": "att1", "contentType": "image/png", "filename": "p.png", "size": 6}])
    wait_until(lambda: signal.said, 30)
    path = signal.said[0].text.split("[attached: ")[1].split(" ")[0]
    assert gateway.request("GET", f"/v1/workspace/main/{path}").body == b"pixels"
    assert gateway.invoke("gsv__Message", {"text": "back", "channel": "signal", "to": ANN, "media": [path]})["ok"]
    wait_until(lambda: len(signal.said) == 3, 20)
    (sent,) = signal.said[2].more["attachments"]
    assert sent.startswith("data:image/png;filename=") and sent.endswith("base64,cGl4ZWxz")


def test_the_daemon_may_come_and_go(signal: SignalServer, house: House) -> None:
    gateway = house(settings(signal))
    signal.write(ANN, "one")
    wait_until(lambda: len(signal.said) == 1, 30)
    signal.down()
    signal.up()
    signal.write(ANN, "two")
    wait_until(lambda: len(signal.said) == 2, 40)
    assert gateway.invoke("message", {"to": f"signal:{ANN}", "content": "three"})["ok"]
