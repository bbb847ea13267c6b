"""Assembly of the parts that connect a gateway with the others of its fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from farhand.api.mcp.server import McpRoutes
from farhand.api.mcp.sessions import SessionNotice
from farhand.api.node_socket.door import NodeServices
from farhand.app.fleet import Member
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.control.freeze import Freeze
from farhand.gateway.fleet.follower import Handler, JournalFollower
from farhand.gateway.fleet.links import FleetLinks
from farhand.gateway.fleet.membership import FleetCalls, Membership
from farhand.gateway.fleet.runs import FleetRuns
from farhand.gateway.nodes.inventory import NodeInventory
from farhand.gateway.nodes.registry import Connection
from farhand.gateway.sessions.runs import Run
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.messages import NodeHello
from farhand.store.group_commit import GroupCommit
from farhand.store.journal.events import Event
from farhand.store.ports import Tx
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fleet import assign_run, other_worker
from farhand.store.tables.nodes import find_node
from farhand.store.tables.sessions import RunRecord

# What clients say about their MCP sessions.
SESSIONS: Final = "fh.mcp"


class _FreezeEvent(msgspec.Struct, frozen=True):
    by: str
    reason: str = ""


class FleetParts:
    """What one gateway of several needs beyond the parts of a single one."""

    def __init__(
        self,
        member: Member,
        database: GroupCommit,
        services: NodeServices,
        inventory: NodeInventory,
        gate: Gate,
        freeze: Freeze,
        tokens: Tokens,
        *,
        sessions: Sessions,
        mcp: McpRoutes,
        followed: Mapping[str, Callable[[], Awaitable[None]]],
        approvals: Approvals,
        settings: Callable[[], str],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        """`followed`: what reads its state again after events of a kind. `resume` takes up work that belongs to this
        gateway and is not being worked on.
        """
        self.member = member
        self._database = database
        self._inventory = inventory
        self._freeze = freeze
        self._tokens = tokens
        self._approvals = approvals
        self._settings = settings
        self._mcp = mcp
        self._registry = services.node_registry
        self._clock = services.node_registry.clock
        self._resume = resume
        self.links = FleetLinks(
            member.id,
            member.bus,
            database,
            services.node_registry,
            gate,
            join=inventory.join_remote,
            leave=inventory.leave_remote,
            handle=services.handle_text,
            on_frame=services.transfers.on_frame,
            connected=lambda: bool(member.bus.connected),
        )
        self.calls = FleetCalls(member.id, member.bus, database, sync=self.links.sync, cancel=gate.cancel)
        self.runs = FleetRuns(
            member.id,
            member.bus,
            database,
            lambda: sessions,
            lambda: sessions.start(member.owned("runs")),
        )
        self._follower: JournalFollower | None = None
        self._handlers: dict[str, Handler] = {
            **{kind: partial(_refreshed, refresh) for kind, refresh in followed.items()},
            "call.ended": self._call_ended,
            "token.": self._tokens_changed,
            "approval.approved": self._answered,
            "approval.denied": self._answered,
            "node.forgotten": self._node_forgotten,
            "freeze.on": self._frozen,
            "freeze.off": self._thawed,
            "node.changed": self._node_changed,
            "node.probed": self._node_changed,
            "node.described": self._node_described,
        }

    async def start(self, stack: contextlib.AsyncExitStack, restart: Callable[[], None]) -> None:
        """Begin to serve with the others; ends with the stack. `restart` starts the gateway anew."""
        self.links.start()
        stack.callback(self.links.close)
        self.calls.start()
        stack.callback(self.calls.close)
        self.runs.start()
        stack.callback(self.runs.close)
        self._sessions_told = self.member.bus.serve(SESSIONS, self._heard)
        stack.callback(self._sessions_told.close)
        self._follower = JournalFollower(self.member.bus, self._database, self._handlers)
        await stack.enter_async_context(self._follower)
        membership = Membership(
            self.member.id,
            self._database,
            clock=self._clock,
            superseded=self.member.superseded,
            taken_over=self._resume,
            handed_on=self.runs.take_up,
            settings=self._settings,
            restart=restart,
        )
        await stack.enter_async_context(membership)

    def follow(self, kind: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Have something read its state again after events of a kind."""
        self._handlers[kind] = partial(_refreshed, refresh)

    async def catch_up(self) -> None:
        """Return once everything is known here that another gateway has recorded by now."""
        if self._follower is not None:
            await self._follower.catch_up()

    # -- what clients say about MCP sessions to another gateway -----------------------------------------

    def tell(self, notice: SessionNotice) -> None:
        self.member.bus.publish(SESSIONS, msgspec.msgpack.encode((self.member.id, notice)))

    async def _heard(self, body: bytes) -> bytes:
        teller, notice = msgspec.msgpack.decode(body, type=tuple[str, SessionNotice])
        if teller != self.member.id:
            await self._mcp.heard(notice)
        return b""

    # -- what other gateways recorded -------------------------------------------------------------------

    async def _call_ended(self, event: Event) -> None:
        self.calls.ended(event.subject)

    async def _tokens_changed(self, _: Event) -> None:
        await self._tokens.refresh()

    async def _answered(self, event: Event) -> None:
        await self._approvals.answered(event.subject)

    async def _node_forgotten(self, event: Event) -> None:
        node = self._registry.nodes.get(event.subject)
        if node is not None and node.connection is None:
            del self._registry.nodes[event.subject]

    async def _frozen(self, event: Event) -> None:
        said = msgspec.json.decode(event.data, type=_FreezeEvent)
        await self._freeze.follow(FreezeOrder(event.at, said.by, said.reason, event.subject))

    async def _thawed(self, _: Event) -> None:
        await self._freeze.follow(None)

    async def _node_changed(self, event: Event) -> None:
        await self.links.changed(event.subject)

    async def _node_described(self, event: Event) -> None:
        card = await self._database.read(lambda tx: find_node(tx, event.subject))
        if card is not None:
            self._inventory.described_elsewhere(event.subject, card)


async def _refreshed(refresh: Callable[[], Awaitable[None]], _: Event) -> None:
    await refresh()


class LazyFleet:
    """Stands for the fleet's parts where they are needed before they are built."""

    def __init__(self, parts: Callable[[], FleetParts | None]) -> None:
        self._parts = parts

    @property
    def _fleet(self) -> FleetParts:
        parts = self._parts()
        assert parts is not None, "this gateway belongs to a fleet"
        return parts

    async def moved(self, seconds: float) -> None:
        await self._fleet.calls.moved(seconds)

    async def cancel(self, call_id: str, reason: str) -> None:
        await self._fleet.calls.cancel(call_id, reason)

    def worker(self, tx: Tx, key: str) -> str | None:
        return other_worker(tx, key, self._fleet.member.id)

    def assign(self, tx: Tx, run_id: str, replica: str) -> None:
        assign_run(tx, run_id, replica)

    async def wake(self, replica: str) -> None:
        await self._fleet.runs.wake(replica)

    async def stop(self, replica: str, key: str, reason: str) -> list[str]:
        return await self._fleet.runs.stop(replica, key, reason)

    def copy(self, record: RunRecord) -> Run:
        return self._fleet.runs.copy(record)

    def tell(self, notice: SessionNotice) -> None:
        self._fleet.tell(notice)

    async def catch_up(self) -> None:
        await self._fleet.catch_up()

    async def end_of(self, call_id: str) -> CallRecord | None:
        return await self._fleet.calls.end_of(call_id)

    def store(self, tx: Tx, connection: Connection) -> None:
        self._fleet.links.store(tx, connection)

    def remove(self, tx: Tx, connection: Connection) -> None:
        self._fleet.links.remove(tx, connection)

    def joined(self, connection: Connection, hello: NodeHello, stored: asyncio.Future[None]) -> None:
        self._fleet.links.joined(connection, hello, stored)

    def left(self, connection: Connection, stored: asyncio.Future[None]) -> None:
        self._fleet.links.left(connection, stored)

    def pass_on(self, connection: Connection, text: bytes, message: object) -> bool:
        return self._fleet.links.pass_on(connection, text, message)  # type: ignore[arg-type]

    def pass_frame(self, connection: Connection, frame: memoryview) -> bool:
        return self._fleet.links.pass_frame(connection, frame)
