"""The chat on a terminal: streaming Markdown, a card for each tool call with its live output, the elapsed time."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from farhand.cli.agent.chat_exchange import arguments_line
from farhand.cli.agent.chat_keyboard import Keyboard
from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.output import json_value, plain, printable

REFRESHES: Final = 8
LOOK_SECONDS: Final = 0.4
LIVE_LINES: Final = 6
CARD_LINES: Final = 8
LONGEST_OUTPUT: Final = 64_000
_FENCE: Final = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)


class Card:
    """A tool call that is running."""

    def __init__(self, use: dict[str, Any]) -> None:
        self.use = use
        self.began = time.monotonic()
        self.call_id = ""
        self.output = ""
        self.offset = 0

    @property
    def tool(self) -> str:
        """The name under which the gateway records the call."""
        name = str(self.use["name"])
        if name.startswith("node_"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return f"{json.loads(self.use['arguments'])['node']}__{name.removeprefix('node_')}".lower()
        return name.lower()


class ChatView:
    """Shows runs with rich: finished blocks are printed, the rest is redrawn until it is finished."""

    def __init__(self, client: Client, console: Console, keyboard: Keyboard) -> None:
        self._client = client
        self._keyboard = keyboard
        self._console = console
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._text = ""
        self._cards: dict[str, Card] = {}
        self._began = 0.0
        self._session = ""
        self._over = threading.Event()
        # Of what is shown, and of the terminal; the first may be taken while the second is held.
        self._lock = threading.RLock()
        self._drawing = threading.RLock()

    # -- the view ---------------------------------------------------------------------------------------

    def began(self, session_key: str) -> None:
        self._text, self._cards, self._began, self._session = "", {}, time.monotonic(), session_key
        self._over = threading.Event()
        self._draw()
        for work in (self._watch_output, self._redraw):
            threading.Thread(target=work, args=(self._over,), daemon=True).start()

    def text(self, text: str) -> None:
        with self._lock:
            self._text += printable(text)
            done, self._text = finished_blocks(self._text)
        if done.strip():
            self._print(Padding(_markdown(done), (0, 0, 1, 0)))
        self._draw()

    def verbatim(self, text: str) -> None:
        self._print(Text(printable(text)))

    def tool_called(self, use: dict[str, Any]) -> None:
        self._finish_text()
        with self._lock:
            self._cards[use["id"]] = Card(use)
        self._draw()

    def tool_ended(self, use: dict[str, Any], outcome: dict[str, Any], seconds: float) -> None:
        with self._lock:
            card = self._cards.pop(use["id"], None) or Card(use)
        self._print(_ended_card(card, outcome, seconds))
        self._draw()

    def pause(self) -> None:
        """Make room for another writer and reader of the terminal: a question, or an error."""
        self._finish_text()
        self._stop()
        self._keyboard.release()

    def note(self, text: str) -> None:
        self.pause()
        self._console.print(Text(text, style="dim"))

    def ended(self) -> None:
        self._over.set()
        self._finish_text()
        with self._lock:
            left, self._cards = list(self._cards.values()), {}
        for card in left:
            self._print(_head("■", "yellow", card, "stopped"))
        self._stop()
        self._keyboard.hold()

    # -- drawing ----------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        """What is redrawn: the unfinished text, running calls, and how long the run takes."""
        with self._lock:
            parts: list[RenderableType] = [_markdown(self._text)] if self._text.strip() else []
            for card in self._cards.values():
                parts.append(_head("●", "cyan", card, f"{time.monotonic() - card.began:.0f} s"))
                parts += [_lines(card.output, LIVE_LINES)] if card.output.strip() else []
            elapsed = time.monotonic() - self._began
            doing = "running" if self._cards else "thinking"
        self._spinner.update(text=Text(f" {doing} {elapsed:.0f} s · Ctrl-C stops", style="dim"))
        parts.append(self._spinner)
        return Group(*parts)

    def _draw(self) -> None:
        with self._drawing:
            if self._live is None:
                # Without a refresh of its own, which may write between a print and its new position.
                self._live = Live(
                    self, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop"
                )
                self._keyboard.hold()
                self._live.start(refresh=True)

    def _stop(self) -> None:
        with self._drawing:
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def _print(self, what: RenderableType) -> None:
        with self._drawing:
            self._console.print(what)

    def _redraw(self, over: threading.Event) -> None:
        while not over.wait(1 / REFRESHES):
            with self._drawing:
                if self._live is not None and not over.is_set():
                    self._live.refresh()

    def _finish_text(self) -> None:
        with self._lock:
            rest, self._text = self._text, ""
        if rest.strip():
            self._print(_markdown(rest))

    # -- output of running calls --------------------------------------------------------------------------

    def _watch_output(self, over: threading.Event) -> None:
        """Fetch what running commands print, until the run has ended."""
        while not over.wait(LOOK_SECONDS):
            with self._lock:
                cards = list(self._cards.values())
            if not cards:
                continue
            try:
                self._find_calls(cards)
                for card in cards:
                    if card.call_id:
                        self._read_on(card)
            except (ClientError, OSError):  # the run itself reports what is wrong
                continue

    def _find_calls(self, cards: list[Card]) -> None:
        if all(card.call_id for card in cards):
            return
        running = self._client.get("/v1/calls", session_key=self._session, state="running", bodies=0, limit=20).value
        taken = {card.call_id for card in cards}
        for call in reversed(running["calls"]):
            card = next((one for one in cards if not one.call_id and one.tool == call["tool"].lower()), None)
            if call["id"] not in taken and card is not None:
                card.call_id = call["id"]

    def _read_on(self, card: Card) -> None:
        path = url_path("/v1/calls/{}/output", card.call_id, offset=card.offset, wait=0)
        try:
            with self._client.open("GET", path) as (response, explained), explained:
                data = response.read(LONGEST_OUTPUT)
        except ClientError as error:
            if error.code not in ("not_found", "range_not_satisfiable"):
                raise
            return
        with self._lock:
            card.offset += len(data)
            card.output = (card.output + data.decode(errors="replace"))[-LONGEST_OUTPUT:]


def finished_blocks(text: str) -> tuple[str, str]:
    """Split Markdown at the last blank line that is not inside a fenced block or a list."""
    cut = 0
    for found in re.finditer(r"\n[ \t]*\n+", text):
        before, after = text[: found.end()], text[found.end() :]
        fences = len(_FENCE.findall(before))
        # An indented line may continue a list, whose numbering a cut would break.
        if fences % 2 == 0 and after and not after[0].isspace() and not re.match(r"([-*+]|\d+[.)])\s", after):
            cut = found.end()
    return text[:cut], text[cut:]


def _markdown(text: str) -> RenderableType:
    # Links are shown with their address: a model must not hide where they lead.
    return Markdown(text, hyperlinks=False)


def _head(mark: str, colour: str, card: Card, right: str) -> RenderableType:
    head = Text(f"{mark} ", style=colour)
    head.append(plain(card.use["name"]), style="bold")
    head.append(f" {arguments_line(card.use['arguments'], 200)}  ", style="dim")
    head.append(right, style="dim")
    head.no_wrap, head.overflow = True, "ellipsis"
    return head


def _ended_card(card: Card, outcome: dict[str, Any], seconds: float) -> RenderableType:
    failed = bool(outcome.get("is_error"))
    result, shown = outcome.get("result"), json_value(outcome["content"])
    took = f"{seconds:.1f} s" if seconds else ""
    if isinstance(result, dict):
        shown = next((result[name] for name in ("output", "content") if isinstance(result.get(name), str)), shown)
        if result.get("status") == "failed":
            failed = True
            took = f"exit code {result.get('exitCode')} · {took}"
    head = _head("✗" if failed else "✓", "red" if failed else "green", card, took)
    return Group(head, _lines(shown, CARD_LINES)) if shown.strip() else head


def _lines(text: str, most: int) -> RenderableType:
    lines = printable(text).rstrip().splitlines()
    shown = lines[-most:]
    left = len(lines) - len(shown)
    body = Text("\n".join(shown), style="dim", overflow="ellipsis", no_wrap=True)
    if left:
        body = Text(f"… {left} more lines\n", style="dim italic") + body
        body.no_wrap, body.overflow = True, "ellipsis"
    return Padding(body, (0, 0, 0, 2))
