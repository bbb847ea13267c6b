"""A machine is added with one line: it installs Farhand from the gateway, over a pinned connection, and joins."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, wait_until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that listens beyond this machine, and so makes a certificate."""
    with GatewayProcess(tmp_path_factory.mktemp("wide") / "home", "--host", "0.0.0.0") as started:
        yield started


@pytest.fixture(scope="module")
def command(gateway: GatewayProcess) -> Command:
    return Command(gateway.home)


class Machine:
    """Another account: its own home, the system's programs, nothing of the environment of the tests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(mode=0o700)
        # The Python of the tests, as a system's own would be: nothing of Farhand is installed in it.
        programs = home / "programs"
        programs.mkdir()
        base = Path(os.path.realpath(Path(ssl.__file__).parents[2] / "bin" / "python3"))
        (programs / "python3").symlink_to(base)
        self.env = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "LANG": "C.UTF-8"}

    def run(self, line: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line],
            env=self.env,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        program = self.home / ".local" / "bin" / "farhand"
        log = (self.home / "log").open("ab")
        with log:
            return subprocess.Popen([program, *arguments], env=self.env, cwd=self.home, stdout=log, stderr=log)


def pair(command: Command, gateway: GatewayProcess, *options: str) -> dict[str, Any]:
    """A pairing, with the address under which this machine reaches the gateway."""
    made: dict[str, Any] = command("node", "pair", *options, "--json").json()
    for name in ("install", "command", "code"):
        host = made["gateway"].removeprefix("https://")
        made[name] = made[name].replace(host, f"127.0.0.1:{gateway.port}")
    return made


def online(command: Command, node_id: str) -> Any:
    def found() -> Any:
        nodes = command("nodes", "--json").json()["nodes"]
        return next((node for node in nodes if node["node_id"] == node_id and node["online"]), None)

    return wait_until(found, 60, f"the node {node_id}")


def test_a_pasted_line_installs_and_joins_and_limits_survive(
    command: Command, gateway: GatewayProcess, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "other home")
    lent = tmp_path / "lent"
    lent.mkdir()
    made = pair(command, gateway, "--id", "web1", "--tag", "web", "--root", str(lent), "--deny-tool", "Edit")
    assert made["install"].startswith("curl ") and "--pinnedpubkey" in made["install"]
    done = machine.run(f"{made['install']} -s -- --no-run --tag extra")
    assert done.returncode == 0, done
    assert f"joined https://127.0.0.1:{gateway.port} as web1" in done.stdout
    for _ in range(2):  # and again after a restart
        node = machine.start("node")
        try:
            shown = online(command, "web1")
            assert shown["tags"] == ["web", "extra"]
            assert shown["runtime"]["limits"]["root"] == [str(lent)]
            assert shown["runtime"]["limits"]["deny_tools"] == ["Edit"]
            table = command("nodes").out
            assert "no Edit" in table and str(lent) in table
            (lent / "a.txt").write_text("here\n")
            assert "here" in command("call", "web1__Read", f"path={lent}/a.txt").out
            found = command("call", "web1__Grep", "pattern=he.e", f"path={lent}", "--json").json()
            assert found["result"]["count"] == 1, found
            assert command("call", "web1__Read", "path=/etc/passwd").status == 1
            assert (
                "not_allowed" in command("call", "web1__Edit", f"path={lent}/a.txt", "oldString=h", "newString=x").err
            )
        finally:
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0, (machine.home / "log").read_text()[-2000:]
        wait_until(lambda: not online_now(command, "web1"), 60, "the node to leave")
    used = machine.run(f"{made['install']} -s -- --no-run")
    assert used.stdout == "" and "401" in used.stderr


def online_now(command: Command, node_id: str) -> bool:
    nodes = command("nodes", "--json").json()["nodes"]
    return any(node["node_id"] == node_id and node["online"] for node in nodes)


def test_a_joining_machine_cannot_lend_more_than_the_code_allows(
    command: Command, gateway: GatewayProcess, tmp_path: Path
) -> None:
    made = pair(command, gateway, "--id", "narrow", "--root", str(tmp_path), "--read-only")
    other = Command(tmp_path / "home")
    wider = other("join", made["code"], "--root", "/", "--no-run")
    assert wider.status == 1 and "outside of" in wider.err and str(tmp_path) in wider.err
    (tmp_path / "inside").mkdir()
    # The refusal did not use the code. Resetting older limits does not reset those of the code.
    joined = other("join", made["code"], "--root", str(tmp_path / "inside"), "--no-run", "--reset-limits", "--json")
    assert joined.json()["limits"] == f"--root {tmp_path}/inside --read-only"
    # Later starts cannot add a tool either, unless the limits are reset by name.
    later = other("node", "--allow-tool", "Bash")
    assert later.status == 1 and "--reset-limits" in later.err, later


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"root": ["srv"]}, "absolute"),
        ({"deny_tools": ["Bahs"]}, "unknown tool"),
        ({"read_only": "yes"}, "read_only"),
        ({"anything": 1}, "anything"),
        ({"tags": ["x" * 5000]}, "limits.tags"),
        ({"tags": ["a"] * 101}, "limits.tags"),
    ],
)
def test_limits_that_no_machine_could_apply_are_refused(command: Command, limits: Any, said: str) -> None:
    home = Path(command.env["FARHAND_HOME"])
    known = json.loads((home / "gateway.json").read_text())
    body = json.dumps({"limits": limits})
    done = subprocess.run(
        ["curl", "-sk", "-H", f"Authorization: Bearer {(home / 'token').read_text().strip()}",
         "-d", body, f"{known['url']}/v1/pairings"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["error"]["code"] == "invalid_request" and said in answer["error"]["message"]


def test_another_certificate_than_the_codes_is_refused_before_anything_is_sent(
    command: Command, gateway: GatewayProcess, tmp_path: Path
) -> None:
    made = pair(command, gateway)
    received: list[bytes] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                try:
                    with context.wrap_socket(peer, server_side=True) as link:
                        received.append(link.recv(100))
                except (OSError, ssl.SSLError):
                    received.append(b"")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        code = made["code"].replace(str(gateway.port), str(server.getsockname()[1]))
        refused = Command(tmp_path / "home")("join", code, "--no-run")
        thread.join(60)
    assert refused.status == 1 and "another certificate" in refused.err
    assert received == [b""]
    broken = Command(tmp_path / "home")("join", made["code"][:-3], "--no-run")
    assert broken.status == 2 and "copy it again" in broken.err


@pytest.mark.parametrize("path", ["/join/AAAA-AAAA", "/join/AAAA-AAAA/farhand-0.1.0.pyz", "/join/x/../../token"])
def test_nothing_is_served_without_a_code(gateway: GatewayProcess, path: str) -> None:
    done = subprocess.run(
        ["curl", "-sk", "--path-as-is", "-o", "/dev/null", "-w", "%{http_code}", f"https://127.0.0.1:{gateway.port}{path}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout in ("401", "404")


def test_the_gateways_certificate_stays_and_its_key_is_private(gateway: GatewayProcess) -> None:
    folder = gateway.home / "tls"
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    before = (folder / "cert.pem").read_bytes()
    gateway.stop()
    gateway.start()
    assert (folder / "cert.pem").read_bytes() == before
    assert Command(gateway.home)("nodes").status == 0


def test_on_loopback_the_line_says_that_only_this_machine_can_use_it(shared_gateway: GatewayProcess) -> None:
    said = Command(shared_gateway.home)("node", "pair")
    assert "http://127.0.0.1" in said.out and "--host 0.0.0.0" in said.err
    made = Command(shared_gateway.home)("node", "pair", "--json").json()
    assert made["pin"] is None and "#" not in made["code"]


def test_a_name_from_the_settings_is_offered_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text('[gateway]\nhosts = ["gw.example", "gw.example:8443"]\n')
    with GatewayProcess(home, "--host", "0.0.0.0") as gateway:
        made = Command(home)("node", "pair", "--json").json()
        assert made["addresses"][:2] == [f"https://gw.example:{gateway.port}", "https://gw.example:8443"]
        assert made["gateway"] == made["addresses"][0]
        shown = Command(home).on_terminal("node", "pair", columns=120)
        assert "█" in shown or "▀" in shown


def test_a_plug_in_under_development_trusts_the_gateways_own_certificate(command: Command, tmp_path: Path) -> None:
    assert command("plugin", "new", "greeter", "--dir", str(tmp_path / "greeter")).status == 0
    program = str(tmp_path / "greeter" / "greeter.py")
    dev = subprocess.Popen(
        [sys.executable, "-m", "farhand", "plugin", "dev", program], env=command.env, stderr=subprocess.PIPE, text=True
    )
    try:
        online(command, "greeter-dev")
        assert "Hello, Ada!" in command("call", "greeter.greet", "who=Ada").out
    finally:
        dev.send_signal(signal.SIGINT)
        said = dev.communicate(timeout=60)[1]
    assert dev.returncode == 0 and "connected to wss://" in said, said


def test_a_bundle_runs_with_nothing_but_python(command: Command, gateway: GatewayProcess, tmp_path: Path) -> None:
    file = tmp_path / "farhand.pyz"
    assert command("node", "bundle", "-o", str(file)).status == 0
    machine = Machine(tmp_path / "machine")
    made = pair(command, gateway, "--id", "bundled")
    done = machine.run(f"python3 -I {file} join '{made['code']}' --no-run --json")
    assert json.loads(done.stdout)["node_id"] == "bundled", done
    node = subprocess.Popen(
        ["python3", "-I", file, "node"], env=machine.env, cwd=machine.home, stderr=subprocess.DEVNULL
    )
    try:
        online(command, "bundled")
        ran = command("call", "bundled__Bash", "command=echo $HOME; env", "--json").json()
        assert str(machine.home) in ran["result"]["output"] and "PYTHONPATH" not in ran["result"]["output"]
    finally:
        node.terminate()
        assert node.wait(60) == 0
    (unpacked,) = (machine.home / ".local/share/farhand").glob("bundle-*")
    unpacked.chmod(0o777)
    refused = machine.run(f"python3 {file} --version")
    assert refused.returncode == 1 and "writable by others" in refused.stderr
    assert command("node", "bundle", "-o", "/proc/farhand.pyz").status == 1
