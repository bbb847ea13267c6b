"""What a user waits for at the prompt: `farhand --help`, one remote command, and the echo of a key, beside ssh.

    python -m benchmarks.prompt [--rounds 40] [--keys 300] [--json]

Everything is measured in turns within one run. Byte code is compiled first, as an installation does. `ssh` logs in to a
server of its own on this machine, with a key, for each command, as users without a shared connection do.
"""

from __future__ import annotations

import argparse
import compileall
import getpass
import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median, quantiles

import farhand
from benchmarks.processes import BenchmarkError, free_port, plain_environment, running
from benchmarks.transfer import start_sshd

PROGRAM = [sys.executable, "-m", "farhand"]
SCRIPT = Path(sys.executable).with_name("farhand")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    compileall.compile_dir(Path(farhand.__file__).parent, quiet=1)
    found = measure(options.rounds, options.keys)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"load {found['load']:.1f}; {options.rounds} rounds, {options.keys} keys; milliseconds")
    print(f"{'':<44}{'p50':>9}{'p95':>9}{'p99':>9}")
    for name, times in found["times"].items():
        print(f"{name:<44}" + "".join(f"{times[part]:>9.1f}" for part in ("p50", "p95", "p99")))
    for name, value in found["ratios"].items():
        print(f"{name:<44}{value:>9.2f}")
    return 0


def measure(rounds: int, keys: int) -> dict:
    environment = {**plain_environment(), "LC_ALL": "C.UTF-8"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    program = [str(SCRIPT)] if SCRIPT.exists() else PROGRAM
    with tempfile.TemporaryDirectory(prefix="farhand-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        environment["FARHAND_HOME"] = str(folder / "home")
        gateway = [*program, "up", "--port", str(free_port()), "--workspace", name]
        stack.enter_context(running(gateway, folder / "up.log", None, environment))
        node = wait_for_node(program, environment)
        port = start_sshd(stack, folder)
        ssh: list[str] = []
        if port is not None:
            ssh = ["ssh", "-p", str(port), "-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no"]
            ssh += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
            ssh += [f"{getpass.getuser()}@127.0.0.1"]
        acts: dict[str, Callable[[], None]] = {
            "python -c pass": lambda: call([sys.executable, "-c", "pass"], environment),
            "farhand --help": lambda: call([*program, "--help"], environment),
            "farhand run NODE -- true": lambda: call([*program, "run", node, "--", "true"], environment),
        }
        if ssh:
            acts["ssh localhost true"] = lambda: call([*ssh, "true"], environment)
        times = in_turns(acts, rounds)
        echo = {"key echo, farhand run --tty": [*program, "run", "--tty", node, "--", "cat"]}
        if ssh:
            echo["key echo, ssh -tt"] = [*ssh[:1], "-tt", *ssh[1:], "cat"]
        times |= key_echo(echo, environment, keys)
    ratios = {}
    if ssh:
        run, bare = median(times["farhand run NODE -- true"]), median(times["ssh localhost true"])
        ratios["farhand run beyond ssh, ms"] = run - bare
        ratios["key echo, times that of ssh"] = median(times["key echo, farhand run --tty"]) / median(
            times["key echo, ssh -tt"]
        )
    shown = {
        name: {"p50": median(values), "p95": quantiles(values, n=20)[-1], "p99": quantiles(values, n=100)[-1]}
        for name, values in times.items()
    }
    return {"load": os.getloadavg()[0], "times": shown, "ratios": ratios}


def wait_for_node(program: Sequence[str], environment: dict[str, str]) -> str:
    """Return the id of the node of this machine once it is connected."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            [*program, "nodes", "--json"], env=environment, capture_output=True, text=True, check=False
        )
        nodes = json.loads(done.stdout).get("nodes", []) if done.returncode == 0 else []
        if nodes and nodes[0]["online"]:
            return str(nodes[0]["node_id"])
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the node did not join: {done.stderr}")
        time.sleep(0.1)


def call(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"{command} ended with {done.returncode}: {done.stderr}")


def in_turns(acts: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        act()
    for _ in range(rounds):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            times[name].append((time.perf_counter() - began) * 1e3)
    return times


class Screen:
    """A program on a pseudo-terminal of this process."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process_id, self._master = pty.fork()
        if self.process_id == 0:
            os.execvpe(command[0], command, environment)

    def echoed(self, key: bytes, seconds: float = 30.0) -> float:
        """Type a key and return after how many milliseconds it is shown."""
        began = time.perf_counter()
        os.write(self._master, key)
        while True:
            left = began + seconds - time.perf_counter()
            if left <= 0 or not select.select([self._master], [], [], left)[0]:
                raise BenchmarkError(f"the key {key!r} was not shown within {seconds:g} s")
            if key in os.read(self._master, 65536):
                return (time.perf_counter() - began) * 1e3

    def begin(self, seconds: float = 60.0) -> None:
        """Wait until the program has taken over the terminal, so that keys are echoed by the other side alone."""
        deadline = time.monotonic() + seconds
        while termios.tcgetattr(self._master)[3] & termios.ECHO:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the program did not take over the terminal within {seconds:g} s")
            time.sleep(0.05)
        self.echoed(b"!")
        while select.select([self._master], [], [], 1.0)[0]:
            os.read(self._master, 65536)

    def end(self) -> None:
        """End the input, and with it the program on the other side."""
        os.write(self._master, b"\n\x04")
        deadline = time.monotonic() + 10.0
        while os.waitpid(self.process_id, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.process_id, 9)
            if select.select([self._master], [], [], 0.05)[0]:
                with suppress(OSError):  # its terminal is closed
                    os.read(self._master, 65536)
        os.close(self._master)


def key_echo(commands: dict[str, list[str]], environment: dict[str, str], keys: int) -> dict[str, list[float]]:
    screens = {name: Screen(command, environment) for name, command in commands.items()}
    try:
        for screen in screens.values():
            screen.begin()
        times: dict[str, list[float]] = {name: [] for name in screens}
        for number in range(keys):
            key = b"abcdefghij"[number % 10 : number % 10 + 1]
            for name, screen in screens.items():
                times[name].append(screen.echoed(key))
                time.sleep(0.01)  # as a fast typist; keys on the heels of each other would share packets
        return times
    finally:
        for screen in screens.values():
            screen.end()


if __name__ == "__main__":
    sys.exit(main())
