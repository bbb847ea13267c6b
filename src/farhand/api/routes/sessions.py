"""Sessions and runs: list, read, send, follow, stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.router import EVENTS, Query, route
from farhand.api.server.streams import EVENT_STREAM, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.daily_budget import OverBudget
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.forking import Forked, Forks
from farhand.gateway.sessions.replay import ReplayedRun, recorded, replay
from farhand.gateway.sessions.runner import Turns
from farhand.gateway.sessions.runs import Run, RunEvent, RunOptions, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.gateway.sessions.tools import message_of
from farhand.llm.model import Thinking
from farhand.protocol.errors import ErrorKind, FarhandError, NotAllowed, ToolError
from farhand.store.tables.sessions import LISTED, MOST_HISTORY_BYTES, ONCE, Entry, SessionRecord

MAX_WAIT_SECONDS = 600.0


class SendRequest(msgspec.Struct):
    message: str
    wait_seconds: float = 0.0
    model: str | None = None
    thinking: Thinking | None = None
    timeout_seconds: float | None = None
    record: bool = False


class ForkRequest(msgspec.Struct, forbid_unknown_fields=True):
    # Of the journal: what was said up to then.
    event: int | None = None
    # The number of a message in the history, instead.
    message: int | None = None
    # The key of the new session; one is made without it.
    to: str | None = None


PAGE = (
    Query("limit", "How many at most: 1 to 1000, 50 by default.", int),
    Query("offset", "How many to pass over.", int),
)
HISTORY = (
    PAGE[0],
    Query("before", "Older than this entry.", int),
    Query("conversation", "The id of an earlier conversation, or `all`."),
)


class SessionRoutes:
    def __init__(self, sessions: Sessions, turns: Turns, ending: asyncio.Event) -> None:
        self._sessions = sessions
        self._turns = turns
        self._ending = ending
        self._forks = Forks(sessions, sessions.now)

    @route(
        "GET",
        "/v1/sessions",
        Scope.READ,
        "Sessions, those used last first.",
        query=(*PAGE, Query("all", "1 shows those of clients that keep the conversation, too.")),
    )
    async def list(self, request: Request) -> Any:
        limit = request.query_int("limit", 50, 1, 1000)
        offset = request.query_int("offset", 0, 0, 2**31)
        kinds = (*LISTED, ONCE) if request.query("all") in ("1", "true") else LISTED
        found, count = await self._sessions.listed(limit, offset, kinds=kinds)
        return {"sessions": [self._view(record) for record in found], "count": count}

    @route("GET", "/v1/sessions/{key}", Scope.READ, "One session.")
    async def show(self, request: Request) -> Any:
        with problems():
            return self._view(await self._sessions.find(request.params["key"]))

    @route("GET", "/v1/sessions/{key}/history", Scope.READ, "What was said in a session, oldest first.", query=HISTORY)
    async def history(self, request: Request) -> Any:
        limit = request.query_int("limit", 50, 1, 1000)
        before = request.query_int("before", 0, 0, 2**62) or None
        with problems():
            record = await self._sessions.find(request.params["key"])
            # The present conversation; `conversation=all` and an earlier one's id lead to what was said before.
            which = request.query("conversation")
            session_id = None if which == "all" else which or record.id
            entries = await self._sessions.history(record.key, limit, before=before, session_id=session_id)
        messages = [_entry_view(entry) for entry in entries]
        cut = sum(len(bytes(entry.message)) for entry in entries) > MOST_HISTORY_BYTES
        more = entries[0].seq if len(entries) == limit or cut else None
        return {
            "key": session_keys.short(record.key),
            "session_key": record.key,
            "session_id": record.id,
            "messages": messages,
            "count": len(messages),
            "before": more,
        }

    @route(
        "POST",
        "/v1/sessions/{key}/messages",
        Scope.CHAT,
        "Say something to the agent of a session.",
        body=SendRequest,
        also={202: "Taken; the run goes on."},
        errors=(409, 503),
        idempotent=True,
        content=True,
    )
    async def send(self, request: Request, wanted: SendRequest) -> Any:
        if not 0 <= wanted.wait_seconds <= MAX_WAIT_SECONDS:
            raise Problem(
                400,
                "invalid_request",
                f"wait_seconds must be from 0 to {MAX_WAIT_SECONDS:g}, not {wanted.wait_seconds:g}",
            )
        options = RunOptions(
            model=wanted.model,
            thinking=wanted.thinking,
            timeout_seconds=wanted.timeout_seconds,
            record=wanted.record,
        )
        with problems():
            if wanted.model:
                self._sessions.check_model(wanted.model)
            run = await self._sessions.send(
                request.params["key"],
                wanted.message,
                origin="http",
                credential=request.credential,
                options=options,
                idempotency_key=request.idempotency_key,
            )
        request.id = run.id
        with contextlib.suppress(TimeoutError), problems():
            if wanted.wait_seconds or run.over:
                return run_view(await run.reply(wanted.wait_seconds or None))
        return {"run_id": run.id, "session_key": run.session_key, "state": "running"}

    @route(
        "POST",
        "/v1/sessions/{key}/stop",
        Scope.CHAT,
        "Stop a session's run and every process it started.",
        errors=(503,),
    )
    async def stop(self, request: Request) -> Any:
        with problems():
            await self._sessions.find(request.params["key"])
            await self._sessions.check_owner(request.params["key"], request.credential)
            stopped = await self._sessions.stop(request.params["key"])
        return {"stopped": stopped, "count": len(stopped)}

    @route(
        "POST",
        "/v1/sessions/{key}/fork",
        Scope.CHAT,
        "Make a session that begins with what was said in this one up to an event or a message.",
        body=ForkRequest,
        status=201,
        answer=Forked,
        errors=(409, 503),
        idempotent=True,
    )
    async def fork(self, request: Request, wanted: ForkRequest) -> Forked:
        if any(number is not None and not 0 < number < 2**62 for number in (wanted.event, wanted.message)):
            raise Problem(400, "invalid_request", "event and message are numbers from 1 on")
        with problems():
            await self._sessions.check_visible(request.params["key"], request.principal)
            return await self._forks.fork(
                request.params["key"],
                event=wanted.event,
                message=wanted.message,
                to=wanted.to,
                credential=request.credential,
                idempotency_key=request.idempotency_key,
            )

    @route("GET", "/v1/runs/{run_id}", Scope.READ, "The state of a run.")
    async def run(self, request: Request) -> Any:
        with problems():
            run = await self._sessions.run(request.params["run_id"])
        if run.outcome is not None:
            return run_view(run.outcome)
        state = "queued" if self._sessions.current(run.session_key) is not run and run.joined is None else "running"
        return {"run_id": run.id, "session_key": run.session_key, "state": state}

    @route(
        "GET",
        "/v1/runs/{run_id}/replay",
        Scope.READ,
        "Repeat a run that has ended from what was written down of it, and tell the first difference.",
        answer=ReplayedRun,
        errors=(404, 503),
    )
    async def replay(self, request: Request) -> Any:
        with problems():
            record = await self._sessions.read(lambda store: recorded(store, request.params["run_id"]))
            return await replay(record)

    @route("GET", "/v1/runs/{run_id}/events", Scope.CHAT, "What happens in a run, from its beginning.", media=(EVENTS,))
    async def events(self, request: Request) -> Reply:
        """What happens in a run, from its beginning; the last event, `ended`, tells its outcome."""
        with problems():
            run = await self._sessions.run(request.params["run_id"])
            if not request.credential.may(Scope.READ) and run.record.credential != request.credential.id:
                raise NotAllowed(
                    f"run {run.id} belongs to another credential; following it needs that one or the scope 'read'"
                )
        return Reply(content_type=EVENT_STREAM, pieces=until_gone(request, with_pulse(_stream(run)), self._ending))

    @route(
        "GET",
        "/v1/tools/cost",
        Scope.READ,
        "What an agent's tools and prompt cost in tokens.",
        query=(Query("agent", "Of this agent."),),
        errors=(404, 503),
    )
    async def cost(self, request: Request) -> Any:
        """What every request to an agent's model carries, in tokens."""
        budget = await self._turns.budget(session_keys.agent_id(request.query("agent") or session_keys.MAIN))
        return {"prompt_tokens": budget.prompt, "tools": budget.tools, "total_tokens": budget.total}

    def _view(self, record: SessionRecord) -> dict[str, Any]:
        run = self._sessions.current(record.key)
        return {
            "key": session_keys.short(record.key),
            "session_key": record.key,
            "session_id": record.id,
            "agent_id": record.agent_id,
            "kind": record.kind,
            "parent_key": record.parent_key,
            "title": record.title,
            "model": self._sessions.describe_model(record),
            "state": "idle" if run is None else "running",
            "run_id": None if run is None else run.id,
            "waiting": self._sessions.waiting(record.key),
            "message_count": record.messages,
            "usage": {
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
                "cached_tokens": record.cached_tokens,
                "cost": record.cost,
            },
            "context_tokens": record.context_tokens,
            "compactions": record.compactions,
            "previous_session_ids": record.previous_ids,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
        }


@contextlib.contextmanager
def problems() -> Any:
    """Turn tool errors of sessions into HTTP errors."""
    try:
        yield
    except OverBudget:
        raise
    except ToolError as error:
        status = {ErrorKind.NOT_FOUND: 404, ErrorKind.INVALID_ARGS: 400, ErrorKind.NOT_ALLOWED: 403}
        code = "invalid_request" if error.kind is ErrorKind.INVALID_ARGS else error.kind.value
        raise Problem(status.get(error.kind, 503), code, error.message) from None


def run_view(outcome: RunOutcome) -> dict[str, Any]:
    """How a run ended. `reply` is there when there is something to say, which may be why there is no answer."""
    view: dict[str, Any] = {
        "run_id": outcome.run_id,
        "session_key": outcome.session_key,
        "state": outcome.state.value,
        "usage": outcome.usage,
        "steps": outcome.steps,
    }
    if outcome.ok or outcome.reply:
        view["reply"] = outcome.reply
    if outcome.finish_reason is not None:
        view["finish_reason"] = outcome.finish_reason
    if outcome.handed:
        view["tool_calls"] = outcome.handed
    if outcome.error is not None:
        view["error"] = outcome.error
        if outcome.error.kind == "not_configured":
            view["reply"] = outcome.error.message
    return view


async def _stream(run: Run) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(run.follow()) as events:
        async for event in events:
            yield _line(event)
    with contextlib.suppress(FarhandError):
        yield b"event: ended\ndata: " + msgspec.json.encode(run_view(await run.reply())) + b"\n\n"


def _line(event: RunEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        str(event.__struct_config__.tag).encode(),
        msgspec.json.encode(event),
    )


def _entry_view(entry: Entry) -> dict[str, Any]:
    message = message_of(entry)
    view: dict[str, Any] = {
        "seq": entry.seq,
        "at": entry.at,
        "role": message.role,
        "content": message.content if isinstance(message.content, str) else msgspec.to_builtins(message.content),
    }
    if message.tool_calls:
        view["tool_calls"] = message.tool_calls
    for name in ("tool_call_id", "name", "thinking"):
        if value := getattr(message, name):
            view[name] = value
    if message.role == "tool":
        view["is_error"] = message.is_error
    if entry.run_id is not None:
        view["run_id"] = entry.run_id
    if entry.model is not None:
        view["model"] = entry.model
        view["usage"] = {
            "prompt_tokens": entry.prompt_tokens,
            "completion_tokens": entry.completion_tokens,
            "cached_tokens": entry.cached_tokens,
            "cost": entry.cost,
        }
    if entry.keeps_from is not None:
        view["summary"] = True
    return view
