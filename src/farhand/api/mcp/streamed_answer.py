"""The answer to a call as a stream of events: progress, questions to the user, and the result."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from farhand.api.mcp import messages as rpc
from farhand.api.mcp.approval_forms import ApprovalForms
from farhand.api.mcp.messages import Id, RpcError
from farhand.api.mcp.sessions import Session
from farhand.api.mcp.tools import outcome
from farhand.api.server.large_bodies import beside_loop, result_bytes
from farhand.gateway.access.credentials import Credential
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.node_calls import MOST_LOG_LINES
from farhand.gateway.calls.open_call import CallLogLine, CallProgress, OpenCall
from farhand.gateway.nodes.output import RemoteCommands
from farhand.protocol.errors import ToolError
from farhand.protocol.names import NATIVE
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.waiting_calls import Approval

PROGRESS_SECONDS: Final = 0.3
# Interval of progress events for a call that prints nothing.
QUIET_SECONDS: Final = 5.0
MOST_TAIL: Final = 500
# Begins the ids of questions about approvals.
QUESTION: Final = "farhand-approval:"
# What waits for a slow reader: the log lines of a call, or its progress, then questions. The last place is for the end.
MOST_NEWS: Final = MOST_LOG_LINES + 20


@dataclass
class StreamedAnswer:
    """A call that is answered by a stream."""

    gate: Gate
    commands: RemoteCommands
    opened: OpenCall
    request_id: Id
    token: Id | None
    session: Session | None
    forms: ApprovalForms
    credential: Credential
    # The least level of log messages that are passed on; empty for none.
    log_level: str = ""
    # The last line of the log that was passed on.
    passed_on: CallLogLine | None = None

    @property
    def _levels(self) -> tuple[str, ...]:
        return rpc.LOG_LEVELS[rpc.LOG_LEVELS.index(self.log_level) :] if self.log_level else ()

    @property
    def reports(self) -> bool:
        """Whether the client wants progress or log messages of the call."""
        return self.token is not None or bool(self._levels)

    def over(self, _ended: asyncio.Future[CallRecord]) -> None:
        if self.session is None:
            return
        asked = self.session.calls.get(self.request_id)
        if asked is not None and asked.call_id == self.opened.record.id:
            del self.session.calls[self.request_id]

    async def pieces(self, version: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer; with a session they have ids, so that a lost stream can be resumed."""
        place = None if self.session is None else place_of(self.opened.record.id, self.request_id)
        ended = self.opened.ended()
        news: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_NEWS)
        ended.add_done_callback(lambda _: news.put_nowait(None))
        self.opened.on_approval(lambda approval: self._ask(approval, news))
        telling = asyncio.ensure_future(self._tell(news)) if self.token is not None else None
        logging = asyncio.ensure_future(self._pass_on_logs(news)) if self._levels else None
        try:
            if place is not None:
                yield rpc.opening(version, place)
            while (message := await news.get()) is not None:
                yield rpc.event(message, place)
            for line in self._log_lines():
                yield rpc.event(line, place)
            record = ended.result()
            yield await beside_loop(
                result_bytes(record),
                lambda: rpc.event(rendered(record, self.request_id, modern=self.session is None), place),
            )
        finally:
            for task in (telling, logging):
                if task is not None:
                    task.cancel()
            if self.session is None and not ended.done():
                self.gate.abandon(self.opened)

    def _ask(self, approval: Approval, news: asyncio.Queue[bytes | None]) -> None:
        """Ask the client's user to approve the call, if the client can ask."""
        if self.session is None or not self.session.elicits:
            return
        if news.qsize() >= MOST_NEWS - 1:  # the reader is slow; the call can be approved elsewhere
            return
        name = f"{QUESTION}{approval.id}"
        self.session.questions[name] = approval.id
        params = self.forms.request(approval, self.credential)
        news.put_nowait(rpc.asking(name, "elicitation/create", params))

    async def _pass_on_logs(self, news: asyncio.Queue[bytes | None]) -> None:
        """Pass on what the call's tool logs while it runs."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if news.empty():  # a slow reader gets what is kept, after it has read the last
                for line in self._log_lines():
                    news.put_nowait(line)

    def _log_lines(self) -> list[bytes]:
        """Return the log messages that were not passed on yet."""
        lines = self.opened.log
        known = next((at for at, line in enumerate(lines) if line is self.passed_on), -1)
        new = [line for line in lines[known + 1 :] if line.level in self._levels]
        if new and known < 0 and self.passed_on is not None:  # of a call, the last lines are kept
            said = "lines may be missing here: the call logged faster than they were read"
            new = [msgspec.structs.replace(new[0], message=said), *new]
        self.passed_on = lines[-1] if lines else None
        logger = self.opened.record.tool
        return [
            rpc.notification("notifications/message", {"level": one.level, "logger": logger, "data": one.message})
            for one in new
        ]

    async def _tell(self, news: asyncio.Queue[bytes | None]) -> None:
        """Report progress: the tool's, else the elapsed time with the last line that the call's command printed."""
        record = self.opened.record
        began = time.monotonic()
        pages = self.commands.output(record.node_id or NATIVE, {"call_id": record.id}, 0, wait=True)
        tail = b""
        printing = True
        by_tool: bool | None = None
        following: asyncio.Future[Any] | None = None
        changed = self.opened.progress_changed()
        if self.opened.progress is not None:  # reported before this began
            changed.set_result(None)
        try:
            while True:
                if printing and following is None:
                    following = asyncio.ensure_future(anext(pages, None))
                waiting = {changed, following} if following is not None else {changed}
                await asyncio.wait(waiting, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                printed = quiet = not any(one.done() for one in waiting)
                if following is not None and following.done():
                    page = None
                    with contextlib.suppress(ToolError):
                        page = following.result()
                    following = None
                    printing = page is not None
                    if page is not None and page.data:
                        tail = (tail + page.data)[-MOST_TAIL:]
                        printed = True
                said = self.opened.progress
                if changed.done():
                    changed = self.opened.progress_changed()
                elif not printed and not quiet:
                    continue
                if by_tool is None:  # numbers must grow, so both kinds are never mixed
                    by_tool = said is not None
                seconds = round(time.monotonic() - began, 3)
                params = {"progressToken": self.token, **_progress(seconds, tail, said, by_tool=by_tool)}
                if news.empty():  # a slow reader gets only the newest, after it has read the last
                    news.put_nowait(rpc.notification("notifications/progress", params))
                await asyncio.sleep(PROGRESS_SECONDS)
        finally:
            changed.cancel()
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
            await pages.aclose()


def _progress(seconds: float, tail: bytes, said: CallProgress | None, *, by_tool: bool) -> dict[str, Any]:
    """Return the fields of a progress notification, `by_tool` in the numbers of the tool, else in seconds."""
    lines = tail.decode(errors="replace").rstrip().splitlines()
    text = lines[-1] if lines else f"at work for {seconds:.0f} s"
    if said is None:
        return {"progress": seconds, "message": text}
    message = said.message or f"{100 * said.progress / said.total:.0f} %"
    if not by_tool:
        return {"progress": seconds, "message": message}
    return {"progress": said.progress, "total": said.total, "message": message}


def rendered(record: CallRecord, request_id: Id, *, modern: bool) -> bytes:
    if record.route == "unknown" and record.error_kind == "not_found":
        return RpcError(rpc.INVALID_PARAMS, f"Unknown tool: {record.error_message}").encoded(request_id)
    return rpc.result(request_id, rpc.complete(outcome(record), modern=modern))


def place_of(call_id: str, request_id: Id) -> str:
    """Return the position at which a stream resumes: the call, and the id of its answer."""
    return f"call:{call_id}:{msgspec.json.encode(request_id).hex()}"


def read_place(mark: str) -> tuple[str, Id] | None:
    kind, _, rest = mark.partition(":")
    call_id, _, encoded = rest.partition(":")
    if kind != "call":
        return None
    try:
        request_id = msgspec.json.decode(bytes.fromhex(encoded), type=Id)
    except (ValueError, msgspec.MsgspecError):
        return None
    return call_id, request_id
