"""Freeze: one order that stops everything on all machines and holds until it is lifted.

The gateway applies it at once, so nothing new starts; then everything that runs is ended, on this machine and on every
node at once, and each node reports its result. A node stores the order on its own disk. A disconnected node gets it
when it reconnects, before any other message.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from farhand.gateway.access.freeze_hold import FreezeHold
from farhand.gateway.calls.gate import Gate
from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.gateway.transfers.transfers import Transfers
from farhand.machine.jobs.job import Ending
from farhand.machine.threads import in_own_thread
from farhand.protocol.errors import Failed
from farhand.protocol.freeze import MAX_REASON_CHARS, FreezeOrder, FreezeState, clean_reason
from farhand.protocol.messages import FreezeReport, NodeFreeze, NodeThaw, encode
from farhand.protocol.untrusted import one_line

log = logging.getLogger(__name__)

T = TypeVar("T")
Asked = asyncio.Future[FreezeReport]

MOST_COUNTED = 1_000_000
# How long to wait for nodes; later reports are still recorded.
CONFIRM_SECONDS = 5.0
OFFLINE = "offline: it gets the order as soon as it connects, before any call"
OFFLINE_THAWED = "offline: it is thawed as soon as it connects"
NOT_SUPPORTED = (
    "not supported by this node: its open calls are cancelled and it gets no new ones; its processes keep running"
)


class NodeFate(msgspec.Struct, frozen=True):
    """The result for one node; `confirmed` only if the node reported it."""

    node_id: str
    online: bool
    confirmed: bool
    ended_processes: int = 0
    stopped_calls: int = 0
    error: str | UnsetType = UNSET


class OwnFate(msgspec.Struct, frozen=True):
    """What was ended on the gateway's own machine and in its records."""

    ended_processes: int = 0
    cancelled_calls: int = 0
    stopped_runs: int = 0
    cancelled_transfers: int = 0
    error: str | UnsetType = UNSET


class FreezeStatus(msgspec.Struct, frozen=True):
    """Whether everything is frozen, and the report of each node."""

    frozen: bool
    since: int | None
    by: str | None
    reason: str | None
    nodes: list[NodeFate]
    gateway: OwnFate | UnsetType = UNSET

    @property
    def summary(self) -> str:
        """Return a summary for people: how many nodes confirmed and how many did not."""
        connected = [fate for fate in self.nodes if fate.online]
        done = [fate for fate in connected if fate.confirmed]
        ended = sum(fate.ended_processes for fate in self.nodes)
        ended += 0 if self.gateway is UNSET else self.gateway.ended_processes
        offline = len(self.nodes) - len(connected)
        summary = f"{len(done)} of {len(connected)} connected nodes confirmed, {ended} processes were ended"
        return f"{summary}; {offline} offline nodes get the order when they connect" if offline else summary


class Freeze:
    """Freezes and thaws everything. `freeze_state` stores the order."""

    def __init__(
        self,
        freeze_state: FreezeState,
        hold: FreezeHold,
        gate: Gate,
        transfers: Transfers,
        node_registry: NodeRegistry,
        *,
        gateway_id: str,
        note: Callable[[str, str, dict[str, Any]], object],
        stop_runs: Callable[[str], Awaitable[int]],
        end_jobs: Callable[[], Awaitable[Ending]],
        thawed: Sequence[Callable[[], None]],
        first_number: int = 1,
    ) -> None:
        """`stop_runs` stops the agents' runs, for a reason, and returns their number; `end_jobs` ends every command on
        the gateway's own machine; `thawed` are called once everything may run again.
        """
        self._freeze_state = freeze_state
        self._hold = hold
        self._gate = gate
        self._transfers = transfers
        self._node_registry = node_registry
        self._gateway_id = gateway_id
        self._note = note
        self._numbers = itertools.count(first_number)
        self._asked: dict[int, tuple[Connection, Asked]] = {}
        self._fates: dict[str, NodeFate] = {}
        self._own: OwnFate | UnsetType = UNSET
        self._one_at_a_time = asyncio.Lock()
        self._stop_runs = stop_runs
        self._end_jobs = end_jobs
        self._thawed = thawed
        if freeze_state.order is not None and not freeze_state.order.gateway_id:  # stored while no gateway ran
            freeze_state.order = msgspec.structs.replace(freeze_state.order, gateway_id=gateway_id)
        hold.order = freeze_state.order

    @property
    def order(self) -> FreezeOrder | None:
        return self._freeze_state.order

    # -- freeze and thaw --------------------------------------------------------------------------------

    async def freeze(self, by: str, reason: str = "") -> FreezeStatus:
        """Stop everything. Return once all nodes have confirmed or timed out; if frozen already, repeat it all.

        Raises Failed if the order could not be stored: it holds, but a restart of the gateway would lift it.
        """
        async with self._one_at_a_time:
            order = self._freeze_state.order
            if order is None:
                order = FreezeOrder(self._node_registry.clock(), by, clean_reason(reason), self._gateway_id)
                log.warning("%s", order.summary)
                self._note("freeze.on", self._gateway_id, {"by": by, "reason": order.reason})
            elif by != order.by:
                self._note("freeze.again", self._gateway_id, {"by": by, "reason": clean_reason(reason)})
            self._freeze_state.order = order  # effective now; stored on disk next
            self._hold.order = order
            asked = self._each_node(lambda connection: self._freeze_node(connection, order))
            calls = self._gate.stop_all(order.summary)
            keeping = in_own_thread(self._freeze_state.try_freeze, order)
            own, unkept, _ = await asyncio.gather(self._stop_own(order.summary, calls), keeping, _confirmed(asked))
            self._own = own
            if unkept is not None:
                raise Failed(unkept)
            return self.state()

    async def thaw(self, by: str) -> FreezeStatus:
        """Let everything run again. Raises Failed if that could not be stored: then the order stays in force.

        A node that reports to be frozen is thawed even if the gateway is not frozen.
        """
        async with self._one_at_a_time:
            order = self._freeze_state.order
            try:
                await in_own_thread(self._freeze_state.thaw, self._node_registry.clock())
            except OSError as error:
                raise Failed(f"the thaw could not be stored, so the freeze stays in force: {error}") from None
            await _confirmed(self._each_node(self._thaw_node))
            if order is not None:
                log.warning("no longer %s; lifted by %s", order.summary, by)
                self._note("freeze.off", self._gateway_id, {"by": by, "since": order.since})
            self._lifted()
            return self.state()

    async def follow(self, order: FreezeOrder | None) -> None:
        """Apply an order, or its end, that another gateway has given to all nodes."""
        async with self._one_at_a_time:
            if (order is None) == (self.order is None):
                return
            if order is None:
                await in_own_thread(self._freeze_state.thaw, self._node_registry.clock())
                for connection in self._node_registry.connections:
                    connection.frozen = None
                self._fates.clear()
                self._lifted()
                return
            log.warning("%s", order.summary)
            self._freeze_state.order = order
            self._hold.order = order
            calls = self._gate.stop_all(order.summary)
            keeping = in_own_thread(self._freeze_state.try_freeze, order)
            self._own, unkept = await asyncio.gather(self._stop_own(order.summary, calls), keeping)
            if unkept is not None:
                log.error("%s", unkept)

    def _lifted(self) -> None:
        self._hold.order = None
        self._own = UNSET
        for notify in self._thawed:
            notify()

    async def asked_in_a_chat(self, by: str, reason: str) -> str:
        """Freeze everything and return the reply for the chat. Raises Failed."""
        answer = await self.freeze(by, reason)
        return f"Frozen: {answer.summary}. `farhand thaw` on the command line lifts it."

    async def resume(self) -> None:
        """End what was left running when the gateway last stopped, at a start under an order."""
        order = self._freeze_state.order
        if order is not None:
            log.warning("%s; `farhand thaw` lifts it", order.summary)
            self._own = await self._stop_own(order.summary, self._gate.stop_all(order.summary))

    def state(self) -> FreezeStatus:
        order = self.order
        nodes = sorted(self._node_registry.nodes.items())
        fates = [self._fates.get(node_id) or _unasked(node_id, node.connection) for node_id, node in nodes]
        return FreezeStatus(
            order is not None,
            order.since if order else None,
            order.by if order else None,
            order.reason if order else None,
            fates,
            self._own,
        )

    # -- this machine -----------------------------------------------------------------------------------

    async def _stop_own(self, reason: str, calls: int) -> OwnFate:
        failures: list[str] = []

        async def tried(what: str, work: Awaitable[T], otherwise: T) -> T:
            try:
                async with asyncio.timeout(CONFIRM_SECONDS):
                    return await work
            except TimeoutError:
                failures.append(f"{what} did not end within {CONFIRM_SECONDS:g} s")
            except Exception as error:
                log.exception("failed to end %s", what)
                failures.append(f"{what}: {type(error).__name__}: {error}")
            return otherwise

        nothing = Ending((), ())
        ending, stopped, transfers = await asyncio.gather(
            tried("commands", self._end_jobs(), nothing),
            tried("runs", self._stop_runs(reason), 0),
            tried("transfers", self._transfers.stop_all(reason), 0),
        )
        again = await tried("commands", self._end_jobs(), nothing)  # again, for what was just being started
        ended = {*ending.ended, *again.ended}
        if again.survivors:
            failures.append(again.describe("commands"))
        return OwnFate(len(ended), calls, stopped, transfers, "; ".join(failures) or UNSET)

    # -- nodes ------------------------------------------------------------------------------------------

    def node_joined(self, connection: Connection) -> None:
        """Send a newly connected node the freeze order, before any other message."""
        order = self.order
        if order is not None:
            self._freeze_node(connection, order)
        elif connection.frozen is not None and (self._freeze_state.thawed_at or 0) >= connection.frozen.since:
            self._thaw_node(connection)
        else:
            self._fates.pop(connection.node_id, None)

    def answered(self, connection: Connection, report: FreezeReport) -> None:
        asked, future = self._asked.get(report.number, (None, None))
        if asked is connection and future is not None and not future.done():
            future.set_result(_plain(report))

    def left(self, connection: Connection) -> None:
        for asked, future in self._asked.values():
            if asked is connection and not future.done():
                future.set_exception(Failed("it disconnected before it confirmed"))
        fate = self._fates.get(connection.node_id)
        if fate is not None:
            self._fates[connection.node_id] = msgspec.structs.replace(fate, online=False)

    def _each_node(self, tell: Callable[[Connection], Asked | None]) -> list[Asked]:
        """Send to every connected node at once and return the futures to wait for."""
        thawing = self.order is None
        for node_id, node in self._node_registry.nodes.items():
            if node.connection is None:
                fate = NodeFate(node_id, False, False, error=OFFLINE_THAWED if thawing else OFFLINE)
                self._fates[node_id] = fate
        summary = [tell(connection) for connection in self._node_registry.connections]
        return [asked for asked in summary if asked is not None]

    def _freeze_node(self, connection: Connection, order: FreezeOrder) -> Asked | None:
        connection.frozen = order
        return self._ask(connection, lambda number: NodeFreeze(number, order), "freeze.node", frozen=True)

    def _thaw_node(self, connection: Connection) -> Asked | None:
        return self._ask(connection, lambda number: NodeThaw(number, self._gateway_id), "thaw.node", frozen=False)

    def _ask(
        self, connection: Connection, say: Callable[[int], NodeFreeze | NodeThaw], kind: str, *, frozen: bool
    ) -> Asked | None:
        """Send one order at once and record the node's report; return None if the node does not support it."""
        node_id = connection.node_id
        if not connection.can_freeze:
            error: str | UnsetType = NOT_SUPPORTED if frozen else UNSET
            self._fates[node_id] = NodeFate(node_id, True, not frozen, error=error)
            return None
        number = next(self._numbers)
        future: Asked = asyncio.get_running_loop().create_future()
        self._asked[number] = (connection, future)
        silent = NodeFate(node_id, True, False, error=f"it did not confirm within {CONFIRM_SECONDS:g} s")
        self._fates[node_id] = silent
        connection.link.send(encode(say(number)))
        future.add_done_callback(lambda done: self._answered(number, connection, kind, frozen, done))
        return future

    def _answered(self, number: int, connection: Connection, kind: str, frozen: bool, done: Asked) -> None:
        """Record a node's report, even a late one."""
        self._asked.pop(number, None)
        failure = done.exception()
        if failure is not None:
            fate = NodeFate(connection.node_id, connection.current, False, error=str(failure))
        else:
            report = done.result()
            if report.frozen is False:
                connection.frozen = None
            well = report.frozen is frozen and report.error is None
            error = UNSET if well else report.error or f"it says that it is {'' if report.frozen else 'not '}frozen"
            fate = NodeFate(connection.node_id, True, well, report.ended_processes, report.stopped_calls, error)
        self._fates[connection.node_id] = fate
        data = {name: value for name, value in msgspec.to_builtins(fate).items() if name != "node_id"}
        self._note(kind, connection.node_id, data)


def _plain(report: FreezeReport) -> FreezeReport:
    """Return a node's report with plausible counts and a single line of text."""
    return msgspec.structs.replace(
        report,
        ended_processes=min(max(0, report.ended_processes), MOST_COUNTED),
        stopped_calls=min(max(0, report.stopped_calls), MOST_COUNTED),
        error=None if report.error is None else one_line(report.error, MAX_REASON_CHARS) or "it failed",
    )


async def _confirmed(asked: list[Asked]) -> None:
    if asked:
        await asyncio.wait(asked, timeout=CONFIRM_SECONDS)


def _unasked(node_id: str, connection: Connection | None) -> NodeFate:
    """Return the state of a node that got no order: it runs, unless it reports otherwise."""
    if connection is None or connection.frozen is None:
        return NodeFate(node_id, connection is not None, connection is not None)
    return NodeFate(node_id, True, False, error=connection.frozen.node_refusal().message)
