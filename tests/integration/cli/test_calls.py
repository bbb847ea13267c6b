"""`farhand calls`: the record, for people and for programs."""

from __future__ import annotations

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, PluginProcess


@pytest.fixture(scope="module")
def made(shared_gateway: GatewayProcess, hello: PluginProcess) -> list[str]:
    """Three calls, oldest first."""
    return [
        shared_gateway.invoke("node.echo", {"n": 1})["request_id"],
        shared_gateway.invoke("node.fs.read_text", {"path": "../secret"})["request_id"],
        shared_gateway.invoke("node.ping")["request_id"],
    ]


def test_the_list_is_newest_first_with_whole_ids_when_piped(command: Command, made: list[str]) -> None:
    lines = command("calls").out.splitlines()
    assert lines[0].split() == ["ID", "TOOL", "NODE", "STATE", "TOOK", "STARTED"]
    assert [line.split()[0] for line in lines[1:4]] == made[::-1]
    assert "error: " in lines[2] and not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--tool", "node.ping"], 1),
        (["--state", "error"], 1),
        (["--node", "hello"], 3),
        (["--node", "nobody"], 0),
        (["--limit", "2"], 2),
    ],
)
def test_filters(command: Command, made: list[str], options: list[str], count: int) -> None:
    assert command("calls", *options, "--json").json()["count"] == count


def test_an_unknown_state_is_refused_with_the_known_ones(command: Command) -> None:
    done = command("calls", "--state", "odd")
    assert done.status == 1 and "running, ok, error" in done.err and "Traceback" not in done.err


def test_show_tells_the_whole_call(command: Command, made: list[str]) -> None:
    shown = command("calls", "show", made[0]).out
    assert made[0] in shown and "state     ok" in shown and '"n": 1' in shown
    failed = command("calls", "show", made[1]).out
    assert "\nerror\n" in failed


def test_the_end_of_an_id_is_enough(command: Command, made: list[str]) -> None:
    assert command("calls", "show", made[0][-12:], "--json").json()["id"] == made[0]


def test_options_before_the_subcommand_count_too(command: Command, made: list[str]) -> None:
    assert command("calls", "--json", "show", made[0]).json()["id"] == made[0]


def test_an_unknown_call(command: Command, made: list[str]) -> None:
    done = command("calls", "show", "0" * 36, "--json")
    assert done.status == 1 and done.json()["error"]["code"] == "not_found"
    for odd in ("nonsense", "", "../nodes", "a/b"):
        assert command("calls", "show", odd).status == 1


def test_cancelling_an_ended_call_says_so(command: Command, made: list[str]) -> None:
    done = command("calls", "cancel", made[0])
    assert done.status == 1 and "already ended: ok" in done.err


def test_a_narrow_terminal_gets_short_ids_and_a_wide_one_whole(command: Command, made: list[str]) -> None:
    narrow = command.with_env(NO_COLOR="1").on_terminal("calls", columns=80)
    assert made[0] not in narrow and made[0][-12:] in narrow
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert made[0] in command.on_terminal("calls", columns=120)


def test_a_number_too_long_for_python_is_shown_as_it_came(command: Command, shared_gateway: GatewayProcess) -> None:
    digits = "7" * 5000
    body = f'{{"tool":"node.echo","args":{{"n":{digits}}}}}'.encode()
    made = shared_gateway.request("POST", "/v1/tools/invoke", body).headers["x-request-id"]
    listed = command("calls")
    assert listed.status == 0 and made in listed.out
    assert f":{digits}" in command("calls", "--json").out
    assert digits in command("calls", "show", made).out
