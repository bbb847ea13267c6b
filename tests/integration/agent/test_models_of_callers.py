"""A caller cannot make the gateway read a file of the host by naming it as a recorded model."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import open_house
from tests.integration.messaging.test_messages import Talk, last_said, say
from tests.support.harness import PATIENCE, wait_until
from tests.support.model_server import text


class Pipe:
    """A pipe, which shows whether it was opened. Unlike /dev/zero it is harmless."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = threading.Event()
        os.mkfifo(path)

    def wait_for_a_reader(self) -> None:
        with self.path.open("wb"):  # returns once a reader opens it
            self.opened.set()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path / "pipe")
    waiting = threading.Thread(target=made.wait_for_a_reader, daemon=True)
    waiting.start()
    yield made
    os.close(os.open(made.path, os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go
    waiting.join(60)


def test_a_recording_named_by_a_token_for_chat_is_not_opened(tmp_path: Path, pipe: Pipe) -> None:
    """S4: `replay:/dev/zero` took the memory, and the answers revealed which paths exist."""
    reported: dict[str, Any] = {}
    with contextlib.contextmanager(open_house)(tmp_path / "home") as house:
        gateway = house.gateway
        talker = gateway.request("POST", "/v1/tokens", {"scopes": ["chat"]}).json()["token"]
        for path in (pipe.path, tmp_path / "gone"):
            body = {"message": "hi", "wait_seconds": 5, "model": f"replay:{path}"}
            answer = gateway.request("POST", "/v1/sessions/caller/messages", body, token=talker, timeout=PATIENCE)
            reported[path.name] = (answer.status, answer.body.decode().replace(str(path), "PATH"))
    assert not pipe.opened.is_set()
    assert reported["pipe"] == reported["gone"], "the answer tells which paths exist"
    assert reported["pipe"][0] == 400, reported


def test_a_recording_named_by_a_stranger_on_an_open_channel_is_not_opened(tmp_path: Path, pipe: Pipe) -> None:
    with Talk(tmp_path / "home", "", answer=lambda request: text(f"You said: {last_said(request)}")) as talk:
        for words in (f"/model replay:{pipe.path}", "hello there"):
            assert say(talk.gateway, "mallory", words).status == 202

        def answered() -> bool:
            return any("You said" in one["text"] for one in talk.receiver.taken)

        wait_until(lambda: pipe.opened.is_set() or answered(), what="an answer")
        assert not pipe.opened.is_set()
