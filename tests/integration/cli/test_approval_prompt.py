"""A command whose call waits for approval says so at once, shows what would run, and asks on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.integration.cli.conftest import Command
from tests.support import pty_screen
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, calls, text

RULES = """
[[policy.rules]]
name = "changes are asked about"
reason = "a person looks at changes"
decision = "ask"
tool = ["Write", "Bash", "write", "exec"]
"""


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(model: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("asking") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home, env=dict(model.environment)) as started:
        yield started


@pytest.fixture(scope="module")
def node(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as started:
        yield started


class Terminal:
    """`farhand …` on a terminal of its own: type to it, and wait for what it shows."""

    def __init__(self, command: Command, *arguments: str) -> None:
        self._main, terminal = pty.openpty()
        self.process = start_process(
            [*FARHAND, *arguments],
            {**command.env, "NO_COLOR": "1"}, stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        self.shown = ""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._main)

    def expect(self, words: str, seconds: float = 60) -> None:
        """Wait for words after those that were expected before."""
        end = time.monotonic() + seconds
        while (found := self.shown.find(words, self._seen)) < 0:
            if not self._read(end):
                raise AssertionError(f"{words!r} is not on the terminal: {self.shown!r}")
        self._seen = found + len(words)

    def type(self, words: str) -> None:
        os.write(self._main, words.encode())

    def end(self) -> int:
        end = time.monotonic() + 60
        while self._read(end):
            pass
        return self.process.wait(60)

    def _read(self, end: float) -> bool:
        readable = select.select([self._main], [], [], max(0.0, end - time.monotonic()))[0]
        piece = b""
        if readable:
            with contextlib.suppress(OSError):  # the other side is closed
                piece = os.read(self._main, 65536)
        self.shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)


def pending(gateway: GatewayProcess, tool: str) -> Any:
    return wait_until(
        lambda: next((one for one in gateway.get("/v1/approvals")["approvals"] if one["tool"] == tool), None),
        60,
        f"an approval for {tool}",
    )


def test_a_call_on_a_terminal_shows_the_diff_and_takes_the_answer(gateway: GatewayProcess) -> None:
    file = gateway.home / "agents" / "main" / "typed.txt"
    file.write_text("one\ntwo\n")
    with Terminal(Command(gateway.home), "call", "write", "path=typed.txt", "content=one\n2\n") as terminal:
        terminal.expect("write waits for approval")
        terminal.expect("changes are asked about: a person looks at changes")
        terminal.expect("until")
        terminal.expect("-two\n+2\n")
        terminal.expect("farhand approve ")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        assert file.read_text() == "one\ntwo\n"
        terminal.type("perhaps\n")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        assert file.read_text() == "one\ntwo\n"
        terminal.type("y\n")
        terminal.expect("approved: write")
        assert terminal.end() == 0
    assert file.read_text() == "one\n2\n"


def test_no_is_a_denial(gateway: GatewayProcess) -> None:
    with Terminal(Command(gateway.home), "call", "exec", "command=touch denied.txt") as terminal:
        terminal.expect("touch denied.txt")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        terminal.type("no\n")
        terminal.expect("denied: exec")
        terminal.expect("not_allowed: denied by owner")
        assert terminal.end() == 1
    assert not (gateway.home / "agents" / "main" / "denied.txt").exists()


def test_always_is_not_asked_again(gateway: GatewayProcess) -> None:
    with Terminal(Command(gateway.home), "call", "exec", "command=echo always-$((1+1))") as terminal:
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        terminal.type("a\n")
        terminal.expect("`farhand policy` lists and removes them")
        terminal.expect("always-2")
        assert terminal.end() == 0
    again = Command(gateway.home)("call", "exec", "command=echo always-$((1+1))")
    assert (again.status, "waits" in again.err) == (0, False) and "always-2" in again.out


def test_a_decision_elsewhere_ends_the_question(gateway: GatewayProcess) -> None:
    with Terminal(Command(gateway.home), "call", "exec", "command=echo from-elsewhere") as terminal:
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        assert answer(gateway, pending(gateway, "exec")).status == 200
        terminal.expect("from-elsewhere")
        assert terminal.end() == 0


def test_interrupting_the_question_leaves_it_open(gateway: GatewayProcess) -> None:
    with Terminal(Command(gateway.home), "call", "exec", "command=echo interrupted") as terminal:
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.expect("farhand calls cancel ")
        assert terminal.end() == 130
    approval = pending(gateway, "exec")
    assert answer(gateway, approval, "deny").status == 200


@pytest.mark.parametrize("options", [(), ("--follow",)], ids=["call", "follow"])
def test_without_a_terminal_json_is_one_document_and_the_question_is_on_standard_error(
    gateway: GatewayProcess, options: tuple[str, ...]
) -> None:
    process = Command(gateway.home).start("call", "exec", "command=echo piped", "--json", *options)
    assert process.stderr is not None and process.stdout is not None
    said = process.stderr.readline()
    assert "exec waits for approval" in said
    approval = pending(gateway, "exec")
    assert approval["id"] in said
    assert answer(gateway, approval).status == 200
    # Not communicate(), which passes over what readline() has buffered.
    out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 0, err
    assert json.loads(out)["state"] == "ok"
    assert "echo piped" in err and "changes are asked about" in err and "[y]es" not in err


def test_a_call_in_the_background_says_what_it_waits_for(gateway: GatewayProcess) -> None:
    done = Command(gateway.home)("call", "exec", "command=echo later", "--background")
    assert done.status == 0
    approval = asked(gateway, done.out.strip())
    assert approval["id"] in done.err and "echo later" in done.err
    assert answer(gateway, approval, "deny").status == 200


def test_a_token_that_may_not_see_approvals_learns_the_rule(gateway: GatewayProcess) -> None:
    made = Command(gateway.home)("token", "create", "--tool", "exec", "--json").json()
    narrow = Command(gateway.home).with_env(FARHAND_URL=gateway.url, FARHAND_TOKEN=made["token"])
    process = narrow.start("call", "exec", "command=echo narrow")
    assert process.stderr is not None
    said = process.stderr.readline() + process.stderr.readline()
    assert "exec waits for approval" in said and "changes are asked about" in said
    assert answer(gateway, pending(gateway, "exec")).status == 200
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "narrow" in out and "[y]es" not in err


def test_many_nodes_say_which_call_waits(gateway: GatewayProcess, node: NodeProcess) -> None:
    process = Command(gateway.home).start("call", "--on", "hands", "Bash", "command=echo many", "--json")
    assert process.stderr is not None
    said = process.stderr.readline()
    assert "hands__Bash waits for approval" in said
    assert answer(gateway, pending(gateway, "hands__Bash")).status == 200
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["results"][0]["output"] == "many"


def test_a_chat_shows_what_waits_and_takes_the_answer(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(calls(("exec", {"command": "echo by-the-agent"})), text("It is done."))
    with Terminal(Command(gateway.home), "chat", "-m", "do it") as terminal:
        terminal.expect("exec waits for approval")
        terminal.expect("changes are asked about")
        terminal.expect("echo by-the-agent")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        terminal.type("y\n")
        terminal.expect("approved: exec")
        terminal.expect("It is done.")
        assert terminal.end() == 0


def test_a_chat_line_by_line_continues_after_the_answer(gateway: GatewayProcess, model: ModelServer) -> None:
    """The line after an answer is the next message, whether or not the question was answered here."""
    model.add(calls(("exec", {"command": "echo asked"})), text("First done."), text("Second done."))
    line = [sys.executable, "-m", "farhand", "chat", "--session", "lines"]
    with pty_screen.Terminal(line, Command(gateway.home).env) as terminal:  # the prompt is drawn, not only printed
        terminal.expect("\n>")
        terminal.type("first\r")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this:")
        assert answer(gateway, pending(gateway, "exec")).status == 200
        terminal.expect("First done.\n>")
        terminal.type("second\r")
        terminal.expect("Second done.\n>")
        terminal.type("\x04")
        assert terminal.wait() == 0
    users = [one["content"] for one in model.requests[-1].messages if one["role"] == "user"]
    assert users == ["first", "second"]


def test_a_chat_with_json_is_one_document(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(calls(("exec", {"command": "echo json"})), text("Json done."))
    process = Command(gateway.home).start("chat", "-m", "go", "--session", "json", "--json")
    assert process.stderr is not None
    assert answer(gateway, pending(gateway, "exec")).status == 200
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["reply"] == "Json done."
    assert "exec waits for approval" in err and "[y]es" not in err


def test_escape_codes_of_an_agent_do_not_reach_the_terminal(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Terminal(Command(gateway.home), "call", "exec", "command=echo \x1b[2Jhidden") as terminal:
        terminal.expect("hidden")
        terminal.expect("[y]es / [n]o / [a]lways for exactly this: ")
        assert "\x1b[2J" not in terminal.shown
        terminal.type("n\n")
        assert terminal.end() == 1
