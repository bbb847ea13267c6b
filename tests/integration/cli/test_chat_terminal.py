"""`farhand chat` on a terminal, with a scripted model: what the screen shows, and what reaches the model."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from farhand.cli.agent.chat_images import ImageError, read_image, with_images
from farhand.cli.agent.chat_terminal import COMMANDS, SlashCompleter
from farhand.cli.agent.chat_view import finished_blocks
from tests.integration.agent.test_agent import House, open_house
from tests.integration.cli.conftest import Command
from tests.support.harness import NodeProcess, wait_until
from tests.support.model_server import Reply, calls, text
from tests.support.pty_screen import Terminal

RULES = """
[[policy.rules]]
name = "ask about writing"
reason = "look first"
decision = "ask"
tool = ["Write"]
"""
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ANSWER = "# Disks\n\nThere are **two**:\n\n- `sda`\n- `sdb`\n\n```\nraw text\n```\n\nThat is all."
READY = "\n>"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("chat-terminal") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(f"[models.other-model]\n{RULES}")
    yield from open_house(home)


@pytest.fixture(scope="module")
def laptop(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("laptop"), "laptop") as node:
        yield node


def chat(house: House, key: str, **env: str) -> Terminal:
    command = Command(house.gateway.home, **env)
    return Terminal([sys.executable, "-m", "farhand", "chat", "--session", key], command.env, columns=200)


def said(session: Any) -> list[str]:
    """The user's messages that the model was last asked about."""
    return [str(one["content"]) for one in session.asked()[-1].messages if one["role"] == "user"]


def test_an_answer_is_formatted_and_a_call_is_a_card_with_live_output(house: House, laptop: NodeProcess) -> None:
    (laptop.workspace / "go").unlink(missing_ok=True)
    command = "for i in 1 2 3; do echo line-$i; done; while [ ! -e go ]; do sleep 0.1; done; echo line-4"
    session = house.session(calls(("node_bash", {"node": "laptop", "command": command}), say="Looking."), text(ANSWER))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} disks?\r")
        terminal.expect("Looking.", "● node_bash", "  line-3", "running")
        assert "line-4" not in terminal.text.replace(command, "")
        (laptop.workspace / "go").touch()
        terminal.expect("✓ node_bash", "  line-4", "Disks", "There are two:", " • sda", "That is all.")
        assert "**" not in terminal.text and "```" not in terminal.text and "running" not in terminal.text
        assert terminal.colour_of("✓") == "green"
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert len(session.asked()) == 2


def test_lines_are_edited_recalled_and_pasted_as_one_message(house: House) -> None:
    session = house.session(*(text(f"answer {number}") for number in range(4)))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} helo\x1b[D\x1b[Dl\r")  # two steps back, one letter
        terminal.expect("answer 0")
        assert said(session) == [f"{session.key} hello"]
        terminal.paste("first line\nsecond line\nthird line")
        terminal.expect("third line")
        terminal.type("\r")
        terminal.expect("answer 1")
        assert said(session)[-1] == "first line\nsecond line\nthird line"
        terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A")  # the history, up to the first message
        terminal.expect(READY)
        terminal.type("\x04")
    with chat(house, session.key) as terminal:  # the history is kept
        terminal.expect("4 messages so far")
        terminal.type("\x1b[A\r")
        terminal.expect("answer 2", f"answer 2\n{READY[1:]}")
        assert said(session)[-1] == "first line\nsecond line\nthird line"
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert (house.gateway.home / "chat_history").stat().st_mode & 0o777 == 0o600


def test_commands_are_completed_explained_and_never_sent(house: House) -> None:
    session = house.session(text("fine"))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type("/res")
        terminal.expect("/resume  [NUMBER | SESSION]")
        terminal.type("\x15/help\r")
        terminal.expect(*COMMANDS, "Alt-Enter")
        terminal.type("/modle\r")
        terminal.expect("there is no command /modle; did you mean /model?")
        terminal.type(f"{session.key} hello\r")
        terminal.expect("fine")
        terminal.type("/model other-model\r")
        terminal.expect("Model: ")
        terminal.type("/fork branch-of-it\r")
        terminal.expect("continuing in branch-of-it")
        terminal.type("/resume\r")
        terminal.expect("/resume NUMBER goes to one", session.key)
        terminal.type(f"/resume {session.key}\r")
        terminal.expect(f"session {session.key} · ")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert len(session.asked()) == 1


def test_ctrl_c_stops_the_run_and_the_chat_continues(house: House, laptop: NodeProcess) -> None:
    session = house.session(calls(("laptop__Bash", {"command": "sleep 300"})), text("after"))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} sleep\r")
        terminal.expect("● laptop__Bash")
        wait_until(lambda: house.gateway.get("/v1/calls?state=running")["calls"], 60, "the call")
        terminal.type("\x03")
        terminal.expect("stopping … (Ctrl-C again leaves)", "■ laptop__Bash", "stopped on request")
        terminal.type("still there?\r")
        terminal.expect("after")
        terminal.type("\x03")  # on an empty line
        assert terminal.wait() == 0


def test_a_second_ctrl_c_leaves(house: House) -> None:
    gate = threading.Event()
    session = house.session(Reply(chunks=[], gate=gate))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} think\r")
        terminal.expect("thinking")
        house.gateway.process.send_signal(19)  # SIGSTOP: the gateway does not answer the request to stop
        try:
            terminal.type("\x03")
            terminal.expect("stopping …")
            terminal.type("\x03")
            assert terminal.wait() == 130
        finally:
            house.gateway.process.send_signal(18)
            gate.set()


def test_an_approval_is_asked_for_with_a_coloured_diff(house: House, laptop: NodeProcess) -> None:
    (laptop.workspace / "a.txt").write_text("old line\n")
    write = ("laptop__Write", {"path": "a.txt", "content": "new line\n"})
    session = house.session(calls(write), text("written"))
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} write\r")
        terminal.expect("ask about writing: look first", "-old line", "+new line", "[y]es / [n]o / [a]lways")
        assert (terminal.colour_of("-old line"), terminal.colour_of("+new line")) == ("red", "green")
        terminal.type("y\r")
        terminal.expect("✓ laptop__Write", "written")
        assert (laptop.workspace / "a.txt").read_text() == "new line\n"
        terminal.type("/undo\r")
        terminal.expect("would be restored: ", "a.txt", "+old line", "Restore this file? [y/N]")
        terminal.type("y\r")
        terminal.expect("restored; to reverse it")
        assert (laptop.workspace / "a.txt").read_text() == "old line\n"
        terminal.type("/exit\r")
        assert terminal.wait() == 0


def test_images_are_sent_by_path(house: House, tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(PICTURE)
    session = house.session(text("a dot"), text("again a dot"))
    url = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    with chat(house, session.key) as terminal:
        terminal.expect(READY)
        terminal.type(f"/image {tmp_path}/none.png\r")
        terminal.expect("cannot read")
        terminal.type(f"{session.key} what is @{tmp_path}/dot.png ?\r")
        terminal.expect("a dot")
        assert url.encode() in session.asked()[0].body
        terminal.type(f"/image {tmp_path}/dot.png\r")
        terminal.expect("goes with the next message")
        terminal.type("and this?\r")
        terminal.expect("again a dot")
        assert session.asked()[1].body.count(url.encode()) == 2
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    for image in ("https://example.org/x.png", "data:text/html;base64,AA==", "data:image/png;base64,!"):
        body = {"message": "x", "images": [image]}
        assert house.gateway.request("POST", f"/v1/sessions/{session.key}/messages", body).status == 400


def test_model_output_cannot_control_the_terminal(house: House) -> None:
    session = house.session(text("red \x1b]0;title\x07 [link](http://evil.example) \x1b[31mtext"))
    with chat(house, session.key, NO_COLOR="1") as terminal:
        terminal.expect(READY)
        terminal.type(f"{session.key} attack\r")
        terminal.expect("(http://evil.example)", "text")
        assert b"\x1b]0;title" not in terminal.raw and b"\x1b[31m" not in terminal.raw
        assert b"\x1b]8;" not in terminal.raw and b"\x1b[2m" not in terminal.raw
        terminal.type("/exit\r")
        assert terminal.wait() == 0


# -- parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "done"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n```\na\n\nb", "one\n\n"),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("1. a\n\n2. b", ""),
        ("- a\n\n  more\n\nend", "- a\n\n  more\n\n"),
    ],
)
def test_finished_blocks_are_split_off(written: str, done: str) -> None:
    assert finished_blocks(written) == (done, written[len(done) :])


def test_completions(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()

    def complete(words: str) -> list[str]:
        return [one.text for one in SlashCompleter().get_completions(Document(words), CompleteEvent())]

    assert complete("/re") == ["/resume"] and set(complete("/")) == set(COMMANDS)
    assert complete("hello") == [] and complete("a /re") == []
    assert complete(f"/image {tmp_path}/ph") == ["oto.png"] == complete(f"see @{tmp_path}/ph")


def test_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    with pytest.raises(ImageError, match="is not a PNG"):
        read_image(str(tmp_path / "x.png"))
    with pytest.raises(ImageError, match="Is a directory"):
        read_image(str(tmp_path))
    assert with_images("mail me@example.png.com or @nothing") == ("mail me@example.png.com or @nothing", [])
