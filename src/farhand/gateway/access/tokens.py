"""Create, list and revoke tokens, and manage the owner's token file."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from farhand.gateway.access.credentials import OWNER, Credentials, Profile, new_secret
from farhand.gateway.journal import EventJournal
from farhand.protocol.errors import FarhandError
from farhand.protocol.key_auth import key_text
from farhand.protocol.names import validate_node_id
from farhand.store.ports import Store, Tx
from farhand.store.sqlite.snapshots import note_revoked
from farhand.store.tables.access.tokens import Token, add_token, all_tokens, revoke_tokens, token_hash
from farhand.store.tables.accounts.budgets import Limit, set_limits

# The scopes that a token restricted to tools or nodes may have: any other would bypass the restriction.
NARROW_SCOPES = frozenset({"read", "tools.read", "tools.write", "tools.exec"})

OWNER_FILE = "token"
MAX_LABEL = 200


class Tokens:
    """Manage the stored tokens. Changes are on disk before a method returns."""

    def __init__(
        self,
        home: Path,
        database: Store,
        journal: EventJournal,
        credentials: Credentials,
        *,
        clock: Callable[[], int],
        connected: Callable[[], Iterable[str]],
        disconnect: Callable[[Token], None],
    ) -> None:
        """Create the manager.

        `connected` returns the tokens of connected nodes; `disconnect` closes the connection of a node whose token is
        revoked.
        """
        self._home = home
        self._database = database
        self._journal = journal
        self._credentials = credentials
        self._clock = clock
        self._connected = connected
        self._disconnect = disconnect

    async def create(
        self,
        *,
        node_id: str | None,
        label: str,
        scopes: list[str],
        tools: Sequence[str] = (),
        nodes: Sequence[str] = (),
        expires_seconds: float | None = None,
        public_key: bytes | None = None,
        made_by: str = OWNER.id,
        profile: Profile = "compact",
        budget: Callable[[str], Sequence[Limit]] | None = None,
    ) -> tuple[Token, str]:
        """Return a new token and its secret, which is not stored.

        `budget` returns the limits of the new token, given the name under which they are stored.
        With `public_key` the secret is empty: the node proves that it holds the private key. A caller's token expires
        no later than its maker. Raises ValueError for invalid settings, and if its maker has ended.
        """
        check_label(label)
        for name in (*nodes, *(() if node_id is None else (node_id,))):
            validate_node_id(name)
        if (tools or nodes) and (node_id is not None or not set(scopes) <= NARROW_SCOPES):
            raise ValueError(f"a token for some tools or nodes has no scopes but {', '.join(sorted(NARROW_SCOPES))}")
        if public_key is not None and node_id is None:
            raise ValueError("a public key belongs to a node: give its node_id")
        if public_key is not None and self._credentials.knows_key(public_key):
            raise ValueError("this public key is already registered; each node needs its own key")
        if any(not tool or tool.split() != [tool] for tool in (*tools, *nodes)):
            raise ValueError("names of tools and nodes must not contain spaces")
        if expires_seconds is not None and not 0 < expires_seconds < 1e10:
            raise ValueError(f"expires_seconds must be more than 0 and less than 1e10, not {expires_seconds:g}")
        now = self._clock()
        expiries = [] if expires_seconds is None else [now + round(expires_seconds * 1000)]
        if node_id is None and (latest := self._credentials.latest_expiry(made_by)) is not None:
            expiries.append(latest)
        secret = new_secret("fhn" if node_id is not None else "fhc")
        token = Token(
            id=secrets.token_hex(4),
            hash=token_hash(secret),
            scopes="node" if node_id is not None else " ".join(scopes),
            node_id=node_id,
            label=label,
            created_at=now,
            tools=" ".join(tools),
            nodes=" ".join(nodes),
            expires_at=min(expiries, default=None),
            public_key=public_key,
            made_by=made_by,
            profile=profile,
        )
        subject = f"token:{token.id}"
        limits = [] if budget is None else budget(subject)

        def add(tx: Tx) -> None:
            if limits:  # before the token: gateways that share the store follow the events in this order
                set_limits(tx, subject, limits, made_by, now)
            add_token(tx, token)

        await self._journal.record(
            add,
            "token.created",
            token.id,
            {"node_id": node_id, "label": label, **({} if public_key is None else {"key": key_text(public_key)})},
        )
        if not self._credentials.add(token):
            revoke = partial(revoke_tokens, token_ids=[token.id], at=self._clock())
            await self._journal.record(revoke, "token.revoked", token.id, {"with": made_by})
            raise ValueError(f"the token {made_by}, which asked for a new one, was revoked")
        return token, secret if public_key is None else ""

    async def all(self) -> list[Token]:
        """Return every stored token; the token of a connected node counts as used now."""
        tokens = await self._database.read(all_tokens)
        uses = {**self._credentials.uses, **dict.fromkeys(self._connected(), self._clock())}
        return [
            msgspec.structs.replace(token, last_used_at=max(uses.get(token.id, 0), token.last_used_at or 0) or None)
            for token in tokens
        ]

    async def refresh(self) -> None:
        """Take over what other gateways did to the stored tokens."""
        for token in await self._database.read(all_tokens):
            if token.revoked_at is not None:
                for removed in self._credentials.remove(token.id):
                    self._disconnect(removed)
            elif not self._credentials.knows(token.id):
                self._credentials.add(token)

    async def revoke(self, token_id: str) -> list[Token]:
        """Revoke a token and all tokens it made, and disconnect their nodes; return them, the token itself first.

        Returns an empty list if there is no such valid token.
        """
        removed = self._credentials.remove(token_id)
        now = self._clock()
        for token in removed:
            self._disconnect(token)
        for token in removed:
            await asyncio.to_thread(note_revoked, self._home, token.id)
            facts = {} if token.id == token_id else {"with": token_id}
            revoke = partial(revoke_tokens, token_ids=[token.id], at=now)
            await self._journal.record(revoke, "token.revoked", token.id, facts)
        return removed


def check_label(label: str) -> None:
    """Raise ValueError for a label that is too long to be stored with each token."""
    if len(label) > MAX_LABEL:
        raise ValueError(f"a label has at most {MAX_LABEL} characters, this one has {len(label)}")


def owner_token(home: Path) -> str:
    """Return the owner's token, created on the first start in a file that only its owner can read.

    Raises FarhandError if the file is blank.
    """
    path = home / OWNER_FILE
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        secret = new_secret("fho")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
    if not secret:
        raise FarhandError(f"the owner's token in {path} is blank; remove the file to create a new token")
    path.chmod(0o600)
    return secret
