"""MCP servers of an older revision, in the sandbox, and servers that hang or talk too much."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.integration.mcp.test_servers import Misbehaving, entry, mount, ready
from tests.support.harness import ROOT, GatewayProcess, wait_until

SERVER = ROOT / "tests" / "support" / "plain_mcp_server.py"


@pytest.mark.parametrize(("policy", "answer"), [("no", "not supported"), ("decline", "decline"), ("defaults", "blue")])
def test_an_older_server_is_called_and_its_questions_are_answered(
    shared_gateway: GatewayProcess, tmp_path: Path, policy: str, answer: str
) -> None:
    name = f"plain-{policy}"
    mount(shared_gateway, name, sys.executable, str(SERVER), elicitation=policy)
    (tmp_path / "a.txt").write_text("hello")
    found = shared_gateway.invoke(f"{name}__read", {"path": str(tmp_path / "a.txt")})
    assert found["result"] == {"content": [{"type": "text", "text": "hello"}]}
    failed = shared_gateway.invoke(f"{name}__read", {"path": str(tmp_path / "missing")})
    assert failed["error"]["kind"] == "failed" and "No such file" in failed["error"]["message"]
    asked = shared_gateway.invoke(f"{name}__ask", {})
    assert answer in asked["result"]["content"][0]["text"].lower()


def test_a_server_that_talks_too_much_does_not_stop_the_gateway(shared_gateway: GatewayProcess) -> None:
    mount(shared_gateway, "loud", sys.executable, str(SERVER))
    call = shared_gateway.invoke("loud__flood", {}, background=True)["request_id"]
    for _ in range(5):
        assert shared_gateway.get("/v1/health")["status"] == "ok"
    wait_until(lambda: shared_gateway.get(f"/v1/calls/{call}")["state"] == "ok", 120, "the end of the call")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_server_runs_in_the_sandbox(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text("[sandbox]\nenabled = true\n")
    secret = tmp_path / "secret.txt"
    secret.write_text("outside")
    with GatewayProcess(home) as gateway:
        workspace = home / "agents" / "main"
        shutil.copy(SERVER, workspace / "server.py")
        (workspace / "data").mkdir()
        # The loader of a program writes this file: for the program that creates the sandbox it would be outside.
        env = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"{tmp_path}/trace", "OTHER": "a 'quoted' $value"}
        mount(gateway, "plain", "/usr/bin/python3", "server.py", env=env)
        assert list(tmp_path.glob("trace*")) == []
        first = gateway.invoke("plain__read", {"path": "/proc/1/environ"})
        # Nothing of the gateway's environment is there to read, whether the kernel lets the server read it or not.
        assert "HOME=" not in str(first), first
        own = gateway.invoke("plain__read", {"path": "/proc/self/environ"})
        assert "OTHER=a 'quoted' $value" in own["result"]["content"][0]["text"], own
        outside = gateway.invoke("plain__read", {"path": str(secret)})
        assert outside["error"]["kind"] == "failed" and "outside" not in str(outside)
        token = gateway.invoke("plain__read", {"path": str(home / "token")})
        assert not token["ok"]
        assert gateway.invoke("plain__write", {"path": "data/made.txt"})["ok"]
        assert (workspace / "data" / "made.txt").read_text() == "written"
        steering = gateway.invoke("plain__write", {"path": "SOUL.md"})
        assert not steering["ok"] and not (workspace / "SOUL.md").exists()


def test_a_server_that_hangs_is_restarted(gateway: GatewayProcess, tmp_path: Path) -> None:
    odd = Misbehaving(gateway, tmp_path / "odd")
    late = odd.call("hang", timeout_ms=1000)
    assert late["error"]["kind"] == "timeout"
    wait_until(lambda: entry(gateway, "odd")["restarts"] >= 1, 120, "the restart")
    ready(gateway, "odd")
    assert odd.said("greet", {"name": "Ada"}) == "Hello Ada"
