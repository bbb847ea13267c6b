"""`farhand call`: one tool call, and an exit status that tells the truth."""

from __future__ import annotations

import json
import signal

import click
import pytest

from farhand.cli.calls.arguments import read_arguments
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, PluginProcess, wait_until


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        (("a=1", "b=two", "c=[1,2]", "d=true", "e=null"), {"a": 1, "b": "two", "c": [1, 2], "d": True, "e": None}),
        (('a="5"',), {"a": "5"}),
        (("a=",), {"a": ""}),
        (("a=x=y",), {"a": "x=y"}),
        (("a={not json",), {"a": "{not json"}),
        (("a=NaN", "b=-Infinity", "c=1e999"), {"a": "NaN", "b": "-Infinity", "c": "1e999"}),
        (('{"a": {"b": 1}}',), {"a": {"b": 1}}),
        (("[1, 2]",), [1, 2]),
        (("a=12345678901234567890",), {"a": 12345678901234567890}),
        (("path=ünï ☃.txt",), {"path": "ünï ☃.txt"}),
    ],
)
def test_values_are_json_where_they_parse_and_text_where_not(arguments: tuple[str, ...], expected: object) -> None:
    assert read_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("a",), "not KEY=VALUE"),
        (("=1",), "not KEY=VALUE"),
        (("a=1", "a=2"), "given twice"),
        (("{bad",), "not JSON"),
        (('{"a": NaN}',), "not JSON"),
        (('{"a": 1}', "b=2"), "not KEY=VALUE"),
        (("a=\udcff",), "not UTF-8"),
        (("[" * 100_000,), "nested too deeply"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_by_name(arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(click.UsageError, match=complaint):
        read_arguments(arguments)


def test_a_result_is_indented_json(command: Command, hello: PluginProcess) -> None:
    done = command("call", "node.echo", "text=grüße", "n=3")
    assert (done.status, done.err) == (0, "")
    assert done.out == '{\n  "text": "grüße",\n  "n": 3\n}\n'


def test_what_is_sent_is_as_long_as_its_characters(command: Command, hello: PluginProcess) -> None:
    """A plug-in takes 256 KiB; escaped, this would be twice as long as in UTF-8, and too long."""
    text = "漢" * 60_000
    done = command("call", "node.echo", "-", "--json", stdin=json.dumps({"text": text}))
    assert done.status == 0 and done.json()["result"]["text"] == text


def test_half_a_character_is_not_sent(command: Command) -> None:
    done = command("call", "node.echo", "-", "--json", stdin='{"text": "half: \\ud83d"}')
    assert done.status == 2 and "half: " in done.json()["error"]["message"]


def test_a_text_is_printed_raw(command: Command, slow: PluginProcess) -> None:
    assert command("call", "slow.text", "text=two\nlines").out == "two\nlines\n"
    assert command("call", "slow.text", "text=ended\n").out == "ended\n"


def test_arguments_come_from_standard_input(command: Command, hello: PluginProcess) -> None:
    assert command("call", "node.echo", "-", stdin='{"a": [1]}').json() == {"a": [1]}
    empty = command("call", "node.echo", "-")
    assert empty.status == 2 and "standard input is not JSON: it is empty" in empty.err


def test_json_is_the_gateways_own_answer(command: Command, hello: PluginProcess) -> None:
    done = command("call", "node.echo", '{"big": 1e400, "twice": 1, "twice": 2}', "--json")
    assert done.status == 2  # 1e400 is no number Python could send faithfully
    answer = command("call", "node.echo", "n=1", "--json").json()
    assert answer["ok"] is True and answer["result"] == {"n": 1} and answer["route"]["node_id"] == "hello"


def test_a_failed_call_is_kind_and_message_and_status_1(command: Command, hello: PluginProcess) -> None:
    done = command("call", "node.fs.read_text")
    assert (done.status, done.out, done.err) == (1, "", "invalid_args: missing 'path' argument\n")


def test_a_failed_call_as_json_is_one_document(command: Command, hello: PluginProcess) -> None:
    done = command("call", "no.such.tool", "--json")
    assert done.status == 1 and done.err == ""
    assert done.json()["ok"] is False and done.json()["error"]["kind"] == "not_found"


def test_a_mistake_as_json_is_one_document(command: Command) -> None:
    done = command("call", "node.echo", "oops", "--json")
    assert done.status == 2 and done.err == ""
    assert done.json()["error"]["code"] == "usage"


def test_escape_codes_of_a_node_do_not_reach_the_terminal(command: Command, slow: PluginProcess) -> None:
    done = command("call", "slow.evil")
    assert done.status == 1 and done.err == "failed: bad �[2J thing\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "100000", "soon"])
def test_an_invalid_timeout_is_refused(command: Command, seconds: str) -> None:
    done = command("call", "node.ping", "--timeout", seconds)
    assert done.status == 2 and "--timeout" in done.err


def test_a_timeout_may_be_a_fraction(command: Command, slow: PluginProcess) -> None:
    done = command("call", "slow.sleep", "--timeout", "0.2")
    assert done.status == 1 and done.err.startswith("timeout: the call did not end within 0.2 s")


def test_the_background_prints_the_id_and_continues(
    command: Command, shared_gateway: GatewayProcess, slow: PluginProcess
) -> None:
    done = command("call", "slow.sleep", "--background", "--session", "s1")
    assert done.status == 0
    call_id = done.out.strip()
    record = shared_gateway.get(f"/v1/calls/{call_id}")
    assert record["state"] == "running" and record["session_key"] == "s1"
    assert command("calls", "cancel", call_id).status == 0


def test_an_idempotency_key_runs_a_call_once(command: Command, hello: PluginProcess) -> None:
    first = command("call", "node.ping", "--idempotency-key", "once", "--json").json()
    again = command("call", "node.ping", "--idempotency-key", "once", "--json").json()
    assert again["request_id"] == first["request_id"] and again["result"] == first["result"]
    other = command("call", "node.echo", "--idempotency-key", "once")
    assert other.status == 1 and "was used for another request" in other.err


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_cancels_the_call_at_the_gateway(
    command: Command, shared_gateway: GatewayProcess, slow: PluginProcess, as_json: bool
) -> None:
    def running() -> list[dict[str, str]]:
        calls: list[dict[str, str]] = shared_gateway.get("/v1/calls?tool=slow.sleep&state=running")["calls"]
        return calls

    process = command.start("call", "slow.sleep", *(["--json"] if as_json else []))
    [record] = wait_until(running, what="the call runs")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    if as_json:
        assert json.loads(out)["error"]["code"] == "interrupted"
    else:
        assert (out, err) == ("", "farhand: interrupted; the gateway cancels the call\n")
    wait_until(lambda: not running(), what="the call ends")
    ended = shared_gateway.get(f"/v1/calls/{record['id']}")
    assert ended["state"] == "cancelled" and "disconnected" in ended["error"]["message"]


def test_ctrl_c_leaves_a_call_with_an_idempotency_key_running(
    command: Command, shared_gateway: GatewayProcess, slow: PluginProcess
) -> None:
    process = command.start("call", "slow.sleep", "--idempotency-key", "stay")
    [record] = wait_until(lambda: shared_gateway.get("/v1/calls?state=running")["calls"], what="the call runs")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "the call continues" in err
    assert command("calls", "cancel", record["id"]).status == 0
