"""A run: the work on one message to a session, from its acceptance to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from farhand.agent.events import Event
from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import decode_credential
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.llm.messages import Message, ToolUse, Usage
from farhand.llm.model import Thinking
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import Failed
from farhand.store.tables.sessions import OPEN_STATES, RunRecord, RunState

# Error kind of a run that was started during a freeze.
FROZEN = "frozen"


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of one message that override those of its session."""

    model: str | None = None
    thinking: Thinking | None = None
    # Time limit of the run.
    timeout_seconds: float | None = None
    # Start a new conversation first; the old one stays in the history.
    fresh: bool = False
    # Further instructions, after the agent's own prompt.
    instructions: str = ""
    max_tokens: int | None = None
    # Restricts the run, and everything it starts, to these nodes.
    pin: Pin | None = None
    # Further parameters of each request to the model, as in `llm.model.ModelRequest`.
    parameters: dict[str, Any] = {}
    # Tools that the client carries out: calls of them end the run and are part of its outcome.
    client_tools: tuple[ToolSpec, ...] = ()
    # False: the model is offered only the client's tools.
    own_tools: bool = True
    # Results of calls that an earlier run left to the client; with these a message may be empty.
    answers: tuple[Message, ...] | None = None
    # The message is from a person the owner has not named: nothing of the owner's may be shown or looked up.
    guest: bool = False
    # The chain of origins that led to this message, the first origin first.
    origins: tuple[str, ...] = ()
    # Emit `Recorded` events, each a line of a recording with which the run can be replayed.
    record: bool = False
    # The message may be a command, since a person wrote it; messages from a model never are.
    command: bool = False

    @property
    def plain(self) -> bool:
        """Return whether there are no special options, so that a running run can take the message."""
        return self == RunOptions(guest=self.guest, origins=self.origins)


class RunFailure(msgspec.Struct, frozen=True):
    """Why a run gave no reply. Its kinds are those of tool errors and of models, such as `not_configured`."""

    kind: str
    message: str


class RunOutcome(msgspec.Struct, frozen=True):
    """The end of a run: `ok` with a reply, or the reason for the failure."""

    run_id: str
    session_key: str
    state: RunState
    reply: str = ""
    error: RunFailure | None = None
    usage: Usage = Usage()
    steps: int = 0
    # Why the model ended its reply (`stop`, `length`, `content_filter`, `tool_calls`), or `rounds`.
    finish_reason: str | None = None
    # Calls that are left to the client.
    handed: tuple[ToolUse, ...] = ()

    @property
    def ok(self) -> bool:
        return self.state is RunState.OK

    @property
    def text(self) -> str:
        """Return the text for a waiting person: the reply, or why there is none."""
        return self.reply or (self.error.message if self.error else "")

    @classmethod
    def of(cls, record: RunRecord) -> RunOutcome:
        failed = record.error_kind is not None
        return cls(
            record.id,
            record.session_key,
            record.state,
            record.reply or "",
            RunFailure(record.error_kind or "failed", record.error_message or "") if failed else None,
            Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.cost),
            record.steps,
            record.finish_reason,
            () if record.handed is None else msgspec.json.decode(record.handed, type=tuple[ToolUse, ...]),
        )


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """A line of a recording of this run, including its newline."""

    line: str


# Events for followers of a run.
RunEvent = Event | Recorded | ApprovalRequested


class Run:
    """A current or queued run of this gateway. The sender of its message may follow, await and stop it."""

    def __init__(self, record: RunRecord) -> None:
        self.id = record.id
        self.session_key = record.session_key
        self.record = record
        self.message = msgspec.json.decode(record.message, type=Message)
        self.options = msgspec.json.decode(record.options, type=RunOptions)
        # The credential on whose behalf the run acts.
        self.asker = _asker(record)
        self.outcome: RunOutcome | None = None
        self.stopping: tuple[RunState, str] | None = None
        # Set to stop the run.
        self.stop = asyncio.Event()
        self.joined: Run | None = None
        self._events: list[RunEvent] = []
        self._began_at = 0
        self._followers: set[asyncio.Event] = set()
        self._end: asyncio.Future[RunOutcome] = asyncio.get_running_loop().create_future()
        self._end.add_done_callback(_retrieve)
        if record.state not in OPEN_STATES:
            self.settle(RunOutcome.of(record))

    @property
    def over(self) -> bool:
        return self._end.done()

    async def reply(self, seconds: float | None = None) -> RunOutcome:
        """Wait for the end of the run and return its outcome.

        Raises TimeoutError if that takes longer (the run continues), Failed if the gateway stops before (the run
        continues after its next start).
        """
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._end)

    async def follow(self) -> AsyncGenerator[RunEvent, None]:
        """Yield the events of the run from its beginning until it has ended."""
        wake = asyncio.Event()
        self._followers.add(wake)
        position = 0
        source = self
        try:
            while True:
                wake.clear()
                if self.joined is not None and source is self:
                    source, position = self.joined, self._began_at
                    source._followers.add(wake)
                over = source.over or self.over
                while position < len(source._events):
                    position += 1
                    yield source._events[position - 1]
                if over:
                    return
                await wake.wait()
        finally:
            self._followers.discard(wake)
            source._followers.discard(wake)

    async def events_after(self, position: int, seconds: float) -> tuple[list[RunEvent], bool]:
        """Return the events after the first `position` ones, once there are any, and whether those are the last."""
        wake = asyncio.Event()
        source = self.joined or self
        first = position + (self._began_at if self.joined is not None else 0)
        watched = {self, source}
        for run in watched:
            run._followers.add(wake)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while len(source._events) <= first and not (source.over or self.over):
                        wake.clear()
                        await wake.wait()
                        if self.joined is not None and source is self:
                            break  # asked again, it is found in the other run
        finally:
            for run in watched:
                run._followers.discard(wake)
        return source._events[first:], source.over or self.over

    def when_over(self, act: Callable[[], object]) -> None:
        self._end.add_done_callback(lambda _: act())

    # -- for the runner -----------------------------------------------------------------------------------

    def happened(self, event: RunEvent) -> None:
        self._events.append(event)
        self._wake()

    def join(self, other: Run) -> None:
        """Make the message part of another run, with which it ends."""
        self.joined = other
        self._began_at = len(other._events)
        self._wake()

    def failed(self, kind: str, reason: str, state: RunState = RunState.FAILED) -> RunOutcome:
        """Return the outcome of this run if it gives no reply."""
        return RunOutcome(self.id, self.session_key, state, error=RunFailure(kind, reason))

    def stopped(self, reason: str, state: RunState = RunState.STOPPED) -> RunOutcome:
        """Return the outcome of this run if it is stopped before it starts."""
        return self.failed("timeout" if state is RunState.TIMEOUT else "cancelled", reason, state)

    def settle(self, outcome: RunOutcome) -> None:
        if not self._end.done():
            self.outcome = outcome
            self._end.set_result(outcome)
            self._wake()

    def let_go(self) -> None:
        """Release all waiters, since the gateway stops."""
        if not self._end.done():
            self._end.set_exception(Failed(f"the gateway is stopping; run {self.id} continues after the next start"))
            self._wake()

    def _wake(self) -> None:
        for follower in self._followers:
            follower.set()


def _asker(record: RunRecord) -> Credential:
    if record.asker is not None:
        return decode_credential(record.asker)
    stored = Credential(record.credential, frozenset(record.scopes))  # stored by an earlier version
    return OWNER if stored.id == OWNER.id and stored.scopes in (OWNER.scopes, frozenset()) else stored


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
