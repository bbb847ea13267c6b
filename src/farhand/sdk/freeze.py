"""A node's part in a freeze: stop at once, end everything, and report the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from farhand.machine.threads import in_own_thread
from farhand.protocol.freeze import FreezeState
from farhand.protocol.messages import FreezeReport, NodeFreeze, NodeThaw, encode
from farhand.sdk.dispatcher import Dispatcher, Send

log = logging.getLogger(__name__)

# How long calls may take to end before the report says that some did not.
STOP_SECONDS = 2.0

# Ends every process that calls left running; returns their number, and an error for those that could not be ended.
EndAll = Callable[[], Awaitable[tuple[int, str | None]]]


class FreezeHandler:
    """Carries out the gateway's orders, across any number of connections."""

    def __init__(self, freeze_state: FreezeState, end_all: EndAll | None) -> None:
        self.freeze_state = freeze_state
        self._end_all = end_all
        self._endings: set[asyncio.Task[None]] = set()

    def freeze(self, message: NodeFreeze, dispatcher: Dispatcher, send: Send) -> None:
        """Freeze before the next frame is handled; the report follows once everything has ended."""
        held = self.freeze_state.order
        if held is None or held.gateway_id in ("", message.order.gateway_id):
            self.freeze_state.order = message.order  # in effect now; stored while everything is being ended
        # Otherwise the order of another gateway stays, which only that gateway may lift. This one repeats its own
        # whenever the node connects.
        calls = dispatcher.stop_all(message.order.summary)
        log.warning("this node is %s", message.order.summary, extra={"event": "freeze"})
        # Independent of the link: the order stays valid if the gateway is killed now.
        ending = asyncio.get_running_loop().create_task(self._end(message, calls, dispatcher, send))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def thaw(self, message: NodeThaw, send: Send) -> None:
        error = self.freeze_state.try_thaw(message.gateway_id, time.time_ns() // 1_000_000)
        if error is None:
            log.warning("this node accepts calls again", extra={"event": "thaw"})
        send(encode(FreezeReport(message.number, error is not None, error=error)))

    async def _end(self, message: NodeFreeze, calls: int, dispatcher: Dispatcher, send: Send) -> None:
        errors: list[str] = []
        processes = 0
        # The shared threads may all be busy.
        order = self.freeze_state.order or message.order
        storing = asyncio.ensure_future(in_own_thread(self.freeze_state.try_freeze, order))
        try:
            processes = await self._end_processes(errors)
            if left := await dispatcher.stopped(STOP_SECONDS):
                errors.append(f"{left} calls did not stop")
            if calls:  # a call may have started a process meanwhile
                processes += await self._end_processes(errors)
        except Exception as error:
            log.exception("freeze failed")
            errors.append(f"{type(error).__name__}: {error}")
        if not_stored := await storing:
            errors.append(not_stored)
        summary = "; ".join(dict.fromkeys(errors)) or None
        send(encode(FreezeReport(message.number, True, processes, calls, summary)))

    async def _end_processes(self, errors: list[str]) -> int:
        if self._end_all is None:
            return 0
        ended, error = await self._end_all()
        errors += [error] if error else []
        return ended
