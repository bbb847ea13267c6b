"""The chats of `POST /agent/process`: each message is answered by the tool it names or by the agent.

The user's message is stored before anything runs, so it is kept even if the tool fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from farhand.agent.events import Completed, Event, StepStarted, TextDelta, ToolCalled, ToolEnded
from farhand.agent.tool_outcome import Outcome
from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import DailyBudget, message_budget
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Catalog, SwitchedOff
from farhand.gateway.calls.gate import Gate, IdempotencyConflict
from farhand.gateway.calls.open_call import NO_ERROR_GIVEN, OpenCall, new_call_id, result_of
from farhand.gateway.calls.policy import Forbidden
from farhand.llm.messages import ToolUse, Usage
from farhand.machine.files.refused_paths import as_raised
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import FarhandError, InvalidArgs, NotFound, ToolError
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import IntegrityError, Store, Tx
from farhand.store.tables import chats
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.chats import Chat, ChatKey, ChatMessage, Said
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

# The origin of a tool that is named in a chat, for the policy.
DIRECT = ("direct",)
NEW = "/new"
AFRESH = "This chat starts afresh."
MOST_ITEMS = 100
# Texts of at most this many characters are never cut.
SHORT = 100

NO_USAGE = Usage()


class Turn(msgspec.Struct, frozen=True):
    """A user's turn in a chat; `tool` is the JSON of a tool and its input, if a tool is to answer."""

    chat: ChatKey
    # Role and text of each message.
    messages: Sequence[tuple[str, str]]
    credential: Credential
    tool: msgspec.Raw | None = None
    idempotency_key: str | None = None

    @property
    def text(self) -> str:
        """Return the user's text."""
        return "\n".join([text for role, text in self.messages if role == "user"]).strip()


class Agent(Protocol):
    """The contract of the agent, which answers turns that name no tool."""

    def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield the events of the run as described in `farhand.agent.events`; closing this ends the run."""
        ...

    async def check_forget(self, chat: ChatKey, credential: Credential) -> None:
        """Raise Denied if another credential started the agent's conversation in a chat."""
        ...

    async def forget(self, chat: ChatKey) -> None:
        """Start a new conversation in the chat."""
        ...


class NoModel(FarhandError):
    """There is no model to answer without a tool."""


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
        agent: Agent | None = None,
        *,
        clock: Callable[[], int],
        secrets: KnownSecrets,
        budget: DailyBudget | None = None,
    ) -> None:
        self._budget = budget or message_budget()
        self._gate = gate
        self._secrets = secrets
        self._catalog = catalog
        self._database = database
        self._clock = clock
        self._tools = {tool.name: tool for tool in tools}
        self._agent = agent

    def _told(self, result: msgspec.Raw) -> str:
        """Return the text of a result, or its JSON if the text is blank."""
        text = msgspec.json.decode(result, type=_Text).text
        reply = text if text.strip() else bytes(result).decode()
        # The text is cut later, and part of a secret would not be recognised: redact before that.
        return reply if len(reply) <= SHORT else self._secrets.redact_text(reply)

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield events as they happen. Closing this early ends what runs.

        Raises ToolError or ItemFailed for a tool that failed, NoModel, StoreError, IdempotencyConflict; errors in the
        turn itself are raised before the first event.
        """
        if turn.text.lower() == NEW:
            await self._start_afresh(turn)
            yield StepStarted(1, "")
            yield TextDelta(1, AFRESH)
            yield Completed(AFRESH, NO_USAGE, 1)
            return
        said: Said | None = await self._hear(turn)
        if turn.tool is None:
            async with aclosing(self._answering(turn).answer(turn)) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        await self._say(said, event.reply)
                    yield event
            return
        tool, inputs, several = self._read(turn.tool)
        yield StepStarted(1, "")
        results: list[msgspec.Raw] = []
        texts: list[str] = []
        for number, arguments in enumerate(inputs):
            call = ToolCall(new_call_id(), tool.name, arguments, turn.chat.session_id)
            use = ToolUse(call.id, tool.name, bytes(arguments).decode())
            yield ToolCalled(1, use)
            key = turn.idempotency_key
            try:
                key = key and f"{key}#{number}" if several else key
                opened, record = await self._run(call, tool, turn.credential, key)
            except IdempotencyConflict:
                self._take_back(said)
                raise
            if opened.repeated:
                use = msgspec.structs.replace(use, id=record.id)
                self._take_back(said)
                said = None
            ended = result_of(record)
            if ended.error is not None:
                error = opened.raised or _kept_error(record)
                raise ItemFailed(number, error, results) if several else error
            results.append(ended.result)
            texts.append(self._told(ended.result))
            seconds = (record.duration_ms or 0.0) / 1000
            yield ToolEnded(1, use, Outcome(texts[-1], result=ended.result), seconds)
        reply = "\n\n".join(texts)
        await self._say(said, reply)
        yield TextDelta(1, reply)
        yield Completed(reply, NO_USAGE, 1)

    # -- chats ------------------------------------------------------------------------------------------

    async def chats(self, filters: dict[str, str], limit: int) -> list[Chat]:
        found = await self._database.read(lambda store: chats.chats(store, filters, limit))
        # A chat's name is the beginning of its first message, and may end within a secret.
        return [
            msgspec.structs.replace(chat, name=self._secrets.redact_excerpt(chat.name, after=True)) for chat in found
        ]

    async def history(self, chat_id: str) -> list[ChatMessage] | None:
        return await self._database.read(lambda store: chats.history(store, chat_id))

    async def remove(self, chat_id: str, credential: Credential) -> bool:
        """Remove a chat and its messages; return False if none exists. Raises Denied for another credential's chat."""

        def remove(store: Tx) -> bool:
            if not _may_change(chats.maker(store, chat_id), credential):
                raise _not_theirs("removing it")
            return chats.remove(store, chat_id)

        return await self._database.write(remove)

    async def _hear(self, turn: Turn) -> Said | None:
        """Store the user's message.

        Returns None, and stores nothing, in a chat of another credential that this one may not read: a tool still
        answers, and the agent does if its conversation there belongs to this credential.
        """
        now = self._clock()
        self._budget.take(turn.credential, sum(len(text) for _, text in turn.messages), now)

        def hear(store: Tx) -> Said | None:
            if not _may_change(chats.maker(store, turn.chat), turn.credential, Scope.READ):
                return None
            return chats.hear(store, turn.chat, turn.messages, now, new_call_id, turn.credential.id)

        return await self._database.write(hear, durable=False)

    async def _say(self, said: Said | None, text: str) -> None:
        """Store an answer. Returns once it is committed, so that a caller finds it again if the gateway is killed."""
        if said is not None:
            now = self._clock()
            written = self._database.write(
                lambda store: chats.say(store, said.chat, "assistant", text, now), durable=False
            )
            await asyncio.wait({written})
            _log_loss(written)

    def _take_back(self, said: Said | None) -> None:
        """Remove the message of a repeated request, which the first one has stored."""
        if said is not None:
            written = self._database.write(lambda store: chats.take_back(store, said), durable=False)
            written.add_done_callback(_log_loss)

    async def _start_afresh(self, turn: Turn) -> None:
        if not turn.credential.may(Scope.CHAT):
            raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which {NEW} needs")

        def forget(store: Tx) -> None:
            if not _may_change(chats.maker(store, turn.chat), turn.credential):
                raise _not_theirs(NEW)
            chats.forget(store, turn.chat)

        if self._agent is not None:
            # The chat and the agent's conversation in it can belong to different credentials.
            await self._agent.check_forget(turn.chat, turn.credential)
        await self._database.write(forget)
        if self._agent is not None:
            await self._agent.forget(turn.chat)

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
        if self._catalog.switched_off(name):
            raise SwitchedOff(f"the tool {name!r} is disabled by the settings ([tools] disabled)")
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

    async def _run(
        self, call: ToolCall, tool: Tool, credential: Credential, key: str | None
    ) -> tuple[OpenCall, CallRecord]:
        """Run a tool; return its call and the record of it at the end."""
        opened = await self._gate.begin(
            call, principal=Principal(credential), own=tool, idempotency_key=key, origins=DIRECT
        )
        try:
            return opened, await self._gate.wait(opened)
        except BaseException:
            self._gate.abandon(opened)
            raise

    # -- the agent --------------------------------------------------------------------------------------

    def _answering(self, turn: Turn) -> Agent:
        """Return the agent for a turn. Raises Denied, NoModel."""
        if not turn.credential.may(Scope.CHAT):
            raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which a chat with the agent needs")
        if self._agent is None:
            raise NoModel(
                "no model is configured: set OPENAI_API_KEY, and OPENAI_BASE_URL and FARHAND_MODEL where they are not "
                "the standard ones; a request with biz_params.tool needs no model"
            )
        return self._agent


def _may_change(maker: str | None, credential: Credential, scope: Scope = Scope.ADMIN) -> bool:
    """Return whether a chat is new or the credential's own; with the scope, any chat may be changed."""
    return maker in (None, credential.id) or credential.may(scope)


def _not_theirs(what: str) -> Denied:
    return Denied(f"another credential began this chat; {what} needs that one, or the scope {Scope.ADMIN.value!r}")


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


def _log_loss(written: asyncio.Future[Any]) -> None:
    error = None if written.cancelled() else written.exception()
    # A chat that was cleared meanwhile rejects messages of the old conversation.
    if error is not None and not isinstance(error, IntegrityError):
        log.error("failed to store a message of a chat: %s", error)
