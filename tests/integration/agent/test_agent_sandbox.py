"""`exec` with `[sandbox]`: commands in bubblewrap, host commands over a real SSH server, nothing lower in silence."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, free_port, wait_until

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def content(gateway: GatewayProcess, command: str, **more: Any) -> str:
    answer = gateway.invoke("exec", {"command": command, **more})
    assert answer["ok"], answer
    return str(answer["result"]["content"])


@dataclass
class Host:
    """An SSH server on loopback whose one key may only run the wrapper."""

    port: int
    key: Path
    known_hosts: Path
    authorized: Path
    public: str

    def allow(self, *commands: str) -> None:
        options = " ".join(f"--allow {command!r}" for command in commands)
        forced = f"{sys.executable} -m farhand host-wrapper {options}"
        self.authorized.write_text(f'command="{forced}",restrict {self.public}')
        self.authorized.chmod(0o600)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if SSHD is None:
        pytest.skip("openssh-server is not installed")
    folder = tmp_path_factory.mktemp("ssh")
    port = free_port()
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile none\nStrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    host = Host(port, folder / "key", folder / "known_hosts", folder / "authorized", (folder / "key.pub").read_text())
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert "listening on" in server.stderr.readline()
        yield host
    finally:
        server.terminate()
        server.wait(60)
        assert server.stderr is not None
        server.stderr.close()


@pytest.fixture
def sandboxed(host: Host, tmp_path: Path) -> Iterator[GatewayProcess]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(
        f'[sandbox]\nenabled = true\nhost_commands = ["hostname", "pwd", "sleep", "touch"]\nssh_port = {host.port}\n'
        f'ssh_user = "{getpass.getuser()}"\nssh_key = "{host.key}"\nssh_known_hosts = "{host.known_hosts}"\n'
    )
    host.allow("hostname", "pwd", "sleep")
    with GatewayProcess(home) as gateway:
        yield gateway


def test_commands_run_in_the_sandbox(sandboxed: GatewayProcess) -> None:
    workspace = sandboxed.home / "agents" / "main"
    assert content(sandboxed, "echo x > a.txt; cat a.txt") == "exit code: 0\nx\n"
    assert (workspace / "a.txt").read_text() == "x\n"
    assert "No such file" in content(sandboxed, f"cat {sandboxed.home}/token")
    assert content(sandboxed, 'echo "$WHO"', env={"WHO": "you"}) == "exit code: 0\nyou\n"
    started = content(sandboxed, "echo up; exec sleep 98765", background=True)
    name = started.rpartition(" ")[2]

    def poll(action: str) -> str:
        return str(sandboxed.invoke("process", {"action": action, "process_id": name})["result"]["content"])

    wait_until(lambda: poll("poll") == "up\n")
    sandboxed.invoke("process", {"action": "signal", "process_id": name, "signal": "SIGTERM"})
    wait_until(lambda: "state: completed" in poll("status"))
    wait_until(lambda: not running("sleep 98765"))


def test_a_command_in_the_sandbox_that_takes_too_long_is_ended_with_all_it_started(sandboxed: GatewayProcess) -> None:
    said = content(sandboxed, "echo begun; setsid sleep 98764 & sleep 98764", timeout=10)
    assert re.match(r"exit code: -?\d+; timeout\nbegun", said)
    wait_until(lambda: not running("sleep 98764"))


def test_a_host_command_goes_to_the_host_by_itself(sandboxed: GatewayProcess) -> None:
    here = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout
    assert content(sandboxed, "hostname") == f"exit code: 0\n{here}"
    assert content(sandboxed, "cat /proc/sys/kernel/hostname") == "exit code: 0\nsandbox\n"
    workspace = sandboxed.home / "agents" / "main"
    (workspace / "a b").mkdir()
    assert content(sandboxed, "pwd", workdir="a b") == f"exit code: 0\n{workspace}/a b\n"


def test_the_hosts_own_list_decides(sandboxed: GatewayProcess, tmp_path: Path) -> None:
    said = content(sandboxed, f"touch {tmp_path}/x")
    assert said == 'exit code: 126\nhost command "touch" is not allowed\n'
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "attack",
    ["hostname; touch {0}", "hostname && touch {0}", "hostname $(touch {0})", "hostname `touch {0}`",
     "hostname\ntouch {0}", "hostname | touch {0}", "hostname & touch {0}", "hostname > {0}",
     'hostname "$(touch {0})"'],
)  # fmt: skip
def test_nothing_else_comes_along_with_a_host_command(sandboxed: GatewayProcess, tmp_path: Path, attack: str) -> None:
    trace = tmp_path / "trace"
    said = content(sandboxed, attack.format(trace))
    assert said.startswith("exit code: 126\nhost command:") and "not allowed" in said
    assert not trace.exists()


def test_unsupported_options_of_host_commands_are_refused(sandboxed: GatewayProcess) -> None:
    for more in ({"background": True}, {"env": {"A": "b"}}):
        answer = sandboxed.invoke("exec", {"command": "hostname", **more})
        assert "is not supported for host commands" in answer["error"]["message"]


def test_a_host_command_ends_when_its_call_does(sandboxed: GatewayProcess) -> None:
    answer = sandboxed.invoke("exec", {"command": "sleep 98763"}, background=True)
    wait_until(lambda: running("sleep 98763"))
    sandboxed.request("DELETE", f"/v1/calls/{answer['request_id']}")
    wait_until(lambda: not running("sleep 98763"))


def test_nothing_is_sent_to_another_host(sandboxed: GatewayProcess, host: Host) -> None:
    known = host.known_hosts.read_text()
    other = host.key.with_suffix(".pub").read_text()
    host.known_hosts.write_text(f"[127.0.0.1]:{host.port} {other}")
    try:
        answer = sandboxed.invoke("exec", {"command": "hostname"})
    finally:
        host.known_hosts.write_text(known)
    assert not answer["ok"] and answer["error"]["message"].startswith("host command failed over SSH:")


def test_changed_settings_hold_for_the_next_command(sandboxed: GatewayProcess, tmp_path: Path) -> None:
    settings = sandboxed.home / "farhand.toml"
    inside, outside = tmp_path / "shared", "cat /proc/sys/kernel/hostname"
    inside.mkdir()
    (inside / "note").write_text("mounted\n")

    def hostname() -> str:
        return content(sandboxed, outside).partition("\n")[2].strip()

    assert "No such file" in content(sandboxed, f"cat {inside}/note") and hostname() == "sandbox"
    settings.write_text(f'[sandbox]\nenabled = true\nmounts = [{{host = "{inside}"}}]\n')
    assert content(sandboxed, f"cat {inside}/note") == "exit code: 0\nmounted\n"
    settings.write_text("[sandbox]\nenabled = false\n")
    assert hostname() != "sandbox"
    assert sandboxed.invoke("gsv__ConfigGet", {"path": "sandbox.enabled"})["result"]["value"] is False
    settings.write_text("[sandbox]\nenabled = true\n")
    assert hostname() == "sandbox"
    answer = sandboxed.request("POST", "/agent/process", shell("cat /proc/sys/kernel/hostname")).json()
    assert "sandbox" in answer["reply"]


@pytest.mark.parametrize("text", [None, "", "[sandbox\n", "[sandbox]\nenabled = 7\n", '[sandbox]\nnetwork = "moon"\n'])
def test_settings_that_cannot_be_used_open_nothing(sandboxed: GatewayProcess, text: str | None) -> None:
    settings = sandboxed.home / "farhand.toml"
    settings.unlink()
    if text is not None:
        settings.write_text(text)
    assert content(sandboxed, "cat /proc/sys/kernel/hostname") == "exit code: 0\nsandbox\n"


def test_a_sandbox_that_cannot_be_lets_nothing_run(sandboxed: GatewayProcess) -> None:
    settings = sandboxed.home / "farhand.toml"
    settings.write_text('[sandbox]\nenabled = true\nuser = "nobody-of-that-name"\n')
    ran = sandboxed.home / "agents" / "main" / "ran"
    answer = sandboxed.invoke("exec", {"command": "touch ran"})
    assert answer["error"]["kind"] == "failed" and "did not run" in answer["error"]["message"]
    assert sandboxed.request("POST", "/agent/process", shell("touch ran")).status == 500
    assert not ran.exists()
    settings.write_text("[sandbox]\nenabled = true\n")
    assert content(sandboxed, "touch ran") == "exit code: 0" and ran.exists()


def shell(command: str) -> dict[str, Any]:
    text = {"role": "user", "type": "message", "content": [{"type": "text", "text": "run"}]}
    params = {"tool": {"name": "shell", "input": {"command": command}}}
    return {"input": [text], "session_id": "s", "user_id": "u", "stream": False, "biz_params": params}


def test_without_bubblewrap_nothing_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text('[sandbox]\nenabled = true\nlevel = "bubblewrap"\n')
    with GatewayProcess(home, env={"PATH": str(tmp_path)}) as gateway:
        answer = gateway.invoke("exec", {"command": f"/usr/bin/touch {tmp_path}/ran"})
        assert answer["error"]["kind"] == "failed"
        assert "'bwrap' is missing" in answer["error"]["message"] and "did not run" in answer["error"]["message"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("line", ['network = "bridge"', "netwrok = 1", 'mounts = [{host = "/x", mode = "rwx"}]'])
def test_settings_that_mean_nothing_stop_the_start(tmp_path: Path, line: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(f"[sandbox]\nenabled = true\n{line}\n")
    gateway = GatewayProcess(home)
    gateway.start(wait=False)
    assert gateway.process is not None
    assert gateway.process.wait(60) != 0
    assert "sandbox" in gateway.log.read_text()
    assert gateway.process.stdout is not None
    gateway.process.stdout.close()


def running(command: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return command in listed.splitlines()
