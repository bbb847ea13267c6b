"""Runs tool calls: limited concurrency, each id once, results kept until acknowledged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw

from farhand.machine import tracing
from farhand.protocol.calls import PROGRAM_STOPPING, ToolFailure
from farhand.protocol.errors import Cancelled, Failed, InvalidArgs, NotFound, ToolError
from farhand.protocol.freeze import FreezeState
from farhand.protocol.json_limits import plain_peer_error
from farhand.protocol.messages import Resume, ToolProgress, ToolRequest, ToolResponse, encode
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.sealing import SealingKey
from farhand.protocol.secret_handles import MARK, substituted
from farhand.sdk.accepted_calls import AcceptedCalls, storable
from farhand.sdk.context import CancelToken, ToolContext
from farhand.sdk.ended_calls import EndedCalls
from farhand.sdk.progress import Reporter
from farhand.sdk.receipts import Signer
from farhand.sdk.response_limits import ResponseLimits, encode_within

if TYPE_CHECKING:
    from farhand.sdk.registry import RegisteredTool, ToolRegistry

log = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_UNACKNOWLEDGED = 4096
CANCEL_GRACE_SECONDS = 2.0
# How long a freeze waits for tools to stop.
FREEZE_GRACE_SECONDS = 0.25

# For a call without secrets; nothing is added to it.
_NO_SECRETS = KnownSecrets()

Send = Callable[[bytes], None]
# Ends every process of a call, and describes what was ended.
EndCall = Callable[[str], Awaitable[str]]


class Dispatcher:
    """The calls of one run of a node, across any number of connections. Its owner calls `close`."""

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        ledger: AcceptedCalls,
        max_concurrent: int,
        max_request_bytes: int,
        max_response_bytes: int,
        max_waiting: int = MAX_WAITING,
        freeze_state: FreezeState | None = None,
        end_call: EndCall | None = None,
        sealing: SealingKey | None = None,
        signer: Signer | None = None,
    ) -> None:
        """`end_call` ends the processes that a finished call left running. `sealing` opens the secrets of calls.
        `signer` signs answers.
        """
        self._sealing = sealing
        self._signer = signer
        self._registry = registry
        self._end_call = end_call
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._leaving = False
        self.freeze_state = freeze_state or FreezeState()
        self._ledger = ledger
        self._max_concurrent = max_concurrent
        self._max_waiting = max_waiting
        self._max_request_bytes = max_request_bytes
        self._max_response_bytes = max_response_bytes
        self._room = ResponseLimits.towards(None, max_response_bytes)
        self._running: dict[str, tuple[asyncio.Task[None], CancelToken]] = {}
        self._waiting: OrderedDict[str, tuple[ToolRequest, RegisteredTool]] = OrderedDict()
        self._unacknowledged: OrderedDict[str, bytes] = OrderedDict()
        self._past = EndedCalls()
        self._accepted: set[str] = set()
        # Running calls that another run of this program can continue.
        self._continuing: set[str] = set()
        self._orphans: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._send: Send | None = None
        self._keeps = False
        self._takes_progress = False
        self._signs = False
        self._closing = ""

    # -- the link ---------------------------------------------------------------------------------------

    def attach(
        self,
        send: Send,
        *,
        keeps: bool,
        max_response_bytes: int | None,
        takes_progress: bool = False,
        takes_receipts: bool = False,
    ) -> None:
        """Send responses through `send` from now on.

        `keeps`: the gateway acknowledges results and accepts them late. `max_response_bytes`: the longest frame it
        accepts, if it announced one. `takes_progress`: it wants to know how far calls are. `takes_receipts`: it wants
        signed answers.
        """
        self._signs = takes_receipts and self._signer is not None
        self._send, self._keeps, self._takes_progress = send, keeps, takes_progress
        self._room = ResponseLimits.towards(max_response_bytes, self._max_response_bytes)
        finished, self._unacknowledged = self._unacknowledged, OrderedDict()
        for request_id, kept in finished.items():
            if keeps:
                self._unacknowledged[request_id] = frame = self._refitted(kept)
                send(frame)
            else:
                self._past.add(request_id, kept)

    def detach(self, reason: str) -> None:
        """Handle a lost link. Calls continue for a gateway that accepts results later; otherwise they are cancelled."""
        self._send = None
        if not self._keeps:
            self._waiting.clear()
            self._orphans.update(self._running)
            for request_id in list(self._running):
                self.cancel(request_id, reason)

    def resume(self) -> Resume:
        return Resume(
            boot=self._ledger.boot,
            running=[*(each for each in self._running if each not in self._orphans), *self._waiting],
            finished=list(self._unacknowledged),
            earlier=sorted(self._ledger.earlier - self._running.keys() - self._waiting.keys()),
        )

    # -- messages ---------------------------------------------------------------------------------------

    def request(self, request: ToolRequest, size: int) -> None:
        """Start, queue or refuse a call. An id that has run never runs again; its response is repeated."""
        request_id = request.request_id
        if request_id in self._running or request_id in self._waiting:
            self._orphans.discard(request_id)  # a gateway waits for it again
            return
        if (kept := self._unacknowledged.get(request_id)) is not None:
            self._transmit(self._refitted(kept))
        elif request_id in self._past:
            self._repeat(request_id)
        elif self._leaving:
            return  # the gateway sends it again after the restart
        elif self._closing:
            self._refuse(request_id, Cancelled(f"cancelled before it started: {self._closing}"))
        elif self.freeze_state.order is not None:
            self._refuse(request_id, self.freeze_state.order.node_refusal())
        elif size > self._max_request_bytes:
            self._refuse(
                request_id,
                InvalidArgs(
                    f"the request has {size} bytes, this node accepts at most {self._max_request_bytes} "
                    "(max_request_bytes)"
                ),
            )
        elif (tool := self._registry.find(request.tool)) is None:
            self._refuse(request_id, NotFound(f"unknown tool: {request.tool}"))
        elif request_id in self._ledger.earlier and not tool.continues:
            self._refuse(request_id, Failed("outcome unknown: the node was restarted while the call ran"))
        elif len(self._running) < self._max_concurrent:
            self._start(request, tool)
        elif len(self._waiting) < self._max_waiting and len(self._unacknowledged) < MAX_UNACKNOWLEDGED:
            self._waiting[request_id] = (request, tool)
        else:
            self._refuse(
                request_id,
                Failed(
                    f"busy: {len(self._running)} calls are running and {len(self._waiting)} waiting; "
                    "it did not run, try again later"
                ),
            )

    def end(self, request_id: str, reason: str, *, everything: bool) -> None:
        """Cancel a call for the gateway: stop it, or end what an earlier run of this program started for it.

        With `everything`, also end what a call that has ended left running.
        """
        if request_id in self._running or request_id in self._waiting:
            self.cancel(request_id, reason)
            if not everything:
                return
        answered = request_id in self._unacknowledged or request_id in self._past
        if self._end_call is None or request_id in self._endings:
            return
        if everything or (request_id in self._ledger.earlier and not answered):
            ending = self._end_left(request_id, reason, self._end_call)
            self._endings[request_id] = asyncio.get_running_loop().create_task(ending)

    async def _end_left(self, request_id: str, reason: str, end_call: EndCall) -> None:
        """End what a call left running, and respond when that is done; until then the gateway repeats its request."""
        try:
            if (running := self._running.get(request_id)) is not None:
                await asyncio.wait({running[0]})
            ended = await end_call(request_id)
        except Exception:
            log.exception("failed to end what call %s left running", request_id)
            return
        finally:
            del self._endings[request_id]
        response = _failure(request_id, Cancelled(ended or reason))
        if request_id in self._unacknowledged:  # the outcome of the call itself is kept
            self._transmit(encode_within(response, self._room))
        else:
            self._answer(response)

    def cancel(self, request_id: str, reason: str, grace: float = CANCEL_GRACE_SECONDS) -> None:
        """Ask a call to stop; if it does not within the grace period, cancel its task."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._refuse(request_id, Cancelled(f"cancelled before it started: {reason}"))
            return
        found = self._running.get(request_id)
        if found is None:
            return
        task, token = found
        token.cancel(reason)
        asyncio.get_running_loop().call_later(grace, task.cancel)

    def acknowledge(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._unacknowledged.pop(request_id, None) is not None:
                self._past.add(request_id)
            if request_id in self._accepted or request_id in self._ledger.earlier:
                self._accepted.discard(request_id)
                try:
                    self._ledger.settle(request_id)
                except OSError as error:  # harmless: the gateway asks about it once more after a restart
                    log.warning("cannot write the file of accepted calls: %s", error)

    def stop_all(self, reason: str) -> int:
        """Ask every call to stop, queued ones included; return how many there are."""
        known = [*self._waiting, *self._running]
        for request_id in known:
            self.cancel(request_id, reason, FREEZE_GRACE_SECONDS)
        return len(known)

    async def stopped(self, seconds: float) -> int:
        """Wait until no call runs; return how many still do after `seconds`."""
        tasks = [task for task, _ in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return len(self._running)

    async def close(self, reason: str, *, leave: bool = False) -> None:
        """Cancel everything and wait for it to end; no tool runs afterwards.

        With `leave`, the gateway receives no response for calls that the next run of this program continues, nor for
        queued ones: it sends them again then.
        """
        self._closing = reason
        if leave and self._keeps:
            self._leaving = True
            self._waiting.clear()
            for request_id, (task, _) in self._running.items():
                if request_id in self._continuing and request_id not in self._left:
                    self._left.add(request_id)
                    task.cancel(PROGRAM_STOPPING)
        for request_id in list(self._waiting):
            self.cancel(request_id, reason)
        tasks = [task for task, _ in self._running.values()]
        for request_id in list(self._running):
            if request_id not in self._left:
                self.cancel(request_id, reason)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_SECONDS + 1)
        for ending in self._endings.values():
            ending.cancel()
        if self._endings:
            await asyncio.wait(self._endings.values())

    # -- running ----------------------------------------------------------------------------------------

    def _start(self, request: ToolRequest, tool: RegisteredTool) -> None:
        if not tool.spec.read_only and self._keeps and storable(request.request_id):
            try:
                self._ledger.accept(request.request_id)
            except OSError as error:
                self._refuse(request.request_id, Failed(f"the call cannot be recorded: {error}; it did not run"))
                return
            self._accepted.add(request.request_id)
            if tool.continues:
                self._continuing.add(request.request_id)
        token = CancelToken()
        # An explicit name: generating the default one takes as long as the rest of creating a task.
        self._loop = self._loop or asyncio.get_running_loop()  # looking it up takes a system call
        task = self._loop.create_task(self._run(request, tool, token), name=request.tool)
        self._running[request.request_id] = (task, token)

    async def _run(self, request: ToolRequest, tool: RegisteredTool, token: CancelToken) -> None:
        request_id, started_at = request.request_id, time.time_ns() // 1_000_000
        try:
            outcome = self._outcome(request, tool, token)
            response = await (_traced(request, outcome) if tracing.is_on() else outcome)
        finally:
            del self._running[request_id]
            self._continuing.discard(request_id)
        if request_id in self._left:
            return
        if self._signs and self._signer is not None:
            response = self._signer.signed(request, response, started_at)
        if request_id in self._orphans:
            self._orphans.discard(request_id)  # its gateway abandoned the call with the link
            self._past.add(request_id, encode_within(response, self._room))
        else:
            self._answer(response)
        while self._waiting and len(self._running) < self._max_concurrent:
            self._start(*self._waiting.popitem(last=False)[1])

    async def _outcome(self, request: ToolRequest, tool: RegisteredTool, token: CancelToken) -> ToolResponse:
        secrets: dict[str, str] = {}
        known = _NO_SECRETS
        context = ToolContext(
            request_id=request.request_id,
            tool_name=request.tool,
            session_key=request.session_key or None,
            cancel=token,
            timeout_ms=None if request.timeout_ms is UNSET else request.timeout_ms,
            report=Reporter(request.request_id, self._tell),
            caller=request.caller or "",
        )
        try:
            args = request.args
            if request.secrets is not UNSET:
                if self._sealing is None:
                    raise InvalidArgs("this node does not accept secrets; the call did not run")
                secrets = self._sealing.open(request.secrets)
                known = KnownSecrets(secrets.values())
                context = msgspec.structs.replace(context, secrets=secrets)
            if MARK in bytes(args) and not tool.takes_handles:
                args = Raw(msgspec.json.encode(substituted(msgspec.json.decode(args), secrets)))
            value = await tool.run(context, args)
            result = msgspec.json.encode(value)
            if secrets:
                result = known.redact(result)
            if not self._keeps and (fault := plain_peer_error(result)) is not None:
                raise Failed(f"the result cannot be sent to this gateway: {fault}")
        except ToolError as error:
            if secrets:
                error = ToolError.of(error.kind.value, known.redact_text(error.message))
            return _failure(request.request_id, error)
        except asyncio.CancelledError:
            return _failure(request.request_id, Cancelled(token.reason or "cancelled"))
        except (KeyboardInterrupt, GeneratorExit):  # the program or its loop ends
            raise
        except BaseException as error:  # a panic of a Rust extension is not an Exception
            shown = known.redact_text(_shown(error))
            # The traceback has the message of the error, too.
            log.error("tool %s failed on call %s: %s", request.tool, request.request_id, shown, exc_info=not secrets)
            return _failure(request.request_id, Failed(f"tool handler panicked: {shown}"))
        return ToolResponse(request.request_id, True, result=Raw(result))

    def _tell(self, progress: ToolProgress) -> None:
        if self._takes_progress and progress.request_id in self._running:
            self._transmit(encode(progress))

    # -- answering --------------------------------------------------------------------------------------

    def _refuse(self, request_id: str, error: ToolError) -> None:
        """Respond to a call that does not run; a plain gateway may send it again."""
        response = _failure(request_id, error)
        if self._keeps:
            self._answer(response)
        else:
            self._transmit(encode_within(response, self._room))

    def _repeat(self, request_id: str) -> None:
        """Repeat the response of a call that has run."""
        if (kept := self._past.answer(request_id)) is not None:
            self._transmit(self._refitted(kept))
        elif not self._keeps:  # otherwise it was acknowledged: the gateway has it
            self._refuse(request_id, Failed(f"call {request_id} was run before; its result is no longer kept"))

    def _answer(self, response: ToolResponse) -> None:
        """Send a response, and keep it until it is acknowledged; for a plain gateway, for a limited time."""
        frame = encode_within(response, self._room)
        if self._keeps:
            self._unacknowledged[response.request_id] = frame
        else:
            self._past.add(response.request_id, frame)
        self._transmit(frame)

    def _refitted(self, frame: bytes) -> bytes:
        """Return a frame that fits this gateway, whose limit may be smaller than that of the one it was made for."""
        if len(frame) <= min(self._room.result, self._room.frame):
            return frame
        return encode_within(msgspec.json.decode(frame, type=ToolResponse), self._room)

    def _transmit(self, frame: bytes) -> None:
        if self._send is not None:
            self._send(frame)


async def _traced(request: ToolRequest, outcome: Awaitable[ToolResponse]) -> ToolResponse:
    parent = request.trace if isinstance(request.trace, str) else ""
    span = tracing.begin(f"run {request.tool}", parent, **{"farhand.call": request.request_id})
    failure = "interrupted"
    try:
        response = await outcome
        failure = response.error.message[:500] if isinstance(response.error, ToolFailure) else ""
        return response
    finally:
        span.end(failure)


def _failure(request_id: str, error: ToolError) -> ToolResponse:
    return ToolResponse(request_id, False, error=ToolFailure.of(error))


def _shown(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
