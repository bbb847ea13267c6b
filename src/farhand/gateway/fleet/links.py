"""Connections of nodes to other gateways of the fleet.

The gateway that holds a node's socket is its holder. Every other gateway has a connection to that node too, whose
frames travel over the bus: what it sends goes to the holder, which writes it to the socket; what the node answers goes
to the gateway that asked. So every part of a gateway uses a node in the same way, wherever its socket is.

The table `links` says which socket is the node's present one. A call is only recorded while that is the socket it goes
to. A gateway that missed something, because it or the bus was away, has the node connect again: the node then lists
what it knows of open calls, as after any lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Literal

import msgspec

from farhand.gateway.calls.gate import Gate
from farhand.gateway.nodes.registry import Connection, Link, NodeRegistry
from farhand.gateway.repeating import BackgroundTasks, set_within
from farhand.machine import tracing
from farhand.protocol.errors import FarhandError, ProtocolError
from farhand.protocol.frames import read_header
from farhand.protocol.messages import (
    FreezeReport,
    Message,
    NodeAnswer,
    NodeFreeze,
    NodeHello,
    NodeQuery,
    NodeThaw,
    ToolCancel,
    ToolProgress,
    ToolRequest,
    ToolResponse,
    TransferCredit,
    TransferDone,
    TransferOpen,
    TransferReady,
    decode,
    encode,
)
from farhand.protocol.version import CLOSE_RESTART, MAX_FRAME_BYTES
from farhand.store.ports import Bus, NoResponder, ReplyUnknown, Store, StoreError, Subscription, Tx
from farhand.store.tables.fleet import NodeLink, link, links, owner_of, present_socket, unlink
from farhand.store.tables.nodes import NodeCard, find_node

log = logging.getLogger(__name__)

LINKS: Final = "fh.links"
ASK_SECONDS: Final = 5.0
POLL_SECONDS: Final = 1.0
# The bus takes at most a megabyte at once.
PART_BYTES: Final = 512 * 1024
AGAIN: Final = "connect again: another gateway has to know what is open"
MOST_ROUTES: Final = 65_536
MOST_EARLY: Final = 1024
# Of answers of one node whose owner is looked up.
MOST_LOOKUPS: Final = 1024
MOST_LOOKUP_BYTES: Final = MAX_FRAME_BYTES
# Of frames whose other parts have not arrived yet.
MOST_PART_BYTES: Final = 4 * MAX_FRAME_BYTES

Kind = Literal["text", "frame", "close"]
Join = Callable[[NodeCard, NodeHello, Link, str | None, str], Connection]


class Packet(msgspec.Struct, array_like=True, frozen=True):
    """A frame to or from a node, or a part of one, on its way between two gateways."""

    # The gateway that is not the holder.
    front: str
    node: str
    socket: str
    kind: Kind
    data: bytes
    # Another part follows.
    more: bool = False
    # The bytes of the parts before this one.
    offset: int = 0


class HelloAnswer(msgspec.Struct, frozen=True):
    """What a holder reports about one of its connections; without a hello, it does not have that connection."""

    hello: bytes = b""
    token_id: str | None = None
    # How long ago the node said hello, in seconds.
    age: float = 0.0


class Wish(msgspec.Struct, frozen=True):
    """A question to the holder of a connection: its hello, or that the node connects again."""

    what: Literal["hello", "again"]
    node: str
    socket: str


_packed = msgspec.msgpack.Encoder().encode
_packet = msgspec.msgpack.Decoder(Packet).decode
_wish = msgspec.msgpack.Decoder(Wish).decode
_hello = msgspec.msgpack.Decoder(HelloAnswer).decode


class RemoteLink:
    """The connection of a node that another gateway holds: a `Link` whose frames travel over the bus."""

    def __init__(self, bus: Bus, front: str, link: NodeLink) -> None:
        self.address = f"{link.replica} (gateway)"
        self.holder = link.replica
        self._bus = bus
        self._front = front
        self._link = link
        self._closed = False

    def send(self, frame: bytes) -> None:
        self._publish("text", frame)

    def send_frame(self, frame: bytes | memoryview) -> None:
        self._publish("frame", bytes(frame))

    def close(self, code: int, reason: str) -> None:
        self._publish("close", code.to_bytes(2) + reason.encode())

    @property
    def congested(self) -> bool:
        return False

    def leave(self) -> None:
        """Send nothing any more."""
        self._closed = True

    def _publish(self, kind: Kind, data: bytes) -> None:
        if not self._closed:
            send(self._bus, f"fh.link.{self.holder}", self._front, self._link.node, self._link.socket, kind, data)


def send(bus: Bus, subject: str, front: str, node: str, socket: str, kind: Kind, data: bytes) -> None:
    """Publish a frame in as many parts as it needs."""
    for start in range(0, max(1, len(data)), PART_BYTES):
        part, more = data[start : start + PART_BYTES], start + PART_BYTES < len(data)
        bus.publish(subject, _packed(Packet(front, node, socket, kind, part, more, start)))


class Joiner:
    """Puts the parts of packets together again. What is never completed is dropped when others need its place."""

    def __init__(self) -> None:
        self._parts: OrderedDict[Hashable, bytearray] = OrderedDict()

    def whole(self, packet: Packet) -> bytes | None:
        """Return the data once all its parts are here; a part whose predecessors are missing is dropped."""
        key = packet.front, packet.node, packet.socket, packet.kind
        if packet.offset == 0:
            self._parts.pop(key, None)
            if not packet.more:
                return packet.data
        parts = self._parts.setdefault(key, bytearray())
        if packet.offset != len(parts) or packet.offset + len(packet.data) > MAX_FRAME_BYTES:
            log.warning("dropped an incomplete frame of node %s from another gateway", packet.node)
            del self._parts[key]
            return None
        parts.extend(packet.data)
        if not packet.more:
            return bytes(self._parts.pop(key))
        self._parts.move_to_end(key)
        while len(self._parts) > 1 and sum(map(len, self._parts.values())) > MOST_PART_BYTES:
            self._parts.popitem(last=False)
        return None


class FleetLinks:
    """Both ends of the connections between gateways. Its owner calls `start` and `close`."""

    def __init__(
        self,
        replica: str,
        bus: Bus,
        database: Store,
        node_registry: NodeRegistry,
        gate: Callable[[], Gate],
        *,
        join: Join,
        leave: Callable[[Connection], None],
        handle: Callable[[Connection, bytes], None],
        on_frame: Callable[[Connection, memoryview], None],
        connected: Callable[[], bool],
    ) -> None:
        """`join` and `leave` tell the other parts of a connection that another gateway holds, and of its end.

        `handle` and `on_frame` process what a node sent to this gateway; `connected` tells whether the bus works.
        """
        self._replica = replica
        self._bus = bus
        self._database = database
        self._node_registry = node_registry
        self._join = join
        self._leave = leave
        self._gate = gate
        self._handle = handle
        self._on_frame = on_frame
        self._connected = connected
        # Of connections that this gateway holds: the hello, and when it came.
        self._hellos: dict[str, tuple[NodeHello, float]] = {}
        # Which gateway gets the answer, and of which connection, by what the answer names. Over another connection a
        # node repeats an answer that may have been lost with the gateway that asked.
        self._routes: OrderedDict[Hashable, tuple[str, str]] = OrderedDict()
        # Answers of nodes to calls whose owner is looked up.
        self._lookups: dict[Connection, deque[tuple[bytes, ToolResponse]]] = {}
        self._joiner = Joiner()
        # Of present connections that another gateway holds and this one has joined: when the node said hello. If one of
        # them is left and joined again, the hello does not list the calls that were sent over it.
        self._joined_at: dict[str, float] = {}
        # Frames that arrived before their connection was made here.
        self._early: dict[str, list[tuple[Kind, bytes]]] = {}
        self._subscriptions: list[Subscription] = []
        self._tasks = BackgroundTasks()
        self._hint = asyncio.Event()
        self._syncing = asyncio.Lock()

    def start(self) -> None:
        serve = self._bus.serve
        self._subscriptions = [
            serve(f"fh.link.{self._replica}", self._from_front),
            serve(f"fh.front.{self._replica}", self._from_holder),
            serve(f"fh.replica.{self._replica}", self._asked),
            serve(LINKS, self._hinted),
        ]
        self._tasks.start(self._follow())

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()
        self._tasks.cancel()

    # -- as a holder ------------------------------------------------------------------------------------

    def store(self, tx: Tx, connection: Connection) -> None:
        link(tx, connection.node_id, connection.socket or "", self._replica)

    def remove(self, tx: Tx, connection: Connection) -> None:
        unlink(tx, connection.node_id, connection.socket or "")

    def joined(self, connection: Connection, hello: NodeHello, stored: asyncio.Future[None]) -> None:
        """Take note of a connection that this gateway holds, and tell the others once it is stored."""
        assert connection.socket is not None
        self._hellos[connection.socket] = hello, time.monotonic()
        stored.add_done_callback(partial(self._stored, connection))

    def left(self, connection: Connection, stored: asyncio.Future[None]) -> None:
        self._hellos.pop(connection.socket or "", None)
        stored.add_done_callback(self._tell)

    def _stored(self, connection: Connection, stored: asyncio.Future[None]) -> None:
        """Have a node connect again whose connection could not be stored: no call could go to it."""
        if not stored.cancelled() and stored.exception() is not None and connection.current:
            connection.link.close(CLOSE_RESTART, "the store is not available; connect again")
        self._tell(stored)

    def _tell(self, stored: asyncio.Future[None]) -> None:
        if not stored.cancelled() and stored.exception() is None:
            self._bus.publish(LINKS, b"")

    def pass_on(self, connection: Connection, text: bytes, message: Message) -> bool:
        """Send a node's message to the gateway it is for; return False if that is this one."""
        key = _answered(message)
        if key is None:
            return False
        front = self._route(key, connection)
        if front is None and isinstance(message, ToolResponse) and not self._gate().is_known(message.request_id):
            self._look_up(connection, text, message)
            return True
        if front is None or front == self._replica:
            return False
        self._to_front(front, connection, "text", text)
        return True

    def _look_up(self, connection: Connection, text: bytes, message: ToolResponse) -> None:
        """Have the owner of a call found, one call of a connection after the other.

        A node that sends more answers than can be looked up connects again, and repeats those without an owner then.
        """
        waiting = self._lookups.get(connection)
        if waiting is None:
            waiting = self._lookups[connection] = deque()
            self._tasks.start(self._find_owners(connection, waiting))
        if len(waiting) >= MOST_LOOKUPS or sum(len(one) for one, _ in waiting) > MOST_LOOKUP_BYTES:
            if connection.current:
                log.warning(
                    "node %s answers more calls than are known here; it has to connect again", connection.node_id
                )
                connection.link.close(CLOSE_RESTART, "too many answers to calls that are not known here; connect again")
            return
        waiting.append((text, message))

    async def _find_owners(self, connection: Connection, waiting: deque[tuple[bytes, ToolResponse]]) -> None:
        try:
            while waiting and connection.current:
                try:
                    await self._find_owner(connection, *waiting[0])
                    waiting.popleft()
                except StoreError as error:
                    log.warning("failed to look up call %s: %s", waiting[0][1].request_id, error)
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            self._lookups.pop(connection, None)

    async def _find_owner(self, connection: Connection, text: bytes, message: ToolResponse) -> None:
        """Deliver the answer to a call that another gateway may own: one that took over, or from before a move.

        Raises StoreError.
        """
        owner = await self._database.read(partial(owner_of, call_id=message.request_id))
        if owner is None or owner == self._replica:
            self._handle(connection, text)
        else:
            self._to_front(owner, connection, "text", text)

    def pass_frame(self, connection: Connection, frame: memoryview) -> bool:
        """Send a node's binary frame to the gateway it is for; return False if that is this one."""
        try:
            _, stream, _ = read_header(frame)
        except ProtocolError:
            return False
        front = self._route(("stream", stream), connection)
        if front is None or front == self._replica:
            return False
        self._to_front(front, connection, "frame", bytes(frame))
        return True

    def _to_front(self, front: str, connection: Connection, kind: Kind, data: bytes) -> None:
        send(self._bus, f"fh.front.{front}", front, connection.node_id, connection.socket or "", kind, data)

    def _held(self, node: str, socket: str) -> Connection | None:
        connection = self._node_registry.connection(node)
        return connection if connection is not None and connection.socket == socket and connection.own else None

    async def _from_front(self, body: bytes) -> bytes:
        packet = _packet(body)
        data = self._joiner.whole(packet)
        connection = self._held(packet.node, packet.socket)
        if data is None or connection is None:  # the asker finds out from the table, and from the next hello
            return b""
        if packet.kind == "close":
            connection.link.close(int.from_bytes(data[:2]), data[2:].decode())
        elif packet.kind == "frame":
            connection.link.send_frame(data)
        else:
            message = decode(data)
            self._note_route(packet, message)
            trace = message.trace if isinstance(message, ToolRequest) and isinstance(message.trace, str) else ""
            connection.link.send(data)
            if trace:
                attributes = {"farhand.node": packet.node, "farhand.from": packet.front}
                tracing.begin("relay to node", trace, **attributes).end()
        return b""

    def _route(self, key: Hashable, connection: Connection) -> str | None:
        front, socket = self._routes.get(key, (None, None))
        return front if socket == connection.socket else None

    def _note_route(self, packet: Packet, message: Message) -> None:
        key = _asked_for(message)
        if key is not None:
            self._routes[key] = packet.front, packet.socket
            self._routes.move_to_end(key)
            while len(self._routes) > MOST_ROUTES:
                self._routes.popitem(last=False)

    async def _asked(self, body: bytes) -> bytes:
        wish = _wish(body)
        connection = self._held(wish.node, wish.socket)
        found = self._hellos.get(wish.socket)
        if connection is None or found is None:
            return _packed(HelloAnswer())
        if wish.what == "again":
            connection.link.close(CLOSE_RESTART, AGAIN)
        hello, at = found
        return _packed(HelloAnswer(encode(hello), connection.token_id, time.monotonic() - at))

    # -- as another gateway -----------------------------------------------------------------------------

    async def _from_holder(self, body: bytes) -> bytes:
        packet = _packet(body)
        data = self._joiner.whole(packet)
        if data is not None:
            connection = self._node_registry.connection(packet.node)
            if connection is not None and connection.socket == packet.socket:
                self._received(connection, packet.kind, data)
            else:
                if sum(map(len, self._early.values())) < MOST_EARLY:
                    self._early.setdefault(packet.socket, []).append((packet.kind, data))
                self._hint.set()
        return b""

    def _received(self, connection: Connection, kind: Kind, data: bytes) -> None:
        if kind == "frame":
            self._on_frame(connection, memoryview(data))
        else:
            self._handle(connection, data)

    async def _hinted(self, _: bytes) -> bytes:
        self._hint.set()
        return b""

    async def _follow(self) -> None:
        while True:
            try:
                await self.sync()
            except FarhandError as error:
                log.debug("failed to look for connections of other gateways: %s", error)
            except Exception:
                log.exception("failed to look for connections of other gateways")
            if not await set_within(self._hint, POLL_SECONDS):
                self._early.clear()
            self._hint.clear()

    async def sync(self) -> None:
        """Make the connections that the table of links says there are. Raises StoreError."""
        async with self._syncing:
            if not self._connected():
                for connection in self._remote():
                    self._drop(connection)
                return
            present = {one.node: one for one in await self._database.read(links)}
            for connection in self._remote():
                found = present.get(connection.node_id)
                if found is None or found.socket != connection.socket:
                    self._drop(connection)
            sockets = {one.socket for one in present.values()}
            self._joined_at = {socket: at for socket, at in self._joined_at.items() if socket in sockets}
            for one in present.values():
                node = self._node_registry.nodes.get(one.node)
                known = node is not None and node.connection is not None and node.connection.socket == one.socket
                if not known and one.replica != self._replica:
                    await self._connect(one)
                elif known and self._is_behind(one):
                    await self._have_again(one)

    def _is_behind(self, to: NodeLink) -> bool:
        """Whether calls were taken up since a node connected: its hello does not tell whether it has them."""
        recovered = self._gate().recovered_at(to.node)
        if recovered is None:
            return False
        if to.replica == self._replica:
            found = self._hellos.get(to.socket)
            return found is not None and found[1] < recovered
        return self._joined_at.get(to.socket, 0.0) < recovered

    async def _have_again(self, to: NodeLink) -> None:
        """Have a node connect again, so that it lists what it has."""
        if to.replica == self._replica:
            if (connection := self._held(to.node, to.socket)) is not None:
                connection.link.close(CLOSE_RESTART, AGAIN)
            return
        with contextlib.suppress(NoResponder, ReplyUnknown):
            await self._ask(to, "again")

    def _remote(self) -> list[Connection]:
        return [connection for connection in self._node_registry.connections if not connection.own]

    def _drop(self, connection: Connection) -> None:
        assert isinstance(connection.link, RemoteLink)
        connection.link.leave()
        self._leave(connection)

    async def _connect(self, to: NodeLink) -> None:
        asked = time.monotonic()
        try:
            answer = _hello(await self._ask(to, "hello"))
        except (NoResponder, ReplyUnknown) as error:
            log.debug("the gateway of node %s does not answer: %s", to.node, error)
            return
        if not answer.hello:
            return
        recovered = self._gate().recovered_at(to.node)
        if self._gate().has_open_calls(to.node) and (
            to.socket in self._joined_at or (recovered is not None and asked - answer.age < recovered)
        ):
            await self._have_again(to)
            return
        hello = decode(answer.hello)
        card, socket = await self._database.read(lambda tx: (find_node(tx, to.node), present_socket(tx, to.node)))
        if not isinstance(hello, NodeHello) or card is None or socket != to.socket:
            return
        self._joined_at[to.socket] = asked - answer.age
        link = RemoteLink(self._bus, self._replica, to)
        connection = self._join(card, hello, link, answer.token_id, to.socket)
        for kind, data in self._early.pop(to.socket, []):
            self._received(connection, kind, data)

    async def _ask(self, to: NodeLink, what: Literal["hello", "again"]) -> bytes:
        wish = _packed(Wish(what, to.node, to.socket))
        return await self._bus.ask(f"fh.replica.{to.replica}", wish, ASK_SECONDS)

    async def changed(self, node_id: str) -> None:
        """Read again what a node offers, after its holder stored a change."""
        node = self._node_registry.nodes.get(node_id)
        if node is not None and node.connection is not None and not node.connection.own:
            card = await self._database.read(lambda tx: find_node(tx, node_id))
            if card is not None:
                self._node_registry.replace_card(node.connection, card)


def _asked_for(message: Message) -> Hashable | None:
    """Return what the answer to a gateway's message will name."""
    if isinstance(message, ToolRequest | ToolCancel):
        return "call", message.request_id
    if isinstance(message, NodeQuery):
        return "query", message.query_id
    if isinstance(message, NodeFreeze | NodeThaw):
        return "freeze", message.number
    if isinstance(message, TransferOpen):
        return "stream", message.stream
    return None


def _answered(message: Message) -> Hashable | None:
    """Return what a node's answer names."""
    if isinstance(message, ToolResponse | ToolProgress):
        return "call", message.request_id
    if isinstance(message, NodeAnswer):
        return "query", message.query_id
    if isinstance(message, FreezeReport):
        return "freeze", message.number
    if isinstance(message, TransferReady | TransferCredit | TransferDone):
        return "stream", message.stream
    return None
