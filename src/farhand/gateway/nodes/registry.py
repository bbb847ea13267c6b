"""Keep track of which nodes are known, which are connected, and which of them serves a tool.

Each connection has a generation. The newest connection represents the node; older ones are closed, and anything they
still send, including their end, no longer affects the node.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from msgspec import UNSET

from farhand.gateway.nodes.cards import cleaned
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
from farhand.protocol.names import (
    MAX_COMPARED_NAMES,
    MAX_TOOL_NAME_CHARS,
    NATIVE,
    acceptable_name,
    covers,
    look_alike,
    same_letters,
    spellings,
    split_tool,
    validate_node_id,
)
from farhand.protocol.version import (
    CLOSE_BAD_HELLO,
    CLOSE_NOT_ALLOWED,
    CLOSE_UNAUTHORIZED,
    CLOSE_VERSION,
    KIB,
    MAX_CAPABILITIES,
    MAX_NODE_ID_LENGTH,
    MAX_REQUEST_BYTES,
    MAX_TOOLS,
    MIB,
    PROTOCOL_VERSION,
)
from farhand.store.tables.nodes import NodeCard

log = logging.getLogger(__name__)

# How much of an unknown id has to be spelled like a known one for that to be suggested.
SIMILAR = 0.75

EXECUTION = "execution"
SPECIALIZED = "specialized"
MOST_LEARNED = 64
MOST_RESUMED = 16_384
# Limits the total bytes of node cards, and sets the minimum counted per card: any holder of a shared token can register
# nodes.
MOST_CARDS = 64 * MIB
LEAST_CARD = 16 * KIB
# The capabilities of every machine's own tools: these tools carry the machine's name, so no node can receive another's
# calls.
COMMON = frozenset(
    {"filesystem.list", "filesystem.read", "filesystem.write", "filesystem.edit", "text.search", "shell.exec"}
)
# A node may connect this often at once, and then once in this time.
JOINS_AT_ONCE = 1000
JOIN_SECONDS = 1.0


class HelloRefused(FarhandError):
    """Reject a hello; carries the close code for the socket."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Link(Protocol):
    """Define what the registry needs from a socket.

    No method raises: the reader reports a lost socket, once.
    """

    # The address from which the node connected.
    address: str

    def send(self, frame: bytes) -> None: ...

    def send_frame(self, frame: bytes | memoryview) -> None:
        """Queue a binary frame. Text frames take precedence, so that calls do not wait for a file.

        The caller may reuse a memoryview as soon as this returns.
        """

    def close(self, code: int, reason: str) -> None: ...

    @property
    def congested(self) -> bool:
        """Return whether the peer is not reading what it was sent."""


class Connection:
    """Represent one socket of one node, from its hello to its end."""

    def __init__(
        self,
        link: Link,
        node_id: str,
        generation: int,
        extras: NodeExtras | None,
        token_id: str | None = None,
        *,
        socket: str | None = None,
        own: bool = True,
    ) -> None:
        self.link = link
        # A name that no other connection has, where several gateways share the store.
        self.socket = socket
        # Whether this gateway holds the socket.
        self.own = own
        self.node_id = node_id
        self.generation = generation
        self.token_id = token_id
        features = extras.features if extras else []
        # It knows only the plug-in guide's messages and parses them with that project's parser.
        self.plain = not features
        self.can_cancel = FEATURE_CANCEL in features
        self.can_transfer = FEATURE_TRANSFER in features
        # It can open a second connection for the bytes of a transfer.
        self.has_files = FEATURE_FILES in features
        self.can_freeze = FEATURE_FREEZE in features
        # The order under which the node rejects calls, as the node reports it.
        self.frozen = extras.frozen if extras else None
        self.queries = {
            feature.removeprefix(FEATURE_QUERY) for feature in features if feature.startswith(FEATURE_QUERY)
        }
        self.unlisted = {
            feature.removeprefix(FEATURE_UNLISTED) for feature in features if feature.startswith(FEATURE_UNLISTED)
        }
        self.resume: Resume | None = _bounded(extras.resume) if extras and FEATURE_RESUME in features else None
        self.max_request_bytes = (extras.max_request_bytes if extras else None) or MAX_REQUEST_BYTES
        self.sealing_key = (extras.sealing_key if extras else "")[:100]
        self.receipt_key = (extras.receipt_key if extras else "")[:100]
        # The id of the node's current process; None for a node that cannot resume.
        self.boot = self.resume.boot if self.resume else None
        self.current = True


def _bounded(resume: Resume | None) -> Resume | None:
    """Return the list without duplicates and limited to a node's maximum; it lists the rest when it next connects."""
    if resume is None:
        return None
    running, finished, earlier = (
        list(dict.fromkeys(ids))[:MOST_RESUMED] for ids in (resume.running, resume.finished, resume.earlier)
    )
    return Resume(resume.boot, running, finished, earlier)


def card_size(card: NodeCard) -> int:
    """Return how many bytes a node counts for in the limit on known nodes."""
    return max(LEAST_CARD, len(msgspec.json.encode(card)))


class Node:
    """Represent a machine that has joined at least once."""

    def __init__(self, card: NodeCard, connected_at: int, last_seen: int) -> None:
        # When the next connection is due, as a reading of a monotonic clock.
        self._next_join = 0.0
        self.card = card
        self.connected_at = connected_at
        self.last_seen = last_seen
        self.connection: Connection | None = None
        self.running = 0
        self.specs: dict[str, ToolSpec] = {}
        self.size = 0
        self.spellings = spellings(card.node_id)
        self.update(card)

    def update(self, card: NodeCard) -> None:
        self.card = card
        self.size = card_size(card)
        self.specs = {spec.name.casefold(): spec for spec in card.tools}

    def may_join(self, now: float) -> bool:
        """Return whether the node may connect again, and count that; `now` is a reading of a monotonic clock.

        Each connection adds events to the journal, whose size is limited: they must not push out the record of calls.
        """
        turn = max(now, self._next_join)
        if turn - now > JOINS_AT_ONCE * JOIN_SECONDS:
            return False
        self._next_join = turn + JOIN_SECONDS
        return True

    @property
    def lent(self) -> list[ToolSpec]:
        """Return the announced tools without those that the owner of the machine does not lend."""
        return [spec for spec in self.card.tools if not spec.withheld]

    @property
    def tags(self) -> list[str]:
        """Return the tags that the owner set, or else those that the node reports."""
        return self.card.tags if self.card.owner_tags is None else self.card.owner_tags

    @property
    def online(self) -> bool:
        return self.connection is not None

    @property
    def seen(self) -> str:
        """Return when the node was last seen, for people and models."""
        return datetime.fromtimestamp(self.last_seen / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def absence(self) -> str:
        """Return the message for a caller who needs this node while it is offline."""
        return f"node {self.card.node_id!r} is offline, last seen {self.seen}"


class NodeRegistry:
    """Hold every known node. `allowed` restricts what a node may announce; nodes not listed there are unrestricted."""

    def __init__(
        self,
        known: Iterable[tuple[NodeCard, int, int]] = (),
        allowed: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._allowed = allowed or {}
        self._generations = itertools.count(1)
        # Increases with every change to which node serves what.
        self.version = 0
        # Called after each of these changes.
        self.listeners: set[Callable[[], None]] = set()
        # Names that no node may use, since MCP servers have them.
        self.taken: set[str] = set()
        # Capability -> the connected nodes that announced it.
        self._serving: dict[str, dict[str, Node]] = {}
        self.nodes: dict[str, Node] = {card.node_id: Node(cleaned(card), at, seen) for card, at, seen in known}

    # -- joining and leaving ----------------------------------------------------------------------------

    def examine(
        self,
        hello: NodeHello,
        bound_id: str | None,
        *,
        own_credential: bool = False,
        named: Collection[str] = (),
    ) -> NodeCard:
        """Return the card of a node that may join. Raises HelloRefused with the reason otherwise.

        `own_credential`: the node used a token or key that the owner made for it. `named`: the nodes that have such
        tokens.
        """
        if hello.protocol_version != PROTOCOL_VERSION:
            raise HelloRefused(
                CLOSE_VERSION,
                f"unsupported protocol version {hello.protocol_version}; this gateway supports {PROTOCOL_VERSION}",
            )
        info = hello.node
        try:
            validate_node_id(info.id)
        except ValueError as error:
            raise HelloRefused(CLOSE_BAD_HELLO, str(error)) from None
        if bound_id is not None and bound_id != info.id:
            raise HelloRefused(CLOSE_UNAUTHORIZED, f"this token belongs to node {bound_id!r}, not {info.id!r}")
        self._refuse_server_name(info.id)
        self._refuse_look_alike(info.id, named)
        extras = None if hello.farhand is UNSET else hello.farhand
        card = NodeCard(
            node_id=info.id,
            name=info.name,
            node_type=info.node_type,
            version=info.version,
            tags=info.tags,
            capabilities=self._permitted(info.id, hello.capabilities),
            tools=self._permitted_tools(info.id, extras.tools if extras else []),
            runtime=extras.runtime if extras else {},
            role=EXECUTION if extras and extras.role == EXECUTION else SPECIALIZED,
        )
        card = self._bound(card, own_credential)
        # An empty list is accepted, as in the original: there is nothing to call. A list whose entries are all invalid
        # is rejected.
        announced = bool(hello.capabilities or (extras and extras.tools))
        if announced and not card.capabilities and not card.tools and not card.refused:
            raise HelloRefused(CLOSE_BAD_HELLO, f"node {info.id!r} announces no capability it may serve and no tools")
        card = cleaned(card)
        if not own_credential:
            self._refuse_crowd(card)
        return card

    def _refuse_crowd(self, card: NodeCard) -> None:
        """Raise HelloRefused if a node that the owner did not admit by name exceeds the limit on known nodes."""
        if self._has_room(card):
            return
        raise HelloRefused(
            CLOSE_NOT_ALLOWED,
            f"{len(self.nodes)} nodes are known, which is as much as the gateway remembers; `farhand nodes forget ID` "
            "makes room, and `farhand token create --node ID` admits a node all the same",
        )

    def _has_room(self, card: NodeCard) -> bool:
        known, size = self.nodes.get(card.node_id), card_size(card)
        if known is not None and size <= known.size:
            return True
        others = sum(node.size for node in self.nodes.values() if node is not known)
        return others + size <= MOST_CARDS

    def _refuse_server_name(self, node_id: str) -> None:
        taken = next((name for name in self.taken if look_alike(name, node_id)), None)
        if taken is not None:
            raise HelloRefused(
                CLOSE_BAD_HELLO,
                f"node id {node_id!r} is taken: {taken!r} is an MCP server; use another id, or "
                f"`farhand mcp remove {taken}` first",
            )

    def _refuse_look_alike(self, node_id: str, named: Collection[str]) -> None:
        """Raise HelloRefused for a new id that could be mistaken for that of a known node."""
        above = [node_id[:at] for at, character in enumerate(node_id) if character == ":"]
        if node_id in self.nodes and (node_id in named or not any(one in named for one in above)):
            return
        said = spellings(node_id)
        rivals = {known: node.spellings for known, node in self.nodes.items()}
        rivals |= {known: spellings(known) for known in (NATIVE, *named) if known not in rivals}
        known = next((one for one in above if one in rivals and node_id not in named), None)
        if known is not None:
            raise HelloRefused(
                CLOSE_BAD_HELLO,
                f"node id {node_id!r} begins with {known!r} and a colon, so paths of transfers on {known!r} could be "
                f"taken for it; use another id, or `farhand token create --node {node_id}`",
            )
        below = next((one for one in self.nodes if one.startswith(f"{node_id}:")), None)
        if below is not None and node_id not in named:
            raise HelloRefused(
                CLOSE_BAD_HELLO,
                f"node id {node_id!r} and a colon begin {below!r}, which is known, so paths of transfers on one could "
                f"be taken for the other; use another id, or `farhand nodes forget {below}` first",
            )
        if node_id in named:  # the owner chose this id; a similar id of an unnamed node does not block it
            rivals = {known: rivals[known] for known in (NATIVE, *named) if known != node_id}
        known = next((known for known, spelled in rivals.items() if not said.isdisjoint(spelled)), None)
        if known is not None:
            raise HelloRefused(
                CLOSE_BAD_HELLO,
                f"node id {node_id!r} looks like {known!r}, which is known; use another id, or "
                f"`farhand nodes forget {known}` first",
            )

    def below(self, node_id: str, named: Collection[str]) -> list[str]:
        """Return the known ids that begin with an id and a colon, apart from those the owner chose (`named`)."""
        return [known for known in self.nodes if known.startswith(f"{node_id}:") and known not in named]

    def join(
        self,
        card: NodeCard,
        hello: NodeHello,
        link: Link,
        token_id: str | None = None,
        *,
        socket: str | None = None,
        own: bool = True,
    ) -> tuple[Connection, Connection | None]:
        """Make `link` the node's connection. Returns it, and the one it replaces, which the caller closes.

        `socket` names the connection where several gateways share the store; one of them has it as its `own`.
        """
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
        generation = next(self._generations)
        node.connection = Connection(link, card.node_id, generation, extras, token_id, socket=socket, own=own)
        return node.connection, replaced

    def leave(self, connection: Connection) -> bool:
        """Handle the loss of a socket; return False if a newer one had already replaced it."""
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
        """Update the tools of a connected node; return None if the update is from an old socket or too large."""
        node = self.nodes.get(connection.node_id)
        if node is None or node.connection is not connection:
            return None
        old = node.card
        card = msgspec.structs.replace(
            old,
            capabilities=self._permitted(old.node_id, update.capabilities),
            tools=self._permitted_tools(old.node_id, update.tools),
        )
        card = self._bound(cleaned(card), connection.token_id is not None)
        if connection.token_id is None and not self._has_room(card):
            log.warning("node %s: rejected its list of tools: too large", old.node_id)
            return None
        self._offer(node, card)
        return card

    def replace_card(self, connection: Connection, card: NodeCard) -> None:
        """Replace what a connected node offers, after another gateway has checked it."""
        node = self.nodes.get(connection.node_id)
        if node is not None and node.connection is connection:
            self._offer(node, card)

    def describe(self, node: Node, label: str, owner_tags: list[str] | None) -> None:
        """Set what the owner says of a node."""
        node.update(msgspec.structs.replace(node.card, label=label, owner_tags=owner_tags))
        self._changed()

    def _offer(self, node: Node, card: NodeCard) -> None:
        self._withdraw(node)
        node.update(card)
        for capability in card.capabilities:
            self._serving.setdefault(capability.casefold(), {})[card.node_id] = node
        self._changed()

    def tools_changed(self) -> None:
        """Note a change of tools that belong to no node."""
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

    @property
    def connections(self) -> list[Connection]:
        """Return the connections of all nodes that are online."""
        return [node.connection for node in self.nodes.values() if node.connection is not None]

    def connection(self, node_id: str) -> Connection | None:
        """Return the connection of a node; None if it is offline or unknown."""
        node = self.nodes.get(node_id)
        return None if node is None else node.connection

    def queries(self, node_id: str) -> set[str]:
        """Return the kinds of queries that a connected node answers."""
        connection = self.connection(node_id)
        return set() if connection is None else connection.queries

    def clock(self) -> int:
        return int(time.time() * 1000)

    # -- lookup -----------------------------------------------------------------------------------------

    def serving(self, tool: str) -> tuple[Node, str, bool] | None:
        """Return the connected node for a dotted tool, the matching capability, and whether no other node serves that.

        Prefers the longest capability, then the fewest running calls, then the smallest id.
        """
        prefix = tool.casefold() if len(tool) <= MAX_TOOL_NAME_CHARS else ""
        while prefix:
            nodes = self._serving.get(prefix)
            if nodes:
                node = min(nodes.values(), key=lambda node: (node.running, node.card.node_id))
                return node, prefix, len(nodes) == 1
            prefix = prefix.rpartition(".")[0]
        return None

    def unknown(self, node_id: str) -> str:
        """Return the error text for an unknown id; it names only a similarly spelled node, with its state."""
        near = None
        if len(node_id) <= MAX_NODE_ID_LENGTH:  # comparing a longer text with every node takes long
            near = next((node for known, node in sorted(self.nodes.items()) if same_letters(known, node_id)), None)
        if near is None and len(node_id) <= MAX_NODE_ID_LENGTH:
            typed = difflib.get_close_matches(node_id, sorted(self.nodes)[:MAX_COMPARED_NAMES], 1, SIMILAR)
            near = self.nodes[typed[0]] if typed else None
        if near is None:
            return f"there is no node {node_id[:MAX_NODE_ID_LENGTH]!r}; `farhand nodes` lists the known ones"
        state = "" if near.online else f", which is offline, last seen {near.seen}"
        return f"there is no node {node_id[:MAX_NODE_ID_LENGTH]!r}; did you mean {near.card.node_id!r}{state}?"

    def away_serving(self, tool: str) -> list[Node]:
        """Return the offline nodes that serve a dotted tool, by id."""
        return [
            node
            for _, node in sorted(self.nodes.items())
            if not node.online and self.serving_on(node, tool) is not None
        ]

    def primary(self) -> Node | None:
        """Return the default execution host: of those connected, the one that joined first.

        A specialized host is never chosen. This does not route calls: a tool still carries its node's name.
        """
        hosts = [node for node in self.nodes.values() if node.online and node.card.role == EXECUTION]
        return min(hosts, key=lambda node: (node.connected_at, node.card.node_id), default=None)

    @staticmethod
    def serving_on(node: Node, tool: str) -> str | None:
        """Return the longest capability of this node that covers `tool`."""
        matching = [capability for capability in node.card.capabilities if covers(capability, tool)]
        return max(matching, key=len, default=None)

    def learn(self, node_id: str, tool: str) -> None:
        """Record the name of a tool that a node without a list of tools has executed."""
        node = self.nodes.get(node_id)
        if node is None or node.card.tools:
            return
        named = split_tool(tool)
        name = named[1] if named else tool
        known = node.card.learned
        if len(known) >= MOST_LEARNED or name in known or name in node.card.capabilities or not acceptable_name(name):
            return
        if split_tool(name) is None and self.serving_on(node, name) is not None:
            node.update(msgspec.structs.replace(node.card, learned=[*known, name]))
            self._changed()

    def _bound(self, card: NodeCard, own_credential: bool) -> NodeCard:
        """Remove capabilities whose calls belong to another node; see `docs/decisions/0030`.

        A capability is bound to the first node with its own credential that announces it. A later node serves nothing
        at or below that capability unless SA_NODE_CAPS names it.
        """
        granted = self._allowed.get(card.node_id, [])
        kept, refused = [], []
        before = self.nodes.get(card.node_id)
        served = frozenset(before.card.capabilities) if before is not None else frozenset()
        owners = self._owners(card.node_id)
        for capability in card.capabilities:
            free = capability in COMMON or capability in served or any(covers(prefix, capability) for prefix in granted)
            holder = None if free else _holder(owners, capability)
            if holder is None:
                kept.append(capability)
            else:
                refused.append(capability)
                log.warning(
                    "node %s: the capability %r belongs to node %s and was refused; SA_NODE_CAPS=%s:%s would allow it",
                    card.node_id,
                    capability,
                    holder,
                    card.node_id,
                    capability,
                )
        owned = [one for one in kept if own_credential and one not in COMMON]
        learned = [] if before is None or card.tools else before.card.learned
        learned = [name for name in learned if any(covers(one, name) for one in kept)]
        card = msgspec.structs.replace(card, capabilities=kept, refused=refused, owned=owned, learned=learned)
        if before is None:
            return card
        return msgspec.structs.replace(card, label=before.card.label, owner_tags=before.card.owner_tags)

    def _owners(self, node_id: str) -> dict[str, str]:
        """Return each capability that is bound to another node, with that node; of several, the smallest id."""
        owners: dict[str, str] = {}
        for known, node in self.nodes.items():
            for capability in node.card.owned if known != node_id else ():
                owners[capability.casefold()] = min(known, owners.get(capability.casefold(), known))
        return owners

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


def _holder(owners: Mapping[str, str], capability: str) -> str | None:
    """Return the node to which a capability, or the nearest one above it, is bound."""
    prefix = capability.casefold()
    while prefix:
        if prefix in owners:
            return owners[prefix]
        prefix = prefix.rpartition(".")[0]
    return None
