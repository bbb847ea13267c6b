"""Discord, against a server with its HTTP interface and its gateway socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.channel_servers import DiscordServer
from tests.support.harness import GatewayProcess, wait_until

House = Callable[[str], GatewayProcess]


@pytest.fixture
def discord() -> Iterator[DiscordServer]:
    with DiscordServer() as server:
        yield server


@pytest.fixture
def gateway(discord: DiscordServer, house: House) -> GatewayProcess:
    return house(f'[channels.discord]\ntoken = "{discord.TOKEN}"\nurl = "{discord.url}"\npolicy = "open"\n')


def test_a_direct_message_is_answered(gateway: GatewayProcess, discord: DiscordServer) -> None:
    discord.write("31", "hello there")
    wait_until(lambda: discord.said, 30)
    (said,) = discord.said
    assert (said.to, said.text) == ("931", "echo: [discord · U31] hello there")
    assert said.more["enforce_nonce"] and said.more["allowed_mentions"] == {"parse": []}
    assert "931" in discord.typed


def test_in_a_server_a_mention_is_answered_as_a_reply(gateway: GatewayProcess, discord: DiscordServer) -> None:
    place = {"guild_id": "1", "channel_id": "777"}
    discord.write("31", "chatter", **place)
    discord.write("32", f"<@{discord.ME}> help", mentions=[{"id": discord.ME}], **place)
    discord.write("33", "a bot", bot=True, mentions=[{"id": discord.ME}], **place)
    wait_until(lambda: discord.said, 30)
    (said,) = discord.said
    assert (said.to, said.text) == ("777", "echo: [discord · U32] help")
    assert said.more["message_reference"]["message_id"] == "10002"


def test_a_lost_socket_is_resumed_and_nothing_is_missed(gateway: GatewayProcess, discord: DiscordServer) -> None:
    discord.write("31", "one")
    wait_until(lambda: len(discord.said) == 1, 30)
    discord.cut()
    discord.write("31", "two")
    wait_until(lambda: len(discord.said) == 2, 40)
    assert discord.resumed >= 1 and discord.identified == 1
    assert [one.text.partition("] ")[2] for one in discord.said] == ["one", "two"]


def test_a_message_to_a_person_opens_their_direct_channel(gateway: GatewayProcess, discord: DiscordServer) -> None:
    long = "```python\n" + "\n".join(f"print({number})" for number in range(400)) + "\n```"
    assert gateway.invoke("gsv__Message", {"text": long, "channel": "discord", "to": "55"})["ok"]
    wait_until(lambda: discord.said and "399" in discord.said[-1].text, 20)
    assert {one.to for one in discord.said} == {"955"} and len(discord.said) > 1
    assert all(one.text.startswith("```python") and one.text.endswith("```") for one in discord.said)
    args = {"text": "to a channel", "channel": "discord", "to": "888", "peerKind": "channel", "replyToId": "5"}
    assert gateway.invoke("gsv__Message", args)["result"]["messageId"]
    assert discord.said[-1].to == "888"


def test_files_come_and_go(gateway: GatewayProcess, discord: DiscordServer) -> None:
    discord.files["f.txt"] = b"words"
    file = {"id": "5", "filename": "f.txt", "url": f"{discord.url}/cdn/f.txt", "size": 5, "content_type": "text/plain"}
    discord.write("31", "see", attachments=[file, {**file, "url": f"{discord.url}/cdn/gone"}])
    wait_until(lambda: discord.said, 30)
    path = discord.said[0].text.split("[attached: ")[1].split(" ")[0]
    assert gateway.request("GET", f"/v1/workspace/main/{path}").body == b"words"
    assert gateway.invoke("gsv__Message", {"text": "b", "channel": "discord", "to": "31", "media": [path]})["ok"]
    wait_until(lambda: len(discord.said) == 3, 20)
    assert discord.said[2].more["file"][1] == b"words"


def test_a_message_with_an_unknown_outcome_is_not_sent_again(gateway: GatewayProcess, discord: DiscordServer) -> None:
    discord.failures = [None, (500, {"message": "oops", "code": 0}), (403, {"message": "Cannot send", "code": 50007})]
    send = lambda text: gateway.invoke("gsv__Message", {"text": text, "channel": "discord", "to": "31"})  # noqa: E731
    answer = send("lost")  # it waits five seconds for the end
    assert answer["ok"] or "outcome unknown:" in str(answer["error"])
    (lost,) = wait_until(lambda: gateway.get("/v1/messages?state=unknown")["messages"])
    assert lost["text"] == "lost" and lost["error"], lost
    send("refused after a second try")
    wait_until(lambda: len(discord.failures) == 0, 20)
    (failed,) = wait_until(lambda: gateway.get("/v1/messages?state=failed")["messages"], 20)
    assert "Cannot send" in failed["error"] and discord.said == []


def test_limits_are_waited_out(gateway: GatewayProcess, discord: DiscordServer) -> None:
    limit = {"message": "You are being rate limited.", "retry_after": 0.3, "global": False}
    headers = {"content-type": "application/json", "retry-after": "1", "x-ratelimit-scope": "user"}
    discord.failures = [(429, limit, headers)]
    assert gateway.invoke("gsv__Message", {"text": "patient", "channel": "discord", "to": "31"})["ok"]
    wait_until(lambda: [one.text for one in discord.said] == ["patient"], 20)
