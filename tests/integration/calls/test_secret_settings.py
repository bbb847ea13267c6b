"""Settings of models, channels and MCP servers name secrets, which only the part that uses them gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integration.cli.conftest import Command
from tests.integration.mcp.test_servers import entry, ready
from tests.support.channel_servers import TelegramServer
from tests.support.harness import ROOT, GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, text

SETTINGS = """
[agent]
model = "mine/some-model"

[providers.mine]
base_url = "{model}"
api_key = "{{{{secret:MODEL_KEY}}}}"
headers = {{ X-Team = "Bearer {{{{secret:TEAM_KEY}}}}" }}

[channels.telegram]
token = "{{{{secret:TELEGRAM}}}}"
url = "{telegram}"
policy = "open"

[mcp.mine]
command = {command}
cwd = "{cwd}"
env = {{ API_KEY = "{{{{secret:MCP_KEY}}}}" }}

[mcp.listed]
command = ["server", "{{{{secret:MCP_KEY}}}}"]
"""
KEYS = ("model-key-0001", "model-key-0002", "team-key-12345", "mcp-key-000001", "mcp-key-000002")


def put(gateway: GatewayProcess, name: str, value: str, **more: Any) -> None:
    answer = gateway.request("PUT", f"/v1/secrets/{name}", {"value": value, **more})
    assert answer.status == 200, answer


def digest(gateway: GatewayProcess, server: str) -> str:
    """The variable as the server has it, which the gateway masks in answers."""
    answer = gateway.invoke(f"{server}__variable", {"name": "API_KEY"})
    return str(answer["result"]["content"][0]["text"]) if answer["ok"] else str(answer["error"]["message"])


def test_settings_name_secrets(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    notes = tmp_path / "notes"
    notes.mkdir()
    with ModelServer(answer=lambda _: text("hello")) as model, TelegramServer() as telegram:
        command = [sys.executable, "-m", "tests.support.mcp_server", str(notes)]
        filled = SETTINGS.format(model=model.url, telegram=telegram.url, command=json.dumps(command), cwd=ROOT)
        (home / "farhand.toml").write_text(filled)
        with GatewayProcess(home) as gateway:
            # Nothing is set yet: the gateway runs, and each part says what it needs in one line.
            reply = gateway.request("POST", "/v1/chat/completions", chat()).json()
            assert "there is no secret 'MODEL_KEY'; set it with `farhand secret set MODEL_KEY`" in json.dumps(reply)
            wait_until(lambda: "there is no secret 'MCP_KEY'" in (entry(gateway, "mine")["error"] or ""), 30)
            assert "could be listed by others" in entry(gateway, "listed")["error"]
            put(gateway, "MODEL_KEY", KEYS[0])
            put(gateway, "TEAM_KEY", KEYS[2], tools=["provider:mine"])
            put(gateway, "MCP_KEY", KEYS[3], tools=["mcp:other"])
            put(gateway, "TELEGRAM", telegram.TOKEN)
            # A restriction holds for settings as it does for calls; a change holds without a restart.
            wait_until(lambda: "is for mcp:other only, not for mcp:mine" in (entry(gateway, "mine")["error"] or ""), 30)
            put(gateway, "MCP_KEY", KEYS[3])
            ready(gateway, "mine")
            assert digest(gateway, "mine") == "***"
            assert gateway.request("POST", "/v1/chat/completions", chat()).status == 200
            sent = model.requests[-1].headers
            assert sent["authorization"] == f"Bearer {KEYS[0]}" and sent["x-team"] == f"Bearer {KEYS[2]}"
            put(gateway, "MODEL_KEY", KEYS[1])
            assert gateway.request("POST", "/v1/chat/completions", chat()).status == 200
            assert model.requests[-1].headers["authorization"] == f"Bearer {KEYS[1]}"
            before = gateway.invoke("mine__pid", {})["result"]["content"][0]["text"]
            put(gateway, "MCP_KEY", KEYS[4])
            wait_until(lambda: pid(gateway) not in ("", before), 30, "the server runs with the new secret")
            # The handle is shown, the value nowhere.
            shown = Command(home)("config").out
            assert "{{secret:MODEL_KEY}}" in shown and "Bearer {{secret:TEAM_KEY}}" in shown, shown
            used = {one["name"]: one["last_call"] for one in gateway.get("/v1/secrets")["secrets"]}
            assert used["MODEL_KEY"] == "provider:mine" and used["MCP_KEY"] == "mcp:mine"
            gateway.stop()
            gateway.start()
            telegram.write(7, "hi")
            wait_until(lambda: telegram.said, 30, "the channel has its token after a restart")
        traces = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
        for key in (*KEYS, telegram.TOKEN):
            assert key.encode() not in traces, key


def pid(gateway: GatewayProcess) -> str:
    answer = gateway.invoke("mine__pid", {})
    return str(answer["result"]["content"][0]["text"]) if answer["ok"] else ""


def chat() -> dict[str, Any]:
    return {"model": "farhand", "messages": [{"role": "user", "content": "hi"}]}


def test_a_server_on_a_node_gets_its_secret_sealed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with (
        GatewayProcess(tmp_path / "home") as gateway,
        NodeProcess(gateway, tmp_path / "node", "far") as node,
    ):
        put(gateway, "KEY", "value-for-the-far-node", nodes=["far"])
        command = [sys.executable, "-m", "tests.support.mcp_server", str(notes)]
        env = {"API_KEY": "{{secret:KEY}}"}
        body = {"name": "there", "command": command, "cwd": str(ROOT), "node": "far", "env": env}
        assert gateway.request("POST", "/v1/mcp/servers", body).status == 201
        ready(gateway, "there")
        assert digest(gateway, "there") == "***"
        here = {"name": "here", "command": command, "cwd": str(ROOT), "env": env}
        assert gateway.request("POST", "/v1/mcp/servers", here).status == 201
        wait_until(lambda: "is for far only, not for the gateway" in (entry(gateway, "here")["error"] or ""), 30)
        node.restart()
        wait_until(lambda: gateway.invoke("there__pid", {})["ok"], 60, "the server runs again")
