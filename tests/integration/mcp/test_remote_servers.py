"""Remote MCP servers behind the gate: streamable HTTP, headers, and OAuth towards them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.mcp.test_servers import entry, ready
from tests.support.harness import ROOT, GatewayProcess, free_port, wait_until
from tests.support.model_server import ModelServer, text


@contextlib.contextmanager
def serving(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    port = int(arguments[-1] if module.endswith("mcp_server") else arguments[0])
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT)

    def listening() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        wait_until(listening, what=module)
        yield process
    finally:
        process.kill()
        process.wait()


def add(gateway: GatewayProcess, name: str, **settings: Any) -> None:
    answer = gateway.request("POST", "/v1/mcp/servers", {"name": name, **settings})
    assert answer.status == 201, answer


def test_a_server_with_a_url_is_called_and_found_again(tmp_path: Path) -> None:
    port = free_port()
    server = ("tests.support.mcp_server", str(tmp_path), str(port))
    with GatewayProcess(tmp_path / "home") as gateway:
        with serving(*server):
            add(gateway, "far", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "Bearer very-secret-header"})
            shown = ready(gateway, "far")
            assert shown["kind"] == "http" and shown["headers"] == ["X-Key"]
            assert b"very-secret" not in gateway.request("GET", "/v1/mcp/servers").body
            answer = gateway.invoke("far__greet", {"name": "Ada"})
            assert answer["result"]["content"][0]["text"] == "Hello Ada" and answer["route"]["kind"] == "mcp"
            gateway.invoke("far__describe", {"text": "another description"})
            wait_until(lambda: entry(gateway, "far")["held"] == 1, what="the changed description")
        assert not gateway.invoke("far__pid", {}, timeout_ms=20_000)["ok"]
        (tmp_path / "description").unlink()
        with serving(*server):
            assert gateway.request("POST", "/v1/mcp/servers/far/restart").status == 200
            ready(gateway, "far")
            assert gateway.invoke("far__greet", {"name": "Ada"})["ok"]


def test_a_server_may_use_the_model_if_the_owner_allows_it(tmp_path: Path) -> None:
    with (
        ModelServer(text("forty-two")) as model,
        GatewayProcess(tmp_path / "home", env=model.environment) as gateway,
    ):
        command = [sys.executable, "-m", "tests.support.mcp_server", str(tmp_path)]
        for name, sampling in (("no", "no"), ("yes", "model")):
            add(gateway, name, command=command, cwd=str(ROOT), sampling=sampling)
            ready(gateway, name)
        refused = gateway.invoke("no__think", {"text": "the answer?"})
        assert refused["error"]["kind"] == "failed" and model.requests == []
        answer = gateway.invoke("yes__think", {"text": "the answer?"})
        assert answer["result"]["content"][0]["text"] == "the model says forty-two"


def test_a_login_is_completed_in_a_browser_and_survives_a_restart(tmp_path: Path) -> None:
    port = free_port()
    with (
        serving("tests.support.mcp_oauth_server", str(port)),
        GatewayProcess(tmp_path / "home") as gateway,
    ):
        add(gateway, "private", url=f"http://127.0.0.1:{port}/mcp")
        wait_until(lambda: entry(gateway, "private")["state"] == "login_required", what="the state")
        assert "farhand mcp login private" in entry(gateway, "private")["error"]
        refused = gateway.invoke("private__whisper", {})
        assert "did not run" in refused["error"]["message"]

        # Answers to logins that were never begun do not count.
        for query in ("", "?code=a&state=b", "?error=denied"):
            assert gateway.request("GET", f"/v1/mcp/callback{query}", token=None).status == 401
        begun = gateway.request("POST", "/v1/mcp/servers/private/login", {}).json()
        assert begun["authorize_url"].startswith(f"http://127.0.0.1:{port}/authorize?")
        stolen = gateway.request("GET", "/v1/mcp/callback?code=mine&state=guess", token=None)
        assert stolen.status == 401

        # What a browser does: it follows the redirect of the authorization server to the gateway.
        page = urllib.request.urlopen(begun["authorize_url"], timeout=60)
        assert "complete" in page.read().decode()
        ready(gateway, "private")
        answer = gateway.invoke("private__whisper", {})
        assert answer["result"]["content"][0]["text"] == "only for friends"

        stored = gateway.home / "mcp" / "private.json"
        assert stat.S_IMODE(os.stat(stored).st_mode) == 0o600
        token = json.loads(stored.read_text())["tokens"]["access_token"]
        assert token.encode() not in gateway.request("GET", "/v1/mcp/servers").body
        gateway.kill()
        gateway.start()
        ready(gateway, "private")  # without another login
        assert gateway.invoke("private__whisper", {})["ok"]
        assert gateway.request("DELETE", "/v1/mcp/servers/private").status == 200
        assert not stored.exists()


def log_in_by_address(gateway: GatewayProcess, port: int) -> Path:
    """Add the server, log in by the address of the last page, and return the file with the tokens."""
    add(gateway, "private", url=f"http://127.0.0.1:{port}/mcp", redirect_url="http://127.0.0.1:9/callback")
    wait_until(lambda: entry(gateway, "private")["state"] == "login_required", what="the state")
    begun = gateway.request("POST", "/v1/mcp/servers/private/login", {}).json()

    class Stop(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        urllib.request.build_opener(Stop).open(begun["authorize_url"], timeout=60)
        raise AssertionError("the authorization server did not redirect")
    except urllib.error.HTTPError as error:
        address = error.headers["Location"]
    assert address.startswith("http://127.0.0.1:9/callback?")
    wrong = gateway.request("POST", "/v1/mcp/servers/private/login", {"url": "http://x/?code=a&state=b"})
    assert wrong.status == 409
    done = gateway.request("POST", "/v1/mcp/servers/private/login", {"url": address})
    assert done.json()["completed"] is True
    ready(gateway, "private")
    return gateway.home / "mcp" / "private.json"


def test_tokens_are_refreshed_before_they_expire_and_after_a_restart(tmp_path: Path) -> None:
    port, home = free_port(), tmp_path / "home"
    with serving("tests.support.mcp_oauth_server", str(port), "3"):
        with GatewayProcess(home) as gateway:
            stored = log_in_by_address(gateway, port)
            first = stored.read_text()

            def refreshed() -> bool:
                answer = gateway.invoke("private__whisper", {})
                assert answer["ok"], (answer, entry(gateway, "private"), gateway.log.read_text()[-3000:])
                return stored.read_text() != first

            wait_until(refreshed, what="the refreshed token")
        second = json.loads(stored.read_text())
        wait_until(lambda: time.time() > second["expires_at"], what="the end of the token")
        with GatewayProcess(home) as gateway:
            ready(gateway, "private")
            assert gateway.invoke("private__whisper", {})["ok"]
        assert json.loads(stored.read_text())["tokens"] != second["tokens"]


def test_a_token_that_the_server_refuses_early_is_refreshed_without_a_login(tmp_path: Path) -> None:
    port = free_port()
    with (
        serving("tests.support.mcp_oauth_server", str(port), "3600", "2"),
        GatewayProcess(tmp_path / "home") as gateway,
    ):
        stored = log_in_by_address(gateway, port)
        first = json.loads(stored.read_text())["tokens"]

        def refreshed() -> bool:
            works = gateway.invoke("private__whisper", {})["ok"]
            assert entry(gateway, "private")["state"] != "login_required"
            return works and json.loads(stored.read_text())["tokens"] != first

        wait_until(refreshed, what="the refreshed token")
