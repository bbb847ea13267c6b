"""The roster: which nodes there are, which are connected, and which of them serves a tool.

Each connection has a generation. A node's newest connection is the node; an older one is closed, and whatever it
still says, its goodbye included, no longer touches the node.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
from msgspec import UNSET

from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import FarhandError
from farhand.protocol.messages import (
    FEATURE_CANCEL,
    FEATURE_FILES,
    FEATURE_FREEZE,
    FEATURE_QUERY,
    FEATURE_RESUME,
    FEATURE_TRANSFER,
    FEATURE_UNLISTED,
    NodeExtras,
    NodeHello,
    Resume,
    ToolsUpdate,
)
from farhand.protocol.names import LONGEST_TOOL_NAME, acceptable_name, covers, validate_node_id
from farhand.protocol.version import (
    CLOSE_BAD_HELLO,
    CLOSE_UNAUTHORIZED,
    CLOSE_VERSION,
    MAX_CAPABILITIES,
    MAX_NAME_LENGTH,
    MAX_REQUEST_BYTES,
    MAX_TOOLS,
    PROTOCOL_VERSION,
)
from farhand.store.nodes import NodeCard

log = logging.getLogger("farhand.roster")

EXECUTION = "execution"
SPECIALIZED = "specialized"


class HelloRefused(FarhandError):
    """A hello that does not make a node; carries the code to close the socket with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Link(Protocol):
    """What the hub needs of a socket. No method raises: a socket that is gone is reported once, by its reader."""

    address: str
    """From where the node connected."""

    def send(self, frame: bytes) -> None: ...

    def send_frame(self, frame: bytes | memoryview) -> None:
        """Queue a binary frame; it gives way to text frames, so that calls do not wait behind a file.

        A memoryview is the caller's again when this returns.
        """
        ...

    def close(self, code: int, reason: str) -> None: ...

    @property
    def congested(self) -> bool:
        """The peer does not read what it was sent."""
        ...


class Connection:
    """One socket of one node, from its hello to its end."""

    def __init__(
        self, link: Link, node_id: str, generation: int, extras: NodeExtras | None, token_id: str | None = None
    ) -> None:
        self.link = link
        self.node_id = node_id
        self.generation = generation
        self.token_id = token_id
        features = extras.features if extras else []
        self.plain = not features
        """It knows the plug-in guide's messages alone, and reads them with that project's parser."""
        self.can_cancel = FEATURE_CANCEL in features
        self.can_transfer = FEATURE_TRANSFER in features
        self.has_files = FEATURE_FILES in features
        """It can open another connection, for the bytes of a transfer."""
        self.can_freeze = FEATURE_FREEZE in features
        self.frozen = extras.frozen if extras else None
        """By whose order the node takes no call, as it says itself."""
        self.queries = {
            feature.removeprefix(FEATURE_QUERY) for feature in features if feature.startswith(FEATURE_QUERY)
        }
        self.unlisted = {
            feature.removeprefix(FEATURE_UNLISTED) for feature in features if feature.startswith(FEATURE_UNLISTED)
        }
        self.resume: Resume | None = extras.resume if extras and FEATURE_RESUME in features else None
        self.max_request_bytes = (extras.max_request_bytes if extras else None) or MAX_REQUEST_BYTES
        self.current = True

    @property
    def boot(self) -> str | None:
        """Which life of the node program this is; None for a node that cannot resume."""
        return self.resume.boot if self.resume else None


class Node:
    """A machine that has joined at least once."""

    def __init__(self, card: NodeCard, connected_at: int, last_seen: int) -> None:
        self.card = card
        self.connected_at = connected_at
        self.last_seen = last_seen
        self.connection: Connection | None = None
        self.running = 0
        self.specs: dict[str, ToolSpec] = {}
        self.update(card)

    def update(self, card: NodeCard) -> None:
        self.card = card
        self.specs = {spec.name.casefold(): spec for spec in card.tools}

    @property
    def online(self) -> bool:
        return self.connection is not None


class Roster:
    """Every known node. `allowed` narrows what a node may announce; nodes absent from it are not narrowed."""

    def __init__(
        self,
        known: Iterable[tuple[NodeCard, int, int]] = (),
        allowed: Mapping[str, list[str]] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._allowed = allowed or {}
        self._generations = itertools.count(1)
        self.version = 0
        """Counts every change of who serves what."""
        self.listeners: set[Callable[[], None]] = set()
        """Called after each of these changes."""
        self._serving: dict[str, dict[str, Node]] = {}
        """Capability -> the connected nodes that announced it."""
        self.nodes: dict[str, Node] = {card.node_id: Node(card, at, seen) for card, at, seen in known}

    # -- joining and leaving ----------------------------------------------------------------------------

    def examine(self, hello: NodeHello, bound_id: str | None) -> NodeCard:
        """The card of a node that may join; raises HelloRefused saying why it may not."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise HelloRefused(
                CLOSE_VERSION,
                f"protocol version {hello.protocol_version} is not spoken here, only {PROTOCOL_VERSION}",
            )
        info = hello.node
        try:
            validate_node_id(info.id)
        except ValueError as error:
            raise HelloRefused(CLOSE_BAD_HELLO, str(error)) from None
        if bound_id is not None and bound_id != info.id:
            raise HelloRefused(CLOSE_UNAUTHORIZED, f"this token belongs to node {bound_id!r}, not {info.id!r}")
        extras = None if hello.farhand is UNSET else hello.farhand
        card = NodeCard(
            node_id=info.id,
            name=info.name[:MAX_NAME_LENGTH],
            node_type=info.node_type[:MAX_NAME_LENGTH],
            version=info.version[:MAX_NAME_LENGTH],
            tags=[tag[:MAX_NAME_LENGTH] for tag in info.tags[:MAX_CAPABILITIES]],
            capabilities=self._permitted(info.id, hello.capabilities),
            tools=self._permitted_tools(info.id, extras.tools if extras else []),
            runtime=extras.runtime if extras else {},
            role=EXECUTION if extras and extras.role == EXECUTION else SPECIALIZED,
        )
        if not card.capabilities and not card.tools:
            raise HelloRefused(CLOSE_BAD_HELLO, f"node {info.id!r} announces no capability it may serve and no tools")
        return card

    def join(
        self, card: NodeCard, hello: NodeHello, link: Link, token_id: str | None = None
    ) -> tuple[Connection, Connection | None]:
        """Make `link` the node's connection. Returns it, and the one it replaces, which the caller closes."""
        now = self.clock()
        node = self.nodes.get(card.node_id)
        if node is None:
            node = self.nodes[card.node_id] = Node(card, now, now)
        self._offer(node, card)
        node.connected_at = node.last_seen = now
        replaced = node.connection
        if replaced is not None:
            replaced.current = False
        extras = None if hello.farhand is UNSET else hello.farhand
        node.connection = Connection(link, card.node_id, next(self._generations), extras, token_id)
        return node.connection, replaced

    def leave(self, connection: Connection) -> bool:
        """The socket is gone; False when a newer one had already taken its place."""
        connection.current = False
        node = self.nodes.get(connection.node_id)
        if node is None or node.connection is not connection:
            return False
        node.connection = None
        self._withdraw(node)
        self._changed()
        return True

    def seen(self, connection: Connection) -> None:
        node = self.nodes.get(connection.node_id)
        if node is not None and node.connection is connection:
            node.last_seen = self.clock()

    def changed(self, connection: Connection, update: ToolsUpdate) -> NodeCard | None:
        """A connected node offers other tools now; None when the update is not from its current socket."""
        node = self.nodes.get(connection.node_id)
        if node is None or node.connection is not connection:
            return None
        old = node.card
        card = msgspec.structs.replace(
            old,
            capabilities=self._permitted(old.node_id, update.capabilities),
            tools=self._permitted_tools(old.node_id, update.tools),
        )
        self._offer(node, card)
        return card

    def _offer(self, node: Node, card: NodeCard) -> None:
        self._withdraw(node)
        node.update(card)
        for capability in card.capabilities:
            self._serving.setdefault(capability.casefold(), {})[card.node_id] = node
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        for listener in list(self.listeners):
            listener()

    def _withdraw(self, node: Node) -> None:
        self.version += 1
        for capability in node.card.capabilities:
            nodes = self._serving.get(capability.casefold())
            if nodes is not None:
                nodes.pop(node.card.node_id, None)
                if not nodes:
                    del self._serving[capability.casefold()]

    def queries(self, node_id: str) -> set[str]:
        """The questions a connected node answers."""
        node = self.nodes.get(node_id)
        return node.connection.queries if node and node.connection else set()

    def clock(self) -> int:
        return int(self._now() * 1000)

    # -- finding ----------------------------------------------------------------------------------------

    def serving(self, tool: str) -> tuple[Node, str, bool] | None:
        """The connected node for a dotted tool, the capability that matched, and whether it alone serves that.

        Longest capability first, then the fewest running calls, then the smallest id.
        """
        prefix = tool.casefold() if len(tool) <= LONGEST_TOOL_NAME else ""
        while prefix:
            nodes = self._serving.get(prefix)
            if nodes:
                node = min(nodes.values(), key=lambda node: (node.running, node.card.node_id))
                return node, prefix, len(nodes) == 1
            prefix = prefix.rpartition(".")[0]
        return None

    def primary(self) -> Node | None:
        """The execution host to work on when nothing else is said: of those connected, the one that joined first.

        A specialized host is never chosen. Nothing is ever sent there by itself: a tool still carries its node's name.
        """
        hosts = [node for node in self.nodes.values() if node.online and node.card.role == EXECUTION]
        return min(hosts, key=lambda node: (node.connected_at, node.card.node_id), default=None)

    @staticmethod
    def serving_on(node: Node, tool: str) -> str | None:
        """The longest capability of this node that covers `tool`."""
        matching = [capability for capability in node.card.capabilities if covers(capability, tool)]
        return max(matching, key=len, default=None)

    def _permitted(self, node_id: str, capabilities: list[str]) -> list[str]:
        permitted = []
        for capability in capabilities[:MAX_CAPABILITIES]:
            if not acceptable_name(capability):
                log.warning("node %s: ignored the capability %.100r", node_id, capability)
            elif self._may_serve(node_id, capability):
                permitted.append(capability)
            else:
                log.warning("node %s: may not serve %r (SA_NODE_CAPS)", node_id, capability)
        return sorted(set(permitted))

    def _permitted_tools(self, node_id: str, tools: list[ToolSpec]) -> list[ToolSpec]:
        return [
            spec
            for spec in tools[:MAX_TOOLS]
            if acceptable_name(spec.name) and self._may_serve(node_id, spec.capability or spec.name)
        ]

    def _may_serve(self, node_id: str, name: str) -> bool:
        prefixes = self._allowed.get(node_id)
        return prefixes is None or any(covers(prefix, name) for prefix in prefixes)
