"""Replay a recorded run through the same loop, without models or tools.

The model's replies and the tools' results come from the record; the current code builds the prompt, the messages and
the offered tools, and each request is compared with the recorded one. No tool runs and no network is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from farhand.agent import loop
from farhand.agent.events import Appended, Compacted, Completed, Event, RunFailed, StepText, Stopped
from farhand.agent.loop import JoiningMessage
from farhand.agent.tool_outcome import Outcome
from farhand.agent.tool_search import CORE, ToolShelf
from farhand.agent.tools import AgentTool, ToolList, Tools, WithClients
from farhand.agent.transcript import mend
from farhand.gateway.calls.open_call import result_of
from farhand.gateway.sessions.entries import message_of
from farhand.gateway.sessions.recorder import ERRORS, Replied, RunSettings, plain_digest, spec_list
from farhand.gateway.sessions.runs import RunOptions
from farhand.llm import messages as model_events
from farhand.llm.errors import ModelError
from farhand.llm.messages import Content, Message, StreamEvent, ToolUse
from farhand.llm.model import ModelRequest
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.protocol.redaction import MASK
from farhand.store.ports import Tx
from farhand.store.tables import recordings as replays
from farhand.store.tables import sessions
from farhand.store.tables.calls import CallRecord, made_by
from farhand.store.tables.recordings import DIGEST_BYTES, Attempt, ModelExchange, digest
from farhand.store.tables.sessions import Entry, RunRecord, RunState

SHOWN = 2_000


class Difference(msgspec.Struct, frozen=True):
    """The first difference."""

    # The model reply during or after which it occurred.
    step: int
    # `prompt`, `messages`, `tools`, `message`, `summary`, `call` or `end`.
    what: str
    expected: str
    got: str


class ReplayedRun(msgspec.Struct, frozen=True):
    """The result of a replay."""

    run_id: str
    session_key: str
    # The recorded end of the run.
    state: str
    identical: bool
    # Number of compared model requests.
    requests: int
    # Number of tool calls answered from the record.
    calls: int
    attempts: int
    difference: Difference | None


class RecordedRun(msgspec.Struct, frozen=True):
    """All recorded data of a run."""

    run: RunRecord
    attempts: list[Attempt]
    asked: list[ModelExchange]
    # The initial messages to the model, for each attempt.
    conversations: list[list[Entry]]
    # Entries of the run and of messages that joined it, including summaries.
    entries: list[Entry]
    calls: dict[str, CallRecord]
    contents: dict[bytes, bytes]


def recorded(store: Tx, run_id: str) -> RecordedRun:
    """Read a run. Raises NotFound if it does not exist, InvalidArgs if it cannot be replayed."""
    run = sessions.find_run(store, run_id)
    if run is not None and run.joined_to is not None:
        run = sessions.find_run(store, run.joined_to)
    if run is None:
        raise NotFound(f"there is no run {run_id!r}; `farhand log --kind run` shows them")
    if run.ended_at is None:
        raise InvalidArgs(f"run {run.id} has not ended yet")
    attempts, asked = replays.attempts(store, run.id), replays.asked(store, run.id)
    if not asked:
        why = run.error_message or "it was made before requests to models were recorded, or was a command"
        raise InvalidArgs(f"run {run.id} asked no model, so there is nothing to repeat: {why}")
    own = {run.id, *sessions.joined_to(store, run.id)}
    first = min(attempt.last_entry for attempt in attempts)
    entries = [
        entry
        for entry in sessions.entries_after(store, run.session_key, first)
        if entry.run_id in own and entry.seq > first
    ]
    started = sessions.find_entry(store, first)
    session_id = started.session_id if started is not None else ""
    conversations = [
        sessions.conversation(store, run.session_key, session_id, attempt.last_entry) for attempt in attempts
    ]
    contents: dict[bytes, bytes] = {}
    for row in asked:
        for name in (row.prompt, row.tools, row.specs):
            _take(store, contents, name)
        for listed in (contents[row.tools], contents[row.specs]):
            for name in _split(listed):
                _take(store, contents, name)
    for attempt in attempts:
        for file in msgspec.json.decode(attempt.settings, type=RunSettings).prompt.parts.files.values():
            _take(store, contents, bytes.fromhex(file))
    return RecordedRun(run, attempts, asked, conversations, entries, made_by(store, f"run:{run.id}:"), contents)


def _take(store: Tx, contents: dict[bytes, bytes], name: bytes) -> None:
    if name not in contents:
        try:
            contents[name] = replays.content(store, name)
        except KeyError:
            raise InvalidArgs(f"a part of the request with the digest {name.hex()} is missing from the store") from None


async def replay(record: RecordedRun) -> ReplayedRun:
    """Replay a run up to the first difference."""
    requests = made = 0
    difference: Difference | None = None
    for number, attempt in enumerate(record.attempts):
        again = _ReplayedAttempt(record, number, attempt)
        difference = await again.run()
        requests += again.requests
        made += again.calls
        if difference is not None:
            break
    run = record.run
    return ReplayedRun(
        run.id, run.session_key, run.state.value, difference is None, requests, made, len(record.attempts), difference
    )


class _ReplayedAttempt:
    def __init__(self, record: RecordedRun, number: int, attempt: Attempt) -> None:
        self._record = record
        self._settings = msgspec.json.decode(attempt.settings, type=RunSettings)
        self._options = msgspec.json.decode(record.run.options, type=RunOptions)
        self._asked = deque(row for row in record.asked if row.attempt == attempt.attempt)
        self._last_attempt = number == len(record.attempts) - 1
        end = sessions.NEWEST if self._last_attempt else record.attempts[number + 1].last_entry
        entries = [entry for entry in record.entries if attempt.last_entry < entry.seq <= end]
        self._conversation = record.conversations[number]
        self._expected = [(entry, message_of(entry)) for entry in entries]
        self._specs: Sequence[ToolSpec] = self._specs_of(self._asked[0].specs) if self._asked else ()
        self._places: dict[str, deque[tuple[int, int]]] = defaultdict(deque)
        for entry, message in self._expected:
            for place, use in enumerate(message.tool_calls):
                self._places[use.id].append((entry.seq, place))
        self._stop = asyncio.Event()
        self._heard = asyncio.Event()
        self._step = 0
        self.difference: Difference | None = None
        self.requests = 0
        self.calls = 0

    async def run(self) -> Difference | None:
        settings = self._settings
        text = self._prompt()
        messages = [Message("system", text), *mend([message_of(entry) for entry in self._conversation])]
        steps = loop.run(
            self,
            messages,
            self._tools(),
            inbox=self._inbox,
            stop=self._stop,
            limits=settings.limits,
            compactor=settings.compactor,
            thinking=settings.thinking,
            max_tokens=settings.max_tokens,
            parameters=self._options.parameters,
            handed={spec.name for spec in self._options.client_tools},
        )
        last: Event | None = None
        async with contextlib.aclosing(steps):
            async for event in steps:
                last = event
                self._step = getattr(event, "step", self._step)
                self._compare(event)
                if self.difference is not None:
                    break
        if self.difference is None and last is not None:
            self._compare_end(last)
        return self.difference

    def _prompt(self) -> str:
        """Rebuild the prompt from its recorded inputs."""
        prompt = self._settings.prompt
        contents = self._record.contents
        files = {name: contents[bytes.fromhex(key)].decode() for name, key in prompt.parts.files.items()}
        parts = msgspec.structs.replace(prompt.parts, files=files)
        return msgspec.structs.replace(prompt, parts=parts).text

    def _tools(self) -> Tools:
        clients = self._options.client_tools
        return WithClients(self._own_tools(), clients) if clients else self._own_tools()

    def _own_tools(self) -> Tools:
        settings, offered = self._settings, self._options.own_tools
        if settings.child or not offered:
            return ToolList(self._specs if offered else (), self._call)
        core = CORE if settings.core is None else settings.core
        return ToolShelf(lambda: self._specs, self._call, core=core, judges=settings.judges)

    # -- the model --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._settings.model

    @property
    def context_tokens(self) -> int:
        return self._settings.context_tokens

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        if not self._asked:
            if self._cut_off:
                self._stop.set()
            else:
                self._differ("end", "no further request to the model", _shown(request.messages[-1]))
            return
        row = self._asked.popleft()
        self.requests += 1
        await asyncio.sleep(0)  # nothing else here waits, and a long run takes a while
        if not self._same_request(row, request):
            return
        if self._asked:
            self._specs = self._specs_of(self._asked[0].specs)
        if row.reply is None:
            partial = self._partial()
            if partial:
                yield model_events.TextDelta(partial)
                await self._heard.wait()
            self._stop.set()
            return
        replied = msgspec.json.decode(row.reply, type=Replied)
        if replied.finished is None:
            raise ERRORS.get(replied.error or "", ModelError)(replied.message)
        yield replied.finished

    @property
    def _cut_off(self) -> bool:
        """Return whether the run was ended from outside, or continues in another attempt."""
        return not self._last_attempt or self._record.run.state in (RunState.STOPPED, RunState.TIMEOUT)

    def _partial(self) -> str:
        """Return the text of an interrupted reply."""
        left = [message for _, message in self._expected if message.role == "assistant"]
        return left[0].text if left and not left[0].tool_calls else ""

    def _same_request(self, row: ModelExchange, request: ModelRequest) -> bool:
        prompt = "".join(message.text for message in request.messages if message.role == "system").encode()
        if digest(prompt) != row.prompt:
            self._differ("prompt", *_first_difference(self._record.contents[row.prompt].decode(), prompt.decode()))
            return False
        if plain_digest(request.messages) != row.messages:
            count = sum(message.role != "system" for message in request.messages)
            self._differ(
                "messages",
                f"{row.count} messages with the digest {row.messages.hex()}",
                f"{count} messages with the digest {plain_digest(request.messages).hex()}, the last: "
                + _shown(request.messages[-1]),
            )
            return False
        _, listed = spec_list(request.tools)
        if digest(listed) != row.tools:
            expected = [spec.name for spec in self._specs_of(row.tools)]
            got = [spec.name for spec in request.tools]
            same = "the same tools with other descriptions" if expected == got else ", ".join(got)
            self._differ("tools", ", ".join(expected), same)
            return False
        return True

    def _specs_of(self, name: bytes) -> list[ToolSpec]:
        contents = self._record.contents
        return [msgspec.json.decode(contents[one], type=AgentTool) for one in _split(contents[name])]

    # -- tools and messages -------------------------------------------------------------------------------

    async def _call(self, use: ToolUse) -> Outcome:
        self.calls += 1
        result = next((said for _, said in self._expected if said.role == "tool" and said.tool_call_id == use.id), None)
        shown = None if result is None else Outcome(result.content, is_error=result.is_error)
        places = self._places.get(use.id)
        if places:
            seq, place = places.popleft()
            call = self._record.calls.get(f"run:{self._record.run.id}:{seq}:{place}")
            if call is not None:
                outcome = Outcome.of_result(result_of(call))
                # The model saw no secrets of the gateway, so the record of the call has more than it was shown.
                return shown if shown is not None and masked(shown.content, outcome.content) else outcome
        if shown is not None:
            return shown
        self._differ("call", "no such call", f"{use.name} {use.arguments}")
        return Outcome.failed("not_found", "the record has no such call")

    def _inbox(self) -> list[JoiningMessage]:
        """Return the messages that joined the run at this point."""
        joining: list[JoiningMessage] = []
        for entry, message in self._expected:
            if message.role != "user" or entry.keeps_from is not None:
                break
            joining.append(JoiningMessage(entry.run_id or "", message))
        return joining

    def _compare(self, event: Event) -> None:
        if isinstance(event, StepText):
            self._heard.set()
        elif isinstance(event, Appended):
            self._compare_message(event.message)
        elif isinstance(event, Compacted):
            place = next((n for n, (entry, _) in enumerate(self._expected) if entry.keeps_from is not None), None)
            expected = None if place is None else self._expected.pop(place)[1]
            if expected != event.compaction.summary:
                self._differ("summary", _shown(expected), _shown(event.compaction.summary))

    def _compare_message(self, message: Message) -> None:
        fits: Callable[[Message], bool]
        if message.role == "tool":  # results are in order of arrival
            fits = lambda said: said.role == "tool" and said.tool_call_id == message.tool_call_id  # noqa: E731
        else:
            fits = lambda said: said.role != "tool"  # noqa: E731
        place = next(
            (n for n, (entry, said) in enumerate(self._expected) if entry.keeps_from is None and fits(said)), None
        )
        expected = None if place is None else self._expected.pop(place)[1]
        if expected != message:
            self._differ("message", _shown(expected), _shown(message))

    def _compare_end(self, last: Event) -> None:
        run = self._record.run
        left = [message for entry, message in self._expected if entry.keeps_from is None]
        if not self._last_attempt:
            return  # it continued after a restart, with what the gateway found then
        match last:
            case Completed():
                got = f"ok: {last.reply}"
            case RunFailed():
                got = f"failed: {last.message}"
            case Stopped():
                got = f"{run.state.value}: " if self._cut_off else "stopped: "
            case _:
                got = type(last).__name__
        expected = f"{run.state.value}: {(run.reply if run.state is RunState.OK else run.error_message) or ''}"
        if self._cut_off:
            expected = f"{run.state.value}: "
        elif left:
            expected, got = _shown(left[0]), got[:SHOWN]
        if expected != got:
            self._differ("end", expected[:SHOWN], got[:SHOWN])

    def _differ(self, what: str, expected: str, got: str) -> None:
        if self.difference is None:
            self.difference = Difference(self._step, what, expected[:SHOWN], got[:SHOWN])
        self._stop.set()


def masked(shown: Content, whole: Content) -> bool:
    """Return whether a text is another one with parts masked."""
    if not isinstance(shown, str) or not isinstance(whole, str) or MASK not in shown:
        return False
    first, *rest = shown.split(MASK)
    if not whole.startswith(first):
        return False
    position = len(first)
    for piece in rest[:-1]:
        position = whole.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return whole.endswith(rest[-1]) and len(whole) - len(rest[-1]) >= position


def _split(listed: bytes) -> list[bytes]:
    return [listed[start : start + DIGEST_BYTES] for start in range(0, len(listed), DIGEST_BYTES)]


def _first_difference(expected: str, got: str) -> tuple[str, str]:
    """Return the first lines that differ."""
    ours, theirs = expected.splitlines(), got.splitlines()
    pairs = enumerate(zip(ours, theirs, strict=False))
    number = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    one, other = "".join(ours[number : number + 1]), "".join(theirs[number : number + 1])
    return f"line {number + 1}: {one}", f"line {number + 1}: {other}"


def _shown(message: Message | None) -> str:
    if message is None:
        return "nothing"
    shown: dict[str, Any] = msgspec.to_builtins(message)
    return msgspec.json.encode(shown).decode()[:SHOWN]
