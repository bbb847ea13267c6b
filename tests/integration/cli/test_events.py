"""`farhand events`: the journal, with nothing missed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import IO, Any

import pytest

from farhand.cli.calls.events import _tail
from farhand.cli.client import Client
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, PluginProcess, wait_until


def test_the_last_twenty_by_default_and_others_by_wish(
    command: Command, shared_gateway: GatewayProcess, hello: PluginProcess
) -> None:
    for _ in range(15):
        shared_gateway.invoke("node.echo")
    document = command("events", "--json").json()
    ids = [event["id"] for event in document["events"]]
    assert len(ids) == 20 and ids == sorted(ids) and document["last_id"] == ids[-1]
    assert [event["id"] for event in command("events", "--limit", "3", "--json").json()["events"]] == ids[-3:]
    everything = command("events", "--after", "0", "--json").json()["events"]
    assert everything[0]["id"] == 1 and everything[-1]["id"] == ids[-1]
    lines = command("events").out.splitlines()
    assert len(lines) == 20 and "call.ended" in lines[-1] and "node.echo on hello ok" in lines[-1]


def test_after_the_last_there_is_nothing(command: Command, hello: PluginProcess) -> None:
    last = command("events", "--json").json()["last_id"]
    assert command("events", "--after", str(last), "--json").json() == {"events": [], "last_id": last}
    done = command("events", "--after", str(last))
    assert (done.status, done.out) == (0, "")


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_an_invalid_id_is_refused(command: Command, value: str) -> None:
    done = command("events", "--after", value, "--json")
    assert done.status == 2 and done.json()["error"]["code"] == "usage"


def test_the_end_of_a_long_journal_is_found(gateway: GatewayProcess) -> None:
    for number in range(60):  # tokens make one event each
        gateway.request("POST", "/v1/tokens", {"label": str(number)})
    import apsw

    with apsw.Connection(str(gateway.home / "farhand.db")) as store:
        for start in range(0, 30_000, 5_000):
            store.executemany(
                "INSERT INTO events (at, kind, subject, data) VALUES (0, 'test', ?, x'7b7d')",
                ((str(n),) for n in range(start, start + 5_000)),
            )
    last, entries = _tail(Client(home=str(gateway.home)), 7)
    assert last == 30_061 and [event["subject"] for event in entries] == [str(n) for n in range(29_993, 30_000)]


def test_following_shows_what_happens_as_lines_of_json(
    command: Command, shared_gateway: GatewayProcess, hello: PluginProcess
) -> None:
    last = command("events", "--limit", "1", "--json").json()["last_id"]
    process = command.start("events", "--follow", "--after", str(last), "--json")
    assert process.stdout is not None
    call_id = shared_gateway.invoke("node.echo")["request_id"]
    events = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [(event["kind"], event["subject"]) for event in events] == [
        ("call.started", call_id),
        ("call.ended", call_id),
    ]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def _next_token(lines: IO[str], ids: list[int]) -> Any:
    """The next entry about a token; the gateway's own starts and stops are entries too. Every id goes to `ids`."""
    while True:
        event = json.loads(lines.readline())
        ids.append(event["id"])
        if event["kind"] == "token.created":
            return event
        assert event["kind"].startswith("gateway.")


@pytest.mark.parametrize("crash", [False, True])
def test_following_survives_a_restart_and_misses_nothing(tmp_path: Path, crash: bool) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start()
    process = Command(gateway.home).start("events", "--follow", "--after", "0", "--json")
    try:
        assert process.stdout is not None
        gateway.request("POST", "/v1/tokens", {"label": "before"})
        ids: list[int] = []
        seen = [_next_token(process.stdout, ids)]
        if crash:
            gateway.kill()
        else:
            gateway.stop()
        gateway.start()
        gateway.request("POST", "/v1/tokens", {"label": "after"})
        seen.append(_next_token(process.stdout, ids))
        assert [event["data"]["label"] for event in seen] == ["before", "after"]
        assert ids == list(range(1, len(ids) + 1))
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        gateway.stop()
    assert "trying again" in err and "connected again" in err and "Traceback" not in err


def test_following_nothing_fails_at_once(tmp_path: Path) -> None:
    done = Command(tmp_path / "nowhere")("events", "--follow", "--json")
    assert done.status == 1 and done.json()["error"]["code"] == "no_gateway"


def test_a_reader_that_leaves_ends_it_quietly(command: Command, hello: PluginProcess) -> None:
    process = command.start("events", "--follow", "--after", "0")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    wait_until(lambda: command("call", "node.ping").status == 0 and process.poll() is not None, what="it ends")
    assert process.returncode == 141 and process.stderr.read() == ""
    process.stderr.close()
