"""`farhand node --root DIR` lends a shell that cannot leave DIR, whichever mechanism confines it."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.machine.sandbox.launcher import landlock_version
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess

LEVELS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")),
    pytest.param("landlock", marks=pytest.mark.skipif(landlock_version() < 1, reason="no Landlock")),
]


class Lent:
    def __init__(self, node: NodeProcess, root: Path, outside: Path) -> None:
        self.node, self.root, self.outside = node, root, outside

    def run(self, command: str) -> tuple[int, str]:
        done = self.node.ok("Bash", {"command": command})
        return done["exitCode"], done["output"]


@pytest.fixture(scope="module", params=LEVELS)
def lent(
    request: pytest.FixtureRequest, shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lent]:
    folder = tmp_path_factory.mktemp("lent")
    root, outside, state = folder / "root", folder / "outside", folder / "root" / "state"
    for path in (root, outside, state):
        path.mkdir()
    (outside / "secret").write_text("the secret\n")
    (outside / "dir").mkdir()
    options = ["--root", str(root), "--sandbox", request.param]
    # The node's own state lies in the lent folder, as it does when a user lends a whole home.
    with NodeProcess(shared_gateway, folder, f"lent-{request.param}", *options, state=state) as node:
        yield Lent(node, root, outside)


def test_the_sandbox_itself_is_not_reported_as_left_running(lent: Lent) -> None:
    for _ in range(10):
        done = lent.node.ok("Bash", {"command": "true"})
        assert "leftRunning" not in done or done["leftRunning"] == [], done


def test_commands_work_in_the_lent_folder(lent: Lent) -> None:
    assert lent.run("echo made > a.txt && mkdir -p d && mv a.txt d/ && cat d/a.txt && pwd") == (
        0,
        f"made\n{lent.root}\n",
    )
    assert (lent.root / "d/a.txt").read_text() == "made\n"
    assert lent.run("echo x > /tmp/farhand-lent-test && cat /tmp/farhand-lent-test && exit 3") == (3, "x\n")
    assert not Path("/tmp/farhand-lent-test").exists()
    assert lent.run("cat /etc/hosts | wc -l && sh -c 'kill -9 $$'; echo $?")[1].endswith("137\n")


def test_the_level_is_shown(lent: Lent, shared_gateway: GatewayProcess) -> None:
    entry = shared_gateway.wait_for_node(lent.node.node_id)
    assert entry["runtime"]["limits"]["sandbox"] == lent.node.node_id.removeprefix("lent-")


def test_nothing_outside_can_be_read_or_written(lent: Lent) -> None:
    for command in (
        f"cat {lent.outside}/secret",
        f"cat {lent.root}/../outside/secret",
        f"cat /proc/self/root{lent.outside}/secret",
        "cat /proc/self/cwd/../outside/secret",
        f"cat /proc/1/root{lent.outside}/secret",
        f"ln -sf {lent.outside}/secret link && cat link",
        f"ln {lent.outside}/secret hard && cat hard",
        f"touch {lent.outside}/new",
        f"echo x > {lent.outside}/secret",
        f"mv d {lent.outside}/dir/",
        "cat /etc/shadow",
        "touch /usr/bin/farhand-test",
        "mount --bind / mnt",
        "mknod device b 8 0",
        "chroot / true",
    ):
        status, output = lent.run(command)
        assert status != 0 and "the secret" not in output, (command, output)
    assert (lent.outside / "secret").read_text() == "the secret\n"
    assert sorted(os.listdir(lent.outside)) == ["dir", "secret"] and not os.listdir(lent.outside / "dir")


def test_the_nodes_own_state_is_not_visible_even_inside_the_lent_folder(lent: Lent) -> None:
    assert os.listdir(lent.root / "state"), "the node keeps its key and its jobs there"
    assert lent.run(f"ls -A {lent.root}/state")[1] == ""
    assert lent.run(f"find {lent.root} -name '*.sock' -o -name socket")[1] == ""


def test_other_processes_cannot_be_seen_or_touched(lent: Lent) -> None:
    assert lent.run(f"kill -0 {os.getpid()}")[0] != 0
    assert lent.run(f"cat /proc/{lent.node.process.pid}/environ")[0] != 0
    assert lent.run("cat /proc/1/environ")[0] != 0
    # A second command is a sandbox of its own: it does not see the first one.
    session = lent.node.ok("Bash", {"command": "sleep 1234", "background": True})["sessionId"]
    assert "sleep 1234" not in lent.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true")[1].replace("cat /proc", "")
    lent.node.ok("Process", {"action": "kill", "sessionId": session})


def test_sockets_of_the_machine_cannot_be_reached(lent: Lent) -> None:
    """Docker, D-Bus, an SSH agent: by a path, or by an abstract name, which no mount hides."""
    name = f"farhand-test-{os.getpid()}"
    path = lent.outside / "service.sock"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind("\0" + name)
        abstract.listen()
        named.bind(str(path))
        named.listen()
        connect = "import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1].replace('@', chr(0)))"
        (lent.root / "connect.py").write_text(connect)
        for address in (f"@{name}", str(path)):
            status, output = lent.run(f"/usr/bin/python3 connect.py '{address}'")
            assert status != 0 and "Error" in output, (address, output)
    path.unlink()


def test_rights_cannot_be_gained(lent: Lent) -> None:
    status = lent.run("grep -E 'CapEff|NoNewPrivs' /proc/self/status")[1].split()
    assert status == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    # A library that is preloaded into the next command runs in the same sandbox.
    assert lent.run(f"LD_PRELOAD={lent.root}/none.so cat {lent.outside}/secret")[0] != 0


@pytest.mark.siege
def test_a_link_that_changes_while_it_is_used_leads_nowhere(lent: Lent) -> None:
    race = (
        f"mkdir -p flip; (for i in $(seq {TURNS}); do rm -rf flip; ln -s {lent.outside} flip; rm -f flip; "
        f"mkdir -p flip; done) & for i in $(seq {TURNS}); do cat flip/secret 2>/dev/null; done; wait"
    )
    assert "the secret" not in lent.run(race)[1]


def test_a_workdir_outside_is_refused(lent: Lent) -> None:
    lent.node.fails("Bash", {"command": "pwd", "workdir": str(lent.outside)}, "not_allowed")


def test_a_level_that_cannot_be_given_is_refused_loudly(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    command = [*FARHAND, "node", "--gateway", shared_gateway.url, "--id", "weak"]
    command += ["--token", "x", "--home", str(tmp_path / "home"), "--root", str(tmp_path), "--sandbox", "bubblewrap"]
    done = run_process(command, env={"PATH": "/nonexistent"})
    assert done.returncode != 0
    assert "bubblewrap" in done.stderr and "cannot start" in done.stderr and "Traceback" not in done.stderr


def test_a_network_rule_without_a_root_is_refused(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    command = [*FARHAND, "node", "--gateway", shared_gateway.url, "--id", "weak"]
    command += ["--token", "x", "--home", str(tmp_path / "home"), "--network"]
    for rule, word in (("none", "--root"), ("nowhere", "allow:HOST"), ("allow:", "allow:HOST"), ("allow:a/b", "a/b")):
        done = run_process([*command, rule], env=os.environ)
        assert done.returncode != 0 and word in done.stderr and "Traceback" not in done.stderr, done.stderr


# -- the network ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"hello {self.path} {self.headers['Host']}\n".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


TURNS = 300 if os.environ.get("FARHAND_SIEGE") == "long" else 60
FETCH = "import urllib.request, sys; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
DIRECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("rule", "reaches"),
    [("none", False), ("allow:localhost", True), ("allow:example.com", False), ("local", True), ("host", True)],
)
def test_a_network_rule_holds(
    shared_gateway: GatewayProcess, tmp_path: Path, server: int, level: str, rule: str, reaches: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    options = ["--root", str(root), "--sandbox", level, "--network", rule]
    name = f"net-{level}-{rule.replace(':', '-')}"
    (root / "fetch.py").write_text(FETCH)
    (root / "direct.py").write_text(DIRECT)
    with NodeProcess(shared_gateway, tmp_path / "node", name, *options) as node:
        # The proxy is for names; programs would not use it for the loopback address of their own.
        fetch = {"command": f"env -u no_proxy -u NO_PROXY /usr/bin/python3 fetch.py http://localhost:{server}/x 2>&1"}
        answer = node.ok("Bash", fetch)["output"]
        assert (f"hello /x localhost:{server}" in answer) is reaches, answer
        direct = node.ok("Bash", {"command": f"/usr/bin/python3 direct.py {server}"})
        assert (direct["exitCode"] == 0) is (rule == "host"), "no way around the proxy"
        if rule == "allow:example.com":
            assert "403" in answer
        # Another command's way out cannot be replaced.
        replaced = node.ok("Bash", {"command": "rm /run/farhand/egress/proxy.sock || touch /run/farhand/egress/x"})
        assert replaced["exitCode"] != 0
