"""Runs the tools a gateway asks for: so many at once, each id once, results kept until acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
from msgspec import UNSET, Raw

from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Cancelled, Failed, InvalidArgs, NotFound, ToolError
from farhand.protocol.freezing import Brake
from farhand.protocol.messages import Resume, ToolRequest, ToolResponse, encode
from farhand.sdk.context import CancelToken, ToolContext
from farhand.sdk.ledger import Ledger, storable
from farhand.sdk.registry import Registered, ToolRegistry

log = logging.getLogger("farhand.sdk")

MAX_WAITING = 64
MAX_UNACKNOWLEDGED = 4096
REMEMBERED_IDS = 65_536
CANCEL_GRACE_SECONDS = 2.0
FREEZE_GRACE_SECONDS = 0.25
"""A freeze does not wait long for a tool to listen."""

Send = Callable[[bytes], None]


class Dispatcher:
    """One life of a node's work, across any number of connections. Its owner calls `close`."""

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        ledger: Ledger,
        max_concurrent: int,
        max_request_bytes: int,
        max_response_bytes: int,
        max_waiting: int = MAX_WAITING,
        brake: Brake | None = None,
    ) -> None:
        self._registry = registry
        self.brake = brake or Brake()
        self._ledger = ledger
        self._max_concurrent = max_concurrent
        self._max_waiting = max_waiting
        self._max_request_bytes = max_request_bytes
        self._max_response_bytes = max_response_bytes
        self._running: dict[str, tuple[asyncio.Task[None], CancelToken]] = {}
        self._waiting: OrderedDict[str, tuple[ToolRequest, Registered]] = OrderedDict()
        self._unacknowledged: OrderedDict[str, bytes] = OrderedDict()
        self._accepted: set[str] = set()
        self._done: deque[str] = deque()
        self._done_ids: set[str] = set()
        self._orphans: set[str] = set()
        self._send: Send | None = None
        self._keeps = False
        self._closing = ""

    # -- the link ---------------------------------------------------------------------------------------

    def attach(self, send: Send, *, keeps: bool) -> None:
        """Answers go through `send` from now on. `keeps`: the gateway acknowledges results and takes them late."""
        self._send, self._keeps = send, keeps
        if not keeps:
            self._unacknowledged.clear()
        for frame in self._unacknowledged.values():
            send(frame)

    def detach(self, reason: str) -> None:
        """The link is gone. Work goes on for a gateway that will take its results later, else it is cancelled."""
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
        """Start, queue or refuse a call. From a gateway that keeps results, an id seen before never starts again."""
        request_id = request.request_id
        if request_id in self._running or request_id in self._waiting:
            return
        kept = self._unacknowledged.get(request_id)
        if kept is not None:
            self._transmit(kept)
            return
        if request_id in self._done_ids:
            return
        if self._closing:
            self._refuse(request_id, Cancelled(f"cancelled before it started: {self._closing}"))
        elif self.brake.order is not None:
            self._refuse(request_id, self.brake.order.refusal_of_node())
        elif size > self._max_request_bytes:
            self._refuse(
                request_id,
                InvalidArgs(
                    f"the request has {size} bytes, this node takes at most {self._max_request_bytes} "
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

    def cancel(self, request_id: str, reason: str, grace: float = CANCEL_GRACE_SECONDS) -> None:
        """Ask a call to stop; one that does not within the grace has its task cancelled."""
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
                self._remember(request_id)
            if request_id in self._accepted or request_id in self._ledger.earlier:
                self._accepted.discard(request_id)
                try:
                    self._ledger.settle(request_id)
                except OSError as error:  # it is asked about once more after a restart, that is all
                    log.warning("the ledger cannot be written: %s", error)

    def stop_all(self, reason: str) -> int:
        """Ask every call to stop, those that wait for their turn too; how many that are."""
        known = [*self._waiting, *self._running]
        for request_id in known:
            self.cancel(request_id, reason, FREEZE_GRACE_SECONDS)
        return len(known)

    async def stopped(self, seconds: float) -> int:
        """Wait until no call runs; how many still do after `seconds`."""
        tasks = [task for task, _ in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return len(self._running)

    async def close(self, reason: str) -> None:
        """Cancel everything and wait for it to end; no tool runs afterwards."""
        self._closing = reason
        for request_id in list(self._waiting):
            self.cancel(request_id, reason)
        tasks = [task for task, _ in self._running.values()]
        for request_id in list(self._running):
            self.cancel(request_id, reason)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_SECONDS + 1)

    # -- running ----------------------------------------------------------------------------------------

    def _start(self, request: ToolRequest, tool: Registered) -> None:
        if not tool.spec.read_only and self._keeps and storable(request.request_id):
            try:
                self._ledger.accept(request.request_id)
            except OSError as error:
                self._refuse(request.request_id, Failed(f"the call cannot be written down: {error}; it did not run"))
                return
            self._accepted.add(request.request_id)
        token = CancelToken()
        # A name of its own: one that asyncio makes up takes as long as the rest of making a task.
        task = asyncio.get_running_loop().create_task(self._run(request, tool, token), name=request.tool)
        self._running[request.request_id] = (task, token)

    async def _run(self, request: ToolRequest, tool: Registered, token: CancelToken) -> None:
        request_id = request.request_id
        try:
            response = await self._outcome(request, tool, token)
        finally:
            del self._running[request_id]
        if request_id in self._orphans:
            self._orphans.discard(request_id)  # its gateway gave the call up with the link
        else:
            self._answer(response)
        while self._waiting and len(self._running) < self._max_concurrent:
            self._start(*self._waiting.popitem(last=False)[1])

    async def _outcome(self, request: ToolRequest, tool: Registered, token: CancelToken) -> ToolResponse:
        context = ToolContext(
            request_id=request.request_id,
            tool_name=request.tool,
            session_key=request.session_key or None,
            cancel=token,
            timeout_ms=None if request.timeout_ms is UNSET else request.timeout_ms,
        )
        try:
            value = await tool.run(context, request.args)
            result = msgspec.json.encode(value)
        except ToolError as error:
            return _failure(request.request_id, error)
        except asyncio.CancelledError:
            return _failure(request.request_id, Cancelled(token.reason or "cancelled"))
        except (KeyboardInterrupt, GeneratorExit):  # the program ends, or its loop is gone
            raise
        except BaseException as error:  # whatever it is: a Rust extension's panic is not even an Exception
            log.exception("tool %s failed on call %s", request.tool, request.request_id)
            return _failure(request.request_id, Failed(f"tool handler panicked: {_shown(error)}"))
        return ToolResponse(request.request_id, True, result=Raw(self._fitted(request.request_id, result)))

    def _fitted(self, request_id: str, result: bytes) -> bytes:
        """The result, or the beginning of it where it is longer than a response may be."""
        if len(result) <= self._max_response_bytes:
            return result
        head = b'{"_truncated":true,"_original_bytes":%d,"partial":"' % len(result)
        frame = len(encode(ToolResponse(request_id, True, result=Raw(head + b'"}'))))
        return head + _beginning(result.decode(), self._max_response_bytes - frame) + b'"}'

    # -- answering --------------------------------------------------------------------------------------

    def _refuse(self, request_id: str, error: ToolError) -> None:
        self._answer(_failure(request_id, error))

    def _answer(self, response: ToolResponse) -> None:
        frame = encode(response)
        excess = len(frame) - self._max_response_bytes
        if excess > 0 and response.error:
            text = response.error.message
            room = len(msgspec.json.encode(text)) - 2 - excess
            shorter = msgspec.json.decode(b'"%b"' % _beginning(text, room), type=str)
            error = ToolFailure(response.error.kind, shorter)
            frame = encode(ToolResponse(response.request_id, False, error=error))
        if self._keeps:
            self._unacknowledged[response.request_id] = frame
        self._transmit(frame)

    def _transmit(self, frame: bytes) -> None:
        if self._send is not None:
            self._send(frame)

    def _remember(self, request_id: str) -> None:
        self._done.append(request_id)
        self._done_ids.add(request_id)
        if len(self._done) > REMEMBERED_IDS:
            self._done_ids.discard(self._done.popleft())


def _failure(request_id: str, error: ToolError) -> ToolResponse:
    return ToolResponse(request_id, False, error=ToolFailure.of(error))


def _shown(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _beginning(text: str, room: int) -> bytes:
    """As much of `text` as fits into `room` bytes, escaped as the inside of a JSON string."""
    escaped = msgspec.json.encode(text)[1:-1]
    for end in range(min(room, len(escaped)), 0, -1):
        try:
            msgspec.json.decode(b'"%b"' % escaped[:end], type=str)
        except (msgspec.MsgspecError, UnicodeError):
            continue  # the cut went through a character or an escape
        return escaped[:end]
    return b""
