"""Fan-out: the same call on many nodes, a few at a time, with an optional canary.

The call of each node is an ordinary one: it passes the gate, has its own record and can be refused. This module only
decides which calls are made, and when.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import MAX_TIMEOUT_MS, check_known
from farhand.gateway.calls.gate import Gate, IdempotencyConflict
from farhand.gateway.calls.open_call import new_call_id, result_of
from farhand.gateway.calls.refusals import ROW_BYTES
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import NULL, ToolCall, ToolFailure
from farhand.protocol.canonical_json import canonical
from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.names import MAX_TOOL_NAME_CHARS, SEPARATOR, join_tool
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import fanouts
from farhand.store.tables import idempotency as keys
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.fanouts import FanOutRecord

TAG = "tag:"
MOST_NODES = 1000
MOST_AT_ONCE = 100
LINE_CHARACTERS = 200

WAITING, RUNNING, OFFLINE, SKIPPED, FAILED = "waiting", "running", "offline", "skipped", "failed"


class FanOutRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool, named without its node, and the nodes: ids, and `tag:NAME` for all nodes with a tag."""

    tool: str
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    nodes: list[str]
    concurrency: int = 10
    # How many nodes are called first; if one of them fails, the others are not called.
    canary: int | bool = 0
    # Start no more calls after the first failure.
    stop_on_failure: bool = False
    # Do not count offline nodes as failures.
    skip_offline: bool = False
    timeout_ms: int | None = None
    session_key: str | None = None
    # Include the whole result of each node.
    results: bool = False
    # Report progress as server-sent events.
    stream: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one node. `state` is that of its call; `failed` means that it ran and its command failed."""

    node_id: str
    state: str
    ok: bool = False
    request_id: str | None = None
    duration_ms: int | None = None
    exit_code: int | None = None
    # The first line of the result.
    output: str = ""
    error: ToolFailure | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET


class FanOutAnswer(msgspec.Struct, frozen=True):
    """The results of all nodes; `ok` if there was at least one to call and every one succeeded."""

    group_id: str
    tool: str
    ok: bool
    counts: dict[str, int]
    duration_ms: int
    results: list[Row]


class Progress(msgspec.Struct, frozen=True):
    """An event: `planned` once, `started` and `ended` for each node, `waiting` for each call that needs an approval,
    and finally `done`."""

    type: str
    row: Row | UnsetType = UNSET
    answer: FanOutAnswer | UnsetType = UNSET
    approval: ApprovalRequested | UnsetType = UNSET


class FanOuts:
    def __init__(self, database: Store, node_registry: NodeRegistry, gate: Gate) -> None:
        self._database = database
        self._node_registry = node_registry
        self._gate = gate

    async def begin(self, request: FanOutRequest, principal: Principal, key: str | None) -> FanOut:
        """Record a fan-out and start it. The same key again returns the same nodes with the results of their calls.

        Raises InvalidArgs, NotFound for an unknown node or tag, Denied for a node beyond the principal's limits,
        OverBudget, IdempotencyConflict, StoreError; no call was made then.
        """
        check(request)
        if key is not None:  # arguments that differ only in formatting are the same request
            request = msgspec.structs.replace(request, args=msgspec.Raw(canonical(request.args)))
        nodes = self._chosen(request.nodes, principal)
        now = self._node_registry.clock()
        self._gate.keyed_calls.take(principal.actor, sum(ROW_BYTES + len(node_id) for node_id in nodes), now)
        record = FanOutRecord(new_call_id(), request.tool, principal.id, nodes, now)
        made = {node_id: new_call_id() for node_id in nodes}
        asked = msgspec.structs.replace(request, stream=False, results=False)  # the form of the answer does not matter
        digest = hashlib.sha256(b"fanout\0" + msgspec.json.encode(asked)).digest()

        def write(store: Tx) -> tuple[str, dict[str, str]]:
            if key is not None:
                first, first_digest = keys.claim(store, principal.id, key, digest, record.id, now)
                if first_digest != digest:
                    raise IdempotencyConflict(f"the idempotency key {key!r} was used for another request")
                if first != record.id:
                    again = fanouts.fanout_nodes(store, first)
                    ids = {node_id: made.get(node_id) or new_call_id() for node_id in again}
                    fanouts.add_calls(store, first, ids)
                    return first, ids
            fanouts.begin_fanout(store, record, made)
            return record.id, made

        group_id, call_ids = await self._database.write(write)
        found = {node_id: self._node_registry.nodes.get(node_id) for node_id in call_ids}
        offline = {
            node_id: node.absence if node else self._node_registry.unknown(node_id)
            for node_id, node in found.items()
            if node is None or not node.online
        }
        return FanOut(self._gate, request, principal, group_id, call_ids, offline, key)

    def _chosen(self, wanted: Sequence[str], principal: Principal) -> list[str]:
        """Return the ids of the chosen nodes, each once, in the given order. Raises NotFound, Denied.

        A tag means no nodes beyond the limits of the principal.
        """
        chosen: dict[str, None] = {}
        nodes = self._node_registry.nodes
        for name in wanted:
            if name.startswith(TAG) and name not in nodes:
                tag = name.removeprefix(TAG)
                found = sorted(one for one, node in nodes.items() if tag in node.tags and principal.may_know(one))
                if not found:
                    raise NotFound(f"no node has the tag {tag[:100]!r}; `farhand nodes` shows the tags of each")
                chosen |= dict.fromkeys(found)
                continue
            check_known(principal, name)
            if name not in nodes:
                raise NotFound(self._node_registry.unknown(name))
            chosen[name] = None
        return list(chosen)


def check(request: FanOutRequest) -> None:
    """Raise InvalidArgs for an invalid request."""
    if len(request.tool) > MAX_TOOL_NAME_CHARS:
        raise InvalidArgs(f"no tool has a name of {len(request.tool)} characters; `farhand tools` lists all tools")
    if not request.tool or SEPARATOR in request.tool:
        raise InvalidArgs(
            f"tool must be named without its node, such as 'Bash', not {request.tool!r}; nodes says where it runs"
        )
    if not 1 <= len(request.nodes) <= MOST_NODES:
        raise InvalidArgs(f"nodes must name 1 to {MOST_NODES} nodes or tags, not {len(request.nodes)}")
    if not 1 <= request.concurrency <= MOST_AT_ONCE:
        raise InvalidArgs(f"concurrency must be from 1 to {MOST_AT_ONCE}, not {request.concurrency}")
    if not 0 <= request.canary <= MOST_NODES:
        raise InvalidArgs(f"canary must be from 0 to {MOST_NODES}, not {request.canary}")
    if request.timeout_ms is not None and not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidArgs(f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {request.timeout_ms}")


class FanOut:
    """A running fan-out. A caller who leaves early calls `abandon`."""

    def __init__(
        self,
        gate: Gate,
        request: FanOutRequest,
        principal: Principal,
        group_id: str,
        made: dict[str, str],
        offline: dict[str, str],
        key: str | None,
    ) -> None:
        """`made` has the call id of each node, `offline` the message for each node that is offline."""
        self._gate = gate
        self._request = request
        self._principal = principal
        self._made = made
        self._online = [node_id for node_id in made if node_id not in offline]
        self._lasting = key is not None
        self._stopped = ""
        self._began = time.perf_counter()
        self._events: list[Progress] = []
        self._changed = asyncio.Event()
        self.group_id = group_id
        self._rows = {
            node_id: Row(
                node_id=node_id, state=OFFLINE, error=ToolFailure("failed", f"{offline[node_id]}; it was not called")
            )
            if node_id in offline
            else Row(node_id=node_id, state=WAITING)
            for node_id in made
        }
        self._events.append(Progress("planned", answer=self.answer()))
        self.task = asyncio.get_running_loop().create_task(self._work())

    def abandon(self) -> None:
        """Start no more calls and cancel those that run, unless the request has an idempotency key."""
        if not self._lasting:
            self.task.cancel()

    def answer(self) -> FanOutAnswer:
        rows = list(self._rows.values())
        counted = [row for row in rows if row.state != OFFLINE or not self._request.skip_offline]
        duration = round((time.perf_counter() - self._began) * 1000)
        return FanOutAnswer(
            self.group_id,
            self._request.tool,
            bool(counted) and all(row.ok for row in counted),
            dict(Counter(row.state for row in rows)),
            duration,
            rows,
        )

    async def follow(self) -> AsyncGenerator[Progress, None]:
        """Yield all events from the beginning to the end."""
        position = 0
        while True:
            self._changed.clear()
            while position < len(self._events):
                position += 1
                yield self._events[position - 1]
            if self.task.done():
                return
            await self._changed.wait()

    # -- under way --------------------------------------------------------------------------------------

    async def _work(self) -> FanOutAnswer:
        try:
            first = int(self._request.canary)
            await self._wave(self._online[:first])
            failed = [node_id for node_id in self._online[:first] if not self._rows[node_id].ok]
            if failed:
                self._stopped = f"the canary on {failed[0]} failed"
            await self._wave(self._online[first:])
        finally:
            answer = self.answer()
            self._emit(Progress("done", answer=answer))
        return answer

    async def _wave(self, nodes: Sequence[str]) -> None:
        waiting = deque(nodes)

        async def serve() -> None:
            while waiting and not self._stopped:
                await self._call(waiting.popleft())

        await asyncio.gather(*(serve() for _ in range(min(self._request.concurrency, len(nodes)))))
        for node_id in waiting:
            skipped = ToolFailure("cancelled", f"{self._stopped}; it was not called")
            self._end(Row(node_id=node_id, state=SKIPPED, error=skipped))

    async def _call(self, node_id: str) -> None:
        request = self._request
        call_id = self._made[node_id]
        self._rows[node_id] = Row(node_id=node_id, state=RUNNING, request_id=call_id)
        self._emit(Progress("started", self._rows[node_id]))
        call = ToolCall(
            call_id,
            join_tool(node_id, request.tool),
            request.args,
            session_key=request.session_key,
            timeout_ms=request.timeout_ms,
        )
        key = f"fanout:{self.group_id}:{node_id}" if self._lasting else None
        try:
            record = await self._ended(call, key)
            row = _row(node_id, record, request.results, self._gate.secrets)
        except (StoreError, IdempotencyConflict) as error:
            failure = ToolFailure.of(Failed(f"the call was not run: {error}"))
            row = Row(node_id=node_id, state=CallState.ERROR.value, error=failure)
        if not row.ok and request.stop_on_failure and not self._stopped:
            self._stopped = f"the call on {node_id} failed"
        self._end(row)

    async def _ended(self, call: ToolCall, key: str | None) -> CallRecord:
        opened = await self._gate.begin(call, principal=self._principal, idempotency_key=key)
        opened.on_approval(lambda approval: self._emit(Progress("waiting", approval=ApprovalRequested.of(approval))))
        try:
            return await self._gate.wait(opened)
        except BaseException:
            self._gate.abandon(opened)
            raise

    def _end(self, row: Row) -> None:
        self._rows[row.node_id] = row
        self._emit(Progress("ended", row))

    def _emit(self, progress: Progress) -> None:
        self._events.append(progress)
        self._changed.set()


class _ResultFields(msgspec.Struct):
    """The fields that results of commands and texts may have."""

    exitCode: Any = None  # noqa: N815
    status: Any = None
    output: Any = None
    content: Any = None
    text: Any = None


def _row(node_id: str, record: CallRecord, whole: bool, secrets: KnownSecrets) -> Row:
    ended = result_of(record)
    state, ok = record.state.value, ended.ok
    fields = _result_fields(ended.result) if ended.ok else _ResultFields()
    exit_code = fields.exitCode if isinstance(fields.exitCode, int) else None
    if ok and (exit_code not in (None, 0) or fields.status in ("failed", "timed_out", "killed", "lost")):
        state, ok = FAILED, False
    words = next((text for text in (fields.output, fields.content, fields.text) if isinstance(text, str)), None)
    if words is None and ended.ok:
        words = bytes(ended.result).decode(errors="replace")
    if ended.error is not None:
        words = ended.error.message
    return Row(
        node_id=node_id,
        state=state,
        ok=ok,
        request_id=record.id,
        duration_ms=None if record.duration_ms is None else round(record.duration_ms),
        exit_code=exit_code,
        output=secrets.truncate(
            next((line for line in (words or "").splitlines() if line.strip()), ""), LINE_CHARACTERS
        ),
        error=ended.error if ended.error is not None else UNSET,
        result=ended.result if whole and ended.ok else UNSET,
    )


def _result_fields(result: msgspec.Raw) -> _ResultFields:
    try:
        check_value_count(result)
        return msgspec.json.decode(result, type=_ResultFields)
    except (msgspec.MsgspecError, RecursionError):
        return _ResultFields()
