"""Tasks of MCP: calls in the background whose clients come back for the result.

A task is a recorded call, so it survives the client, the gateway and the node. In 2025-11-25 a client asks for a task
(`task` in `tools/call`) and fetches its result by `tasks/result`. From 2026-07-28 on, tasks are an extension: a client
that announces it may get a task instead of a result, and finds the result in `tasks/get`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from farhand.api.mcp import messages as rpc
from farhand.api.mcp.approval_forms import ApprovalForms
from farhand.api.mcp.messages import RpcError, RpcMessage
from farhand.api.mcp.tools import outcome
from farhand.gateway.access.credentials import Credential
from farhand.gateway.calls.gate import Gate
from farhand.store.ports import Store
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.mcp.tasks import TaskRow, add_task, find_task, tasks_of
from farhand.store.tables.waiting_calls import Approval

EXTENSION: Final = "io.modelcontextprotocol/tasks"
RELATED: Final = "io.modelcontextprotocol/related-task"
DEFAULT_TTL_MS: Final = 7 * 86_400_000
MAX_TTL_MS: Final = 30 * 86_400_000
POLL_MS: Final = 1000
PAGE: Final = 100
LAST: Final = "~"  # greater than any id

# By whether the version has tasks as an extension.
METHODS: Final = {
    False: ("tasks/get", "tasks/list", "tasks/cancel"),
    True: ("tasks/get", "tasks/update", "tasks/cancel"),
}
CAPABILITY: Final[dict[str, Any]] = {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}}


class Tasks:
    """Creates tasks and answers `tasks/…`."""

    def __init__(self, database: Store, gate: Gate, forms: ApprovalForms, clock: Callable[[], int]) -> None:
        self._database = database
        self._gate = gate
        self._forms = forms
        self._clock = clock

    # -- creating ---------------------------------------------------------------------------------------

    @staticmethod
    def wanted_ttl(message: RpcMessage, *, modern: bool) -> int | None:
        """Return the time to live of the task that a call may become; None if its client does not want one."""
        if modern:
            capabilities = message.meta.get(rpc.CAPABILITIES_KEY)
            extensions = capabilities.get("extensions") if isinstance(capabilities, dict) else None
            return DEFAULT_TTL_MS if isinstance(extensions, dict) and EXTENSION in extensions else None
        wanted = message.value("task")
        if wanted is None:
            return None
        ttl = wanted.get("ttl", DEFAULT_TTL_MS) if isinstance(wanted, dict) else None
        if isinstance(ttl, bool) or not isinstance(ttl, int | float) or ttl < 0:
            raise RpcError(rpc.INVALID_PARAMS, "task must be an object; its ttl is a number of milliseconds")
        return min(max(int(ttl), 1), MAX_TTL_MS)

    async def create(self, record: CallRecord, ttl_ms: int, *, modern: bool) -> dict[str, Any]:
        """Make a call that runs in the background a task, and return the result of `tools/call`."""
        row = TaskRow(record.id, record.credential, record.created_at, record.created_at + ttl_ms)
        await self._database.write(partial(add_task, row=row))
        task = await self._task(row, record, modern=modern)
        if not modern:
            return {"task": task}
        return {**task, "resultType": "task"}

    # -- answering --------------------------------------------------------------------------------------

    async def answer(self, method: str, message: RpcMessage, credential: Credential, *, modern: bool) -> dict[str, Any]:
        """Return the result of a request about tasks, other than `tasks/result`. Raises RpcError."""
        if method not in METHODS[modern]:
            raise RpcError(rpc.METHOD_NOT_FOUND, f"there is no method {method[:100]!r} here")
        if modern and self.wanted_ttl(message, modern=True) is None:
            needed: dict[str, Any] = {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
            raise RpcError(rpc.MISSING_CAPABILITY, f"announce the extension {EXTENSION} to use tasks", needed)
        if method == "tasks/list":
            return await self._list(message, credential)
        row, record = await self.find(message, credential)
        if method == "tasks/get":
            return await self._task(row, record, modern=modern, credential=credential)
        if method == "tasks/cancel":
            if not modern and record.ended_at is not None:
                raise RpcError(rpc.INVALID_PARAMS, f"the task has ended already: {_status(record, modern=False)}")
            ended = await self._gate.cancel(record.id, "cancelled by its client") or record
            return {} if modern else await self._task(row, ended, modern=False)
        await self._update(record, message, credential)
        return {}

    async def find(self, message: RpcMessage, credential: Credential) -> tuple[TaskRow, CallRecord]:
        """Return the task that a request names. Raises RpcError if it is unknown, has expired, or is another's."""
        task_id = message.value("taskId")
        if not isinstance(task_id, str):
            raise RpcError(rpc.INVALID_PARAMS, "taskId is required")
        row = await self._database.read(lambda tx: find_task(tx, task_id))
        record = None if row is None else await self._gate.find(row.call_id)
        known = row is not None and row.credential == credential.id and row.expires_at > self._clock()
        if row is None or record is None or not known:
            raise RpcError(rpc.INVALID_PARAMS, f"there is no task {task_id[:100]!r}, or it has expired")
        return row, record

    async def _list(self, message: RpcMessage, credential: Credential) -> dict[str, Any]:
        cursor = message.value("cursor")
        if not isinstance(cursor, str | None):
            raise RpcError(rpc.INVALID_PARAMS, "cursor must be one that an earlier answer gave")
        now = self._clock()
        rows = await self._database.read(
            lambda tx: tasks_of(tx, credential.id, cursor if cursor is not None else LAST, now, PAGE + 1)
        )
        tasks = []
        for row in rows[:PAGE]:
            record = await self._gate.find(row.call_id)
            if record is not None:
                tasks.append(await self._task(row, record, modern=False))
        page: dict[str, Any] = {"tasks": tasks}
        return {**page, "nextCursor": rows[PAGE - 1].call_id} if len(rows) > PAGE else page

    async def _update(self, record: CallRecord, message: RpcMessage, credential: Credential) -> None:
        responses = message.value("inputResponses")
        if not isinstance(responses, dict):
            raise RpcError(rpc.INVALID_PARAMS, "inputResponses must be an object")
        approval = await self._forms.pending(record.id) if record.state is CallState.WAITING else None
        for key, response in responses.items():
            if approval is not None and key == approval.id:
                await self._forms.answer(approval, response, credential)

    # -- shapes -----------------------------------------------------------------------------------------

    async def _task(
        self, row: TaskRow, record: CallRecord, *, modern: bool, credential: Credential | None = None
    ) -> dict[str, Any]:
        """Return a task in the shape of its generation; with `credential`, with its result or what it asks for."""
        approval = await self._forms.pending(record.id) if record.state is CallState.WAITING else None
        status = "input_required" if approval is not None else _status(record, modern=modern)
        changed = record.ended_at or (approval.asked_at if approval is not None else record.created_at)
        ttl = row.expires_at - row.created_at
        task: dict[str, Any] = {"taskId": row.call_id, "status": status}
        if (remark := self._remark(record, approval)) is not None:
            task["statusMessage"] = remark
        task |= {"createdAt": _moment(row.created_at), "lastUpdatedAt": _moment(changed)}
        task |= {"ttlMs": ttl, "pollIntervalMs": POLL_MS} if modern else {"ttl": ttl, "pollInterval": POLL_MS}
        if not modern or credential is None:
            return task
        if approval is not None:
            form = self._forms.request(approval, credential)
            task["inputRequests"] = {approval.id: {"method": "elicitation/create", "params": form}}
        elif status == "completed":
            task["result"] = {**outcome(record), "resultType": "complete"}
        return task

    def _remark(self, record: CallRecord, approval: Approval | None) -> str | None:
        if approval is not None:
            return self._forms.text(approval)
        if record.state is CallState.WAITING:
            return "waits for its machine" if record.node_id is not None else "waits"
        if record.ended_at is None:
            return f"{record.tool} is running"
        return None if record.error_message is None else f"{record.error_kind}: {record.error_message}"[:2000]


def result(record: CallRecord) -> dict[str, Any]:
    """Return the result of `tasks/result`."""
    found = outcome(record)
    return {**found, "_meta": {**found["_meta"], RELATED: {"taskId": record.id}}}


def _status(record: CallRecord, *, modern: bool) -> str:
    """Return the status of a task. A tool that fails is `failed`, or `completed` with an error since 2026-07-28."""
    if record.ended_at is None:
        return "working"
    if record.state is CallState.CANCELLED:
        return "cancelled"
    return "completed" if modern or record.state is CallState.OK else "failed"


def _moment(at: int) -> str:
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
