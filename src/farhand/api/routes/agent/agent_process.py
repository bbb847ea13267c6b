"""`POST /agent/process` and its chats. Names, codes and events are those of a published guide, which clients follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable
from typing import Any

import msgspec

from farhand.agent.events import Completed, Event, RunFailed, StepStarted, StepText, Stopped, ToolCalled, ToolEnded
from farhand.api.server.http import Problem, Reply, Request, existing, invalid, json_reply, read_json, unknown
from farhand.api.server.router import EVENTS, JSON, Query, decoder_of, route
from farhand.api.server.streams import EVENT_STREAM, until_gone, watching
from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import OverBudget
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import SwitchedOff
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY, IdempotencyConflict
from farhand.gateway.calls.policy import Forbidden
from farhand.gateway.sessions.agent_process import Direct, ItemFailed, Turn
from farhand.llm.messages import Role
from farhand.machine.files.refused_paths import AlreadyExists, ForbiddenPath
from farhand.protocol.calls import NULL
from farhand.protocol.errors import FarhandError, InvalidArgs, NotFound, ToolError
from farhand.protocol.freeze import Frozen
from farhand.store.ports import StoreError
from farhand.store.tables.chats import Chat, ChatKey

MOST_KEY_CHARACTERS = 256
SUMMARY_CHARACTERS = 160
MOST_CHATS = 1000
GUIDE_CHANNELS = frozenset({"console", "webhook", "qq"})
CHAT_FILTERS = ("session_id", "user_id", "channel")
CHAT_QUERY = (
    Query("session_id", "Only chats of this session."),
    Query("user_id", "Only chats of this user."),
    Query("channel", "Only chats of this channel."),
    Query("limit", f"How many at most: 1 to {MOST_CHATS}, 100 by default.", int),
)


class TextPart(msgspec.Struct):
    """A part of a message; only text is supported."""

    type: str = "text"
    text: str = ""


class InputMessage(msgspec.Struct):
    role: Role = "user"
    type: str = "message"
    content: str | list[TextPart] = ""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if part.type == "text")


class Business(msgspec.Struct):
    """`biz_params`; other fields are ignored."""

    # `{name, input}`, or `{name, items: [input, …]}`.
    tool: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)


class ProcessRequest(msgspec.Struct):
    session_id: str
    user_id: str
    input: list[InputMessage] = []
    channel: str | None = None
    stream: bool = False
    biz_params: Business | None = None


class StepStartedEvent(msgspec.Struct, tag="step_started"):
    step: int


class UseShown(msgspec.Struct):
    name: str
    input: Any


class ToolCallEvent(msgspec.Struct, tag="tool_call"):
    step: int
    tool_call: UseShown


class ResultShown(msgspec.Struct):
    name: str
    ok: bool
    summary: str


class ResultMeta(msgspec.Struct):
    result: Any


class ToolResultEvent(msgspec.Struct, tag="tool_result"):
    step: int
    tool_result: ResultShown
    meta: ResultMeta


class DeltaEvent(msgspec.Struct, tag="assistant_delta"):
    step: int
    delta: str


class CompletedEvent(msgspec.Struct, tag="completed"):
    step: int
    reply: str


ProcessEvent = StepStartedEvent | ToolCallEvent | ToolResultEvent | DeltaEvent | CompletedEvent


class ProcessAnswer(msgspec.Struct):
    reply: str
    events: list[ProcessEvent]


class SaidPart(msgspec.Struct):
    text: str
    type: str = "text"


class SaidMessage(msgspec.Struct):
    role: str
    content: list[SaidPart]
    at: int
    type: str = "message"


class ChatHistory(msgspec.Struct):
    messages: list[SaidMessage]


_encode = msgspec.json.Encoder().encode


class AgentProcessRoutes:
    def __init__(self, direct: Direct, ending: asyncio.Event, channels: Collection[str] = ()) -> None:
        """`channels`: names of channels in addition to those of the guide."""
        self._channels = GUIDE_CHANNELS | {name.lower() for name in channels}
        self._ending = ending
        self._direct = direct

    @route(
        "POST /agent/process",
        (Scope.TOOLS_READ, Scope.CHAT),
        "Send a message in a chat; the named tool or the agent answers.",
        body=ProcessRequest,
        body_raw=True,
        answer=ProcessAnswer,
        media=(JSON, EVENTS),
        errors=(404, 409, 423, 500, 502, 503),
        idempotent=True,
        narrow=True,
        content=True,
    )
    async def process(self, request: Request) -> Reply:
        wanted: ProcessRequest = read_json(await request.body(), decoder_of(ProcessRequest), malformed="invalid_json")
        turn = _turn(wanted, self._channels, request.credential, request.header(b"idempotency-key"))
        events = self._direct.answer(turn)
        if not wanted.stream:
            return await self._whole(request, events)
        first = b""
        try:
            while not first:  # errors before the first event are ordinary HTTP errors
                first = _lines(await anext(events))
        except FarhandError as error:
            raise problem(error) from None
        pieces = until_gone(request, _stream(first, events), self._ending)
        headers = [(b"x-accel-buffering", b"no")]
        return Reply(content_type=EVENT_STREAM, headers=headers, pieces=pieces)

    async def _whole(self, request: Request, events: AsyncGenerator[Event, None]) -> Reply:
        task = asyncio.current_task()
        assert task is not None
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        shown: list[ProcessEvent] = []
        reply = ""
        try:
            with watching(request, leave):
                async for event in events:
                    if isinstance(event, ToolCalled | ToolEnded):
                        request.id = event.use.id
                    shown += _shown(event)
                    if isinstance(event, Completed):
                        reply = event.reply
        except FarhandError as error:
            raise problem(error) from None
        except asyncio.CancelledError:
            if not left:
                raise
            raise Problem(400, "incomplete_request", "the client left before the answer") from None
        return Reply(_encode(ProcessAnswer(reply, shown)))

    @route(
        "GET /chats",
        Scope.READ,
        "Chats of `/agent/process`, most recently used first.",
        answer=list[Chat],
        query=CHAT_QUERY,
    )
    async def chats(self, request: Request) -> Reply:
        filters = {name: value for name in CHAT_FILTERS if (value := request.query(name)) is not None}
        return json_reply(await self._direct.chats(filters, request.query_int("limit", 100, 1, MOST_CHATS)))

    @route("GET /chats/{chat_id}", Scope.READ, "Messages of a chat.", answer=ChatHistory)
    async def chat(self, request: Request) -> Reply:
        chat_id = request.params["chat_id"]
        messages = existing(await self._direct.history(chat_id), "chat", chat_id)
        return json_reply(ChatHistory([SaidMessage(one.role, [SaidPart(one.text)], one.at) for one in messages]))

    @route("DELETE /chats/{chat_id}", Scope.CHAT, "Remove a chat and begin a new conversation in its session.")
    async def remove(self, request: Request) -> Reply:
        try:
            found = await self._direct.remove(request.params["chat_id"], request.credential)
        except FarhandError as error:
            raise problem(error) from None
        if not found:
            raise unknown("chat", request.params["chat_id"])
        return json_reply({"deleted": True})


def problem(error: FarhandError) -> Problem:
    """Return the guide's code and status of an error."""
    match error:
        case ItemFailed():
            inner = problem(error.error)
            return Problem(inner.status, inner.code, str(error), details={"item": error.item, "done": error.done})
        case ForbiddenPath():
            return Problem(403, "tool_forbidden_path", error.message)
        case SwitchedOff() | Frozen() | Forbidden():
            return Problem(403, "tool_disabled", error.message)
        case Denied():
            return Problem(403, "forbidden", error.message)
        case InvalidArgs():
            return Problem(400, "invalid_tool_input", error.message)
        case NotFound():
            return Problem(404, "tool_not_found", error.message)
        case AlreadyExists():
            return Problem(409, "tool_conflict", error.message)
        case OverBudget():
            return Problem(429, "too_many_requests", error.message)
        case ToolError():
            return Problem(500, "tool_error", error.message)
        case IdempotencyConflict():
            return Problem(409, "idempotency_conflict", str(error))
        case StoreError():
            return Problem(503, "not_recorded", f"nothing was run: {error}")
        case Problem():
            return error
    return Problem(500, "internal", str(error))


def _turn(wanted: ProcessRequest, channels: Collection[str], credential: Credential, key: str | None = None) -> Turn:
    """Convert a request into a turn of a chat. Raises Problem if it is invalid."""
    channel = (wanted.channel or "").strip().lower() or "console"
    for name, value in (("session_id", wanted.session_id), ("user_id", wanted.user_id), ("channel", channel)):
        if not value.strip():
            raise invalid(f"{name} is required")
        if len(value) > MOST_KEY_CHARACTERS:
            raise invalid(f"{name} has at most {MOST_KEY_CHARACTERS} characters")
    if channel not in channels:
        known = ", ".join(sorted(channels))
        raise Problem(400, "channel_not_supported", f"channel {channel!r} is not supported; supported: {known}")
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        raise invalid(f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
    tool = wanted.biz_params.tool if wanted.biz_params else NULL
    turn = Turn(
        ChatKey(wanted.session_id, wanted.user_id, channel),
        [(message.role, message.text) for message in wanted.input],
        credential,
        None if bytes(tool) == b"null" else tool,
        key,
    )
    if turn.tool is None and not turn.text:
        raise invalid("input must have a message of the user, or biz_params.tool name a tool")
    return turn


async def _stream(first: bytes, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for event in events:
            if lines := _lines(event):
                yield lines
    except FarhandError as error:
        yield _data(_error(problem(error)))
    finally:
        await events.aclose()
    yield b"data: [DONE]\n\n"


def _lines(event: Event) -> bytes:
    return b"".join([_data(shown) for shown in _shown(event)])


def _data(value: Any) -> bytes:
    return b"data: %b\n\n" % _encode(value)


def _error(problem: Problem) -> dict[str, Any]:
    meta: dict[str, Any] = {"code": problem.code, "message": str(problem)}
    if problem.details is not None:
        meta["details"] = problem.details
    return {"type": "error", "meta": meta}


def _shown(event: Event) -> Iterable[ProcessEvent]:
    """Convert an event to those of the guide, possibly none. Raises Problem for a failed run."""
    match event:
        case StepStarted():
            return (StepStartedEvent(event.step),)
        case StepText():
            return (DeltaEvent(event.step, event.text),)
        case ToolCalled():
            return (ToolCallEvent(event.step, UseShown(event.use.name, _arguments(event.use.arguments))),)
        case ToolEnded():
            outcome = event.outcome
            text = outcome.content if isinstance(outcome.content, str) else ""
            summary = text if len(text) <= SUMMARY_CHARACTERS else text[:SUMMARY_CHARACTERS] + "..."
            result = ResultShown(event.use.name, not outcome.is_error, summary)
            return (ToolResultEvent(event.step, result, ResultMeta(outcome.result)),)
        case Completed():
            return (CompletedEvent(event.steps, event.reply),)
        case RunFailed(kind="not_configured"):
            raise Problem(503, "model_not_configured", event.message)
        case RunFailed(kind="frozen"):
            raise Problem(423, "frozen", event.message)
        case RunFailed():
            raise Problem(502, "model_failed", event.message)
        case Stopped():
            raise Problem(409, "stopped", event.reason)
    return ()


def _arguments(text: str) -> Any:
    """Return a tool's arguments as an object; invalid JSON from a model stays text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
