"""The chat loop on a terminal: line editing, history, slash commands."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farhand.cli.agent.chat_exchange import ChatExchange
from farhand.cli.agent.chat_images import ImageError, read_image, with_images
from farhand.cli.agent.chat_keyboard import Keyboard
from farhand.cli.agent.chat_undo import undo_last
from farhand.cli.agent.chat_view import ChatView
from farhand.cli.client import Client, ClientError, NoGateway, url_path
from farhand.cli.output import ago, colours, plain, remark

HISTORY_FILE: Final = "chat_history"
MOST_SESSIONS: Final = 20

# Commands that the session carries out; the others are those of this program.
OF_SESSION: Final = {
    "/new": "begin a new conversation; the old one stays in the history",
    "/stop": "stop what runs in this session, and every process it started",
    "/status": "what this session is doing, and what it has cost",
    "/compact": "replace the older part of the conversation by a summary",
    "/model": "[NAME]  show or choose the model; /model default goes back",
    "/think": "[LEVEL]  how long it thinks: off, minimal, low, medium, high, xhigh",
    "/freeze": "[WHY]  stop everything on every machine",
}
OF_PROGRAM: Final = {
    "/help": "this list",
    "/exit": "leave; also Ctrl-D",
    "/resume": "[NUMBER | SESSION]  list the sessions, or go to one",
    "/fork": "[NAME]  continue in a copy of this conversation",
    "/undo": "restore the files that the last answer changed",
    "/image": "PATH  send an image with the next message; @PATH in a message does the same",
}
COMMANDS: Final = {**OF_PROGRAM, **OF_SESSION}
ALIASES: Final = {"/quit": "/exit", "/q": "/exit", "/?": "/help", "/reset": "/new", "/sessions": "/resume"}


class SlashCompleter(Completer):
    """Completes commands at the beginning of a line, and paths after /image and @."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and " " not in text:
            for name, help_text in COMMANDS.items():
                if name.startswith(text):
                    yield Completion(name, start_position=-len(text), display_meta=help_text)
            return
        word = text.rpartition(" ")[2]
        path = text.partition(" ")[2] if text.startswith("/image ") else word[1:] if word.startswith("@") else None
        if path is not None:
            yield from self._paths.get_completions(Document(path), complete_event)


class TerminalChat:
    """One conversation after the other, until the user leaves."""

    def __init__(self, client: Client, key: str, options: dict[str, Any], record: str | None) -> None:
        self._client = client
        self._options = options
        self._record = record
        self._console = Console(highlight=False, color_system="auto" if colours() else None)
        self._keyboard = Keyboard()
        self._view = ChatView(client, self._console, self._keyboard)
        self._images: list[str] = []
        self._listed: list[str] = []
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(client),
            completer=SlashCompleter(),
            complete_while_typing=True,
            key_bindings=_keys(),
            enable_open_in_editor=True,
            prompt_continuation="  ",
        )
        self._go_to(key)
        self._actions: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/exit": lambda _: False,
            "/resume": self._resume,
            "/fork": self._fork,
            "/undo": self._undo,
            "/image": self._image,
        }

    def run(self) -> int:
        """Read and answer messages. Ctrl-D, /exit, and Ctrl-C on an empty line leave."""
        with self._keyboard:
            return self._converse()

    def _converse(self) -> int:
        self._greet()
        while True:
            try:
                text = self._prompt.prompt("> ")
            except KeyboardInterrupt:
                if self._prompt.default_buffer.text.strip():
                    continue
                return 0
            except EOFError:
                return 0
            if not text.strip():
                continue
            try:
                if not self._take(text):
                    return 0
            except NoGateway:
                raise
            except (ClientError, ImageError) as error:
                self._view.ended()
                remark(f"farhand: {error}")
            except KeyboardInterrupt:  # the second one, while the run was being stopped
                self._view.ended()
                return 130

    def _take(self, text: str) -> bool:
        """Carry out a command or send a message; return whether the chat continues."""
        if not text.startswith("/") or "\n" in text.strip():
            return self._send(text)
        word, _, rest = text.strip().partition(" ")
        name = ALIASES.get(word.lower(), word.lower())
        if name in self._actions:
            return self._actions[name](rest.strip())
        if name in OF_SESSION:
            return self._send(f"{name} {rest}".strip())
        if "/" in word[1:]:  # a path
            return self._send(text)
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else "/help lists them."
        remark(f"there is no command {plain(word)}; {meant} To send it as a message, begin with a blank.")
        return True

    def _send(self, text: str) -> bool:
        said, found = with_images(text)
        images = [*self._images, *found]
        options = {**self._options, **({"images": images} if images else {})}
        self._exchange.send(said, options, self._record)
        self._images = []
        return True

    # -- commands ---------------------------------------------------------------------------------------

    def _greet(self) -> None:
        try:
            session = self._client.get("/v1/sessions/{}", self._key).value
        except ClientError:  # it begins with the first message, or this token may not read it
            session = None
        model = session["model"] if session else None
        said = session["message_count"] if session else 0
        parts = [f"session {plain(self._key)}", *([plain(model)] if model else [])]
        parts += [f"{said} messages so far"] if said else []
        self._console.print(Text(" · ".join([*parts, "/help lists commands"]), style="dim"))

    def _help(self, _rest: str) -> bool:
        table = Table.grid(padding=(0, 2))
        for name, text in COMMANDS.items():
            table.add_row(Text(name, style="bold"), text)
        self._console.print(table)
        self._console.print(
            Text("Enter sends, Alt-Enter begins a new line, a paste is one message. Ctrl-C stops the run.", style="dim")
        )
        return True

    def _go_to(self, key: str) -> None:
        self._key = key
        self._exchange = ChatExchange(self._client, key, self._view, ask=True)

    def _resume(self, rest: str) -> bool:
        if rest.isdecimal() and 1 <= int(rest) <= len(self._listed):
            rest = self._listed[int(rest) - 1]
        if rest:
            self._client.get("/v1/sessions/{}", rest)  # an unknown one is an error
            self._go_to(rest)
            self._greet()
            self._recall()
            return True
        found = self._client.get("/v1/sessions", limit=MOST_SESSIONS).value["sessions"]
        self._listed = [one["key"] for one in found]
        table = Table.grid(padding=(0, 2))
        for number, one in enumerate(found, 1):
            mark = "*" if one["key"] == self._key else ""
            title = plain(one["title"] or "")
            table.add_row(f"{number}{mark}", Text(plain(one["key"]), style="bold"), ago(one["updated_at"]), Text(title))
        self._console.print(table if found else Text("no sessions yet", style="dim"))
        if found:
            self._console.print(Text("/resume NUMBER goes to one", style="dim"))
        return True

    def _recall(self) -> None:
        """Show the end of the conversation."""
        history = self._client.get("/v1/sessions/{}/history", self._key, limit=6).value["messages"]
        for entry in history:
            content = entry.get("content")
            if entry["role"] == "user" and isinstance(content, str):
                self._console.print(Text(f"> {plain(content)[:200]}", style="cyan"))
            elif entry["role"] == "assistant" and isinstance(content, str) and content.strip():
                self._view.text(content)
                self._view.ended()

    def _fork(self, rest: str) -> bool:
        forked = self._client.post(f"{url_path('/v1/sessions/{}', self._key)}/fork", {"to": rest} if rest else {}).value
        before = self._key
        self._go_to(forked["key"])
        remark(f"continuing in {plain(forked['key'])}; /resume {plain(before)} goes back")
        return True

    def _undo(self, _rest: str) -> bool:
        with self._keyboard.released():
            undo_last(self._client, self._key, self._console)
        return True

    def _image(self, rest: str) -> bool:
        if not rest:
            remark("give the path of an image: /image photo.png")
            return True
        self._images.append(read_image(rest))
        remark(f"{plain(rest)} goes with the next message")
        return True


def _history(client: Client) -> History:
    """Return the history of earlier chats, in a file that only its owner can read."""
    path = client.home / HISTORY_FILE
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:  # no home here, such as with --url
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def can_converse() -> bool:
    """Return whether standard input and output are a terminal that can position its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
