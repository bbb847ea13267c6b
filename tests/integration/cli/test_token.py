"""`farhand token`."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from farhand.cli.admin.token import SCOPES
from farhand.gateway.access.credentials import CALLER_SCOPES, Scope
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess, PluginProcess


def test_the_scopes_offered_are_those_there_are() -> None:
    assert tuple(scope.value for scope in Scope) == SCOPES
    assert SCOPES[:5] == tuple(scope.value for scope in CALLER_SCOPES)


def test_show_prints_the_owners_token(command: Command, shared_gateway: GatewayProcess) -> None:
    assert command("token", "show").out == shared_gateway.token + "\n"
    assert command("token", "show", "--json").json() == {"token": shared_gateway.token}


def test_show_without_a_token_says_how_to_get_one(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert "`farhand up` creates it" in command("token", "show").err
    (tmp_path / "token").write_text(" \n")
    done = command("token", "show", "--json")
    assert done.status == 1 and done.json()["error"]["code"] == "no_token"


def test_the_printed_command_makes_the_node_join(
    command: Command, shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    out = command("token", "create", "--node", "lap-top", "--label", "kitchen").out
    [line] = [line.strip() for line in out.splitlines() if "SA_NODE_TOKEN=" in line]
    variable, program, *arguments = shlex.split(line)
    assert program == "farhand" and variable.partition("=")[2] in out.split("\n\n")[0]
    process = start_process(
        [*FARHAND, *arguments, "--home", str(tmp_path / "node-home")],
        {**os.environ, "SA_NODE_TOKEN": variable.partition("=")[2]}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        shared_gateway.wait_for_node("lap-top")
        [entry] = [t for t in command("token", "list", "--json").json()["tokens"] if t["label"] == "kitchen"]
        assert entry["last_used_at"] >= entry["created_at"], "a node that is connected uses its token"
        assert command("token", "revoke", entry["id"]).out == f"revoked: {entry['id']}\n"
        shared_gateway.wait_for_node("lap-top", online=False)
    finally:
        process.terminate()
        process.wait(60)
    assert variable.partition("=")[2] not in shared_gateway.log.read_text()


def test_a_callers_token_may_do_what_its_scopes_say(command: Command, shared_gateway: GatewayProcess) -> None:
    made = command("token", "create", "--scope", "read", "--json").json()
    assert made["scopes"] == ["read"] and made["token"] in made["command"] and made["last_used_at"] is None
    reader = command.with_env(FARHAND_URL=shared_gateway.url, FARHAND_TOKEN=made["token"])
    [line] = [line for line in command("token", "list").out.splitlines() if line.startswith(made["id"])]
    assert "never" in line
    assert reader("nodes").status == 0
    [line] = [line for line in command("token", "list").out.splitlines() if line.startswith(made["id"])]
    assert "never" not in line, "its last use is shown"
    refused = reader("call", "node.ping", "--json")
    assert refused.status == 1 and refused.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize("scope", [scope for scope in SCOPES if not scope.startswith("tools.") and scope != "chat"])
def test_the_printed_command_is_one_that_the_token_may_give(command: Command, tmp_path: Path, scope: str) -> None:
    made = command("token", "create", "--scope", scope, "--json").json()
    url, token, _, *words = shlex.split(made["command"])
    done = Command(tmp_path, **dict(word.split("=", 1) for word in (url, token)))(*words)
    assert done.status == 0, done


def test_the_printed_command_of_a_narrow_token_is_a_call(command: Command, hello: PluginProcess) -> None:
    made = command("token", "create", "--tool", "node.echo", "--node-only", "hello", "--json").json()
    *known, _ = shlex.split(made["command"])
    assert known[2:] == ["farhand", "call", "node.echo"]
    caller = command.with_env(**dict(word.split("=", 1) for word in known[:2]))
    assert caller("call", "node.echo", "a=1", "--json").json()["result"] == {"a": 1}


def test_list_shows_no_secrets_and_marks_what_was_revoked(command: Command) -> None:
    made = command("token", "create", "--label", "gone", "--json").json()
    command("token", "revoke", made["id"])
    shown = command("token", "list").out
    [line] = [line for line in shown.splitlines() if line.startswith(made["id"])]
    assert line.split()[1] == "revoked" and made["token"] not in shown
    again = command("token", "revoke", made["id"], "--json")
    assert again.status == 1 and again.json()["error"]["code"] == "not_found"


def test_list_shows_what_a_token_is_limited_to(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        command = Command(gateway.home, NO_COLOR="1")
        command("token", "create", "--label", "free", "--scope", "tools.read")
        assert "EXPIRES" not in command("token", "list").out and "ONLY FOR" not in command("token", "list").out
        limits = ["--tool", "lap__Read", "--node-only", "lap", "--expires", "2h"]
        made = command("token", "create", "--label", "bound", *limits, "--scope", "tools.read", "--json").json()
        day = time.strftime("%Y-%m-%d", time.localtime(made["expires_at"] / 1000))
        head, *lines = command("token", "list").out.splitlines()
        [bound] = [line for line in lines if "bound" in line]
        [free] = [line for line in lines if "free" in line]
        assert "EXPIRES" in head and day in bound and bound.endswith("lap__Read on lap")
        assert day not in free and free.endswith("tools.read")
        narrow = command.on_terminal("token", "list")
        assert day in narrow and "lap__Read" in narrow and "tools.read" in narrow


@pytest.mark.parametrize(
    "options",
    [["--scope", "bogus"], ["--node", "x", "--scope", "read"], ["--node"], ["--node", "gsv"], ["--node", "a__b"]],
)
def test_a_token_that_cannot_be_made(command: Command, options: list[str]) -> None:
    done = command("token", "create", *options, "--json")
    assert done.status in (1, 2) and done.json()["error"]["code"] in ("usage", "invalid_request")


def test_create_needs_a_running_gateway(tmp_path: Path) -> None:
    done = Command(tmp_path)("token", "create", "--node", "x")
    assert done.status == 1 and "no gateway is running" in done.err and "farhand up" in done.err
