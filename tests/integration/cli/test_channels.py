"""`farhand message` and `farhand channels`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    home = tmp_path_factory.mktemp("channels") / "home"
    with GatewayProcess(home):
        yield Command(home)


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        for arguments in (["message", "list"], ["channels", "hook"], ["tools", "--cost", "no-such-tool"]):
            done = Command(gateway.home)(*arguments)
            assert done.status == 0 and "Traceback" not in done.err and done.out + done.err


def test_a_message_is_sent_listed_and_shown(talking: Command) -> None:
    assert "sent to console:me" in talking("message", "send", "hello", "--channel", "console", "--to", "me").out
    (one,) = json.loads(talking("message", "list", "--channel", "console", "--json").out)["messages"]
    assert (one["text"], one["state"]) == ("hello", "sent")
    assert "hello" in talking("message", "list").out
    assert "1 of 1 sent" in talking("message", "show", one["id"]).out


def test_the_same_id_sends_nothing_new(talking: Command) -> None:
    for _ in range(2):
        talking("message", "send", "once", "--channel", "console", "--to", "you", "--id", "abc")
    assert json.loads(talking("message", "list", "--to", "you", "--json").out)["count"] == 1


def test_an_undeliverable_message_is_reported(talking: Command) -> None:
    failed = talking("message", "send", "hello")
    assert failed.status == 1 and "channel is required" in failed.err
    failed = talking("message", "send", "hello", "--channel", "pigeon", "--to", "x", "--json")
    assert failed.status == 1 and json.loads(failed.out)["error"]["code"] == "not_found"
    assert talking("message", "retry", "nothing").status == 1


def test_channels_are_listed(talking: Command) -> None:
    for arguments in ((), ("list",), ("status",)):
        assert "console" in talking("channels", *arguments).out
    assert json.loads(talking("channels", "--json").out)["channels"][0]["channel"] == "console"


def test_hooks_are_made_and_removed(talking: Command) -> None:
    made = talking("channels", "hook", "add", "ci", "--deliver", "console:me").out
    assert "post to /hooks/ci" in made and "secret: " in made
    assert "/hooks/ci" in talking("channels", "hook").out
    assert talking("channels", "hook", "remove", "ci").status == 0
    assert talking("channels", "hook", "remove", "ci").status == 1


def test_no_pairing_requests(talking: Command) -> None:
    assert json.loads(talking("channels", "pair", "--json").out)["count"] == 0
    for act in ("approve", "reject", "forget"):
        refused = talking("channels", "pair", act, "K7PQ2MXW")
        assert refused.status == 1 and "no pairing request" in refused.err
