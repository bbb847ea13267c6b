"""The hub: one object with a method for everything a door can ask for."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET

from farhand import __version__
from farhand.gateway.access.credentials import OWNER, Credentials, NodeTokens, new_secret
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.control.effects import Effects
from farhand.gateway.control.freeze import Freeze
from farhand.gateway.nodes.cards import cleaned_runtime
from farhand.gateway.nodes.end_orders import EndOrders
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import Connection, Link, NodeRegistry
from farhand.gateway.nodes.returning import ReturningNodes, connected_at_the_end
from farhand.gateway.transfers.transfers import Transfers
from farhand.machine.freeze_file import FREEZE_FILE, FreezeFile
from farhand.machine.time_zone import machine_zone
from farhand.protocol.errors import ErrorKind, Failed, FarhandError, ToolError
from farhand.protocol.freeze import FreezeState
from farhand.protocol.key_auth import key_text
from farhand.protocol.messages import FEATURE_TRANSFER, FEATURES, GatewayExtras, GatewayWelcome, NodeHello, ToolsUpdate
from farhand.protocol.names import NATIVE, validate_node_id
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.version import CLOSE_REPLACED, CLOSE_UNAUTHORIZED, MAX_FRAME_BYTES
from farhand.store.journal.events import Event, append_event, events_after, last_event
from farhand.store.ports import Tx
from farhand.store.sqlite.snapshots import Recovery, note_revoked, open_store, revoked_tokens
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import calls
from farhand.store.tables import idempotency as keys
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fanouts import fanout_calls
from farhand.store.tables.nodes import NodeCard, all_nodes, forget_node, node_seen, save_node
from farhand.store.tables.tokens import (
    Token,
    add_token,
    all_tokens,
    get_meta,
    revoke_tokens,
    set_meta,
    token_hash,
    tokens_used,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

EVENT_PAGE = 500
OUTPUT_WAIT_MS = 20_000
FIRST_WAIT_MS = 200
NODE_AWAY_SECONDS = 120.0
JOBS_SECONDS = 5.0
# What a token for some tools or nodes may have: whatever acts in other ways would get round them.
NARROW_SCOPES = frozenset({"read", "tools.read", "tools.write", "tools.exec"})


class Output(msgspec.Struct, frozen=True):
    """A piece of what a command printed, and where it belongs."""

    offset: int
    next_offset: int
    data: bytes
    over: bool
    skipped: int = 0


class JobView(msgspec.Struct, frozen=True):
    """A command as its node tells it."""

    job_id: str
    command: str
    started_at: int
    running: bool
    call_id: str | None = None
    workdir: str = ""
    pid: int = 0
    background: bool = False
    ended_at: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    lost: bool = False
    output_bytes: int = 0


# As many as a node keeps, and as may run beside them.
JobViews = Annotated[list[JobView], msgspec.Meta(max_length=16_384)]


class Probed(msgspec.Struct, frozen=True):
    """Which programs a node has; the names are those of its runtime information."""

    hostBinStatus: dict[str, bool]  # noqa: N815
    hostBinStatusUpdatedAt: int  # noqa: N815


class Hub:
    """Opened by `Hub.open`; whoever opened it calls `close`."""

    def __init__(
        self,
        database: SqliteStore,
        owner: str,
        environment: NodeTokens,
        *,
        open: bool,  # noqa: A002
        freeze_state: FreezeState | None = None,
    ) -> None:
        read = database.query
        self._database = self.database = database
        self.gateway_id = read(_gateway_id)
        # Hidden in whatever leaves the gateway.
        self.secrets = KnownSecrets([owner, *environment.secrets])
        self.credentials = Credentials(owner, read(all_tokens), environment, open=open)
        nodes = read(all_nodes)
        self.node_registry = NodeRegistry(nodes, environment.capabilities)
        # Work that was open when the gateway stopped, or is late, begins when these are back.
        self.returning = ReturningNodes(self.node_registry, read(lambda store: connected_at_the_end(store, nodes)))
        self.catalog = Catalog(self.node_registry)
        self.gate = Gate(database, self.node_registry, self.catalog, self.credentials)
        self.credentials.on_removed.append(self.gate.credential_ended)
        self.gate.secrets = self.secrets
        self.queries = Queries(self.node_registry)
        self.end_orders = EndOrders(database, self.node_registry, self.node_registry.clock)
        self.transfers = Transfers(database, self.node_registry, self.queries)
        self.transfers.invalid = self.credentials.ended
        self.credentials.on_removed.append(self.transfers.credential_ended)
        self.freeze = Freeze(
            freeze_state or FreezeState(),
            self.gate,
            self.transfers,
            self.node_registry,
            gateway_id=self.gateway_id,
            note=self.note,
        )
        waiting_calls = self.gate.waiting_calls
        self.approvals = Approvals(database, waiting_calls, Effects(self.queries), self.node_registry.clock)
        waiting_calls.approvals = self.approvals
        self.approvals.lineage = self.credentials.lineage
        self.freeze.thawed.append(waiting_calls.resume)
        # In which times of day are read.
        self.zone: Callable[[], ZoneInfo] = lambda: machine_zone(os.environ)
        # Set when the gateway stops: whoever follows something live is let go.
        self.ending = asyncio.Event()
        # By the loop's clock, when the next long hello with a token is dealt with; under None, with any other.
        self.next_long_hello: dict[str | None, float] = {}
        # What had to be done to the store at this start.
        self.recovery: Recovery | None = None
        self.backup_at: int | None = None
        self.backup_failure: str | None = None
        self._home: Path | None = None

    @classmethod
    async def open(cls, home: Path, environ: Mapping[str, str], *, open: bool = False) -> Hub:  # noqa: A002
        """A damaged store is set aside for its last good copy.

        Raises StoreError when the store cannot be opened, FarhandError for an environment that cannot be meant.
        """
        environment = NodeTokens.from_env(environ)
        owner = owner_token(home)
        database, recovery = open_store(home, time.time_ns() // 1_000_000)
        database.query(lambda store: revoke_tokens(store, revoked_tokens(home)))
        freeze_state = FreezeFile(
            home / FREEZE_FILE
        )  # not in the store: an earlier copy of that must not lift a freeze
        hub = cls(database, owner, environment, open=open, freeze_state=freeze_state)
        hub.recovery = recovery
        hub._home = home
        hub._record(lambda _: None, "gateway.started", hub.gateway_id, {"version": __version__})
        await hub._database.write(partial(keys.forget_keys, now=hub.node_registry.clock()))
        return hub

    async def start(self) -> None:
        """Take up what was open when the gateway last stopped; the gateway's own tools are served before this."""
        await self.transfers.recover()
        waiting = await self.gate.recover()
        if waiting:
            log.info("%d calls were open when the gateway stopped; waiting for their nodes", waiting)

    async def close(self) -> None:
        self.gate.close()
        self.end_orders.close()
        await self.transfers.close()
        for node in self.node_registry.nodes.values():
            if node.connection is not None:
                self.leave(node.connection)
        self._record(lambda _: None, "gateway.stopped", self.gateway_id, {})
        await self._database.close()

    @property
    def healthy(self) -> bool:
        return self._database.healthy

    # -- nodes ------------------------------------------------------------------------------------------

    def welcome(self, hello: NodeHello) -> GatewayWelcome:
        """A plain node gets the plug-in guide's three fields, one that announced features is told ours."""
        plain = hello.farhand is UNSET or not hello.farhand.features
        return GatewayWelcome(
            gateway_version=__version__,
            farhand=UNSET
            if plain
            else GatewayExtras([*FEATURES, FEATURE_TRANSFER], self.gateway_id, max_response_bytes=MAX_FRAME_BYTES),
        )

    def join(self, card: NodeCard, hello: NodeHello, link: Link, token_id: str | None = None) -> Connection:
        """Connect a node that was examined and welcomed; an older connection of it is closed."""
        connection, replaced = self.node_registry.join(card, hello, link, token_id)
        node = self.node_registry.nodes[card.node_id]
        used = {} if token_id is None else {token_id: self.node_registry.clock()}

        def joined(store: Tx) -> None:
            save_node(store, card, node.connected_at, node.last_seen)
            tokens_used(store, used)

        self._record(
            joined,
            "node.online",
            card.node_id,
            {"generation": connection.generation, "version": card.version, "node_type": card.node_type},
        )
        log.info("node %s joined (generation %d)", card.node_id, connection.generation)
        if replaced is not None:
            replaced.link.close(CLOSE_REPLACED, "a newer connection of this node took over")
            if replaced.resume is None:
                self.gate.node_calls.left(replaced)
            self.transfers.node_left(replaced)
            self.freeze.left(replaced)
            self.end_orders.node_left(replaced)
        self.freeze.node_joined(connection)
        self.gate.node_calls.joined(connection)
        self.end_orders.node_joined(connection)
        self.transfers.node_joined(connection)
        return connection

    def leave(self, connection: Connection) -> None:
        """A socket ended. Only the node's current one makes it offline."""
        self.queries.left(connection)
        self.freeze.left(connection)
        self.transfers.node_left(connection)
        if not self.node_registry.leave(connection):
            return
        node = self.node_registry.nodes[connection.node_id]
        used = {} if connection.token_id is None else {connection.token_id: self.node_registry.clock()}

        def left(store: Tx) -> None:
            node_seen(store, connection.node_id, node.last_seen)
            tokens_used(store, used)

        self._record(
            left,
            "node.offline",
            connection.node_id,
            {"generation": connection.generation},
        )
        log.info("node %s left (generation %d)", connection.node_id, connection.generation)
        self.gate.node_calls.left(connection)
        self.end_orders.node_left(connection)

    def update(self, connection: Connection, update: ToolsUpdate) -> None:
        card = self.node_registry.changed(connection, update)
        if card is not None:
            node = self.node_registry.nodes[card.node_id]
            self._record(
                lambda store: save_node(store, card, node.connected_at, node.last_seen),
                "node.changed",
                card.node_id,
                {"tools": len(card.tools), "capabilities": card.capabilities},
            )
            self.gate.waiting_calls.resume()

    # -- questions to nodes -----------------------------------------------------------------------------

    async def output(
        self, node_id: str, of: Mapping[str, str], offset: int, *, wait: bool
    ) -> AsyncGenerator[Output, None]:
        """What a command printed from `offset` on: what is there, or with `wait` until it has ended.

        A node that drops off is waited for; the gateway's own machine is asked as `gsv`. Raises ToolError when it does
        not know the command, or stays away.
        """
        own = node_id == NATIVE
        away_since: float | None = None
        begun = False
        while True:
            # The first answer comes soon: a reader is told at once that there is something to read, and from where.
            patience = 0 if not wait else OUTPUT_WAIT_MS if begun else FIRST_WAIT_MS
            node = self.node_registry.nodes.get(node_id)
            connection = node.connection if node else None
            try:
                params = {**of, "offset": offset, "wait_ms": patience}
                answer = await self.queries.ask(node_id, "output", params, OUTPUT_WAIT_MS / 1000 + 10)
            except ToolError as error:
                if not wait or (node is None and not own):
                    raise
                if node is not None and (connection is None or node.connection is not connection):  # gone, or back
                    now = time.monotonic()
                    away_since = away_since or now
                    if now - away_since > NODE_AWAY_SECONDS:
                        raise
                    await asyncio.sleep(0.2)
                elif begun or error.kind is not ErrorKind.NOT_FOUND or not await self._may_start(node_id, of):
                    raise
                else:
                    await asyncio.sleep(0.02)
                continue
            begun = True
            away_since = None
            page = _read_answer(node_id, answer, Output)
            offset = page.next_offset
            yield page
            if page.over or (not wait and not page.data) or self.gate.closing:
                return

    async def _may_start(self, node_id: str, of: Mapping[str, str]) -> bool:
        """Whether what is asked for is a call that is open, so that its command may be about to start."""
        if "call_id" not in of or "output" not in self.queries.answered_by(node_id):
            return False
        record = await self.gate.find(of["call_id"])
        return record is not None and record.ended_at is None

    async def jobs(self, node_id: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
        """The commands of one node or of all connected ones, newest first, and the nodes that did not answer."""
        nodes = [node.card.node_id for node in self.node_registry.nodes.values() if node.connection is not None]
        asked = [name for name in (*nodes, NATIVE) if node_id in (None, name)]
        asked = [name for name in asked if "jobs" in self.queries.answered_by(name)]
        answers = await asyncio.gather(
            *(self.queries.ask(name, "jobs", None, JOBS_SECONDS) for name in asked), return_exceptions=True
        )
        jobs: list[dict[str, Any]] = []
        silent = []
        for name, answer in zip(asked, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                found = _read_answer(name, answer, JobViews)
                jobs += [{**msgspec.structs.asdict(job), "node_id": name} for job in found]
            except ToolError as error:
                if error.kind is ErrorKind.NOT_ALLOWED:
                    continue  # its owner does not lend commands, so there are none to list
                log.warning("failed to list the commands of node %s: %s", name, error)
                silent.append(name)
        return sorted(jobs, key=lambda job: int(job["started_at"]), reverse=True), silent

    async def probe(self, node_id: str, bins: list[str]) -> dict[str, Any]:
        """Ask which programs a node has; what it says becomes part of its runtime information. Raises ToolError."""
        answer = await self.queries.ask(node_id, "probe", {"bins": bins}, 30.0)
        probed = _read_answer(node_id, answer, Probed)
        node = self.node_registry.nodes[node_id]
        known = node.card.runtime.get("hostBinStatus")
        asked = {name: there for name, there in probed.hostBinStatus.items() if name in bins}
        found = {**(known if isinstance(known, dict) else {}), **asked}
        runtime = cleaned_runtime(
            {
                **node.card.runtime,
                "hostBinStatus": found,
                "hostBinStatusUpdatedAt": probed.hostBinStatusUpdatedAt,
            }
        )
        card = msgspec.structs.replace(node.card, runtime=runtime)
        node.update(card)
        self._record(
            lambda store: save_node(store, card, node.connected_at, node.last_seen),
            "node.probed",
            node_id,
            {"bins": bins},
        )
        return runtime

    # -- the record -------------------------------------------------------------------------------------

    async def calls(
        self,
        filters: Mapping[str, str],
        limit: int,
        before: str | None = None,
        group: str | None = None,
        *,
        bodies: bool = True,
    ) -> list[CallRecord]:
        """Newest first; read-only calls that still run are known to the gate alone. `bodies` as for `calls.search`."""
        running = self.gate.open_records()  # one that ends meanwhile may be too late for the rows
        found, members = await self._database.read(
            lambda store: (
                calls.search(store, filters, limit=limit, before=before, group=group, bodies=bodies),
                set() if group is None else fanout_calls(store, group),
            )
        )
        # The gate's word is newer than the row's, by a moment.
        newest = {record.id: record for record in (*running, *found, *self.gate.open_records())}
        fitting = [
            record
            for record in newest.values()
            if (before is None or record.id < before)
            and (group is None or record.id in members)
            and all(getattr(record, name) == value for name, value in filters.items())
        ]
        return sorted(fitting, key=lambda record: record.id, reverse=True)[:limit]

    async def last_event(self) -> int:
        """The id of the newest journal entry; 0 when there is none."""
        return await self._database.read(last_event)

    async def events(self, last: int, *, follow: bool) -> AsyncIterator[list[Event]]:
        """Journal entries after `last`, in pages; with `follow`, for ever.

        An empty page means that nothing came for a while: a moment to show the reader that the line is alive.
        """
        position = last
        wakes = self._database.watch()
        try:
            while True:
                wakes.clear()
                page = await self._database.read(partial(events_after, last=position, limit=EVENT_PAGE))
                if page:
                    position = page[-1].id
                    yield page
                elif not follow or self.gate.closing:
                    return
                else:
                    try:
                        async with asyncio.timeout(15):
                            await wakes.wait()
                        await asyncio.sleep(0.02)  # gather what comes in a burst
                    except TimeoutError:
                        yield []
        finally:
            self._database.unwatch(wakes)

    def note(self, kind: str, subject: str, data: Mapping[str, Any]) -> None:
        """Put something that happened into the journal."""
        self._record(lambda _: None, kind, subject, data)

    def _record(
        self, operation: Callable[[Any], object], kind: str, subject: str, data: Mapping[str, Any]
    ) -> asyncio.Future[None]:
        now = self.node_registry.clock()

        def write(store: Any) -> None:
            operation(store)
            append_event(store, now, kind, subject, data)

        return self._database.write(write, durable=kind.startswith(("token.", "freeze.")))

    # -- credentials ------------------------------------------------------------------------------------

    async def create_token(
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
    ) -> tuple[Token, str]:
        """Make a token; return it with its secret, which is shown this once.

        With `public_key` there is no secret: the node proves that it holds the private key. The token of a caller
        expires with its maker at the latest. Raises ValueError for invalid settings, and when its maker has ended.
        """
        for name in (*nodes, *(() if node_id is None else (node_id,))):
            validate_node_id(name)
        if (tools or nodes) and (node_id is not None or not set(scopes) <= NARROW_SCOPES):
            raise ValueError(f"a token for some tools or nodes has no scopes but {', '.join(sorted(NARROW_SCOPES))}")
        if public_key is not None and node_id is None:
            raise ValueError("a public key is that of a node; say of which")
        if public_key is not None and self.credentials.knows_key(public_key):
            raise ValueError("this public key is registered; a key is that of one node")
        if any(not tool or tool.split() != [tool] for tool in (*tools, *nodes)):
            raise ValueError("tools and nodes are named without spaces")
        if expires_seconds is not None and not 0 < expires_seconds < 1e10:
            raise ValueError(f"expires_seconds must be more than 0 and less than 1e10, not {expires_seconds:g}")
        now = self.node_registry.clock()
        expiries = [] if expires_seconds is None else [now + round(expires_seconds * 1000)]
        if node_id is None and (latest := self.credentials.latest_expiry(made_by)) is not None:
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
        )
        await self._record(
            lambda store: add_token(store, token),
            "token.created",
            token.id,
            {"node_id": node_id, "label": label, **({} if public_key is None else {"key": key_text(public_key)})},
        )
        if not self.credentials.add(token):
            revoke = partial(revoke_tokens, token_ids=[token.id], at=self.node_registry.clock())
            await self._record(revoke, "token.revoked", token.id, {"with": made_by})
            raise ValueError(f"the token {made_by}, which asked for a new one, was revoked")
        return token, secret if public_key is None else ""

    async def tokens(self) -> list[Token]:
        """Those that were made. A node that is connected uses its token all the time."""
        tokens = await self._database.read(all_tokens)
        connections = [node.connection for node in self.node_registry.nodes.values() if node.connection is not None]
        uses = {**self.credentials.uses}
        uses.update((one.token_id, self.node_registry.clock()) for one in connections if one.token_id is not None)
        return [
            msgspec.structs.replace(token, last_used_at=max(uses.get(token.id, 0), token.last_used_at or 0) or None)
            for token in tokens
        ]

    async def revoke_token(self, token_id: str) -> list[Token]:
        """Revoke a token and all it made, and disconnect their nodes; return them, the token itself first.

        Empty if there is no such token, or it was revoked before.
        """
        removed = self.credentials.remove(token_id)
        now = self.node_registry.clock()
        for token in removed:
            node = self.node_registry.nodes.get(token.node_id or "")
            if node is not None and node.connection is not None and node.connection.token_id == token.id:
                node.connection.link.close(CLOSE_UNAUTHORIZED, "this node's token was revoked")
        for token in removed:
            if self._home is not None:
                await asyncio.to_thread(note_revoked, self._home, token.id)
            facts = {} if token.id == token_id else {"with": token_id}
            await self._record(partial(revoke_tokens, token_ids=[token.id], at=now), "token.revoked", token.id, facts)
        return removed

    async def forget(self, node_id: str) -> bool:
        """Remove an offline node from the inventory. Raises FarhandError while it is connected."""
        node = self.node_registry.nodes.get(node_id)
        if node is None:
            return False
        if node.connection is not None:
            raise FarhandError(f"node {node_id!r} is connected; stop it or revoke its token first")
        if node.running:
            raise FarhandError(f"{node.running} calls wait for node {node_id!r}; cancel them first")
        del self.node_registry.nodes[node_id]
        await self._record(lambda store: forget_node(store, node_id), "node.forgotten", node_id, {})
        return True


def _read_answer(node_id: str, answer: msgspec.Raw, kind: type[T]) -> T:
    """What a node said, in the shape it should have. Raises Failed for anything else: a node may say what it likes."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise Failed(f"node {node_id!r} gave an answer that cannot be read: {error}") from None


def owner_token(home: Path) -> str:
    """The owner's token, made on the first start, readable by its owner alone. Raises FarhandError if it is blank."""
    path = home / "token"
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        secret = new_secret("fho")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
    if not secret:
        raise FarhandError(f"the owner's token in {path} is blank; remove the file to have a new one made")
    path.chmod(0o600)
    return secret


def _gateway_id(store: Any) -> str:
    known = get_meta(store, "gateway_id")
    if known is None:
        known = uuid.uuid4().hex
        set_meta(store, "gateway_id", known)
    return known
