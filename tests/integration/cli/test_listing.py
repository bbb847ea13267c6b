"""`farhand tools` and `farhand nodes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command, node_env
from tests.support.harness import ROOT, GatewayProcess, PluginProcess


def test_tools_lists_names_nodes_and_descriptions(command: Command, hello: PluginProcess, slow: PluginProcess) -> None:
    done = command("tools")
    assert done.status == 0
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert rows["node.ping"].split()[1:] == ["hello", "Say", "that", "this", "node", "is", "there."]
    assert "Evil [31m words." in rows["slow.evil"], "escape codes of a node stay out of the terminal"


def test_a_pattern_is_a_part_or_a_glob(command: Command, hello: PluginProcess, slow: PluginProcess) -> None:
    def names(pattern: str) -> list[str]:
        return [offer["name"] for offer in command("tools", pattern, "--json").json()["tools"]]

    assert names("READ_") == ["node.fs.read_text"]
    assert names("node.*") == ["node.echo", "node.fs.read_text", "node.ping"]
    assert names("nothing") == []


def test_a_pattern_nothing_matches(command: Command, hello: PluginProcess) -> None:
    done = command("tools", "nothing")
    assert (done.status, done.out) == (0, "") and "no tool matches 'nothing'" in done.err


def test_the_whole_name_shows_the_parameters(command: Command, slow: PluginProcess) -> None:
    shown = command("tools", "slow.sleep").out
    assert "PARAMETER  TYPE    NEEDED  DEFAULT" in shown and "seconds    number  no      60.0" in shown
    assert shown.endswith("farhand call slow.sleep\n")
    assert "farhand call slow.text text=…" in command("tools", "slow.text").out


def test_a_long_description_is_cut_on_a_terminal_only(command: Command, hello: PluginProcess) -> None:
    end = '"notes/today.txt"}.'
    assert end in command("tools").out
    narrow = command.with_env(NO_COLOR="1").on_terminal("tools", columns=60)
    assert end not in narrow and "…" in narrow and "node.fs.read_text" in narrow
    assert all(len(line) <= 60 for line in narrow.splitlines())


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 80])
def test_an_id_is_whole_however_narrow_the_terminal(command: Command, hello: PluginProcess, columns: int) -> None:
    shown = command.with_env(NO_COLOR="1").on_terminal("nodes", columns=columns).splitlines()
    assert shown[0].startswith("NODE") and any(line.startswith("hello ") for line in shown)
    assert all(len(line) <= columns for line in shown)
    assert all(len(name) >= 4 or name == "…" for name in shown[0].split()), "no column of single letters"


def test_colours_on_a_terminal_unless_disabled(command: Command, hello: PluginProcess) -> None:
    assert "\x1b[32monline" in command.on_terminal("nodes")
    assert "\x1b" not in command.with_env(NO_COLOR="1").on_terminal("nodes")
    assert "\x1b" not in command.with_env(TERM="dumb").on_terminal("nodes")
    assert "\x1b" not in command("nodes").out


def test_json_on_a_terminal_is_indented(command: Command, hello: PluginProcess) -> None:
    assert command.on_terminal("nodes", "--json").startswith('{\n  "nodes": [')


def test_nodes_that_are_offline_stay_until_they_are_forgotten(
    command: Command, shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    env = node_env(shared_gateway, "type:old.host", tmp_path)
    with PluginProcess(ROOT / "examples/hello_node.py", tmp_path, env):
        shared_gateway.wait_for_node("type:old.host")
        refused = command("nodes", "forget", "type:old.host", "--json")
        assert refused.status == 1 and refused.json()["error"]["code"] == "conflict"
    shared_gateway.wait_for_node("type:old.host", online=False)
    [line] = [line for line in command("nodes").out.splitlines() if line.startswith("type:old.host")]
    assert line.split()[1:4] == ["offline", "just", "now"]
    assert command("nodes", "forget", "type:old.host").out == "forgotten: type:old.host\n"
    assert "type:old.host" not in command("nodes").out
    again = command("nodes", "forget", "type:old.host")
    assert again.status == 1 and "there is no node" in again.err


def test_no_nodes_say_what_to_do_and_the_gateways_own_tools_are_there(gateway: GatewayProcess) -> None:
    command = Command(gateway.home)
    done = command("nodes")
    assert (done.status, done.out) == (0, "") and "farhand node pair" in done.err
    assert ["read", "local", "Read"] in [line.split()[:3] for line in command("tools").out.splitlines()]
    assert "farhand node pair" in command("tools").err
    assert "no calls yet" in command("calls").err
    assert command("nodes", "--json").json() == {"nodes": [], "count": 0, "primary": None}
