"""Assembly of the parts that connect a gateway with the others of its fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from farhand.api.mcp.server import McpRoutes
from farhand.api.mcp.sessions import SessionNotice
from farhand.api.node_socket.services import NodeServices
from farhand.app.fleet import Member
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.fleet.follower import Handler, JournalFollower
from farhand.gateway.fleet.links import FleetLinks
from farhand.gateway.fleet.membership import FleetCalls, Membership
from farhand.gateway.fleet.runs import FleetRuns
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.freeze import FreezeOrder
from farhand.store.group_commit import GroupCommit
from farhand.store.journal.events import Event
from farhand.store.tables.nodes import find_node

# What clients say about their MCP sessions.
SESSIONS: Final = "fh.mcp"


class _FreezeEvent(msgspec.Struct, frozen=True):
    by: str
    reason: str = ""


class FleetConnections:
    """The nodes, calls and runs of other gateways. What they need is built later, and looked up when it is used."""

    def __init__(
        self,
        member: Member,
        database: GroupCommit,
        node_registry: NodeRegistry,
        services: Callable[[], NodeServices],
        sessions: Callable[[], Sessions],
    ) -> None:
        self.member = member
        self.links = FleetLinks(
            member.id,
            member.bus,
            database,
            node_registry,
            lambda: services().gate,
            join=lambda *given: services().inventory.join_remote(*given),
            leave=lambda connection: services().inventory.leave_remote(connection),
            handle=lambda connection, text: services().handle_text(connection, text),
            on_frame=lambda connection, frame: services().transfers.on_frame(connection, frame),
            connected=lambda: bool(member.bus.connected),
        )
        self.calls = FleetCalls(
            member.id,
            member.bus,
            database,
            sync=self.links.sync,
            cancel=lambda call_id, reason: services().gate.cancel(call_id, reason),
        )
        self.runs = FleetRuns(member.id, member.bus, database, sessions, lambda: sessions().start(member.owned("runs")))

    def tell(self, notice: SessionNotice) -> None:
        """Pass on what a client said about its MCP session."""
        self.member.bus.publish(SESSIONS, msgspec.msgpack.encode((self.member.id, notice)))


class FleetParts:
    """What one gateway of several needs beyond the parts of a single one."""

    def __init__(
        self,
        connections: FleetConnections,
        database: GroupCommit,
        services: NodeServices,
        tokens: Tokens,
        *,
        mcp: McpRoutes,
        followed: Mapping[str, Callable[[], Awaitable[None]]],
        approvals: Approvals,
        settings: Callable[[], str],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        """`followed`: what reads its state again after events of a kind. `resume` takes up work that belongs to this
        gateway and is not being worked on.
        """
        self._connections = connections
        self._member = connections.member
        self._database = database
        self._inventory = services.inventory
        self._freeze = freeze = services.freeze
        self._settings = settings
        self._mcp = mcp
        self._registry = services.node_registry
        self._clock = services.node_registry.clock
        self._resume = resume
        self._follower: JournalFollower | None = None
        self._handlers: dict[str, Handler] = {
            "call.ended": self._call_ended,
            "token.": lambda _: tokens.refresh(),
            "approval.approved": lambda event: approvals.answered(event.subject),
            "approval.denied": lambda event: approvals.answered(event.subject),
            "node.forgotten": self._node_forgotten,
            "freeze.on": self._frozen,
            "freeze.off": lambda _: freeze.follow(None),
            "node.changed": lambda event: connections.links.changed(event.subject),
            "node.probed": lambda event: connections.links.changed(event.subject),
            "node.described": self._node_described,
        }
        for kind, refresh in followed.items():
            self.follow(kind, refresh)

    async def start(self, stack: contextlib.AsyncExitStack, restart: Callable[[], None]) -> None:
        """Begin to serve with the others; ends with the stack. `restart` starts the gateway again."""
        for part in (self._connections.links, self._connections.calls, self._connections.runs):
            part.start()
            stack.callback(part.close)
        stack.callback(self._member.bus.serve(SESSIONS, self._heard).close)
        self._follower = JournalFollower(self._member.bus, self._database, self._handlers)
        await stack.enter_async_context(self._follower)
        membership = Membership(
            self._member.id,
            self._database,
            clock=self._clock,
            superseded=self._member.superseded,
            taken_over=self._resume,
            handed_on=self._connections.runs.take_up,
            settings=self._settings,
            restart=restart,
        )
        await stack.enter_async_context(membership)
        await self._member.starting.stop()

    def follow(self, kind: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Have something read its state again after events of a kind."""
        self._handlers[kind] = lambda _: refresh()

    async def catch_up(self) -> None:
        """Return once everything is known here that another gateway has recorded by now."""
        if self._follower is not None:
            await self._follower.catch_up()

    # -- what clients say about MCP sessions to another gateway -----------------------------------------

    async def _heard(self, body: bytes) -> bytes:
        teller, notice = msgspec.msgpack.decode(body, type=tuple[str, SessionNotice])
        if teller != self._member.id:
            await self._mcp.heard(notice)
        return b""

    # -- what other gateways recorded -------------------------------------------------------------------

    async def _call_ended(self, event: Event) -> None:
        self._connections.calls.ended(event.subject)

    async def _node_forgotten(self, event: Event) -> None:
        node = self._registry.nodes.get(event.subject)
        if node is not None and node.connection is None:
            del self._registry.nodes[event.subject]

    async def _frozen(self, event: Event) -> None:
        said = msgspec.json.decode(event.data, type=_FreezeEvent)
        await self._freeze.follow(FreezeOrder(event.at, said.by, said.reason, event.subject))

    async def _node_described(self, event: Event) -> None:
        card = await self._database.read(lambda tx: find_node(tx, event.subject))
        if card is not None:
            self._inventory.described_elsewhere(event.subject, card)
