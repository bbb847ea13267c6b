"""Assembly of the parts that connect a gateway with the others of its fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from farhand.api.node_socket.door import NodeServices
from farhand.app.fleet import Member
from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.freeze import Freeze
from farhand.gateway.fleet.follower import JournalFollower
from farhand.gateway.fleet.links import FleetLinks
from farhand.gateway.fleet.membership import FleetCalls, Membership
from farhand.gateway.nodes.inventory import NodeInventory
from farhand.gateway.nodes.registry import Connection
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.messages import NodeHello
from farhand.store.group_commit import GroupCommit
from farhand.store.journal.events import Event
from farhand.store.ports import Tx
from farhand.store.tables.calls import CallRecord


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
        standing: StandingApprovals,
        *,
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        """`resume` takes up work that belongs to this gateway and is not being worked on."""
        self.member = member
        self._database = database
        self._freeze = freeze
        self._tokens = tokens
        self._standing = standing
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
        self._handlers = {
            "call.ended": self._call_ended,
            "token.": self._tokens_changed,
            "policy.always_added": self._standing_changed,
            "policy.always_removed": self._standing_changed,
            "freeze.on": self._frozen,
            "freeze.off": self._thawed,
            "node.changed": self._node_changed,
            "node.probed": self._node_changed,
        }

    async def start(self, stack: contextlib.AsyncExitStack, restart: Callable[[], None]) -> None:
        """Begin to serve with the others; ends with the stack. `restart` starts the gateway anew."""
        self.links.start()
        stack.callback(self.links.close)
        self.calls.start()
        stack.callback(self.calls.close)
        await stack.enter_async_context(JournalFollower(self.member.bus, self._database, self._handlers))
        membership = Membership(
            self.member.id,
            self._database,
            clock=self._clock,
            superseded=self.member.superseded,
            taken_over=self._resume,
            restart=restart,
        )
        await stack.enter_async_context(membership)

    # -- what other gateways recorded -------------------------------------------------------------------

    async def _call_ended(self, event: Event) -> None:
        self.calls.ended(event.subject)

    async def _tokens_changed(self, _: Event) -> None:
        await self._tokens.refresh()

    async def _standing_changed(self, _: Event) -> None:
        await self._standing.refresh(self._database)

    async def _frozen(self, event: Event) -> None:
        said = msgspec.json.decode(event.data, type=_FreezeEvent)
        await self._freeze.follow(FreezeOrder(event.at, said.by, said.reason, event.subject))

    async def _thawed(self, _: Event) -> None:
        await self._freeze.follow(None)

    async def _node_changed(self, event: Event) -> None:
        await self.links.changed(event.subject)


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
