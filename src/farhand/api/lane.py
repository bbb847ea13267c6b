"""A lane for the caller who calls again and again.

A client that keeps its connection sends the same head with every call, byte for byte, and the guard would come to the
same verdict on it each time. So the verdict is kept with the head, on the connection; a request that begins with that
head and is whole goes straight to the gate: no parser, no task, no timers. Anything else takes the usual way, through
uvicorn. Measured: 160 µs of CPU a call before, see docs/performance.md for what is left of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from farhand.api.cork import CorkedProtocol
from farhand.api.guard import ADMITTED, Admission, Guard
from farhand.api.http import Reply
from farhand.api.lobby import HEAD_SECONDS, REQUEST_SECONDS, Lobby
from farhand.gateway.credentials import Credential

END_OF_LINE = b"\r\n"
END_OF_HEAD = b"\r\n\r\n"
FEW_CALLERS = 2
BODY_SECONDS = 0.05
"""A known head waits so long for its body; then both take the usual way."""


class LaneDoor(Protocol):
    """A route that can answer without a task."""

    def answer_at_once(
        self, body: bytes, credential: Credential, reply: Callable[[str, Reply], None]
    ) -> Callable[[], None] | None:
        """Answer by `reply`, with the id of the answer, perhaps before this returns; what is returned is to be called
        when the client hangs up before. None, with nothing done, for a request that takes the usual way."""
        ...


class Pass(msgspec.Struct, frozen=True):
    """What a head stands for; `size` is that of the whole request."""

    head: bytes
    size: int
    admission: Admission
    door: LaneDoor


class Answers:
    """What the connections of a server write in one turn of the loop.

    Each write to a socket wakes the client that sleeps on it, which takes longer than the write. So the first answer of
    a turn goes out at once, and the others follow together at its end: a client of many connections is up by then.
    """

    def __init__(self) -> None:
        self.callers = 0
        """Connections that use the lane. With a few, there is nothing to gather."""
        self._late: list[tuple[asyncio.Transport, bytes]] | None = None

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._late is not None:
            self._late.append((transport, data))
            return
        if self.callers > FEW_CALLERS:
            self._late = []
            asyncio.get_running_loop().call_soon(self.flush)
        transport.write(data)

    def flush(self) -> None:
        """Write what is late."""
        if self._late is None:
            return
        late, self._late = self._late, None
        for transport, data in late:
            if not transport.is_closing():
                transport.write(data)


class LaneProtocol(CorkedProtocol):
    def __init__(
        self, *, guard: Guard, doors: Mapping[str, LaneDoor], lobby: Lobby, answers: Answers, **options: Any
    ) -> None:
        """`doors`: by their paths, which are those of POST routes."""
        super().__init__(**options)
        self._answers = answers
        self._guard = guard
        self._lobby = lobby
        self._deadline: asyncio.TimerHandle | None = None
        """While it is set, nobody knows whose connection this is."""
        self._doors = {f"POST {path} HTTP/1.1".encode(): door for path, door in doors.items()}
        self._seen = b""
        self._pass: Pass | None = None
        self._body_due: asyncio.TimerHandle | None = None
        """While it is set, the known head is here and its body is waited for."""
        self._busy = False
        """A call of the lane is being answered."""
        self._hang_up: Callable[[], None] | None = None
        self._waiting = b""
        self._last = False
        self._answered_at = 0.0

    # -- until it is known whose it is --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.turn_out)
        self._lobby.enter(self, self.client[0] if self.client else "")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is not None:
            self.scope[ADMITTED] = self._let_in  # type: ignore[literal-required]
            self._wait_at_most(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        if self._deadline is not None:
            self._wait_at_most(REQUEST_SECONDS)
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        self._let_in()  # the node socket has an eye on its own strangers
        super().handle_websocket_upgrade()

    def turn_out(self) -> None:
        self._lobby.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.transport.abort()

    def _wait_at_most(self, seconds: float) -> None:
        assert self._deadline is not None
        self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.turn_out)

    def _let_in(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._lobby.leave(self)

    # -- the lane -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._busy:  # not answered yet: whatever comes waits its turn
            self._waiting += data
            self.flow.pause_reading()
            return
        known = self._pass
        if self._body_due is not None:
            data = self._take_head() + data
        if known is not None and self._between and self.cycle.response_complete and data.startswith(known.head):
            if len(data) == known.size:
                if self._guard.still_admits(known.admission) and self._took(known, data):
                    return
            elif len(data) == len(known.head):  # many clients send the body apart
                self._body_due = self.loop.call_later(BODY_SECONDS, self._let_head_go)
                return
        self._answers.flush()  # what comes now may be refused at once, and stands behind the last answer
        begins = self._between
        super().data_received(data)
        door = self._doors.get(data[: data.find(END_OF_LINE)]) if begins else None
        if door is not None:
            self._learn(data, door)

    def _took(self, known: Pass, data: bytes) -> bool:
        """Whether the door has taken a request; else nothing was done."""
        self._busy = True
        hang_up = known.door.answer_at_once(data[len(known.head) :], known.admission.credential, self._answer)
        if hang_up is None:
            self._busy = False
            return False
        self._hang_up = hang_up if self._busy else None
        return True

    def _take_head(self) -> bytes:
        assert self._body_due is not None and self._pass is not None
        self._body_due.cancel()
        self._body_due = None
        return self._pass.head

    def _let_head_go(self) -> None:
        if self._body_due is not None:
            self._answers.flush()
            super().data_received(self._take_head())

    def _learn(self, data: bytes, door: LaneDoor) -> None:
        """Remember a head that comes for the second time, by itself or with all of its body and nothing else."""
        end = data.find(END_OF_HEAD)
        if end < 0:
            return
        size = end + len(END_OF_HEAD)
        head = data[:size]
        if head != self._seen:
            self._seen = head
            return
        admission = self._guard.admission(dict(self.scope))
        if admission is not None and len(data) - size not in (0, admission.length):
            admission = None
        self._answers.callers += (admission is not None) - (self._pass is not None)
        self._pass = None if admission is None else Pass(head, size + admission.length, admission, door)

    def _answer(self, call_id: str, reply: Reply) -> None:
        self._busy = False
        self._hang_up = None
        transport = self.transport
        if transport.is_closing():
            return
        self.server_state.total_requests += 1
        reply.body = self._guard.secrets.hide(reply.body)
        whole = reply.whole(call_id, self.server_state.default_headers, close=self._last)
        if self._last:
            transport.write(whole)
            transport.close()
            return
        self._answers.write(transport, whole)
        self._answered_at = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)
        if self._waiting:
            data, self._waiting = self._waiting, b""
            self.flow.resume_reading()
            self.data_received(data)

    def eof_received(self) -> None:
        self._answers.flush()  # the connection is closed after this
        super().eof_received()

    def timeout_keep_alive_handler(self) -> None:
        # The lane leaves this timer alone, since setting one for each call costs more than looking at the clock here.
        idle = 0.0 if self._busy or self._body_due is not None else self.loop.time() - self._answered_at
        if idle < self.timeout_keep_alive:
            self._wait_for_more(self.timeout_keep_alive - idle)
        else:
            super().timeout_keep_alive_handler()

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_in()
        self._answers.callers -= self._pass is not None
        if self._body_due is not None:
            self._take_head()
        self._pass = None
        self._waiting = b""
        if self._hang_up is not None:
            self._hang_up()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def shutdown(self) -> None:
        self._let_head_go()
        self._answers.flush()
        if self._busy:
            self._last = True
        else:
            super().shutdown()
