"""Open the store of a home folder and its objects."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand import __version__
from farhand.app.fleet import Member, check_fleet_settings, join, open_shared_store
from farhand.app.plugins import OBJECTS, PluginError, Plugins
from farhand.config import Config, ObjectsSection, SettingsError
from farhand.gateway.access.credentials import NodeTokens
from farhand.gateway.journal import EventJournal
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.nodes.returning import ReturningNodes, connected_at_the_end
from farhand.machine.files.undo_log import UndoLog
from farhand.protocol.errors import FarhandError, ToolError
from farhand.store.group_commit import GroupCommit
from farhand.store.objects.base import SPACES, Objects
from farhand.store.objects.folder import FolderObjects
from farhand.store.sqlite.snapshots import Recovery, open_store, revoked_tokens
from farhand.store.tables.access.one_time_codes import remove_codes
from farhand.store.tables.access.tokens import get_meta, revoke_tokens, set_meta
from farhand.store.tables.idempotency import forget_keys
from farhand.store.tables.nodes import all_nodes

# How long an object store may take to answer when the gateway starts.
OBJECTS_SECONDS: Final = 10.0


@dataclass(frozen=True)
class OpenedStore:
    """The store of a home folder, and what is read from it before anything else is built."""

    database: GroupCommit
    recovery: Recovery | None
    journal: EventJournal
    gateway_id: str
    node_tokens: NodeTokens
    node_registry: NodeRegistry
    # Work that was open when the gateway stopped, or is late, begins when these are back.
    returning: ReturningNodes
    # This gateway among those that share the store, if any.
    member: Member | None


async def open_home(
    home: Path, config: Config, environ: Mapping[str, str], stack: contextlib.AsyncExitStack
) -> OpenedStore:
    """Open the store; a damaged one is replaced by its last good copy. It is closed with the stack.

    Raises StoreError when the store cannot be opened, FarhandError for an invalid environment.
    """
    node_tokens = NodeTokens.from_env(environ)
    check_fleet_settings(config)
    database: GroupCommit
    recovery: Recovery | None = None
    member: Member | None = None
    if config.store.url:
        database = open_shared_store(home, config.store)
        stack.push_async_callback(database.close)
        member = await join(home, config, database, stack)
    else:
        database, recovery = open_store(home, time.time_ns() // 1_000_000)
        stack.push_async_callback(database.close)
        database.query(remove_codes)  # an older copy of the store may have some that were used
    database.query(lambda store: revoke_tokens(store, revoked_tokens(home)))
    nodes = database.query(all_nodes)
    node_registry = NodeRegistry(nodes, node_tokens.capabilities)
    returning = ReturningNodes(node_registry, database.query(lambda store: connected_at_the_end(store, nodes)))
    gateway_id = database.query(_gateway_id)
    journal = EventJournal(database, node_registry.clock)
    journal.note("gateway.started", gateway_id, {"version": __version__})
    stack.callback(journal.note, "gateway.stopped", gateway_id, {})
    await database.write(partial(forget_keys, now=node_registry.clock()))
    return OpenedStore(database, recovery, journal, gateway_id, node_tokens, node_registry, returning, member)


def open_objects(home: Path, section: ObjectsSection, plugins: Plugins, undo_log: UndoLog | None = None) -> Objects:
    """Return the object store that the settings name. Raises SettingsError when it is not available."""
    if not section.url:
        return FolderObjects(home, undo_log)
    scheme = section.url.partition("://")[0]
    loaders = plugins.loaders(OBJECTS)
    if scheme not in loaders:
        known = ", ".join(f"{name}://…" for name in loaders)
        raise SettingsError(f"[objects] url: {section.url!r} names no known object store; known: {known}")
    if scheme == "s3" and importlib.util.find_spec("obstore") is None:
        raise SettingsError("[objects] url needs the extra: pip install 'farhand[s3]'")
    try:
        objects: Objects = loaders[scheme]()(**msgspec.structs.asdict(section))
    except (PluginError, ValueError) as error:
        raise SettingsError(f"[objects] {error}") from None
    return objects


async def check_objects(objects: Objects, url: str) -> None:
    """Raise FarhandError unless an object store answers."""
    try:
        async with asyncio.timeout(OBJECTS_SECONDS):
            await objects.list(f"{SPACES[0]}/", limit=1)
    except TimeoutError:
        raise FarhandError(f"cannot reach the objects {url}: no answer within {OBJECTS_SECONDS:g} s") from None
    except ToolError as error:
        raise FarhandError(
            f"cannot reach the objects {url}: {error.message}; check [objects] url, endpoint, region and keys"
        ) from None


def _gateway_id(store: Any) -> str:
    known = get_meta(store, "gateway_id")
    if known is None:
        known = uuid.uuid4().hex
        set_meta(store, "gateway_id", known)
    return known
