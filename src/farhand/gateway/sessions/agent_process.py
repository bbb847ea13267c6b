"""The chats of `POST /agent/process`: each message is answered by the tool it names or by the agent.

A chat is a view of a session: what was said and answered there, by the agent or by tools. The user's message is stored
before anything runs, so it is kept even if the tool fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

import msgspec

from farhand.agent.events import (
    Completed,
    Event,
    RunFailed,
    StepStarted,
    StepText,
    Stopped,
    ToolCalled,
    ToolEnded,
)
from farhand.agent.tool_outcome import Outcome
from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import DailyBudget, message_budget
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import NO_ERROR_GIVEN, new_call_id, result_of
from farhand.gateway.calls.policy import Forbidden
from farhand.gateway.calls.refusals import ROW_BYTES
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.sessions.entries import entry_of, message_of
from farhand.gateway.sessions.keys import MAIN, MAX_NAME, process_key
from farhand.gateway.sessions.runs import Recorded
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Message, Role, ToolUse, Usage
from farhand.machine.files.refused_paths import as_raised
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import FarhandError, InvalidArgs, NotAllowed, NotFound, ToolError
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import chats, sessions
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.chats import Chat, ChatKey, ChatRecord
from farhand.store.tables.sessions import RunState, SessionRecord
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

# The origin of a tool that is named in a chat, for the policy.
DIRECT = ("direct",)
NEW = "/new"
AFRESH = "This chat starts afresh."
MOST_ITEMS = 100
# Texts of at most this many characters are never cut.
SHORT = 100
MOST_CHARACTERS = 8 * 1024 * 1024
# The roles of messages that are a part of the conversation.
SHOWN = ("user", "assistant")

NO_USAGE = Usage()


class Turn(msgspec.Struct, frozen=True):
    """A user's turn in a chat; `tool` is the JSON of a tool and its input, if a tool is to answer."""

    chat: ChatKey
    # Role and text of each message.
    messages: Sequence[tuple[Role, str]]
    credential: Credential
    tool: msgspec.Raw | None = None
    idempotency_key: str | None = None

    @property
    def text(self) -> str:
        return "\n".join([text for role, text in self.messages if role == "user"]).strip()

    @property
    def title(self) -> str:
        return next((text.strip() for _, text in self.messages if text.strip()), "")[:MAX_NAME]

    @property
    def session_key(self) -> str:
        return process_key(self.chat.channel, self.chat.user_id, self.chat.session_id)


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    text: str
    at: int


class Agent(Protocol):
    """The contract of the agent, which answers turns that name no tool."""

    def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield the events of the run as described in `farhand.agent.events`; closing this ends the run."""

    async def check_forget(self, key: str, credential: Credential) -> None:
        """Raise Denied if another credential started the agent's conversation in a session."""

    async def forget(self, key: str) -> None:
        """Start a new conversation in the session."""


class ItemFailed(FarhandError):
    """One of several inputs failed; those before it were done, those after it were not started."""

    def __init__(self, item: int, error: ToolError, done: Sequence[msgspec.Raw]) -> None:
        super().__init__(f"items[{item}]: {error.message}")
        self.item = item
        self.error = error
        self.done = tuple(done)


class _ToolWords(msgspec.Struct, forbid_unknown_fields=True):
    """`biz_params.tool`."""

    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")
    items: list[msgspec.Raw] | None = None


class _Text(msgspec.Struct):
    text: str = ""


class Direct:
    """Answers turns. `agent` answers those that name no tool."""

    def __init__(
        self,
        database: Store,
        gate: Gate,
        catalog: Catalog,
        tools: Iterable[Tool],
        agent: Agent,
        *,
        clock: Callable[[], int],
        budget: DailyBudget | None = None,
    ) -> None:
        self._budget = budget or message_budget()
        self._gate = gate
        self._catalog = catalog
        self._database = database
        self._clock = clock
        self._tools = {tool.name: tool for tool in tools}
        self._agent = agent

    def _reply_text(self, result: msgspec.Raw) -> str:
        """Return the text of a result, or its JSON if the text is blank."""
        text = msgspec.json.decode(result, type=_Text).text
        reply = text if text.strip() else bytes(result).decode()
        # The text is cut later, and part of a secret would not be recognised: redact before that.
        return reply if len(reply) <= SHORT else self._gate.secrets.redact_text(reply)

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield events as they happen. Closing this early ends what runs.

        Raises ToolError or ItemFailed for a tool that failed, NoModel, StoreError, IdempotencyConflict; errors in the
        turn itself are raised before the first event.
        """
        if turn.text.lower() == NEW:
            await self._start_afresh(turn)
            yield StepStarted(1, "")
            yield StepText(1, AFRESH)
            yield Completed(AFRESH, NO_USAGE, 1)
            return
        if turn.tool is None:
            if not turn.credential.may(Scope.CHAT):
                raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which a chat with the agent needs")
            async with aclosing(self._agent.answer(turn)) as events:
                async for event in events:
                    yield event
            return
        # With a key, the message may be one that the first request has stored.
        said = None if turn.idempotency_key else await self._store_turn(turn)
        try:
            tool, inputs, several = self._read(turn.tool)
        except ToolError:
            if turn.idempotency_key:
                await self._store_turn(turn)
            raise
        yield StepStarted(1, "")
        results: list[msgspec.Raw] = []
        texts: list[str] = []
        for number, arguments in enumerate(inputs):
            call = ToolCall(new_call_id(), tool.name, arguments, turn.chat.session_id)
            use = ToolUse(call.id, tool.name, bytes(arguments).decode())
            yield ToolCalled(1, use)
            key = turn.idempotency_key
            opened = await self._gate.begin(
                call,
                principal=Principal(turn.credential),
                own=tool,
                idempotency_key=f"{key}#{number}" if key and several else key,
                origins=DIRECT,
            )
            try:
                if key and number == 0 and not opened.repeated:
                    said = await self._store_turn(turn)
                record = await self._gate.wait(opened)
            except BaseException:
                self._gate.abandon(opened)
                raise
            if opened.repeated:
                use = msgspec.structs.replace(use, id=record.id)
                said = None
            ended = result_of(record)
            if ended.error is not None:
                error = opened.raised or _kept_error(record)
                raise ItemFailed(number, error, results) if several else error
            results.append(ended.result)
            texts.append(self._reply_text(ended.result))
            seconds = (record.duration_ms or 0.0) / 1000
            yield ToolEnded(1, use, Outcome(texts[-1], result=ended.result), seconds)
        reply = "\n\n".join(texts)
        await self._store_answer(said, reply)
        yield StepText(1, reply)
        yield Completed(reply, NO_USAGE, 1)

    # -- chats ------------------------------------------------------------------------------------------

    async def chats(self, filters: dict[str, str], limit: int) -> list[Chat]:
        found = await self._database.read(lambda store: chats.chats(store, filters, limit))
        # A chat's name is the beginning of its first message, and may end within a secret.
        return [
            msgspec.structs.replace(chat, name=self._gate.secrets.redact_excerpt(chat.name, after=True))
            for chat in found
        ]

    async def history(self, chat_id: str) -> list[ChatMessage] | None:
        """Return what was said and answered, at most the newest `MOST_CHARACTERS`; None if there is no such chat."""

        def read(store: Tx) -> list[ChatMessage] | None:
            chat = chats.find(store, chat_id)
            if chat is None:
                return None
            found: list[ChatMessage] = []
            size = 0
            for entry in sessions.newest_entries(store, chat.session_key, chat.first_entry):
                message = message_of(entry)
                if entry.keeps_from is None and message.role in SHOWN and not message.tool_calls:
                    found.append(ChatMessage(message.role, message.text, entry.at))
                    size += len(message.text)
                if size > MOST_CHARACTERS:
                    break
            return found[::-1]

        return await self._database.read(read)

    async def remove(self, chat_id: str, credential: Credential) -> bool:
        """Remove a chat; return False if none exists. Raises Denied for another credential's chat."""
        found = await self._database.read(lambda store: chats.find(store, chat_id))
        if found is not None:
            await self._forget(found.session_key, found, credential, "removing it")
        return found is not None

    async def _store_turn(self, turn: Turn) -> SessionRecord | None:
        """Store what the user said to a tool; return its session, or None if it is not stored (see `enter_chat`)."""
        now = self._clock()
        # A chat without a message is stored, too.
        self._budget.take(turn.credential, ROW_BYTES + sum(len(text) for _, text in turn.messages), now)

        def write(store: Tx) -> SessionRecord | None:
            new = SessionRecord(
                key=turn.session_key, id=new_call_id(), agent_id=MAIN, title=turn.title, created_at=now, updated_at=now
            )
            session = enter_chat(turn, store, sessions.add_session(store, new), now)
            if session is not None:
                for role, text in turn.messages:
                    if role in SHOWN and text.strip():
                        sessions.append_entry(store, entry_of(session, None, now, Message(role, text)))
            return session

        return await self._database.write(write, durable=False)

    async def _store_answer(self, said: SessionRecord | None, text: str) -> None:
        """Store an answer. Returns once it is committed, so that a caller finds it again if the gateway is killed."""
        if said is not None:
            now, session = self._clock(), said

            def write(store: Tx) -> None:
                current = sessions.find_session(store, session.key)
                if current is not None and current.id == session.id:  # else a new conversation began meanwhile
                    sessions.append_entry(store, entry_of(session, None, now, Message("assistant", text)))

            try:
                await self._database.write(write, durable=False)
            except StoreError as error:
                log.error("failed to store a message of a chat: %s", error)

    async def _start_afresh(self, turn: Turn) -> None:
        if not turn.credential.may(Scope.CHAT):
            raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which {NEW} needs")
        found = await self._database.read(lambda store: chats.find(store, turn.chat))
        await self._forget(turn.session_key, found, turn.credential, NEW)

    async def _forget(self, key: str, chat: ChatRecord | None, credential: Credential, what: str) -> None:
        """Remove a chat and begin a new conversation in its session; the old one stays in the session's history."""
        if chat is not None and chat.made_by != credential.id and not credential.may(Scope.ADMIN):
            raise Denied(
                f"another credential began this chat; {what} needs that one, or the scope {Scope.ADMIN.value!r}"
            )
        # The chat and the agent's conversation in it can belong to different credentials.
        await self._agent.check_forget(key, credential)
        if chat is not None:
            await self._database.write(lambda store: chats.remove(store, chat.id))
        await self._agent.forget(key)

    # -- tools ------------------------------------------------------------------------------------------

    def _read(self, text: msgspec.Raw) -> tuple[Tool, list[msgspec.Raw], bool]:
        """Return the tool, its inputs, and whether they are a list. Raises InvalidArgs, SwitchedOff, NotFound."""
        try:
            words = msgspec.json.decode(text, type=_ToolWords)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidArgs(_worded(str(error))) from None
        name = words.name.strip().lower()
        if not name:
            raise InvalidArgs("biz_params.tool.name cannot be empty")
        self._catalog.refuse_switched_off(name)
        tool = self._tools.get(name)
        if tool is None:
            raise NotFound(f"tool {name!r} not found; there are {', '.join(self._tools)}")
        items = words.items
        if b'"items"' in bytes(words.input):
            inner = _items(words.input)
            if inner is not None and items is not None:
                raise InvalidArgs("biz_params.tool has items twice: beside input and in it; give one of them")
            items = inner if items is None else items
        if items is None:
            return tool, [_input("biz_params.tool.input", words.input)], False
        if not 1 <= len(items) <= MOST_ITEMS:
            raise InvalidArgs(f"items must be 1 to {MOST_ITEMS} inputs, not {len(items)}")
        return tool, [_input(f"items[{number}]", item) for number, item in enumerate(items)], True


def enter_chat(turn: Turn, store: Tx, session: SessionRecord, now: int) -> SessionRecord | None:
    """Make the chat of a turn unless it exists; return its session, with the conversation to continue.

    What tools said to one credential must not reach the agent of another. So an agent's turn begins a new conversation
    if only tools have answered another credential in this chat, and a tool's turn is not stored (None is returned) in
    the chat of another credential, or beside the agent of another.
    """
    chat, credential = chats.find(store, turn.chat), turn.credential.id
    if chat is None:
        chats.add(store, new_call_id(), turn.chat, session.key, turn.title, credential, now)
    elif turn.tool is not None:
        others = sessions.has_runs(store, session.key, since=chat.created_at, besides=credential)
        return None if others or chat.made_by != credential else session
    elif chat.made_by == credential or sessions.has_runs(store, session.key, since=chat.created_at):
        return session
    return sessions.begin_anew(store, session, new_call_id(), now) if session.messages else session


def _kept_error(record: CallRecord) -> ToolError:
    """Return the error of a call from its record, so that a repeated request gets the same answer."""
    message = record.error_message or NO_ERROR_GIVEN
    if record.state is CallState.DENIED:
        return Forbidden(message)
    return as_raised(record.error_kind or "failed", message)


def _input(place: str, text: msgspec.Raw) -> msgspec.Raw:
    """Return the input of a tool as an object; null means an empty one. Raises InvalidArgs."""
    data = bytes(text)
    if data == b"null":
        return msgspec.Raw(b"{}")
    if not data.startswith(b"{"):
        raise InvalidArgs(f"{place} must be an object")
    return text


def _items(text: msgspec.Raw) -> list[msgspec.Raw] | None:
    """Return the inputs in `items`, if there are any."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return None
    if "items" not in fields:
        return None
    if len(fields) > 1:
        beside = next(name for name in fields if name != "items")
        raise InvalidArgs(f"biz_params.tool.input has both 'items' and {beside[:100]!r}; put each input into items")
    try:
        return msgspec.json.decode(fields["items"], type=list[msgspec.Raw])
    except msgspec.MsgspecError:
        raise InvalidArgs("biz_params.tool.input.items must be a list of inputs") from None


def _worded(text: str) -> str:
    """Reword `Expected `str`, got `int` - at `$.name`` as `biz_params.tool.name: expected str, got int`."""
    reason, _, place = text.replace("`", "'").partition(" - at ")
    place = place.strip("'").removeprefix("$")
    if reason.startswith("Object missing required field"):
        return "biz_params.tool.name is required"
    return f"biz_params.tool{place}: {reason[:1].lower()}{reason[1:]}"


class SessionAgent:
    """The agent: answers turns with runs of their chat's session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield the events of the run, the last one `Completed`, `Stopped` or `RunFailed`; closing this ends the run.

        Raises ToolError for a rejected message, IdempotencyConflict, StoreError.
        """
        try:
            run = await self._sessions.send(
                turn.session_key,
                turn.text,
                origin="direct",
                credential=turn.credential,
                title=turn.title,
                own_key=True,
                enter=partial(enter_chat, turn),
                idempotency_key=turn.idempotency_key,
            )
        except NotAllowed as error:
            raise Denied(error.message) from None
        try:
            async for event in run.follow():
                if isinstance(event, Completed | Stopped | RunFailed):
                    break  # the outcome has the same information, even if these events were not sent
                if not isinstance(event, Recorded | ApprovalRequested):
                    yield event
            outcome = await run.reply()
        finally:
            if not run.over:
                self._sessions.ask_to_stop(run, RunState.STOPPED, "the client disconnected")
        if outcome.state is RunState.STOPPED:
            yield Stopped(outcome.text, outcome.usage, outcome.steps)
        elif outcome.error is not None:
            yield RunFailed(outcome.error.kind, outcome.error.message, outcome.usage, outcome.steps)
        else:
            yield Completed(outcome.reply, outcome.usage, outcome.steps)

    async def check_forget(self, key: str, credential: Credential) -> None:
        """Raise Denied if another credential started the conversation in a session."""
        try:
            await self._sessions.check_owner(key, credential)
        except NotAllowed as error:
            raise Denied(error.message) from None

    async def forget(self, key: str) -> None:
        """Stop what runs in a session and start a new conversation; the old one stays in the history."""
        await self._sessions.stop(key, "a new conversation was begun")
        with contextlib.suppress(NotFound):
            await self._sessions.begin_anew(key)
