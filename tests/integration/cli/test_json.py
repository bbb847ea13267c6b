"""`--json`: every command takes it, and puts exactly one JSON document on standard output."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from farhand import __version__
from farhand.cli.main import farhand
from tests.integration.cli.conftest import Command
from tests.support.harness import SHARED_TOKEN, GatewayProcess, free_port


def tree(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from tree(below, (*path, name))


COMMANDS = dict(tree(farhand))
GROUPS = [
    path for path, one in COMMANDS.items() if isinstance(one, click.Group) and not one.invoke_without_command
]  # fmt: skip


def test_every_command_takes_it() -> None:
    without = [
        " ".join(path)
        for path, one in COMMANDS.items()
        if not any("--json" in parameter.opts for parameter in one.params)
    ]
    assert len(COMMANDS) > 80 and without == []


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_a_group_alone_is_one_document(tmp_path: Path, path: tuple[str, ...]) -> None:
    done = Command(tmp_path)(*path, "--json")
    assert (done.status, done.json()["error"]["code"]) == (2, "usage")


@pytest.mark.parametrize("words", [["--version", "--json"], ["--json", "--version"]])
def test_the_version_is_a_document(tmp_path: Path, words: list[str]) -> None:
    assert Command(tmp_path)(*words).json() == {"version": __version__}
    assert Command(tmp_path)("--version").out == f"farhand {__version__}\n"


@pytest.mark.parametrize("words", [["--json", "token", "list"], ["token", "--json", "list"]])
def test_a_command_inherits_the_options_of_its_group(command: Command, words: list[str]) -> None:
    assert "tokens" in command(*words).json()


@pytest.mark.parametrize("name", ["up", "gateway"])
def test_a_gateway_tells_when_it_is_ready(tmp_path: Path, name: str) -> None:
    gateway = GatewayProcess(tmp_path / "home", "--json", command=name)
    gateway.start(wait=False)
    try:
        assert gateway.process is not None and gateway.process.stdout is not None
        text = gateway.process.stdout.read()  # to its end: nothing follows
        reported = json.loads(text)
        assert (reported["ready"], reported["url"], reported["home"]) == (True, gateway.url, str(gateway.home))
        assert (reported["version"], reported["pid"]) == (__version__, gateway.process.pid)
        assert Path(reported["token_file"]).read_text().strip() == gateway.token and gateway.token not in text
        assert reported["console"].startswith(f"{gateway.url}/signin?code=")
        assert (reported["node"] is None) == (name == "gateway")
        if name == "up":
            gateway.wait_for_node(reported["node"])
    finally:
        status = gateway.stop()
    assert status == 0


@pytest.mark.parametrize("name", ["up", "gateway"])
def test_a_gateway_that_cannot_start_is_one_document(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = Command(tmp_path / "home")(name, "--port", str(taken.getsockname()[1]), "--json")
    assert done.status == 1 and "cannot listen" in done.json()["error"]["message"]


def node(gateway_url: str, tmp_path: Path, *more: str, token: str = SHARED_TOKEN) -> subprocess.Popen[str]:
    command = Command(tmp_path / "state", SA_NODE_TOKEN=token)
    return command.start(
        "node", "--json", "--gateway", gateway_url, "--id", "told", "--workspace", str(tmp_path), *more
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, Any, str]:
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    return process.returncode, json.loads(out), err


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_node_tells_when_it_is_connected(shared_gateway: GatewayProcess, tmp_path: Path, level: str) -> None:
    process = node(shared_gateway.url, tmp_path, "--log-level", level)
    assert process.stdout is not None
    reported = json.loads(process.stdout.read())  # to its end: nothing follows
    shared_gateway.wait_for_node("told")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    status = process.returncode
    assert (status, reported["ready"], reported["node_id"], reported["pid"]) == (0, True, "told", process.pid)
    assert (reported["gateway"], reported["workspace"]) == (shared_gateway.url, str(tmp_path))
    assert ("connected to" in err) == (level == "info")


def test_a_node_that_is_refused_is_one_document(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    out, _ = node(shared_gateway.url, tmp_path, token="wrong").communicate(timeout=60)
    assert json.loads(out)["error"]["message"]


def test_a_node_that_never_got_through_says_so(tmp_path: Path) -> None:
    process = node(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert process.stderr is not None
    process.stderr.readline()  # it tries
    status, reported, _ = ended(process)
    assert (status, reported["ready"]) == (0, False)


def test_a_folder_that_cannot_be_made_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = Command(tmp_path / "home")("gateway", "--port", "0", "--workspace", str(tmp_path / "file/inside"), "--json")
    assert done.status == 1 and str(tmp_path / "file") in done.json()["error"]["message"]


def test_an_unexpected_error_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "home" / "memory.db").mkdir(parents=True)
    done = Command(tmp_path / "home")("gateway", "--port", "0", "--json")
    assert done.status == 1 and done.json()["error"]["message"] and "Traceback" not in done.err


@pytest.mark.parametrize("host", ["a" * 70, "no-such-host.invalid", "203.0.113.9"])
def test_a_foreign_host_is_named(tmp_path: Path, host: str) -> None:
    done = Command(tmp_path / "home")("gateway", "--host", host, "--port", "0", "--json")
    reported = done.json()["error"]["message"]
    assert done.status == 1 and host in reported and "--host" in reported and "--port" not in reported


def test_a_node_without_a_credential_learns_how_to_get_one(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    done = Command(tmp_path)("node", "--gateway", shared_gateway.url, "--id", "told", "--json")
    message = done.json()["error"]["message"]
    assert done.status == 1 and shared_gateway.url in message and "`farhand node pair`" in message


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "ftp://127.0.0.1", "http://:3210"])
def test_a_node_with_an_invalid_address(tmp_path: Path, url: str) -> None:
    done = Command(tmp_path, SA_NODE_TOKEN="x")("node", "--gateway", url, "--json")
    assert done.status == 1 and url in done.json()["error"]["message"]
