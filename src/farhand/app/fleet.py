"""Assembles what the gateways of a fleet share: the store on PostgreSQL, the bus, and the secrets of a home."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand import __version__
from farhand.api.routes.fleet import FleetRoutes
from farhand.config import Config, SettingsError, StoreSection
from farhand.gateway.access.secrets import KEY_FILE as SECRETS_KEY
from farhand.gateway.access.secrets import has_secrets_key
from farhand.gateway.access.tokens import OWNER_FILE, owner_token
from farhand.gateway.fleet.membership import BEAT_SECONDS, DEAD_SECONDS
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.repeating import Repeating
from farhand.machine.files.private_files import write_private
from farhand.protocol.key_auth import to_text
from farhand.store.bus.signed import SignedBus
from farhand.store.group_commit import GroupCommit
from farhand.store.journal.seal import KEY_FILE, load_key
from farhand.store.ports import StoreError, Tx
from farhand.store.tables.access.tokens import get_meta, set_meta, token_hash
from farhand.store.tables.fleet import Replica, beat, leave_fleet, own_unowned, owned, replicas

SCHEMES: Final = ("postgresql", "postgres")
LEAST_SECRET: Final = 32
REPLICA_FILE: Final = "replica"
OWNER_HASH: Final = "owner_hash"
EXTRA: Final = "pip install 'farhand[fleet]'"
# How long a gateway that stops tries to tell the others.
LEAVE_SECONDS: Final = 5.0


def check_fleet_settings(config: Config) -> None:
    """Raise SettingsError when the settings for several gateways are incomplete."""
    store, bus = config.store, config.bus
    if not store.url:
        if bus.url:
            raise SettingsError('[bus] url is for gateways that share a store: also set [store] url = "postgresql://…"')
        return
    if store.url.partition("://")[0] not in SCHEMES or "://" not in store.url:
        raise SettingsError("[store] url must begin with postgresql://; without it, the store is a file in the home")
    missing = [name for name in ("psycopg", "nats", "obstore") if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"[store] url needs the extra `fleet` ({', '.join(missing)} not found): {EXTRA}")
    if not bus.url:
        raise SettingsError(
            "[store] url needs [bus] url too, such as nats://127.0.0.1:4222: gateways reach each other there"
        )
    if not bus.url.startswith(("nats://", "tls://")):
        raise SettingsError("[bus] url must begin with nats:// or tls://")
    if not config.objects.url.startswith("s3://"):
        raise SettingsError(
            "[store] url needs [objects] url too, such as s3://bucket/farhand: gateways share files there"
        )
    if store.secret and len(store.secret) < LEAST_SECRET:
        raise SettingsError(f"[store] secret has {len(store.secret)} characters; at least {LEAST_SECRET} are needed")


@dataclass(frozen=True)
class Member:
    """This gateway among those that share the store."""

    # Stays the same for a home.
    id: str
    epoch: int
    bus: Any
    # Whether others have taken over the work of this gateway.
    superseded: Callable[[], bool]
    # The first number of its queries and freezes, and of its streams: a node answers several gateways, so they differ.
    first_number: int
    first_stream: int
    # Reports that the gateway is alive until its membership does so: a start can take longer than others wait.
    starting: Repeating

    def owned(self, table: str) -> Callable[[Tx], set[str]]:
        """Return the query for the ids of open work in a table that belong to this gateway."""
        return lambda tx: owned(tx, table, self.id)


async def join(home: Path, config: Config, database: GroupCommit, stack: contextlib.AsyncExitStack) -> Member:
    """Connect to the bus and become one of the gateways on this store. Raises FarhandError."""
    nats = await importlib.import_module("farhand.store.bus.nats").NatsBus.open(config.bus.url)
    bus = SignedBus(nats, owner_token(home))  # the gateways of a store have the same owner
    stack.push_async_callback(bus.close)
    name = replica_id(home)
    store: Any = database
    digest = settings_digest(config)
    epoch = store.join(name, __version__, digest)
    database.query(lambda tx: own_unowned(tx, name))

    async def leave() -> None:
        with contextlib.suppress(StoreError, TimeoutError):  # without it, the others notice after a while
            async with asyncio.timeout(LEAVE_SECONDS):
                await database.write(lambda tx: leave_fleet(tx, name))

    async def show_alive() -> float:
        await database.write(lambda tx: beat(tx, name, digest), durable=False)
        return BEAT_SECONDS

    stack.push_async_callback(leave)
    starting = Repeating(show_alive, "beat of a starting gateway", retry_seconds=BEAT_SECONDS)
    starting.start()
    stack.push_async_callback(starting.stop)
    high = secrets.randbits(20) + 1
    return Member(name, epoch, bus, lambda: bool(store.superseded), high << 32, (high % 4096) << 20, starting)


def fleet_routes(
    config: Config, gateway_id: str, member: Member | None, database: GroupCommit, node_registry: NodeRegistry
) -> FleetRoutes:
    """Return the route that lists the gateways; a single one lists itself."""
    started_at, digest = node_registry.clock(), settings_digest(config)

    async def alone() -> list[Replica]:
        online = sum(node.online for node in node_registry.nodes.values())
        return [Replica(gateway_id, 1, __version__, digest, started_at, node_registry.clock(), False, online)]

    async def together() -> list[Replica]:
        return [one for one in await database.read(lambda tx: replicas(tx, DEAD_SECONDS)) if not one.silent]

    return FleetRoutes(gateway_id if member is None else member.id, alone if member is None else together)


def replica_id(home: Path) -> str:
    """Return the id of the gateway of a home, created on its first start: the machine's name and some digits."""
    path = home / REPLICA_FILE
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "gateway"
        write_private(path, f"{host}-{secrets.token_hex(3)}\n".encode())
        return path.read_text().strip()


def settings_digest(config: Config) -> str:
    """Return a digest of the settings that should be the same for all gateways of a fleet."""
    shared = msgspec.to_builtins(config)
    for name in ("gateway", "log", "console", "node", "sandbox"):
        shared.pop(name, None)
    return blake3(msgspec.json.encode(shared, order="deterministic")).hexdigest()[:16]


def open_shared_store(home: Path, section: StoreSection) -> GroupCommit:
    """Open the store on PostgreSQL. Raises StoreError, also if the gateways that use it have other secrets."""
    if section.secret:
        _derive_secrets(home, section.secret)
    postgres = importlib.import_module("farhand.store.postgres.store")
    database: GroupCommit = postgres.PostgresStore.open(section.url, load_key(home, make=True))
    own = token_hash(owner_token(home)).hex()

    def check_owner(tx: Tx) -> str:
        known = get_meta(tx, OWNER_HASH)
        if known is None:
            set_meta(tx, OWNER_HASH, own)
        return known or own

    if database.query(check_owner) != own:
        database.shut()
        raise StoreError(
            f"the owner's token in {home / OWNER_FILE} is not that of the gateways on this store: copy the files "
            f"{OWNER_FILE}, {KEY_FILE} and {SECRETS_KEY} from the home of one of them, or set [store] secret for all "
            "before their first start"
        )
    return database


def _derive_secrets(home: Path, secret: str) -> None:
    """Create the owner's token and the keys of the journal and the secrets of a home, where they are missing."""
    key = blake3(secret.encode(), derive_key_context="farhand journal key").digest()
    token = blake3(secret.encode(), derive_key_context="farhand owner token").hexdigest()
    handles = blake3(secret.encode(), derive_key_context="farhand secrets key").digest()
    files = [(KEY_FILE, key), (OWNER_FILE, f"fho_{token}\n".encode())]
    if not has_secrets_key(home):
        files.append((SECRETS_KEY, to_text(handles).encode()))
    for name, content in files:
        try:
            descriptor = os.open(home / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
