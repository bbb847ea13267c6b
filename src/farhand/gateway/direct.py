"""The direct door's chats: one message in, one answer out, by the tool it names or by the agent.

What the user said is in the store before anything runs, so a tool that fails leaves it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import apsw
import msgspec

from farhand.agent.events import Completed, Event, StepStarted, TextDelta, ToolCalled, ToolEnded
from farhand.agent.outcome import Outcome
from farhand.gateway.admission import Denied
from farhand.gateway.catalog import SwitchedOff
from farhand.gateway.credentials import Credential, Scope
from farhand.gateway.gate import IdempotencyConflict
from farhand.gateway.hub import Hub
from farhand.gateway.open_call import NO_ERROR_GIVEN, OpenCall, new_call_id
from farhand.gateway.open_call import Outcome as CallOutcome
from farhand.gateway.policy import Forbidden
from farhand.llm.messages import ToolUse, Usage
from farhand.machine.refused_paths import as_raised
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import FarhandError, InvalidArgs, NotFound, ToolError
from farhand.store import chats
from farhand.store.calls import CallRecord, CallState
from farhand.store.chats import Chat, ChatKey, ChatMessage, Said, Words
from farhand.tools.tool import Tool

log = logging.getLogger("farhand.direct")

DIRECT = ("direct",)
"""The origin of a tool that is named in a chat, for the policy."""
NEW = "/new"
AFRESH = "This chat starts afresh."
MOST_ITEMS = 100
SHORT = 100
"""Characters of a text that nobody cuts."""

NO_USAGE = Usage()


class Turn(msgspec.Struct, frozen=True):
    """What somebody says in a chat; `tool` is the JSON of a tool and its input, where that is to answer."""

    chat: ChatKey
    messages: Sequence[tuple[str, str]]
    """Role and text of each."""
    credential: Credential
    tool: msgspec.Raw | None = None
    idempotency_key: str | None = None

    @property
    def text(self) -> str:
        """The words of the user."""
        return "\n".join([text for role, text in self.messages if role == "user"]).strip()


class Agent(Protocol):
    """Who answers a turn that names no tool."""

    def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """The events of the run, as `farhand.agent.events` promises them; whoever closes this ends the run."""
        ...

    async def forget(self, chat: ChatKey) -> None:
        """The chat starts afresh."""
        ...


class NoModel(FarhandError):
    """Nobody is there to answer without a tool."""


class ItemFailed(FarhandError):
    """One of several inputs failed; those before it were done, those after it were not begun."""

    def __init__(self, item: int, error: ToolError, done: Sequence[msgspec.Raw]) -> None:
        super().__init__(f"items[{item}]: {error.message}")
        self.item = item
        self.error = error
        self.done = tuple(done)


class Read(msgspec.Struct, frozen=True):
    """What a tool that only reads gave: the call, its result, and the text of that."""

    call: ToolCall
    result: msgspec.Raw
    text: str


class _ToolWords(msgspec.Struct):
    """`biz_params.tool`."""

    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")
    items: list[msgspec.Raw] | None = None


class _Text(msgspec.Struct):
    text: str = ""


class _Saying:
    """What is said in a turn that one call answers (`open_call.Saying`)."""

    __slots__ = ("_at", "_told", "_turn", "reply", "said")

    def __init__(self, turn: Turn, at: int, told: Callable[[Any, msgspec.Raw], str]) -> None:
        self._turn = turn
        self._at = at
        self._told = told
        self.said: Said | None = None
        """Where the question was put, once that was done apart from the answer."""
        self.reply: str | None = None
        """The answer, where it is kept with the question."""

    def hear(self, store: apsw.Connection) -> None:
        self.said = chats.hear(store, self._turn.chat, self._turn.messages, self._at, new_call_id)

    def words(self, value: Mapping[str, Any], result: msgspec.Raw) -> Words:
        self.reply = self._told(value.get("text"), result)
        return Words(self._turn.chat, self._turn.messages, self._at, self.reply)


class Direct:
    """Answers turns. `agent` answers those that name no tool."""

    def __init__(self, hub: Hub, tools: Iterable[Tool], agent: Agent | None = None) -> None:
        self._gate = hub.gate
        self._secrets = hub.secrets
        self._catalog = hub.catalog
        self._database = hub.database
        self._clock = hub.roster.clock
        self._tools = {tool.name: tool for tool in tools}
        self._agent = agent

    def _told(self, result: msgspec.Raw) -> str:
        """The reply that a result comes to."""
        return self._told_of(msgspec.json.decode(result, type=_Text).text, result)

    def _told_of(self, text: Any, result: msgspec.Raw) -> str:
        """The text of a result, or where that is blank the whole."""
        told = text if isinstance(text, str) and text.strip() else bytes(result).decode()
        # Half a secret is not known for one: it is hidden before the text is cut to be short.
        return told if len(told) <= SHORT else self._secrets.hide_text(told)

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """What happens, as it happens. Whoever closes this early ends what runs.

        Raises ToolError or ItemFailed for a tool that failed, NoModel, StoreError, IdempotencyConflict; whatever is
        wrong with the turn itself before the first event.
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
                        self._say(said, event.reply)
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
                outcome = await self._run(call, tool, turn.credential, key and f"{key}#{number}" if several else key)
            except IdempotencyConflict:
                self._take_back(said)
                raise
            if outcome.repeated:
                use = msgspec.structs.replace(use, id=outcome.record.id)
                self._take_back(said)
                said = None
            ended = outcome.result
            if ended.error is not None:
                error = outcome.raised or _kept_error(outcome.record)
                raise ItemFailed(number, error, results) if several else error
            results.append(ended.result)
            texts.append(self._told(ended.result))
            seconds = (outcome.record.duration_ms or 0.0) / 1000
            yield ToolEnded(1, use, Outcome(texts[-1], result=ended.result), seconds)
        reply = "\n\n".join(texts)
        self._say(said, reply)
        yield TextDelta(1, reply)
        yield Completed(reply, NO_USAGE, 1)

    def answer_at_once(
        self, turn: Turn, then: Callable[[Read], None], failed: Callable[[str, Exception], None]
    ) -> Callable[[], None] | None:
        """`answer` without a task, for one input of a tool that only reads; None, with nothing done, for other turns.

        `then` is given what was read, perhaps before this returns, `failed` the id of the call and why not. What is
        returned is to be called by a caller who hangs up.
        """
        if turn.tool is None or turn.idempotency_key is not None or turn.text.lower() == NEW:
            return None
        try:
            tool, inputs, several = self._read(turn.tool)
        except ToolError:
            return None
        if several or tool.at_once is None or not turn.credential.may(Scope.TOOLS_READ):
            return None
        call = ToolCall(new_call_id(), tool.name, inputs[0], turn.chat.session_id)
        saying = _Saying(turn, self._clock(), self._told_of)

        def ended(record: CallRecord) -> None:
            if record.result is None:
                raised = opened.raised if opened is not None else None
                failed(call.id, raised or _kept_error(record))
                return
            text = saying.reply
            if text is None:
                text = self._told(record.result)
                self._say(saying.said, text, behind=True)
            then(Read(call, record.result, text))

        opened: OpenCall | None = None
        opened = self._gate.run(call, turn.credential, ended, lambda lost: failed(call.id, lost), tool, DIRECT, saying)
        return lambda: None if opened is None else self._gate.abandon(opened)

    # -- chats ------------------------------------------------------------------------------------------

    async def chats(self, filters: dict[str, str], limit: int) -> list[Chat]:
        await self._settled()
        found = await self._database.read(lambda store: chats.chats(store, filters, limit))
        # A name is the beginning of what was said first, and may end within a secret.
        return [msgspec.structs.replace(chat, name=self._secrets.hide_piece(chat.name, after=True)) for chat in found]

    async def history(self, chat_id: str) -> list[ChatMessage] | None:
        await self._settled()
        return await self._database.read(lambda store: chats.history(store, chat_id))

    async def remove(self, chat_id: str) -> bool:
        return await self._database.write(lambda store: chats.remove(store, chat_id))

    async def _settled(self) -> None:
        """What was said so far is there to be read."""
        await self._database.write(lambda _: None, durable=False)

    def _hear(self, turn: Turn) -> asyncio.Future[Said]:
        now = self._clock()
        return self._database.write(
            lambda store: chats.hear(store, turn.chat, turn.messages, now, new_call_id), durable=False
        )

    def _say(self, said: Said | None, text: str, *, behind: bool = False) -> None:
        """Keep an answer; unless `behind`, it is kept when this returns."""
        if said is not None:
            now = self._clock()

            def say(store: apsw.Connection) -> int:
                return chats.say(store, said.chat, "assistant", text, now)

            if behind:
                self._database.write_behind(say, _not_kept)
            else:
                self._database.write_then(say, _not_kept, durable=False, at_once=True)

    def _take_back(self, said: Said | None) -> None:
        """A request that came again was heard the first time."""
        if said is not None:
            self._database.write_behind(lambda store: chats.take_back(store, said), _not_kept)

    async def _start_afresh(self, turn: Turn) -> None:
        if not turn.credential.may(Scope.CHAT):
            raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which {NEW} needs")
        await self._database.write(lambda store: chats.forget(store, turn.chat))
        if self._agent is not None:
            await self._agent.forget(turn.chat)

    # -- tools ------------------------------------------------------------------------------------------

    def _read(self, text: msgspec.Raw) -> tuple[Tool, list[msgspec.Raw], bool]:
        """The tool, its inputs, and whether they are several. Raises InvalidArgs, SwitchedOff, NotFound."""
        try:
            words = msgspec.json.decode(text, type=_ToolWords)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidArgs(_worded(str(error))) from None
        if not words.name.strip():
            raise InvalidArgs("biz_params.tool.name cannot be empty")
        if self._catalog.switched_off(words.name):
            raise SwitchedOff(f"the tool {words.name!r} is disabled by the settings ([tools] disabled)")
        tool = self._tools.get(words.name)
        if tool is None:
            raise NotFound(f"tool {words.name!r} not found; there are {', '.join(self._tools)}")
        items = words.items
        if items is None and b'"items"' in bytes(words.input):
            items = _items(words.input)
        if items is None:
            return tool, [_input("biz_params.tool.input", words.input)], False
        if not 1 <= len(items) <= MOST_ITEMS:
            raise InvalidArgs(f"items must be 1 to {MOST_ITEMS} inputs, not {len(items)}")
        return tool, [_input(f"items[{number}]", item) for number, item in enumerate(items)], True

    async def _run(self, call: ToolCall, tool: Tool, credential: Credential, key: str | None) -> CallOutcome:
        opened = await self._gate.begin(call, credential=credential, own=tool, idempotency_key=key, origins=DIRECT)
        if isinstance(opened, CallOutcome):
            return opened
        try:
            return await self._gate.wait(opened)
        except BaseException:
            self._gate.abandon(opened)
            raise

    # -- the agent --------------------------------------------------------------------------------------

    def _answering(self, turn: Turn) -> Agent:
        """Raises Denied, NoModel."""
        if not turn.credential.may(Scope.CHAT):
            raise Denied(f"this credential lacks the scope {Scope.CHAT.value!r}, which a chat with the agent needs")
        if self._agent is None:
            raise NoModel(
                "no model is configured: set OPENAI_API_KEY, and OPENAI_BASE_URL and FARHAND_MODEL where they are not "
                "the standard ones; a request with biz_params.tool needs no model"
            )
        return self._agent


def _kept_error(record: CallRecord) -> ToolError:
    """Why a call failed, by its record alone: a request that is repeated is told what the first one was."""
    message = record.error_message or NO_ERROR_GIVEN
    if record.state is CallState.DENIED:
        return Forbidden(message)
    return as_raised(record.error_kind or "failed", message)


def _input(place: str, text: msgspec.Raw) -> msgspec.Raw:
    """The input of a tool as an object; null is an empty one. Raises InvalidArgs."""
    data = bytes(text)
    if data == b"null":
        return msgspec.Raw(b"{}")
    if not data.startswith(b"{"):
        raise InvalidArgs(f"{place} must be an object")
    return text


def _items(text: msgspec.Raw) -> list[msgspec.Raw] | None:
    """The inputs that an input carries under `items`, where it does."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return None
    if "items" not in fields:
        return None
    try:
        return msgspec.json.decode(fields["items"], type=list[msgspec.Raw])
    except msgspec.MsgspecError:
        raise InvalidArgs("biz_params.tool.input.items must be a list of inputs") from None


def _worded(text: str) -> str:
    """`Expected `str`, got `int` - at `$.name`` -> `biz_params.tool.name: expected str, got int`."""
    reason, _, place = text.replace("`", "'").partition(" - at ")
    place = place.strip("'").removeprefix("$")
    if reason.startswith("Object missing required field"):
        return "biz_params.tool.name is required"
    return f"biz_params.tool{place}: {reason[:1].lower()}{reason[1:]}"


def _not_kept(_value: Any, error: Exception | None) -> None:
    # A chat that was started afresh meanwhile has no place for what belonged to the old one.
    if error is not None and not isinstance(error, apsw.ConstraintError):
        log.error("a message of a chat could not be kept: %s", error)
