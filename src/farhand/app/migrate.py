"""Move a home into a fleet, and back: the store, and with it the objects."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.app.fleet import OWNER_HASH, SCHEMES
from farhand.app.home import open_objects
from farhand.app.plugins import Plugins
from farhand.config import Config, SettingsError
from farhand.gateway.access.tokens import owner_token
from farhand.gateway.fleet.membership import DEAD_SECONDS
from farhand.protocol.errors import FarhandError
from farhand.store.journal.seal import forget_head, load_key
from farhand.store.objects.base import SPACES, Objects
from farhand.store.objects.folder import FolderObjects
from farhand.store.ports import Tx
from farhand.store.sqlite.snapshots import STORE_FILE
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.access.tokens import set_meta, token_hash
from farhand.store.tables.fleet import replicas

SQLITE: Final = "sqlite"


class Moved(msgspec.Struct, frozen=True):
    """What was copied."""

    rows: dict[str, int]
    objects: int


async def move(home: Path, config: Config, to: str, bucket: str | None) -> Moved:
    """Copy the store of a home to the database `to`, or with `sqlite` that of the settings into the home.

    `bucket`: also the objects; into the home, from the bucket of the settings. Raises FarhandError.
    """
    source: Objects
    target: Objects
    if to == SQLITE:
        rows = _into_home(home, config)
        source, target = open_objects(home, config.objects, Plugins()), FolderObjects(home)
    elif to.partition("://")[0] in SCHEMES:
        rows = _into_database(home, to)
        section = msgspec.structs.replace(config.objects, url=bucket or "")
        source, target = FolderObjects(home), open_objects(home, section, Plugins())
    else:
        raise SettingsError(f"--to takes postgresql://… or {SQLITE}, not {to.partition('://')[0]!r}")
    copied = 0
    try:
        if bucket is not None or (to == SQLITE and config.objects.url):
            copied = await _copy_objects(source, target)
    finally:
        await source.close()
        await target.close()
    return Moved(rows, copied)


def _postgres(name: str) -> Any:
    try:
        return importlib.import_module(f"farhand.store.postgres.{name}")
    except ImportError:
        raise SettingsError("PostgreSQL needs the extra: pip install 'farhand[fleet]'") from None


def _into_database(home: Path, url: str) -> dict[str, int]:
    moving, engine = _postgres("moving"), _postgres("store")
    if not (home / STORE_FILE).exists():
        raise FarhandError(f"there is no store to copy: {home / STORE_FILE} does not exist")
    source = SqliteStore.open(home / STORE_FILE)
    try:
        target = engine.PostgresStore.open(url, load_key(home))
        try:
            rows: dict[str, int] = moving.copy_store(source, target, source.query(moving.tables_of_sqlite))
            owner = token_hash(owner_token(home)).hex()

            def finish(tx: Tx) -> None:
                moving.continue_numbers(tx)
                set_meta(tx, OWNER_HASH, owner)

            target.query(finish)
            return rows
        finally:
            target.shut()
    finally:
        source.shut()


def _into_home(home: Path, config: Config) -> dict[str, int]:
    moving, engine = _postgres("moving"), _postgres("store")
    path = home / STORE_FILE
    if not config.store.url:
        raise SettingsError("[store] url names no database to copy from")
    if path.exists():
        raise FarhandError(f"{path} exists; move it away first")
    source = engine.PostgresStore.open(config.store.url, load_key(home))
    try:
        alive = [one.id for one in source.query(lambda tx: replicas(tx, DEAD_SECONDS)) if not one.silent]
        if alive:
            raise FarhandError(f"gateways still use the store: {', '.join(alive)}; stop them first")
        forget_head(home)
        target = SqliteStore.open(path, restored=True)
        try:
            rows: dict[str, int] = moving.copy_store(source, target, target.query(moving.tables_of_sqlite))
        except BaseException:
            target.shut()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            raise
        target.shut()
        return rows
    finally:
        source.shut()


async def _copy_objects(source: Objects, target: Objects) -> int:
    count = 0
    for space in sorted(SPACES):
        after: str | None = None
        while True:
            page = await source.list(f"{space}/", after=after)
            for info in page.objects:
                found, data = await source.get(info.key)
                await target.put(info.key, data, content_type=found.content_type)
                count += 1
            if page.after is None:
                break
            after = page.after
    return count
