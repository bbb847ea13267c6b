"""Recognise callers and nodes by their tokens."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from farhand.machine.time_zone import utc_text
from farhand.protocol.errors import FarhandError
from farhand.protocol.key_auth import read_key
from farhand.protocol.names import SEPARATOR, validate_capability, validate_node_id
from farhand.protocol.redaction import OWN_PREFIXES
from farhand.store.tables.access.tokens import Token, token_hash

TOKENS_VARIABLE = "SA_NODE_TOKENS"
CAPABILITIES_VARIABLE = "SA_NODE_CAPS"


class Scope(StrEnum):
    """List what a credential may do. `admin` includes all others."""

    READ = "read"
    CHAT = "chat"
    TOOLS_READ = "tools.read"
    TOOLS_WRITE = "tools.write"
    TOOLS_EXEC = "tools.exec"
    APPROVE = "approve"
    PAIR = "pair"
    FREEZE = "freeze"
    ADMIN = "admin"


# Which tools MCP clients see: those of all machines as one family (`node_bash`), or those of each machine.
Profile = Literal["compact", "full"]

# The default scopes of a token.
CALLER_SCOPES = (Scope.READ, Scope.CHAT, Scope.TOOLS_READ, Scope.TOOLS_WRITE, Scope.TOOLS_EXEC)
# The default scopes of a token that is restricted to some tools or nodes.
NARROW_CALLER_SCOPES = (Scope.TOOLS_READ, Scope.TOOLS_WRITE, Scope.TOOLS_EXEC)


class Credential(msgspec.Struct, frozen=True):
    """Represent a recognised caller. Its rights come from the store, never from the caller."""

    id: str
    scopes: frozenset[str]
    # Patterns of the tool names it may use; empty: all.
    tools: tuple[str, ...] = ()
    # Nodes it may use; empty: all nodes and the gateway's own tools.
    nodes: tuple[str, ...] = ()
    # For pinned work, a description of the pin, and its node and tag. It may use `nodes` and tools that belong to no
    # machine.
    pinned: str = ""
    pin_node: str | None = None
    pin_tag: str | None = None
    # The credential that made this one, such as a hook's; this one ends with it.
    issuer: str = ""
    # Which tools MCP clients see with it.
    profile: Profile = "full"

    @property
    def is_token(self) -> bool:
        """Return whether this is an issued token, not the owner, a channel, a hook or an agent."""
        return ":" not in self.id and self.id != "owner"

    @property
    def narrowed(self) -> bool:
        return bool(self.tools or self.nodes or self.pinned)

    def reaches(self, node_id: str | None, tool: str, *, of_server: bool = False) -> bool:
        """Return whether this credential may use a tool, given by its name on its node, or on its MCP server."""
        if self.nodes and node_id not in self.nodes:
            return False
        dotted = "." in tool and not of_server
        names = [tool] if node_id is None else [f"{node_id}__{tool}", *([tool] if dotted else [])]
        return not self.tools or any(fnmatchcase(name, pattern) for name in names for pattern in self.tools)

    def may_know(self, node_id: str) -> bool:
        """Return whether it may use anything on a node; if not, errors and lists do not mention the node either."""
        if self.pinned:
            return True
        if self.nodes and node_id not in self.nodes:
            return False
        return not self.tools or any(_may_name(pattern, node_id) for pattern in self.tools)

    def may(self, scope: Scope | tuple[Scope, ...]) -> bool:
        """Return whether it has one of the scopes; exec includes write, and write includes read."""
        if isinstance(scope, tuple):
            return any(self.may(one) for one in scope)
        return not self.scopes.isdisjoint(_INCLUDED_IN[scope])


def _may_name(pattern: str, node_id: str) -> bool:
    """Return whether a pattern of a token's tools can match a tool of a node."""
    node, separator, _ = pattern.partition(SEPARATOR)
    # Without a node, it matches the dotted names of plug-ins, which may run on any.
    return fnmatchcase(node_id, node) if separator else any(character in pattern for character in "*?[.")


_INCLUDED_IN: dict[Scope, frozenset[str]] = {
    **{scope: frozenset({scope.value, Scope.ADMIN.value}) for scope in Scope},
    Scope.TOOLS_WRITE: frozenset({"tools.exec", "tools.write", "admin"}),
    Scope.TOOLS_READ: frozenset({"tools.exec", "tools.write", "tools.read", "admin"}),
}


OWNER = Credential("owner", frozenset({Scope.ADMIN.value}))


class NodeGrant(msgspec.Struct, frozen=True):
    """Permit a node to connect; with `node_id`, only as that node. `token_id` names the stored token it used."""

    node_id: str | None = None
    token_id: str | None = None
    expires_at: int | None = None
    # The node has to prove that it holds the private key.
    public_key: bytes | None = None

    @property
    def anonymous(self) -> bool:
        """Return whether the node was not admitted by name: it used the shared token or an open gateway."""
        return self.token_id is None and (self.node_id is None or self.public_key is not None)


class NodeTokens(msgspec.Struct, frozen=True):
    """Hold the tokens of the plug-in guide's environment: one shared token, or one for each node."""

    shared: str | None = None
    by_node: tuple[tuple[str, str], ...] = ()
    capabilities: dict[str, list[str]] = {}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> NodeTokens:
        """Read `SA_NODE_TOKENS`, or else `SA_NODE_TOKEN`. Raises FarhandError for a malformed entry."""
        pairs = tuple(_node_tokens(environ.get(TOKENS_VARIABLE, "")))
        named = TOKENS_VARIABLE in environ
        shared = None if named else environ.get("SA_NODE_TOKEN") or None
        return cls(shared, pairs, _node_capabilities(environ.get(CAPABILITIES_VARIABLE, "")))

    @property
    def secrets(self) -> list[str]:
        return [*(secret for _, secret in self.by_node), *((self.shared,) if self.shared else ())]


class Credentials:
    """Recognise tokens by their hashes. `open`: no credentials are required (the guard restricts this to loopback)."""

    def __init__(
        self,
        owner: str,
        tokens: Iterable[Token],
        environment: NodeTokens,
        *,
        open: bool,  # noqa: A002
        tokens_beside_keys: bool = False,
        lent: Mapping[str, Callable[[str], frozenset[str] | None]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the credentials.

        `tokens_beside_keys`: whether a node with a key may also log in with a token. `lent` returns, by the first part
        of the id, the current scopes of a hook, a channel or a person on one; None if it no longer exists.
        """
        self.open = open
        self._tokens_beside_keys = tokens_beside_keys
        self._lenders = lent or {}
        self._on_removed: list[Callable[[str], None]] = []
        # Tokens whose expiry was announced.
        self._expired: set[str] = set()
        self._clock = clock
        # When tokens were used since the last `take_uses`.
        self._uses: dict[str, int] = {}
        self._owner = token_hash(owner)
        tokens = list(tokens)
        # The credential that made each token, including tokens that are no longer valid.
        self._makers: dict[str, str] = {token.id: token.made_by for token in tokens}
        self._revoked_nodes = {one.node_id for one in tokens if one.revoked_at is not None and one.node_id is not None}
        self._tokens: dict[bytes, Token] = {}
        # The rights of callers' tokens, by their hashes.
        self._callers: dict[bytes, Credential] = {}
        self._by_id: dict[str, Token] = {}
        for token in sorted(tokens, key=lambda one: len(self.lineage(one.id))):  # makers before the tokens they made
            if token.revoked_at is None:
                self.add(token)
        self._shared = None if environment.shared is None else token_hash(environment.shared)
        self._by_node = [(node_id, token_hash(secret)) for node_id, secret in environment.by_node]

    def subscribe(self, removed: Callable[[str], None]) -> None:
        """Call `removed` with the id of each credential that is revoked, removed or expired."""
        self._on_removed.append(removed)

    @property
    def owner_hash(self) -> bytes:
        return self._owner

    def recognise(self, secret: str) -> Credential | None:
        """Return the caller with this token; None if it is not valid."""
        known = self._recognise(token_hash(secret))
        if known is not None and known is not OWNER:
            self.note_use(known.id)
        return known

    @property
    def uses(self) -> Mapping[str, int]:
        """Return when tokens were used since the last `take_uses`."""
        return self._uses

    def note_use(self, token_id: str) -> None:
        self._uses[token_id] = int(self._clock() * 1000)

    def take_uses(self) -> dict[str, int]:
        """Return when tokens were used since the last call, and start over."""
        uses, self._uses = self._uses, {}
        return uses

    def _over(self, expires_at: int | None) -> bool:
        return expires_at is not None and self._clock() * 1000 >= expires_at

    def _recognise(self, digest: bytes) -> Credential | None:
        if hmac.compare_digest(digest, self._owner):
            return OWNER
        known = self._callers.get(digest)
        return None if known is None or self._over(self._tokens[digest].expires_at) else known

    def ended(self, ids: Iterable[str]) -> str | None:
        """Return why one of these credentials is no longer valid; None while all are."""
        for name in ids:
            if name == OWNER.id:
                continue
            if ":" in name:  # not a token, but an agent, a hook, a channel or a person on one
                if self._lent(name, frozenset()) is None:
                    return f"{name} was removed, or may no longer use the agent"
                continue
            token = self._by_id.get(name)
            if token is None:
                return f"the token {name} was revoked"
            if token.expires_at is not None and self._over(token.expires_at):
                return f"the token {name} expired at {utc_text(token.expires_at)}"
        return None

    def lineage(self, name: str) -> frozenset[str]:
        """Return a credential and the chain of tokens that made it, without the owner."""
        found: dict[str, None] = {}
        while name and name != OWNER.id and name not in found:
            found[name] = None
            name = self._makers.get(name, "")
        return frozenset(found)

    def makers(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the tokens that made some credentials, directly or indirectly, without these themselves."""
        names = frozenset(names)
        return tuple(sorted(frozenset[str]().union(*map(self.lineage, names)) - names))

    def reduced(self, credential: Credential) -> Credential:
        """Return a stored credential, restricted to the scopes it would be given now."""
        scopes = credential.scopes
        for name in filter(None, (credential.id, credential.issuer)):
            scopes &= self._lent(name, scopes) or frozenset()
        return credential if scopes == credential.scopes else msgspec.structs.replace(credential, scopes=scopes)

    def _lent(self, name: str, default: frozenset[str]) -> frozenset[str] | None:
        find = self._lenders.get(name.partition(":")[0]) if ":" in name else None
        return default if find is None else find(name)

    def announce_removed(self, name: str) -> None:
        """Notify listeners about a hook, or a person on a channel, that may no longer use the agent."""
        for notify in self._on_removed:
            notify(name)

    def named(self, name: str) -> Credential:
        """Return the rights of a recorded id; no rights if it is no longer known."""
        if name == OWNER.id:
            return OWNER
        token = self._by_id.get(name)
        known = None if token is None else self._recognise(token.hash)
        return Credential(name, frozenset()) if known is None else known

    def announce_expired(self) -> float | None:
        """Notify listeners about tokens that expired since the last call; return the seconds until the next expiry."""
        following: float | None = None
        for token in list(self._tokens.values()):
            if token.expires_at is None or token.id in self._expired:
                continue
            left = token.expires_at / 1000 - self._clock()
            if left > 0:
                following = left if following is None else min(left, following)
                continue
            self._expired.add(token.id)
            self.announce_removed(token.id)
        return following

    def recognise_node(self, secret: str, claimed: str) -> NodeGrant | None:
        """Return what a node's token grants, or None; a token of another node than `claimed` grants nothing.

        On an open gateway a node without a valid token may connect too, but not under the id of a node that has a
        token of its own.
        """
        grant = self._token_grant(secret, claimed) if secret else None
        return NodeGrant() if grant is None and self.open else grant

    def _token_grant(self, secret: str, claimed: str) -> NodeGrant | None:
        digest = token_hash(secret)
        for node_id, known in self._by_node:
            if hmac.compare_digest(digest, known) and claimed in ("", node_id) and not self.has_key(node_id):
                return NodeGrant(node_id)
        if self._shared is not None and hmac.compare_digest(digest, self._shared):
            return NodeGrant()
        token = self._tokens.get(digest)
        if token is None or token.node_id is None or claimed not in ("", token.node_id) or self._over(token.expires_at):
            return None
        if token.public_key is not None or self.has_key(token.node_id):  # a key has no secret to present
            return None
        return NodeGrant(token.node_id, token.id, token.expires_at)

    def recognise_key(self, public_key: bytes, claimed: str) -> NodeGrant | None:
        """Return the grant of the node that a key is registered for; it applies once the node has proved its key."""
        token = self._key(public_key)
        if token is None:
            return NodeGrant(claimed or None, public_key=public_key) if self.open else None
        if claimed not in ("", token.node_id) or self._over(token.expires_at):
            return None
        return NodeGrant(token.node_id, token.id, token.expires_at, public_key)

    def knows_key(self, public_key: bytes) -> bool:
        return self._key(public_key) is not None

    def _key(self, public_key: bytes) -> Token | None:
        return next((token for token in self._tokens.values() if token.public_key == public_key), None)

    def has_registered(self, node_id: str, key: str) -> bool:
        """Return whether a public key, as text, is registered for a node."""
        try:
            public_key = read_key(key)
        except ValueError:
            return False
        token = self._key(public_key)
        return token is not None and token.node_id == node_id

    def has_key(self, node_id: str) -> bool:
        """Return whether a node has to log in with its key, so that no token is accepted for it."""
        return not self._tokens_beside_keys and any(
            token.node_id == node_id and token.public_key is not None and not self._over(token.expires_at)
            for token in self._tokens.values()
        )

    def still_grants(self, grant: NodeGrant) -> bool:
        """Return whether a grant has been neither revoked nor expired."""
        return grant.token_id is None or (
            not self._over(grant.expires_at) and any(token.id == grant.token_id for token in self._tokens.values())
        )

    def was_revoked(self, node_id: str) -> bool:
        """Return whether this node's token was revoked and it has no other; the shared token must not readmit it."""
        return node_id in self._revoked_nodes and not self.has_own_token(node_id)

    def has_own_token(self, node_id: str) -> bool:
        """Return whether a node has its own token and therefore may not use the shared one."""
        stored = any(token.node_id == node_id for token in self._tokens.values())
        return stored or any(node_id == name for name, _ in self._by_node)

    @property
    def named_nodes(self) -> set[str]:
        """Return the ids of nodes with their own tokens, whether they have joined or not."""
        stored = {token.node_id for token in self._tokens.values() if token.node_id is not None}
        return stored | {node_id for node_id, _ in self._by_node}

    @property
    def nodes_can_join(self) -> bool:
        return (
            self.open
            or self._shared is not None
            or bool(self._by_node)
            or any(token.node_id is not None for token in self._tokens.values())
        )

    def seconds_left(self, token_id: str) -> float:
        """Return how long a recognised token remains valid; 0 once it is revoked."""
        token = next((one for one in self._tokens.values() if one.id == token_id), None)
        if token is None:
            return 0.0
        return math.inf if token.expires_at is None else max(0.0, token.expires_at / 1000 - self._clock())

    def latest_expiry(self, maker: str) -> int | None:
        """Return the latest expiry of tokens that a credential makes: its own expiry. None means never."""
        token = self._by_id.get(maker)
        return None if token is None else token.expires_at

    def add(self, token: Token) -> bool:
        """Recognise a token; return False if the token that made it is revoked.

        A caller's token expires no later than its maker. A node's token does not: it connects a machine, and a token
        that adds machines is usually short-lived.
        """
        self._makers[token.id] = token.made_by
        if token.made_by in self._makers and token.made_by not in self._by_id:
            return False
        latest = self.latest_expiry(token.made_by) if token.node_id is None else None
        if latest is not None and (token.expires_at is None or token.expires_at > latest):
            token = msgspec.structs.replace(token, expires_at=latest)
        self._tokens[token.hash] = token
        self._by_id[token.id] = token
        if token.node_id is None:
            self._callers[token.hash] = Credential(
                token.id,
                frozenset(token.scopes.split()),
                tuple(token.tools.split()),
                tuple(token.nodes.split()),
                profile="compact" if token.profile == "compact" else "full",
            )
        return True

    def knows(self, token_id: str) -> bool:
        """Whether a token is valid here."""
        return token_id in self._by_id

    def remove(self, token_id: str) -> list[Token]:
        """Remove a token and every token it made, directly or indirectly; return an empty list if it is not valid."""
        if token_id not in self._by_id:
            return []
        removed = [token for token in self._by_id.values() if token_id in self.lineage(token.id)]
        removed.sort(key=lambda token: token.id != token_id)
        for token in removed:
            del self._tokens[token.hash], self._by_id[token.id]
            self._callers.pop(token.hash, None)
            if token.node_id is not None:
                self._revoked_nodes.add(token.node_id)
        for token in removed:
            self.announce_removed(token.id)
        return removed


def new_secret(prefix: str) -> str:
    """Return 256 random bits with a prefix by which people, secret scanners and redaction recognise them."""
    assert prefix in OWN_PREFIXES, "redaction has to know it"
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def _node_tokens(text: str) -> Iterable[tuple[str, str]]:
    for number, entry in _entries(text):
        try:
            node_id, token = _split(entry)
            validate_node_id(node_id)
        except ValueError:
            node_id = token = ""
        if not token:  # a malformed entry may contain the token, so it is not shown
            raise FarhandError(f"{TOKENS_VARIABLE}: entry {number} is not id:token; expected: id:token,id:token")
        yield node_id, token


def _node_capabilities(text: str) -> dict[str, list[str]]:
    """Return what each node may serve; a node with an empty list may serve nothing."""
    allowed: dict[str, list[str]] = {}
    for number, entry in _entries(text):
        try:
            node_id, prefixes = _split(entry)
            validate_node_id(node_id)
            if node_id in allowed:
                raise ValueError(f"{node_id!r} has an entry before this one")
            named = [prefix.strip() for prefix in prefixes.split("+")] if prefixes else []
            allowed[node_id] = [validate_capability(prefix) for prefix in named]
        except ValueError as error:
            reason = f"entry {number}, {entry[:100]!r}: {error}; expected: id:prefix+prefix,id:prefix"
            raise FarhandError(f"{CAPABILITIES_VARIABLE}: {reason}") from None
    return allowed


def _entries(text: str) -> Iterable[tuple[int, str]]:
    """Yield the non-blank comma-separated entries, numbered from 1."""
    return ((number, entry.strip()) for number, entry in enumerate(text.split(","), 1) if entry.strip())


def _split(entry: str) -> tuple[str, str]:
    """Split at the last colon, since ids may contain colons. Raises ValueError if there is none."""
    node_id, separator, value = entry.rpartition(":")
    if not separator:
        raise ValueError("there is no colon in it")
    return node_id.strip(), value.strip()
