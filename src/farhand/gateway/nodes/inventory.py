"""Track nodes as they join, change and leave, in the registry, the store and dependent services."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from farhand import __version__
from farhand.gateway.journal import EventJournal
from farhand.gateway.nodes.cards import cleaned_label, cleaned_runtime, cleaned_tags
from farhand.gateway.nodes.queries import Queries, read_answer
from farhand.gateway.nodes.registry import Connection, Link, Node, NodeRegistry
from farhand.protocol.errors import FarhandError
from farhand.protocol.messages import (
    FEATURE_FLEET,
    FEATURE_RECEIPTS,
    FEATURE_TRANSFER,
    FEATURES,
    GatewayExtras,
    GatewayWelcome,
    NodeHello,
    ToolsUpdate,
)
from farhand.protocol.version import CLOSE_BAD_HELLO, CLOSE_REPLACED, CLOSE_RESTART, CLOSE_UNAUTHORIZED, MAX_FRAME_BYTES
from farhand.store.ports import Tx
from farhand.store.tables.access.tokens import Token, tokens_used
from farhand.store.tables.nodes import NodeCard, describe_node, forget_node, node_seen, save_node

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
# Capabilities that an event names.
MOST_NOTED = 20

Listener = Callable[[Connection], None]


class NodeLinks(Protocol):
    """Where several gateways share the store: which connection of a node is the present one, and who holds it."""

    def store(self, tx: Tx, connection: Connection) -> None:
        """Store a connection with the transaction that records its node."""

    def remove(self, tx: Tx, connection: Connection) -> None: ...

    def joined(self, connection: Connection, hello: NodeHello, stored: asyncio.Future[None]) -> None: ...

    def left(self, connection: Connection, stored: asyncio.Future[None]) -> None: ...


class ProbeAnswer(msgspec.Struct, frozen=True):
    """List the programs a node has, named as in its runtime information."""

    hostBinStatus: dict[str, bool]  # noqa: N815
    hostBinStatusUpdatedAt: int  # noqa: N815


class NodeInventory:
    """Record every change of the nodes and notify listeners.

    `joined` is called for each new connection of a node, `lost` for each connection that ended or was replaced, `left`
    when it was the node's only one or was replaced, `changed` after a node changed its tools.
    """

    def __init__(
        self,
        node_registry: NodeRegistry,
        queries: Queries,
        journal: EventJournal,
        gateway_id: str,
        *,
        joined: Sequence[Listener],
        lost: Sequence[Listener],
        left: Sequence[Listener],
        changed: Sequence[Callable[[], None]],
        joined_elsewhere: Sequence[Listener] = (),
        links: NodeLinks | None = None,
    ) -> None:
        """`joined_elsewhere` is called for each connection that another gateway holds; `links` stores those of this one
        for the others."""
        self._node_registry = node_registry
        self._queries = queries
        self._journal = journal
        self._gateway_id = gateway_id
        self._joined = joined
        self._joined_elsewhere = joined_elsewhere
        self._links = links
        self._lost = lost
        self._left = left
        self._changed = changed

    def welcome(self, hello: NodeHello) -> GatewayWelcome:
        """Return the answer to a hello; a node without features gets only the plug-in guide's fields."""
        plain = hello.farhand is UNSET or not hello.farhand.features
        together = () if self._links is None else (FEATURE_FLEET,)
        return GatewayWelcome(
            gateway_version=__version__,
            farhand=UNSET
            if plain
            else GatewayExtras(
                [*FEATURES, FEATURE_TRANSFER, FEATURE_RECEIPTS, *together],
                self._gateway_id,
                max_response_bytes=MAX_FRAME_BYTES,
            ),
        )

    def join(self, card: NodeCard, hello: NodeHello, link: Link, token_id: str | None = None) -> Connection:
        """Connect a node whose hello was accepted; its previous connection is closed."""
        name = None if self._links is None else secrets.token_hex(12)
        connection, replaced = self._node_registry.join(card, hello, link, token_id, socket=name)
        node = self._node_registry.nodes[card.node_id]

        def joined(store: Tx) -> None:
            if self._links is not None:
                self._links.store(store, connection)
            save_node(store, card, node.connected_at, node.last_seen)
            tokens_used(store, self._token_use(connection))

        data = {"generation": connection.generation, "version": card.version, "node_type": card.node_type}
        stored = self._journal.record(joined, "node.online", card.node_id, data)
        if self._links is not None:
            self._links.joined(connection, hello, stored)
        log.info("node %s joined (generation %d)", card.node_id, connection.generation)
        if replaced is not None:
            replaced.link.close(CLOSE_REPLACED, "a newer connection of this node took over")
            _notify((*self._left, *self._lost), replaced)
        _notify(self._joined, connection)
        return connection

    def leave(self, connection: Connection) -> None:
        """Handle the end of a connection. Only the end of the current one takes the node offline."""
        _notify(self._lost, connection)
        if not self._node_registry.leave(connection):
            return
        node = self._node_registry.nodes[connection.node_id]

        def left(store: Tx) -> None:
            if self._links is not None:
                self._links.remove(store, connection)
            node_seen(store, connection.node_id, node.last_seen)
            tokens_used(store, self._token_use(connection))

        data = {"generation": connection.generation}
        stored = self._journal.record(left, "node.offline", connection.node_id, data)
        if self._links is not None:
            self._links.left(connection, stored)
        log.info("node %s left (generation %d)", connection.node_id, connection.generation)
        _notify(self._left, connection)

    def join_remote(
        self, card: NodeCard, hello: NodeHello, link: Link, token_id: str | None, socket: str
    ) -> Connection:
        """Connect a node that another gateway holds, which has checked its hello and recorded it."""
        connection, replaced = self._node_registry.join(card, hello, link, token_id, socket=socket, own=False)
        connection.has_files = False  # its second connection would go to the holder
        if replaced is not None:
            replaced.link.close(CLOSE_REPLACED, "a newer connection of this node took over")
            _notify((*self._left, *self._lost), replaced)
        _notify(self._joined_elsewhere, connection)
        return connection

    def leave_remote(self, connection: Connection) -> None:
        """Handle the end of a connection that another gateway holds, or that can no longer be reached there."""
        _notify(self._lost, connection)
        if self._node_registry.leave(connection):
            _notify(self._left, connection)

    def update(self, connection: Connection, update: ToolsUpdate) -> None:
        card = self._node_registry.changed(connection, update)
        if card is None:
            return
        # Not all of them: a node that changes them all the time must not push older events out of the journal.
        shown = {"tools": len(card.tools), "capabilities": card.capabilities[:MOST_NOTED]}
        self._save(card, "node.changed", shown)
        for notify in self._changed:
            notify()

    async def probe(self, node_id: str, bins: list[str]) -> dict[str, Any]:
        """Ask a node which programs it has and return its runtime information with the answer. Raises ToolError."""
        answer = await self._queries.ask(node_id, "probe", {"bins": bins}, PROBE_SECONDS)
        probed = read_answer(node_id, answer, ProbeAnswer)
        node = self._node_registry.nodes[node_id]
        known = node.card.runtime.get("hostBinStatus")
        asked = {name: there for name, there in probed.hostBinStatus.items() if name in bins}
        status = {
            "hostBinStatus": {**(known if isinstance(known, dict) else {}), **asked},
            "hostBinStatusUpdatedAt": probed.hostBinStatusUpdatedAt,
        }
        runtime = cleaned_runtime({**node.card.runtime, **status})
        card = msgspec.structs.replace(node.card, runtime=runtime)
        node.update(card)
        self._save(card, "node.probed", {"bins": bins})
        return runtime

    async def describe(
        self, node_id: str, by: str, *, label: str | UnsetType = UNSET, tags: list[str] | UnsetType | None = UNSET
    ) -> Node | None:
        """Set the owner's name and tags of a node, connected or not; return None if it is unknown.

        An empty label shows the node's own name again, tags of None the tags that it reports.
        """
        node = self._node_registry.nodes.get(node_id)
        if node is None:
            return None
        name = node.card.label if label is UNSET else cleaned_label(label)
        own = node.card.owner_tags if tags is UNSET else None if tags is None else cleaned_tags(tags)
        self._node_registry.describe(node, name, own)
        data = {"by": by, "label": name, "tags": own}
        await self._journal.record(
            lambda store: describe_node(store, node_id, name, own), "node.described", node_id, data
        )
        return node

    def described_elsewhere(self, node_id: str, stored: NodeCard) -> None:
        """Take over the name and tags that another gateway stored."""
        node = self._node_registry.nodes.get(node_id)
        if node is not None:
            self._node_registry.describe(node, stored.label, stored.owner_tags)

    async def forget(self, node_id: str) -> bool:
        """Remove an offline node; return False if it is unknown.

        Raises FarhandError while it is connected or awaited.
        """
        node = self._node_registry.nodes.get(node_id)
        if node is None:
            return False
        if node.connection is not None:
            raise FarhandError(f"node {node_id!r} is connected; stop it or revoke its token first")
        if node.running:
            raise FarhandError(f"{node.running} calls wait for node {node_id!r}; cancel them first")
        del self._node_registry.nodes[node_id]
        await self._journal.record(lambda store: forget_node(store, node_id), "node.forgotten", node_id, {})
        return True

    def dismiss(self, node_ids: Iterable[str], reason: str) -> None:
        """Disconnect nodes and forget them; one for which calls wait is only disconnected."""
        for node_id in node_ids:
            node = self._node_registry.nodes[node_id]
            if (connection := node.connection) is not None:
                self.leave(connection)
                connection.link.close(CLOSE_BAD_HELLO, reason)
            if not node.running:
                del self._node_registry.nodes[node_id]
                self._journal.record(partial(forget_node, node_id=node_id), "node.forgotten", node_id, {})

    def send_away(self) -> None:
        """Have the connected nodes connect to other gateways, since this one stops."""
        for connection in self._node_registry.connections:
            if connection.own:
                connection.link.close(CLOSE_RESTART, "the gateway is stopping; connect to another one")

    def close(self) -> None:
        """Record every connected node as offline."""
        for connection in self._node_registry.connections:
            if connection.own:
                self.leave(connection)

    def _save(self, card: NodeCard, kind: str, data: dict[str, Any]) -> None:
        node = self._node_registry.nodes[card.node_id]
        self._journal.record(
            lambda store: save_node(store, card, node.connected_at, node.last_seen), kind, card.node_id, data
        )

    def _token_use(self, connection: Connection) -> dict[str, int]:
        return {} if connection.token_id is None else {connection.token_id: self._node_registry.clock()}


def _notify(listeners: Iterable[Listener], connection: Connection) -> None:
    for notify in listeners:
        notify(connection)


def connected_tokens(node_registry: NodeRegistry) -> list[str]:
    """Return the ids of the tokens with which nodes are connected."""
    return [one.token_id for one in node_registry.connections if one.token_id is not None]


def disconnect_token(node_registry: NodeRegistry, token: Token) -> None:
    """Close the connection of the node that used a revoked token."""
    connection = node_registry.connection(token.node_id or "")
    if connection is not None and connection.token_id == token.id:
        connection.link.close(CLOSE_UNAUTHORIZED, "this node's token was revoked")
