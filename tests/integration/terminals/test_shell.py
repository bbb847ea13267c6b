"""`farhand shell`, `farhand run --tty` and `farhand terminals`, typed on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from tests.integration.terminals.test_run import SLOW, Runner
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.terminal import ScreenWithoutFaults


class Person:
    """Someone at a terminal, in which one command runs."""

    def __init__(self, farhand: Runner, *words: str, cols: int = 80, rows: int = 24) -> None:
        self.master, slave = pty.openpty()
        self._screen = ScreenWithoutFaults(cols, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._resize(cols, rows)
        self.process = start_process(
            [*FARHAND, *words],
            farhand.environment(),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SLOW)

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self._stream.feed(data)
        except OSError:
            pass

    def _resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def resize(self, cols: int, rows: int) -> None:
        self._screen.resize(rows, cols)
        self._resize(cols, rows)
        self.process.send_signal(signal.SIGWINCH)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def shows(self, text: str) -> bool:
        return any(text in line for line in self._screen.display)

    def sees(self, text: str) -> None:
        try:
            wait_until(lambda: self.shows(text), what=f"{text!r} on the screen")
        except AssertionError:
            shown = "\n".join(self._screen.display)
            raise AssertionError(f"{text!r} is not on the screen:\n{shown}") from None

    def status(self) -> int:
        return self.process.wait(SLOW)


@pytest.fixture
def farhand(shared_gateway: GatewayProcess, hands: NodeProcess) -> Iterator[Runner]:
    yield Runner(shared_gateway)


def test_a_shell_is_left_and_taken_up_again(farhand: Runner) -> None:
    with Person(farhand, "shell", "hands", cols=90, rows=20) as person:
        person.sees("Ctrl-] detaches")
        person.type("export PS1='ready> '; value=kept; stty size\r")
        person.sees("20 90")
        person.resize(70, 15)
        person.type("clear; stty size\r")
        person.sees("15 70")
        person.type("\x1d")
        person.sees("attaches again")
        assert person.status() == 0
    found = json.loads(farhand("terminals", "--json").stdout)["terminals"]
    terminal = next(one["terminal_id"] for one in found if one["running"])
    assert terminal[:13].encode() in farhand("terminals").stdout
    with Person(farhand, "shell", "--attach", terminal[:20]) as person:
        person.type("echo it is $value; exit 9\r")
        person.sees("it is kept")
        assert person.status() == 9


def test_a_full_screen_program_through_the_command_line(farhand: Runner, hands: NodeProcess) -> None:
    command = ["run", "--tty", "hands", "--", "vim", "-u", "NONE", "-N", "-n", "cli.txt"]
    with Person(farhand, *command, cols=60, rows=12) as person:
        person.sees("cli.txt")
        person.type("ityped here")
        person.sees("typed here")
        person.sees("INSERT")
        person.type("\x03")  # Ctrl-C goes to vim, which leaves its insert mode
        wait_until(lambda: not person.shows("INSERT"), what="the end of the insert mode")
        person.type(":wq\r")
        assert person.status() == 0
    assert (hands.workspace / "cli.txt").read_text() == "typed here\n"


def test_the_command_line_waits_for_a_killed_gateway(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands"):
        farhand = Runner(gateway)
        with Person(farhand, "run", "--tty", "hands", "--", "PS1='$ ' exec bash --norc --noprofile -i") as person:
            person.sees("$")
            person.type("echo be''fore\r")
            person.sees("before")
            gateway.kill()
            person.sees("connecting again")
            gateway.start()
            gateway.wait_for_node("hands")

            def back() -> bool:
                return bool(gateway.get("/v1/terminals")["terminals"][0]["viewers"])

            wait_until(back, what="the command line is connected again")
            person.type("echo af''ter; exit 3\r")
            person.sees("after")
            assert person.status() == 3


def test_mistakes_at_the_prompt(farhand: Runner) -> None:
    done = farhand("shell")
    assert done.returncode == 2 and b"name a node" in done.stderr
    done = farhand("shell", "nobody")
    assert done.returncode == 125 and b"there is no node 'nobody'" in done.stderr
    done = farhand("shell", "--attach", "no-such-terminal")
    assert done.returncode == 125 and b"no-such-terminal" in done.stderr
    done = farhand("shell", "--detach", "hands")
    terminal = done.stdout.decode().strip()
    assert done.returncode == 0 and len(terminal) == 36
    done = farhand("kill", "hands", terminal)
    assert done.returncode == 0, done
    # Without a terminal on this side, input is passed on as it is.
    done = farhand("run", "--tty", "hands", "--", "cat", input=b"one line\n")
    assert done.returncode == 0 and b"one line" in done.stdout
