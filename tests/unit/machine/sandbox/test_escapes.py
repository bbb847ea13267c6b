"""The list of escapes, at both levels, as root and as an ordinary user."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from farhand.machine.sandbox.launch import interpreter, interpreter_folder
from farhand.machine.sandbox.levels import ChosenSandbox, SandboxPlan
from tests.integration.nodes.test_lent_folder_shell import LEVELS

PYTHON = "/usr/bin/python3"
NOBODY = 65534


class Place:
    """A lent folder, a folder outside, and a way to run commands in the sandbox as some user."""

    def __init__(self, base: Path, level: str, uid: int) -> None:
        self.root, self.outside, self.uid = base / "root", base / "outside", uid
        # The state of the node, with the keeper's socket and the files of other jobs, as when a whole home is lent.
        self.state = self.root / "state"
        for path in (self.root, self.outside, self.state, self.state / "job"):
            path.mkdir()
        for path in (self.outside / "secret", self.state / "job" / "output"):
            path.write_text("the secret\n")
        sandbox = ChosenSandbox(SandboxPlan(workspace=str(self.root), level=level, hidden=(str(self.state),)))
        sandbox.check()
        for path in (self.root, self.outside, *self.state.rglob("*"), self.state):
            os.chown(path, uid, uid)
        self._sandbox = sandbox

    def begin(self, command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words_as(self.uid, self._sandbox, self.root, environment), command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )

    def run(self, command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        with self.begin(command, environment) as process:
            output = process.communicate(timeout=60)[0]
        return process.returncode, output

    def refuses(self, command: str) -> str:
        status, output = self.run(command)
        assert status != 0 and "the secret" not in output, (command, status, output)
        return output


def words_as(uid: int, sandbox: ChosenSandbox, folder: Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the prefix of a command that a user runs in a sandbox, which root has checked."""
    own = os.geteuid()
    os.seteuid(uid)  # what is needed depends on the user
    try:
        words = with_system_python(sandbox.words(str(folder), environment))
    finally:
        os.seteuid(own)
    become = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid != own else []
    return [*become, *words]


def with_system_python(words: list[str]) -> list[str]:
    """Use the system's Python: another user may not be able to run that of the tests, which are run by root."""
    found = [PYTHON if word == interpreter() else word for word in words]
    folder = interpreter_folder()
    for number in range(len(found) - 2):
        if found[number : number + 3] == ["--ro-bind", folder, folder]:
            return found[:number] + found[number + 3 :]
    return found


@pytest.fixture(scope="module", params=[0, NOBODY], ids=["root", "user"])
def uid(request: pytest.FixtureRequest) -> int:
    if os.geteuid() != 0:
        pytest.skip("only root can run commands as another user")
    if request.param:
        done = subprocess.run(
            ["/usr/bin/setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "unshare", "-Ur", "true"],
            check=False,
            capture_output=True,
        )
        if done.returncode:
            pytest.skip(f"the kernel gives ordinary users no user namespaces: {done.stderr!r}")
    return int(request.param)


@pytest.fixture(scope="module", params=LEVELS)
def place(request: pytest.FixtureRequest, uid: int) -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="farhand-escapes-", dir="/var/tmp"))  # pytest's own folders are root's only
    base.chmod(0o755)
    try:
        yield Place(base, request.param, uid)
    finally:
        shutil.rmtree(base)


def test_commands_run_as_the_user_in_the_lent_folder(place: Place) -> None:
    assert place.run("echo made > file && cat file && id -u") == (0, f"made\n{place.uid}\n")
    assert (place.root / "file").stat().st_uid == place.uid


@pytest.mark.parametrize(
    "command",
    [
        "cat {outside}/secret",
        "ln -sf {outside}/secret link; cat link",
        "ln {outside}/secret hard && cat hard",
        "ln -sf {outside} folder; cat folder/secret",
        "cat /proc/self/root{outside}/secret",
        "cat /proc/self/cwd/../outside/secret",
        "cat /proc/1/root{outside}/secret",
        "for fd in /proc/self/fd/* /proc/1/fd/*; do cat $fd/../outside/secret $fd{outside}/secret; done; false",
        "touch {outside}/new",
        "mv link {outside}/ 2>/dev/null || cp file {outside}/",
    ],
)
def test_nothing_outside_is_reached_by_links_and_proc(place: Place, command: str) -> None:
    place.run("echo x > file")
    place.refuses(command.format(outside=place.outside))
    assert os.listdir(place.outside) == ["secret"]


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p mnt; mount --bind / mnt && cat mnt{outside}/secret",
        "mount -t tmpfs none mnt",
        "umount /tmp && false; umount -l {above}; cat {outside}/secret",
        "mount -o remount,rw /usr && touch /usr/farhand-test",
        "unshare -Ur sh -c 'mount -t proc proc mnt; mount --bind / mnt; cat mnt{outside}/secret'",
        "unshare -Urm sh -c 'umount -l {above}; umount -l /; cat {outside}/secret'",
        "chroot / cat {outside}/secret",
        "mknod disk b 8 0 && cat disk",
        "pivot_root . .",
    ],
)
def test_mounts_lead_nowhere(place: Place, command: str) -> None:
    place.refuses(command.format(outside=place.outside, above=place.root.parent))


TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(0 if libc.ptrace(16, int(sys.argv[1]), 0, 0) == 0 else ctypes.get_errno())
"""


def test_processes_outside_cannot_be_traced_signalled_or_read(place: Place) -> None:
    (place.root / "trace.py").write_text(TRACE)
    become = ["/usr/bin/setpriv", f"--reuid={place.uid}", f"--regid={place.uid}", "--clear-groups"]
    with subprocess.Popen([*become, "sleep", "60"], env={"MARK": "the secret"}) as victim:
        try:
            place.refuses(f"{PYTHON} trace.py {victim.pid}")
            place.refuses(f"kill -9 {victim.pid}")
            place.refuses(f"cat /proc/{victim.pid}/environ")
            place.refuses(f"cat /proc/{victim.pid}/root{place.outside}/secret")
            assert victim.poll() is None
        finally:
            victim.kill()


def test_other_commands_and_their_files_are_not_there(place: Place) -> None:
    other = place.begin("echo 'the secret' > /tmp/other; echo ready > ready; sleep 60")
    try:
        end = time.monotonic() + 30
        while not (place.root / "ready").exists() and time.monotonic() < end:
            os.sched_yield()
        place.refuses("cat /tmp/other")
        assert "sleep 60" not in place.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true")[1]
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


@pytest.mark.parametrize(
    "command",
    [
        "cat state/job/output",
        "mv state elsewhere; cat elsewhere/job/output",
        "umount state; umount -l state; cat state/job/output",
        "unshare -Urm sh -c 'umount -l {state}; cat {state}/job/output'",
        "ln -s state link; cat link/job/output",
        "cat /proc/self/root{state}/job/output /proc/self/cwd/state/job/output",
        "rmdir state && mkdir state && cat state/job/output",
        "echo forged > state/job/output",
    ],
)
def test_the_state_of_the_node_in_a_lent_folder_is_not_there(place: Place, command: str) -> None:
    place.refuses(command.format(state=place.state))
    assert (place.state / "job" / "output").read_text() == "the secret\n"


CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1].replace('@', chr(0)))"


@contextlib.contextmanager
def listening(address: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.replace("@", "\0"))
        if not address.startswith("@"):
            Path(address).chmod(0o666)
        server.listen()
        try:
            yield
        finally:
            if not address.startswith("@"):
                Path(address).unlink()


@pytest.mark.parametrize("kind", ["path", "abstract", "docker", "keeper"])
def test_sockets_of_the_machine_are_not_reached(place: Place, kind: str) -> None:
    (place.root / "connect.py").write_text(CONNECT)
    address = {
        "path": f"{place.outside}/service.sock",
        "abstract": f"@farhand-escape-{os.getpid()}",
        "docker": "/run/docker.sock",
        "keeper": f"{place.state}/keeper.sock",
    }[kind]
    if kind == "docker" and Path(address).exists():
        pytest.skip("this machine has a Docker socket, which is not touched")
    with listening(address):
        place.refuses(f"{PYTHON} connect.py '{address}'")
        if kind == "docker":
            place.refuses(f"{PYTHON} connect.py /var{address}")


@pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="no dbus-daemon")
def test_a_dbus_daemon_is_not_reached(place: Place) -> None:
    (place.root / "connect.py").write_text(CONNECT)
    socket_path = f"{place.outside}/bus"
    daemon = subprocess.Popen(
        ["dbus-daemon", "--session", "--nofork", "--nopidfile", f"--address=unix:path={socket_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until(lambda: Path(socket_path).exists())
        Path(socket_path).chmod(0o666)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(socket_path)  # it is there
        place.refuses(f"DBUS_SESSION_BUS_ADDRESS=unix:path={socket_path} {PYTHON} connect.py {socket_path}")
    finally:
        daemon.kill()
        daemon.wait()
        Path(socket_path).unlink(missing_ok=True)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_no_rights_are_gained(place: Place) -> None:
    status = place.run("grep -E 'CapPrm|CapEff|CapBnd|NoNewPrivs' /proc/self/status")[1].split()
    none = "0" * 16
    assert status == ["CapPrm:", none, "CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1"]
    shutil.copy("/usr/bin/cat", place.root / "suid")
    (place.root / "suid").chmod(0o4755)  # of root, as a program on the machine could be
    place.refuses(f"./suid {place.outside}/secret")
    assert place.run("./suid /proc/self/status | grep -E '^Uid'")[1].split()[1:3] == [str(place.uid)] * 2
    place.refuses(f"LD_PRELOAD={place.root}/none.so LD_LIBRARY_PATH=. cat {place.outside}/secret")
    (place.root / "suid").unlink()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/bin/env", "/usr/bin/env"),
        ("/etc/passwd", "/etc/passwd"),
        ("/usr", "/usr"),
        ("/dev/null", "/dev/null"),
        ("/dev/null", "/dev/stdin"),  # the standard input of a command that has none
        ("/dev/zero", "/dev/zero"),
        ("/dev/tty", "/dev/tty"),
    ],
)
def test_modes_owners_and_times_of_the_system_stay(place: Place, path: str, name: str) -> None:
    """A program that has root's files only for reading could open them to everyone with `chmod`."""
    before = os.stat(path)
    remounted = f"mount -o remount,bind,rw {name} && chmod 4777 {name}"
    try:
        for command in (
            f"chmod 4777 {name}",
            f"touch -d 2001-01-01 {name}",
            f"chown 5 {name}",
            f"setfattr -n user.a {name}",
            remounted,
            f"unshare -Urm sh -c '{remounted}'",
        ):
            place.run(command)
        after = os.stat(path)
    finally:  # a machine that is left changed would make the next run pass
        if os.stat(path).st_mode != before.st_mode or os.stat(path).st_mtime_ns != before.st_mtime_ns:
            os.chown(path, before.st_uid, before.st_gid)
            os.chmod(path, stat.S_IMODE(before.st_mode))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)
    # Another program that uses the device meanwhile sets its time to now.
    assert time.localtime(after.st_mtime).tm_year != 2001


def test_devices_can_be_used(place: Place) -> None:
    assert place.run("echo x > /dev/null && head -c 3 /dev/zero | wc -c && cat /dev/stdin") == (0, "3\n")


def test_variables_of_a_command_have_no_effect_before_it_is_confined(place: Place) -> None:
    """`LD_PRELOAD` would run code in the program that confines the command; `LD_DEBUG` shows where it had an effect."""
    environment = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"{place.root}/loaded"}
    assert place.run("echo run", environment) == (0, "run\n")
    loaded = list(place.root.glob("loaded.*"))
    assert loaded and not any("python" in path.read_text() for path in loaded)
    for path in loaded:
        path.unlink()


def test_a_link_that_changes_while_it_is_used_leads_nowhere(place: Place) -> None:
    race = (
        f"mkdir -p flip; (for i in $(seq 100); do rm -rf flip; ln -s {place.outside} flip; rm -f flip; "
        "mkdir -p flip; done) & for i in $(seq 100); do cat flip/secret 2>/dev/null; done; wait"
    )
    assert "the secret" not in place.run(race)[1]


def test_the_network_is_not_there(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place.refuses(f"{PYTHON} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 5)'")
