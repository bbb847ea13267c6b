"""Fan-out: one call to many nodes, a few at a time, perhaps one of them first.

Each node's call is an ordinary one: it passes the gate, has its own record and may be refused like any other. What is
decided here is only which calls are made, and when.
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
from farhand.gateway.calls.admission import MAX_TIMEOUT_MS
from farhand.gateway.calls.gate import Gate, IdempotencyConflict
from farhand.gateway.calls.open_call import new_call_id, result_of
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import NULL, ToolCall, ToolFailure
from farhand.protocol.canonical_json import canonical
from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.protocol.names import SEPARATOR, join_tool
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


class FanOutRequest(msgspec.Struct, kw_only=True):
    """Which tool, without its node, on which nodes: ids, and `tag:NAME` for all that carry a tag."""

    tool: str
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    nodes: list[str]
    concurrency: int = 10
    # So many nodes first; if one of them fails, the others are left alone.
    canary: int | bool = 0
    # Begin nothing more after the first failure.
    stop_on_failure: bool = False
    # A node that is not connected is no failure.
    skip_offline: bool = False
    timeout_ms: int | None = None
    session_key: str | None = None
    # Give each node's whole result too.
    results: bool = False
    # Tell what happens while it happens, as server-sent events.
    stream: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part. `state` is that of its call; `failed`: it ran, but its command did not end well."""

    node_id: str
    state: str
    ok: bool = False
    request_id: str | None = None
    duration_ms: int | None = None
    exit_code: int | None = None
    # The first line of what came back.
    output: str = ""
    error: ToolFailure | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET


class FanOutAnswer(msgspec.Struct, frozen=True):
    """`ok` only when every node that was to be called succeeded, and there was one."""

    group_id: str
    tool: str
    ok: bool
    counts: dict[str, int]
    duration_ms: int
    results: list[Row]


class Progress(msgspec.Struct, frozen=True):
    """Something that happened: `planned` once, then `started` and `ended` for each node, at last `done`.

    In between `waiting` for each call that waits to be approved.
    """

    type: str
    row: Row | UnsetType = UNSET
    answer: FanOutAnswer | UnsetType = UNSET
    approval: ApprovalRequested | UnsetType = UNSET


class FanOuts:
    """Begins fan-outs."""

    def __init__(self, database: Store, node_registry: NodeRegistry, gate: Gate) -> None:
        self._database = database
        self._node_registry = node_registry
        self._gate = gate

    async def begin(self, request: FanOutRequest, principal: Principal, key: str | None) -> FanOut:
        """Write it down and start it. The same key again finds the same nodes, and what their calls came to.

        Raises InvalidArgs, NotFound for a node or tag that is not known, IdempotencyConflict, StoreError; nothing has
        been called then.
        """
        check(request)
        if key is not None:  # the same arguments, however they are written, are the same calls
            request = msgspec.structs.replace(request, args=msgspec.Raw(canonical(request.args)))
        nodes = self._chosen(request.nodes)
        now = self._node_registry.clock()
        record = FanOutRecord(new_call_id(), request.tool, principal.id, nodes, now)
        made = {node_id: new_call_id() for node_id in nodes}
        asked = msgspec.structs.replace(request, stream=False, results=False)  # how it is told does not matter
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
        away = {
            node_id: node.absence if node else self._node_registry.unknown(node_id)
            for node_id, node in found.items()
            if node is None or not node.online
        }
        return FanOut(self._gate, request, principal, group_id, call_ids, away, key)

    def _chosen(self, wanted: Sequence[str]) -> list[str]:
        """The ids of the nodes that are meant, each once, in the order of their naming. Raises NotFound."""
        chosen: dict[str, None] = {}
        for name in wanted:
            if name.startswith(TAG) and name not in self._node_registry.nodes:
                tag = name.removeprefix(TAG)
                found = sorted(node_id for node_id, node in self._node_registry.nodes.items() if tag in node.card.tags)
                if not found:
                    raise NotFound(f"no node has the tag {tag!r}; `farhand nodes` shows the tags of each")
                chosen |= dict.fromkeys(found)
            elif name in self._node_registry.nodes:
                chosen[name] = None
            else:
                raise NotFound(self._node_registry.unknown(name))
        return list(chosen)


def check(request: FanOutRequest) -> None:
    """Raises InvalidArgs naming what cannot be meant."""
    if not request.tool or SEPARATOR in request.tool:
        raise InvalidArgs(f"tool is named without its node, as 'Bash'; the nodes say where, not {request.tool!r}")
    if not 1 <= len(request.nodes) <= MOST_NODES:
        raise InvalidArgs(f"nodes must name 1 to {MOST_NODES} nodes or tags, not {len(request.nodes)}")
    if not 1 <= request.concurrency <= MOST_AT_ONCE:
        raise InvalidArgs(f"concurrency must be from 1 to {MOST_AT_ONCE}, not {request.concurrency}")
    if not 0 <= request.canary <= MOST_NODES:
        raise InvalidArgs(f"canary must be from 0 to {MOST_NODES}, not {request.canary}")
    if request.timeout_ms is not None and not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidArgs(f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {request.timeout_ms}")


class FanOut:
    """One that is under way. Whoever leaves it calls `abandon`."""

    def __init__(
        self,
        gate: Gate,
        request: FanOutRequest,
        principal: Principal,
        group_id: str,
        made: dict[str, str],
        away: dict[str, str],
        key: str | None,
    ) -> None:
        """`made`: the id of the call for each node. `away`: the nodes that are offline, and what to say of each."""
        self._gate = gate
        self._request = request
        self._principal = principal
        self._made = made
        self._online = [node_id for node_id in made if node_id not in away]
        self._lasting = key is not None
        self._stopped = ""
        self._began = time.perf_counter()
        self._happened: list[Progress] = []
        self._wakes = asyncio.Event()
        self.group_id = group_id
        self._rows = {
            node_id: Row(
                node_id=node_id, state=OFFLINE, error=ToolFailure("failed", f"{away[node_id]}; it was not called")
            )
            if node_id in away
            else Row(node_id=node_id, state=WAITING)
            for node_id in made
        }
        self._happened.append(Progress("planned", answer=self.answer()))
        self.task = asyncio.get_running_loop().create_task(self._work())

    def abandon(self) -> None:
        """Nobody waits for it: begin nothing more and cancel what runs; one with a key goes on."""
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
        """What happens, from the beginning to the end."""
        position = 0
        while True:
            self._wakes.clear()
            while position < len(self._happened):
                position += 1
                yield self._happened[position - 1]
            if self.task.done():
                return
            await self._wakes.wait()

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
            self._tell(Progress("done", answer=answer))
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
        self._tell(Progress("started", self._rows[node_id]))
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
        opened.on_approval(lambda approval: self._tell(Progress("waiting", approval=ApprovalRequested.of(approval))))
        try:
            return await self._gate.wait(opened)
        except BaseException:
            self._gate.abandon(opened)
            raise

    def _end(self, row: Row) -> None:
        self._rows[row.node_id] = row
        self._tell(Progress("ended", row))

    def _tell(self, progress: Progress) -> None:
        self._happened.append(progress)
        self._wakes.set()


class _Said(msgspec.Struct):
    """What results of commands and texts have in common, where they have it."""

    exitCode: Any = None  # noqa: N815
    status: Any = None
    output: Any = None
    content: Any = None
    text: Any = None


def _row(node_id: str, record: CallRecord, whole: bool, secrets: KnownSecrets) -> Row:
    ended = result_of(record)
    state, ok = record.state.value, ended.ok
    said = _said(ended.result) if ended.ok else _Said()
    exit_code = said.exitCode if isinstance(said.exitCode, int) else None
    if ok and (exit_code not in (None, 0) or said.status in ("failed", "timed_out", "killed", "lost")):
        state, ok = FAILED, False
    words = next((text for text in (said.output, said.content, said.text) if isinstance(text, str)), None)
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


def _said(result: msgspec.Raw) -> _Said:
    try:
        return msgspec.json.decode(result, type=_Said)
    except (msgspec.MsgspecError, RecursionError):
        return _Said()
