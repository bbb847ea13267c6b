"""`farhand mcp …`: servers behind the gate, and the configuration of clients."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.integration.http.test_mcp import connected, run
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import ROOT, GatewayProcess, wait_until

BIN = Path(sys.executable).parent


def farhand(gateway: GatewayProcess, *arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FARHAND_HOME": str(gateway.home), **({"HOME": str(home)} if home else {})}
    environment = {name: value for name, value in environment.items() if name not in ("XDG_CONFIG_HOME", "CODEX_HOME")}
    return run_process([*FARHAND, "mcp", *arguments], env=environment, cwd=ROOT, timeout=120)


def test_a_server_is_added_listed_accepted_and_removed(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    gateway = shared_gateway
    empty = farhand(gateway, "list")
    assert "farhand mcp add" in empty.stdout + empty.stderr and empty.returncode == 0
    server = [sys.executable, "-m", "tests.support.mcp_server", str(tmp_path)]
    added = farhand(gateway, "add", "odd", "--cwd", str(ROOT), "--env", "MODE=a=b", "--", *server)
    assert added.returncode == 0 and "odd__greet" in added.stdout, added
    assert gateway.invoke("odd__variable", {"name": "MODE"})["result"]["content"][0]["text"] == "a=b"
    assert "already" in farhand(gateway, "add", "odd", "--", "true").stderr
    listed = json.loads(farhand(gateway, "list", "--json").stdout)
    assert [one["name"] for one in listed["servers"]] == ["odd"]

    gateway.invoke("odd__describe", {"text": "Something else."})
    wait_until(lambda: gateway.get("/v1/mcp/servers/odd")["held"] == 1, what="the change")
    assert "1 held back" in farhand(gateway, "list").stdout
    shown = farhand(gateway, "show", "odd").stdout
    assert "Greet somebody." in shown and "Something else." in shown and "held back" in shown
    assert "greet" in farhand(gateway, "accept", "odd").stdout
    assert gateway.invoke("odd__greet", {"name": "Ada"})["ok"]
    assert "no tool 'gret'" in farhand(gateway, "accept", "odd", "gret").stderr
    assert "removed: odd" in farhand(gateway, "remove", "odd").stdout
    gone = farhand(gateway, "remove", "odd")
    assert gone.returncode == 1 and "there is no MCP server 'odd'" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "x"), "either --url"),
        (("add", "x", "--url", "http://a", "--", "b"), "either --url"),
        (("add", "x", "--env", "novalue", "--", "b"), "NAME=VALUE"),
        (("add", "gsv", "--", "b"), "reserved"),
        (("add", "x", "--url", "ftp://a"), "not an http:// or https:// address"),
        (("add", "x", "--node", "nowhere", "--", "b"), "there is no node 'nowhere'"),
        (("install", "claude"), "did you mean 'claude-code'"),
        (("install", "codex", "--project", "."), "no configuration file for a project"),
        (("login", "nothing"), "there is no MCP server"),
        (("lst",), "list"),
    ],
)
def test_mistakes_are_explained(shared_gateway: GatewayProcess, arguments: tuple[str, ...], message: str) -> None:
    found = farhand(shared_gateway, *arguments)
    assert found.returncode in (1, 2) and message in found.stderr, found


FILES = {
    "claude-code": (".claude.json", "mcpServers", "url", "headers"),
    "cursor": (".cursor/mcp.json", "mcpServers", "url", "headers"),
    "vscode": (".config/Code/User/mcp.json", "servers", "url", "headers"),
    "gemini": (".gemini/settings.json", "mcpServers", "httpUrl", "headers"),
    "codex": (".codex/config.toml", "mcp_servers", "url", "http_headers"),
}


def read(path: Path) -> Any:
    return tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())


@pytest.mark.parametrize("client", FILES)
def test_a_client_is_configured_with_a_token_of_its_own(
    shared_gateway: GatewayProcess, tmp_path: Path, client: str
) -> None:
    name, key, url_key, headers_key = FILES[client]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".toml":
        path.write_text('# mine\nmodel = "o5"\n\n[mcp_servers.other]\ncommand = "x"\n')
    else:
        path.write_text(json.dumps({"theme": "dark", key: {"other": {"command": "x"}}}))
    before = path.read_text()
    tokens = len(shared_gateway.get("/v1/tokens")["tokens"])

    dry = farhand(shared_gateway, "install", client, "--dry-run", home=tmp_path)
    assert dry.returncode == 0 and str(path) in dry.stdout and "would write" in dry.stdout
    assert path.read_text() == before and len(shared_gateway.get("/v1/tokens")["tokens"]) == tokens

    done = farhand(shared_gateway, "install", client, "--tool", "gsv__*", home=tmp_path)
    assert done.returncode == 0, done
    found = read(path)
    assert found[key]["other"] == {"command": "x"} and ("# mine" in path.read_text() or found["theme"] == "dark")
    entry = found[key]["farhand"]
    assert entry[url_key] == f"{shared_gateway.url}/mcp"
    secret = entry[headers_key]["Authorization"].removeprefix("Bearer ")
    assert secret not in done.stdout and secret != shared_gateway.token
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    async def listed() -> set[str]:
        async with connected(shared_gateway, "auto", secret) as session:
            return {tool.name for tool in (await session.list_tools()).tools}

    names = run(listed())
    assert names and all(name.startswith("gsv__") for name in names)

    # Again: the entry is replaced and the earlier token is revoked.
    again = json.loads(farhand(shared_gateway, "install", client, "--json", home=tmp_path).stdout)
    assert again["written"] is True and secret not in path.read_text()
    assert shared_gateway.request("GET", "/v1/tools", token=secret).status == 401


def test_a_file_that_cannot_be_kept_is_left_alone(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    path = tmp_path / ".cursor" / "mcp.json"
    path.parent.mkdir()
    for content in ("{ // a comment\n}", "[]", '{"mcpServers": 7}'):
        path.write_text(content)
        tokens = len(shared_gateway.get("/v1/tokens")["tokens"])
        found = farhand(shared_gateway, "install", "cursor", home=tmp_path)
        assert found.returncode == 1 and "nothing was written" in found.stderr, found
        assert path.read_text() == content and len(shared_gateway.get("/v1/tokens")["tokens"]) == tokens
    # A new file for a project.
    done = farhand(shared_gateway, "install", "vscode", "--project", str(tmp_path), home=tmp_path)
    assert done.returncode == 0 and read(tmp_path / ".vscode" / "mcp.json")["servers"]["farhand"]["type"] == "http"
