"""Attempts of an attacker that nodes and the gateway withstand: codes, lent folders, limits, terminals, kills."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.sandbox.levels import ChosenSandbox, SandboxPlan
from farhand.machine.sandbox.resources import AppliedLimits
from farhand.node.program import node_folder
from tests.integration.cli.conftest import Command
from tests.integration.http.test_attacks_doors import token
from tests.integration.nodes.test_attacks_nodes import joined
from tests.integration.nodes.test_lent_folder_shell import LEVELS
from tests.integration.nodes.test_lent_limits import running, stored
from tests.support.harness import GatewayProcess, NodeProcess
from tests.support.terminal import TerminalViewer
from tests.unit.sdk.wire import asynchronous

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

# -- a gateway that is joined ---------------------------------------------------------------------------------------


@needs_bubblewrap
@pytest.mark.parametrize("offered", [{"allow_tools": ["Bash"]}, {"allow_tools": ["Bash"], "sandbox": "none"}])
def test_a_code_lends_nothing_outside_of_the_folders_that_its_user_names(
    shared_gateway: GatewayProcess, tmp_path: Path, offered: dict[str, Any]
) -> None:
    root, home, secret = tmp_path / "root", tmp_path / "other", tmp_path / "secret"
    root.mkdir()
    secret.write_text("what is not lent\n")
    made = shared_gateway.request("POST", "/v1/pairings", {"limits": offered}).json()
    name = f"careful{len(offered)}"
    words = ["join", made["code"], "--id", name, "--home", str(home), "--root", str(root)]
    with running(shared_gateway, name, *words, "--gateway", shared_gateway.url, log=tmp_path / "log"):
        seen = shared_gateway.invoke(f"{name}__Bash", {"command": f"cat {secret}; touch {tmp_path}/escaped"})
        assert "what is not lent" not in str(seen) and not (tmp_path / "escaped").exists()
    assert "allow_tools" not in stored(home)


class FalseGateway(http.server.BaseHTTPRequestHandler):
    """Answers a code with another node's id, and with a token instead of taking the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        said: dict[str, Any] = {"node_id": None, "limits": {}, "gateway_id": "g"}
        if self.path == "/v1/pair":
            said = {"node_id": "another", "token": "fhn_x", "gateway_id": "g"}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def false_gateway() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FalseGateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_gateway_does_not_name_a_node_without_limits(false_gateway: str, tmp_path: Path) -> None:
    """The limits are stored for the id that was asked for; a later start would have used the other id."""
    home = tmp_path / "other"
    said = Command(home)("join", "AAAA-AAAA", "--gateway", false_gateway, "--id", "mine", "--read-only", "--no-run")
    assert said.status != 0 and not (home / "node-token.json").exists(), said


def test_no_login_is_stored_without_its_limits(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    """As after a kill, or on a full disk, in the middle of a join."""
    home = tmp_path / "other"
    folder = node_folder(home, "halfway")
    (folder / "lent.json.new").mkdir(parents=True)  # cannot be written
    code = Command(shared_gateway.home)("node", "pair", "--json").json()["code"]
    said = Command(home)("join", code, "--id", "halfway", "--read-only", "--no-run")
    assert said.status != 0, said
    assert not (home / "node-token.json").exists() and not (folder / "key.json").exists()


def test_a_script_that_arrives_incompletely_runs_nothing(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    code = shared_gateway.request("POST", "/v1/pairings", {}).json()["code"]
    script = shared_gateway.request("GET", f"/join/{code}", token=None).body
    lines = script.splitlines(keepends=True)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for count in range(1, len(lines), 4):
        done = subprocess.run(["sh"], input=b"".join(lines[:count]), env=environment, check=False, capture_output=True)
        assert b"downloading" not in done.stderr and not list(tmp_path.iterdir()), count


# -- folders in folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_lent_folder_in_another_is_not_replaced_by_a_link(
    shared_gateway: GatewayProcess, tmp_path: Path, level: str
) -> None:
    root, outside, name = tmp_path / "root", tmp_path / "outside", f"nested-{level}"
    inner = root / "above" / "inner"
    for folder in (inner, outside):
        folder.mkdir(parents=True)
    (outside / "secret").write_text("what is not lent\n")
    roots = ["--root", str(root), "--root", str(inner), "--sandbox", level]
    with NodeProcess(shared_gateway, tmp_path, name, *roots) as node:
        node.ok("Bash", {"command": f"cd {root}; mv above moved; mkdir above; ln -s ../../outside above/inner"})
        assert (inner / "secret").read_text() == "what is not lent\n", "outside of the sandbox, the link leads out"
        command = f"cat {inner}/secret; touch {inner}/planted"
        said = shared_gateway.invoke(f"{name}__Bash", {"command": command, "workdir": str(root)})
        assert "what is not lent" not in str(said) and not (outside / "planted").exists(), said
        assert shared_gateway.invoke(f"{name}__Read", {"path": f"{inner}/secret"})["ok"] is False
        node.stop()
        node.start(wait=False)
        assert node.process is not None and node.process.wait(60) != 0
        assert "leads out of" in node.log.read_text()


@pytest.mark.parametrize("level", LEVELS)
def test_a_workspace_in_a_lent_folder_is_not_replaced_by_a_link(
    shared_gateway: GatewayProcess, tmp_path: Path, level: str
) -> None:
    """A node is often started in a folder of the project that it lends."""
    root, outside, name = tmp_path / "root", tmp_path / "outside", f"within-{level}"
    workspace = root / "workspace"
    for folder in (workspace, outside):
        folder.mkdir(parents=True)
    (outside / "secret").write_text("what is not lent\n")
    options = ["--root", str(root), "--workspace", str(workspace), "--sandbox", level]
    with NodeProcess(shared_gateway, tmp_path, name, *options) as node:
        node.ok("Bash", {"command": f"cd {root}; mv workspace moved; ln -s {outside} workspace"})
        command = f"cat {outside}/secret; touch {outside}/planted; cat workspace/secret; touch workspace/planted"
        for trial in (False, True):
            args = {"command": command, "workdir": str(root), "trial": trial}
            said = shared_gateway.invoke(f"{name}__Bash", args)
            assert "what is not lent" not in str(said) and not (outside / "planted").exists(), said


@needs_bubblewrap
def test_a_link_of_a_trial_does_not_keep_its_files(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    """The folders of a trial are removed, and those that its links lead to are left alone."""
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    with NodeProcess(shared_gateway, tmp_path, "linked") as node:
        command = f"mkdir folder; ln -s {target} folder/link; ln -s {target} link"
        tried = node.ok("Bash", {"command": command, "trial": True})
        node.ok("Trial", {"trialId": tried["trialId"], "action": "discard"})
        assert node.ok("Bash", {"command": "true", "trial": True})["changes"] == []
        assert not list(node.state.glob("nodes/*/trials/*/upper0"))[1:], "the files of the first one are gone"
    assert target.stat().st_mode & 0o777 == 0o755


# -- limits of memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_no_folder_of_the_sandbox_is_a_way_around_the_limits(tmp_path: Path, level: str) -> None:
    """Folders that are in memory are read-only, or as small as /tmp."""
    limits = AppliedLimits(level="rlimits", temporary=1024 * 1024)
    sandbox = ChosenSandbox(SandboxPlan(workspace=str(tmp_path), level=level, limits=limits))
    sandbox.check()
    folders = "/ /dev /dev/shm /etc /home /run /run/farhand /srv /tmp /var"
    command = f"for folder in {folders}; do head -c 2M /dev/zero > $folder/fill && echo $folder; done 2>/dev/null; true"
    done = subprocess.run([*sandbox.words(str(tmp_path)), command], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("level", LEVELS)
def test_the_private_keys_of_the_machine_are_not_there(tmp_path: Path, level: str) -> None:
    """Certificates are; for a node of root, the folder with the keys beside them could be read."""
    sandbox = ChosenSandbox(SandboxPlan(workspace=str(tmp_path), level=level))
    sandbox.check()
    command = "ls /etc/ssl/private || stat -c %a /etc/ssl; ls /etc/ssl/certs >/dev/null || echo no certificates"
    done = subprocess.run([*sandbox.words(str(tmp_path)), command], capture_output=True, text=True, check=True)
    assert done.stdout == "755\n"


# -- terminals and rules --------------------------------------------------------------------------------------------

RULE = '[[policy.rules]]\nname = "no shell"\ntool = "*__Bash"\nnode = "ruled"\ndecision = "{}"\n'


def test_a_rule_about_the_shell_holds_for_terminals(tmp_path: Path) -> None:
    """Also for one that is open: it stops taking input, however it is sent."""
    home = tmp_path / "home"
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path, "ruled") as node:
        opened = gateway.request("POST", "/v1/terminals", {"node": "ruled", "command": "sh"}).json()["terminal_id"]
        other = token(gateway, "tools.exec")
        with TerminalViewer(gateway, opened, 0) as viewer, TerminalViewer(gateway, opened, 0, token=other) as guest:
            viewer.type("echo fir''st\r")
            viewer.sees("first")
            (home / "farhand.toml").write_text(RULE.format("ask"))
            guest.type("touch planted\r")
            assert guest.ended()[0] == 4403
            (home / "farhand.toml").write_text(RULE.format("deny"))
            viewer.type("touch planted\r")
            assert viewer.ended()[0] == 4403
        with TerminalViewer(gateway, opened, 0) as viewer:
            assert viewer.ended()[0] == 4403
        assert gateway.request("POST", f"/v1/calls/{opened}/input?close=0", b"touch planted\n").status == 403
        for args in ({"data": "touch planted", "action": "submit"}, {"data": "touch planted\n", "action": "write"}):
            assert gateway.invoke("ruled__Process", {"sessionId": opened, **args})["ok"] is False
        assert gateway.request("POST", "/v1/terminals", {"node": "ruled"}).status == 403
        assert not (node.workspace / "planted").exists()
        (home / "farhand.toml").write_text(RULE.format("deny") + 'args = { terminal = "*" }\n')
        assert gateway.request("POST", "/v1/terminals", {"node": "ruled"}).status == 403
        node.ok("Bash", {"command": "true"})


# -- a node that fills the journal ----------------------------------------------------------------------------------


@asynchronous
async def test_a_node_writes_little_into_the_journal_by_changing_its_tools(shared_gateway: GatewayProcess) -> None:
    async with joined(shared_gateway, "restless") as node:
        many = [f"restless.{number}.{'x' * 80}" for number in range(500)]
        await node.send({"type": "tools_update", "capabilities": many, "tools": []})
        await node.settled()
        found = await asyncio.to_thread(shared_gateway.get, "/v1/journal?kind=node.changed&limit=1")
    assert found["events"][0]["subject"] == "restless" and len(json.dumps(found)) < 5000
