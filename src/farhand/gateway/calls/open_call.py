"""A call from the moment it is allowed until its one end, and how that end is told."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import Callable

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.nodes.registry import Node
from farhand.protocol.calls import NULL, ToolFailure, ToolResult
from farhand.protocol.errors import ToolError
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import Approval, Why
from farhand.tools.tool import Tool

UNKNOWN = "outcome unknown:"
NO_ERROR_GIVEN = "unknown node error"


class Outcome(msgspec.Struct, frozen=True):
    """What the caller of a call is told."""

    record: CallRecord
    # True when an earlier request with the same idempotency key made this call.
    repeated: bool = False
    # What the gate or a tool of the gateway's own raised just now; it may tell more than its kind.
    raised: ToolError | None = None

    @property
    def result(self) -> ToolResult:
        record = self.record
        if record.state is CallState.OK:
            return ToolResult(ok=True, result=NULL if record.result is None else record.result)
        return ToolResult.failed(record.error_kind or "failed", record.error_message or NO_ERROR_GIVEN)


class Parked(msgspec.Struct, kw_only=True):
    """Why a call is held back, and what it takes to examine it again when it starts."""

    why: Why
    principal: Principal
    origins: tuple[str, ...]
    # How long it may run, once it does.
    timeout_ms: int
    # When the waiting is over.
    until: int
    # How long its caller waits for it.
    patience_ms: int | None = None
    # Of a call that may wait for its node: the moment until which it may start.
    before: int | None = None
    # Of a call that waits to be approved: the rule that wants that, and the rule's own words.
    rule: str = ""
    reason: str = ""
    # What was asked, once it was.
    approval: Approval | None = None
    # Its question is being put, or it is being started.
    busy: bool = False


class OpenCall(msgspec.Struct, eq=False):
    """A call that has not ended."""

    record: CallRecord
    node: Node | None
    request: bytes
    read_only: bool
    # The gateway's own tool that runs it, where no node does.
    own: Tool | None = None
    principal: Principal | None = None
    # Where it comes from, as the policy was told.
    origins: tuple[str, ...] = ()
    # It is held back: nothing of it has left the gateway.
    parked: Parked | None = None
    # It was held back once, and its caller was told to come again.
    promised: bool = False
    raised: ToolError | None = None
    task: asyncio.Task[None] | None = None
    listeners: list[Callable[[CallRecord], None]] = []
    # What whoever waits is told once the call is over.
    told: CallRecord | None = None
    # Called with the approval once the question is put.
    asked: list[Callable[[Approval], None]] = []
    deadline: asyncio.TimerHandle | None = None
    # By the loop's clock, while that is too far away for a timer.
    expires: float | None = None
    sent: bool = False
    # Its node left before it was sent, and is waited for.
    stranded: bool = False
    # It ended without having run, and nobody wanted that: its idempotency key may be used again.
    unrun: bool = False
    # It has ended; its record says so once that is written down.
    over: bool = False
    started: float = msgspec.field(default_factory=time.perf_counter)
    stopping: tuple[CallState, str] | None = None
    waiters: int = 0

    def __repr__(self) -> str:
        return f"<open call {self.record.id}>"  # arguments and results are nothing for a log

    def ended(self) -> asyncio.Future[CallRecord]:
        """A future of the caller's own: whoever cancels it takes it from nobody else."""
        future: asyncio.Future[CallRecord] = asyncio.get_running_loop().create_future()
        if self.told is not None:
            future.set_result(self.told)
        else:
            self.listeners.append(lambda record: None if future.done() else future.set_result(record))
        return future

    def tell(self, record: CallRecord) -> None:
        """Let everybody go who waits; the first word counts."""
        if self.told is None:
            self.told = record
            for listener in self.listeners:
                listener(record)

    def when_asked(self, tell: Callable[[Approval], None]) -> None:
        """Call `tell` once this call waits for an approval; at once if it does already."""
        self.asked.append(tell)
        if self.parked is not None and self.parked.approval is not None and not self.over:
            tell(self.parked.approval)

    def let_go(self, record: CallRecord) -> None:
        """Tell those who wait how it stands, and let them go; the call stays open."""
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener(record)

    @property
    def lasted(self) -> float:
        """Milliseconds, so far."""
        return (time.perf_counter() - self.started) * 1000

    @property
    def wanted(self) -> bool:
        """Somebody waits for it, or was promised it."""
        return self.waiters > 0 or self.record.background or self.record.idempotency_key is not None or self.promised


def ended(record: CallRecord, state: CallState, result: ToolResult, now: int, duration: float) -> CallRecord:
    return msgspec.structs.replace(
        record,
        state=state,
        ended_at=now,
        duration_ms=int(duration * 1000) / 1000,  # `round` takes eight times as long
        result=result.result if result.ok else None,
        error_kind=result.error.kind if result.error else None,
        error_message=result.error.message if result.error else None,
    )


def refused_by_node(error: ToolFailure) -> bool:
    """A node that has enough to do sends a call back before anything of it ran."""
    return error.message.startswith("busy:") and "did not run" in error.message


def bare(error: ToolError) -> ToolError:
    """An error to be kept, without the frames it came through: they hold the whole call, and the call holds it."""
    return error.with_traceback(None)


def failed(message: str) -> ToolResult:
    return ToolResult.failed("failed", message)


def unknown(message: str) -> ToolResult:
    return ToolResult.failed("failed", f"{UNKNOWN} {message}")


def stopped(state: CallState, message: str) -> ToolResult:
    return ToolResult.failed("timeout" if state is CallState.TIMEOUT else "cancelled", message)


# An id is a name, not a secret: a generator that need not ask the kernel each time will do.
_random_bits = random.Random(os.urandom(32)).getrandbits  # noqa: S311
_halves = struct.Struct(">QQ").pack


def new_call_id() -> str:
    """A UUID that sorts by time (version 7), so that the record's index grows at one end and lists it in order: in
    parts of a millisecond, since there is more than one call in it."""
    now, rest = divmod(time.time_ns(), 1_000_000)
    moment = now << 16 | 0x7000 | (rest << 12) // 1_000_000
    digits = _halves(moment, 1 << 63 | _random_bits(62)).hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
