"""Trials before an approval: the owner sees what a command did in a copy-on-write view, and approving it keeps that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from farhand.gateway.access.credentials import OWNER
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog, Target, read_arguments
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, Waiting, ended, new_call_id, preview_key
from farhand.gateway.calls.policy_subject import GATEWAY
from farhand.gateway.repeating import BackgroundTasks
from farhand.protocol.calls import ToolCall, ToolFailure, ToolResult
from farhand.protocol.errors import Failed, FarhandError, ToolError
from farhand.protocol.names import join_tool
from farhand.protocol.untrusted import one_line
from farhand.store.tables.calls import CallRecord, CallState
from farhand.tools import trial
from farhand.tools.preview import FileEffect, Preview

log = logging.getLogger(__name__)

# How long the order to discard a trial waits for a node that is offline. Trials expire after that time anyway.
DISCARD_WITHIN_MS: Final = 24 * 60 * 60 * 1000
MOST_OUTPUT: Final = 4000
LONGEST_LINE: Final = 4096


class TrialPreviews:
    """Runs the trials of waiting calls, as calls of the owner: the caller learns nothing before the answer."""

    def __init__(self, gate: Callable[[], Gate], catalog: Catalog, clock: Callable[[], int]) -> None:
        """`gate` returns the gate, whose waiting calls ask here in turn."""
        self._gate = gate
        self._catalog = catalog
        self._clock = clock
        self._tasks = BackgroundTasks()

    async def run(self, opened: OpenCall, waiting: Waiting, target: Target) -> CallRecord | None:
        """Run a call as a trial; return how that ended, None if the call ended first. It runs once, even if the
        gateway stops in between."""
        record = opened.record
        try:
            call = self._as_trial(record, waiting, target)
        except ToolError as error:
            refused = ToolResult(False, error=ToolFailure.of(error))
            return ended(record, CallState.ERROR, refused, self._clock(), 0.0)
        gate = self._gate()
        principal = Principal(OWNER)
        tried = await gate.begin(call, principal=principal, idempotency_key=preview_key(record.id), origins=GATEWAY)
        over, call_over = tried.ended(), opened.ended()
        try:
            await asyncio.wait({over, call_over}, return_when=asyncio.FIRST_COMPLETED)
            while not over.done() and not opened.over and not gate.closing:  # only the caller left
                call_over = opened.ended()
                await asyncio.wait({over, call_over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.abandon(tried)
        if over.done() and not opened.over:
            return over.result()
        if not gate.closing:
            gate.stop(tried, "the call that it was to show has ended")
            self._discard_later(tried)
        return None

    def follow(self, opened: OpenCall, trial_id: str) -> None:
        """Discard a trial if the call that it shows ends without keeping it."""
        self._tasks.start(self._discard_unless_kept(opened, trial_id))

    def _as_trial(self, record: CallRecord, waiting: Waiting, target: Target) -> ToolCall:
        """Return the call that tries another one. Raises ToolError if its tool or its machine cannot do that."""
        where = "this machine" if target.node is None else f"node {target.node.card.node_id!r}"
        if target.spec is None or "trial" not in target.spec.parameters.get("properties", {}):
            raise Failed(f"the tool {record.tool!r} cannot run as a trial")
        can = (
            target.own is not None and not target.own.server
            if target.node is None
            else self._catalog.serves_unlisted(target.node, trial.SPEC)
        )
        if not can:
            raise Failed(f"{where} cannot run trials")
        arguments = {**(read_arguments(record.args) or {}), "trial": True}
        return ToolCall(
            id=new_call_id(),
            tool=record.tool,
            args=msgspec.Raw(msgspec.json.encode(arguments)),
            session_key=record.session_key,
            agent_id=record.agent_id,
            timeout_ms=waiting.timeout_ms,
            asker=waiting.principal.asker.id,
        )

    async def _discard_unless_kept(self, opened: OpenCall, trial_id: str) -> None:
        end = await opened.ended()
        while end.state is CallState.WAITING and not self._gate().closing:  # only the caller left
            end = await opened.ended()
        if end.state is not CallState.OK:
            await self._discard(trial_id)

    def _discard_later(self, tried: OpenCall) -> None:
        async def after_its_end() -> None:
            await tried.ended()
            await self._discard(tried.record.id)

        self._tasks.start(after_its_end())

    async def _discard(self, trial_id: str) -> None:
        gate = self._gate()
        try:
            record = await gate.find(trial_id)
            if record is None or gate.closing:
                return
            call = ToolCall(
                id=new_call_id(),
                tool=trial.OWN if record.node_id is None else join_tool(record.node_id, trial.NAME),
                args=msgspec.Raw(msgspec.json.encode({"trialId": trial_id, "action": "discard"})),
                agent_id=record.agent_id,
            )
            before = None if record.node_id is None else self._clock() + DISCARD_WITHIN_MS
            own = self._catalog.own(trial.OWN) if record.node_id is None else None
            await gate.begin(call, principal=Principal(OWNER), own=own, background=True, origins=GATEWAY, before=before)
        except FarhandError as error:
            log.warning("trial %s was not discarded, and expires: %s", trial_id, error)

    def close(self) -> None:
        self._tasks.cancel()


class _Change(msgspec.Struct, frozen=True):
    path: str
    kind: str
    diff: str = ""


class _Tried(msgspec.Struct, frozen=True, rename="camel"):
    """What the result of a trial says, of a node (`output`) or of the gateway's own machine (`content`)."""

    trial_id: str
    changes: list[_Change]
    exit_code: int | None = None
    timed_out: bool = False
    output: str = ""
    content: str = ""


def with_trial(preview: Preview, tried: CallRecord) -> tuple[Preview, str]:
    """Return the preview of a call that was tried, and a note for the approver if that did not work."""
    problem = tried.error_message or "its result cannot be read"
    try:
        if tried.state is CallState.OK and tried.result is not None:
            found = msgspec.json.decode(tried.result, type=_Tried)
            if found.trial_id == tried.id:
                return _tried_preview(preview, found), ""
    except msgspec.MsgspecError as error:
        problem = f"its result cannot be read: {error}"
    reason = one_line(problem, LONGEST_LINE)
    return preview, f"It could not be tried before asking ({reason}). Approving runs it for real."


def _tried_preview(preview: Preview, found: _Tried) -> Preview:
    if found.timed_out:
        how = "it was ended after its time limit"
    else:
        how = "" if found.exit_code is None else f"it ended with exit code {found.exit_code}"
    changes = len(found.changes)
    what = f"changed {changes} file{'' if changes == 1 else 's'} or folders" if changes else "changed nothing"
    summary = f"Tried without network: {', '.join(filter(None, (how, what)))}. Approving keeps exactly that."
    files = tuple(
        FileEffect(one_line(one.path, LONGEST_LINE), None, one.diff, one_line(one.kind, 20)) for one in found.changes
    )
    output = (found.output or found.content)[-MOST_OUTPUT:]
    return msgspec.structs.replace(preview, files=files, summary=summary, output=output)
