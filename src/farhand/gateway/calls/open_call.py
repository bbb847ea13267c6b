"""A call from its admission until its end, and the helpers that describe an end."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import Callable

import msgspec

from farhand.gateway.access.credentials import OWNER
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.charging import Charge
from farhand.gateway.calls.state import OpenState
from farhand.gateway.nodes.registry import Connection, Node
from farhand.protocol.calls import NULL, ToolFailure, ToolResult
from farhand.protocol.errors import ToolError
from farhand.store.tables.accounts.receipts import SignedAnswer
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import Approval, Why
from farhand.tools.tool import Tool

UNKNOWN = "outcome unknown:"
NO_ERROR_GIVEN = "unknown node error"

_KINDS = {CallState.TIMEOUT: "timeout", CallState.CANCELLED: "cancelled"}


class Waiting(msgspec.Struct, kw_only=True):
    """Why a call is held back, and what is needed to check it again when it starts."""

    why: Why
    principal: Principal
    origins: tuple[str, ...]
    # How long the call may run once it has started.
    timeout_ms: int
    # When the wait ends, in milliseconds since 1970.
    until: int
    # How long the caller waits for an answer.
    patience_ms: int | None = None
    # For a call that may wait for its node: when it must have started.
    before: int | None = None
    # For a call that needs an approval: the policy rule, and the reason that the rule gives.
    rule: str = ""
    reason: str = ""
    # The question to the owner, once it is asked.
    approval: Approval | None = None
    # A task is asking or starting; there is never more than one.
    busy: bool = False


class CallProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a call, as its tool last reported it."""

    progress: float
    # What `progress` is a part of.
    total: float
    message: str = ""
    at: int = 0


class CallLogLine(msgspec.Struct, frozen=True):
    """A line that the tool of an open call logged."""

    at: int
    level: str
    message: str


class OpenCall(msgspec.Struct, eq=False):
    """A call and its callers. `Gate.begin` returns one even for a call that has ended already."""

    record: CallRecord
    # The node that the call counts for, until it ends.
    node: Node | None = None
    request: bytes = b""
    # Recorded with its end only.
    read_only: bool = False
    # The gateway's own tool that runs it, if no node does.
    own: Tool | None = None
    principal: Principal | None = None
    # Where the call comes from, for the policy.
    origins: tuple[str, ...] = ()
    # The credential that is behind it.
    asker: str = ""
    # What its node signed about it.
    receipt: SignedAnswer | None = None
    # The budgets it counts against.
    charge: Charge | None = None
    state: OpenState = OpenState.RECORDING
    # How the call is held back; kept after it has started.
    waiting: Waiting | None = None
    # The trial that is kept instead of running the call: its owner was shown what it changed.
    keeps: str = ""
    # The first reason to stop.
    stop_reason: str = ""
    # What the gate or a tool of the gateway raised; it can say more than the recorded kind.
    raised: ToolError | None = None
    # An earlier request with the same idempotency key made this call.
    repeated: bool = False
    progress: CallProgress | None = None
    log: tuple[CallLogLine, ...] = ()
    # How many events about progress and logs were recorded, and when the last one was.
    progress_events: int = 0
    told_at: int = 0
    task: asyncio.Task[None] | None = None
    # How many callers wait for the end.
    waiters: int = 0
    started: float = msgspec.field(default_factory=time.perf_counter)
    deadline: asyncio.TimerHandle | None = None
    # The deadline by the loop's clock, while it is too far away for a timer.
    expires: float | None = None
    # The span of the call, for the node.
    trace: str = ""
    # What the callers were notified of.
    end: CallRecord | None = None
    # The loop of the gate; looking it up takes a system call.
    loop: asyncio.AbstractEventLoop | None = None
    _listeners: list[Callable[[CallRecord], None]] = []
    _approval_listeners: list[Callable[[Approval], None]] = []
    _progress_waiters: list[asyncio.Future[None]] = []

    @classmethod
    def settled(cls, record: CallRecord, *, raised: ToolError | None = None, repeated: bool = False) -> OpenCall:
        """Return a call that needs no waiting: it was refused, or an earlier request made it."""
        return cls(record, state=OpenState.ENDED, end=record, raised=raised, repeated=repeated)

    def __repr__(self) -> str:
        return f"<open call {self.record.id} {self.state}>"  # arguments and results do not belong in a log

    # -- state ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.state in (OpenState.ENDING, OpenState.ENDED)

    @property
    def sent(self) -> bool:
        """Whether it was sent, or a tool of the gateway started it, and it has not ended."""
        return self.state is OpenState.RUNNING or self.stopping

    @property
    def stopping(self) -> bool:
        return self.state in (OpenState.CANCELLING, OpenState.TIMING_OUT)

    @property
    def held(self) -> bool:
        """Whether its record says `waiting`, or is about to."""
        return self.record.state is CallState.WAITING

    @property
    def connection(self) -> Connection | None:
        return self.node.connection if self.node is not None else None

    @property
    def wanted(self) -> bool:
        """Whether a caller waits for it or may ask for it later."""
        record = self.record
        return self.waiters > 0 or record.background or record.idempotency_key is not None or self.waiting is not None

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1000

    # -- callers ----------------------------------------------------------------------------------------

    def ended(self) -> asyncio.Future[CallRecord]:
        """Return a new future for the record of the ended call; cancelling it affects no other caller."""
        future: asyncio.Future[CallRecord] = (self.loop or asyncio.get_running_loop()).create_future()
        if self.end is not None:
            future.set_result(self.end)
        else:
            self._listeners.append(lambda record: None if future.done() else future.set_result(record))
        return future

    def notify(self, record: CallRecord) -> None:
        """Notify the callers of the end, once."""
        if self.end is None:
            self.end = record
            self.release(record)

    def release(self, record: CallRecord) -> None:
        """Answer those who wait now with `record`; the call stays open."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(record)

    def progress_changed(self) -> asyncio.Future[None]:
        """Return a future that ends when the tool next reports progress."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._progress_waiters = [one for one in self._progress_waiters if not one.done()]
        self._progress_waiters.append(future)
        return future

    def set_progress(self, progress: CallProgress) -> None:
        self.progress = progress
        waiters, self._progress_waiters = self._progress_waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def on_approval(self, listener: Callable[[Approval], None]) -> None:
        """Call `listener` when the owner is asked to approve this call; at once if that has happened."""
        self._approval_listeners.append(listener)
        if self.waiting is not None and self.waiting.approval is not None and self.state is OpenState.WAITING:
            listener(self.waiting.approval)

    def approval_asked(self, approval: Approval) -> None:
        for listener in self._approval_listeners:
            listener(approval)


def ended(record: CallRecord, state: CallState, result: ToolResult, now: int, duration_ms: float) -> CallRecord:
    return msgspec.structs.replace(
        record,
        state=state,
        ended_at=now,
        duration_ms=int(duration_ms * 1000) / 1000,  # `round` takes eight times as long
        result=result.result if result.ok else None,
        error_kind=result.error.kind if result.error else None,
        error_message=result.error.message if result.error else None,
    )


def preview_key(call_id: str) -> str:
    """Return the idempotency key of the trial that shows what a call does before it is approved."""
    return f"preview:{call_id}"


def is_preview(record: CallRecord | None) -> bool:
    """Whether a call is such a trial."""
    return (
        record is not None and record.credential == OWNER.id and (record.idempotency_key or "").startswith("preview:")
    )


def result_of(record: CallRecord) -> ToolResult:
    if record.state is CallState.OK:
        return ToolResult(ok=True, result=NULL if record.result is None else record.result)
    return ToolResult.failed(record.error_kind or "failed", record.error_message or NO_ERROR_GIVEN)


def failure(state: CallState, message: str) -> ToolResult:
    """Return the result of a call that ended in `state` without an answer."""
    if state is CallState.UNKNOWN:
        message = f"{UNKNOWN} {message}"
    return ToolResult.failed(_KINDS.get(state, "failed"), message)


def refused_by_node(error: ToolFailure) -> bool:
    """Whether a busy node sent a call back before it ran."""
    return error.message.startswith("busy:") and "did not run" in error.message


def bare(error: ToolError) -> ToolError:
    """Return the error without its traceback, whose frames would keep the whole call alive."""
    return error.with_traceback(None)


# Ids need not be secret, so they do not need the kernel's random numbers.
_random_bits = random.Random(os.urandom(32)).getrandbits  # noqa: S311
_halves = struct.Struct(">QQ").pack


def new_call_id() -> str:
    """Return a UUID of version 7 with sub-millisecond time, so that ids sort by time and the index grows at one end."""
    now, rest = divmod(time.time_ns(), 1_000_000)
    moment = now << 16 | 0x7000 | (rest << 12) // 1_000_000
    digits = _halves(moment, 1 << 63 | _random_bits(62)).hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
