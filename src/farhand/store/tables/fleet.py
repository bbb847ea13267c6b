"""Gateways that share a store: which are alive, which holds a node's connection, and who owns open work.

Only the store on PostgreSQL has these tables. Times are those of the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import StoreError, Tx
from farhand.store.tables.calls import CallRecord, begin_all

# Kinds of work that belong to one gateway: tables with the columns `replica` and `ended_at`, and their keys.
OWNED: Final = {"calls": "id", "runs": "id", "transfers": "id", "hook_posts": "seq", "awaited_replies": "run_id"}
_HAS_WORK: Final = " OR ".join(
    f"EXISTS (SELECT 1 FROM {table} WHERE {table}.replica = replicas.id AND ended_at IS NULL)"  # noqa: S608
    for table in OWNED
)

JOIN: Final = """
    INSERT INTO replicas (id, epoch, beat, started_at, version, settings)
    VALUES (?, 1, clock_timestamp(), clock_timestamp(), ?, ?)
    ON CONFLICT (id) DO UPDATE SET epoch = replicas.epoch + 1, beat = excluded.beat, started_at = excluded.started_at,
        version = excluded.version, settings = excluded.settings
    RETURNING epoch"""
SILENT: Final = f"""
    SELECT id FROM replicas
    WHERE id <> ? AND beat < clock_timestamp() - make_interval(secs => cast(? AS DOUBLE PRECISION))
    AND (EXISTS (SELECT 1 FROM links WHERE links.replica = replicas.id) OR beat > cast('-infinity' AS TIMESTAMPTZ)
        OR {_HAS_WORK})"""  # noqa: S608
FENCE: Final = "UPDATE replicas SET epoch = epoch + 1, beat = cast('-infinity' AS TIMESTAMPTZ) WHERE id = ?"
ALL: Final = """
    SELECT id, epoch, version, settings, cast(extract(epoch FROM started_at) * 1000 AS BIGINT),
        cast(extract(epoch FROM beat) * 1000 AS BIGINT), extract(epoch FROM clock_timestamp() - beat) > ?,
        (SELECT count(*) FROM links WHERE links.replica = replicas.id)
    FROM replicas WHERE beat > cast('-infinity' AS TIMESTAMPTZ) ORDER BY started_at, id"""
LINK: Final = """
    INSERT INTO links (node, gen, socket, replica) VALUES (?, 1, ?, ?)
    ON CONFLICT (node) DO UPDATE SET gen = links.gen + 1, socket = excluded.socket, replica = excluded.replica
    RETURNING gen"""
LINKS: Final = "SELECT node, gen, socket, replica FROM links WHERE replica IS NOT NULL"
# From a gateway that has left or was fenced, never from one that may still write.
LEASE: Final = """
    INSERT INTO leases (name, replica) VALUES (?, ?)
    ON CONFLICT (name) DO UPDATE SET replica = excluded.replica
        WHERE leases.replica = excluded.replica OR NOT EXISTS (
            SELECT 1 FROM replicas WHERE id = leases.replica AND beat > cast('-infinity' AS TIMESTAMPTZ))
    RETURNING replica"""


class Replica(msgspec.Struct, frozen=True):
    """A gateway of the fleet."""

    id: str
    epoch: int
    version: str
    # A digest of the settings that all gateways should have alike.
    settings: str
    started_at: int
    beat_at: int
    silent: bool
    nodes: int


class NodeLink(msgspec.Struct, frozen=True):
    """A node's connection: the gateway that holds its socket, and a name for that socket that is never used again."""

    node: str
    gen: int
    socket: str
    replica: str


class LinkMoved(StoreError):
    """The node is connected elsewhere by now; the call was not recorded and did not run."""


def join_fleet(tx: Tx, replica: str, version: str, settings: str) -> int:
    """Register a gateway that starts, and return its epoch; an earlier process of it can write nothing any more."""
    ((epoch,),) = tx.execute(JOIN, (replica, version, settings)).fetchall()
    tx.execute("UPDATE links SET replica = NULL WHERE replica = ?", (replica,))
    return int(epoch)


def beat(tx: Tx, replica: str, settings: str) -> None:
    tx.execute("UPDATE replicas SET beat = clock_timestamp(), settings = ? WHERE id = ?", (settings, replica))


def leave_fleet(tx: Tx, replica: str) -> None:
    """Let others take over the work of a gateway that stops."""
    tx.execute("UPDATE replicas SET beat = cast('-infinity' AS TIMESTAMPTZ) WHERE id = ?", (replica,))
    tx.execute("UPDATE links SET replica = NULL WHERE replica = ?", (replica,))


def take_over(tx: Tx, replica: str, seconds: float, now: int) -> list[str]:
    """Take the work of gateways that were silent for some time, and return their ids. They can write nothing then."""
    silent = [str(row[0]) for row in tx.execute(SILENT, (replica, seconds))]
    for lost in silent:
        tx.execute(FENCE, (lost,))
        for table in OWNED:
            tx.execute(f"UPDATE {table} SET replica = ? WHERE replica = ? AND ended_at IS NULL", (replica, lost))  # noqa: S608
        tx.execute("UPDATE links SET replica = NULL WHERE replica = ?", (lost,))
        append_event(tx, now, "replica.lost", lost, {"taken_over_by": replica})
    return silent


def replicas(tx: Tx, silent_after: float) -> list[Replica]:
    return [Replica(*row) for row in tx.execute(ALL, (silent_after,))]


def owned(tx: Tx, table: str, replica: str) -> set[str]:
    """Return the ids of the open work of one kind that a gateway owns."""
    key = OWNED[table]
    rows = tx.execute(f"SELECT {key} FROM {table} WHERE ended_at IS NULL AND replica = ?", (replica,))  # noqa: S608
    return {str(row[0]) for row in rows}


def own_unowned(tx: Tx, replica: str) -> None:
    """Take open work that no gateway owns: it comes from a store in a home."""
    for table in OWNED:
        tx.execute(f"UPDATE {table} SET replica = ? WHERE replica IS NULL AND ended_at IS NULL", (replica,))  # noqa: S608


def owner_of(tx: Tx, call_id: str) -> str | None:
    rows = tx.execute("SELECT replica FROM calls WHERE id = ? AND ended_at IS NULL", (call_id,)).fetchall()
    return None if not rows or rows[0][0] is None else str(rows[0][0])


def other_worker(tx: Tx, key: str, replica: str) -> str | None:
    """Return another gateway that works on a session, if there is one."""
    rows = tx.execute(
        "SELECT replica FROM runs WHERE session_key = ? AND ended_at IS NULL AND replica <> ? LIMIT 1", (key, replica)
    ).fetchall()
    return str(rows[0][0]) if rows else None


def run_owner(tx: Tx, run_id: str) -> str | None:
    rows = tx.execute("SELECT replica FROM runs WHERE id = ? AND ended_at IS NULL", (run_id,)).fetchall()
    return None if not rows or rows[0][0] is None else str(rows[0][0])


def assign_run(tx: Tx, run_id: str, replica: str) -> None:
    """Make a new run one of another gateway, which works on its session."""
    tx.execute("UPDATE runs SET replica = ? WHERE id = ?", (replica, run_id))


def claim_lease(tx: Tx, name: str, replica: str) -> bool:
    """Return whether this gateway alone may do something now: until it leaves the fleet or is taken for dead."""
    rows = tx.execute(LEASE, (name, replica)).fetchall()
    return bool(rows)


def open_among(tx: Tx, call_ids: Sequence[str]) -> set[str]:
    """Return which of these calls are open, on any gateway."""
    if not call_ids:
        return set()
    marks = ", ".join("?" * len(call_ids))
    rows = tx.execute(f"SELECT id FROM calls WHERE ended_at IS NULL AND id IN ({marks})", tuple(call_ids))  # noqa: S608
    return {str(row[0]) for row in rows}


# -- links --------------------------------------------------------------------------------------------------


def link(tx: Tx, node: str, socket: str, replica: str) -> int:
    """Store which gateway holds a node's connection from now on, and return the number of the connection."""
    ((gen,),) = tx.execute(LINK, (node, socket, replica)).fetchall()
    return int(gen)


def unlink(tx: Tx, node: str, socket: str) -> None:
    tx.execute("UPDATE links SET replica = NULL WHERE node = ? AND socket = ?", (node, socket))


def links(tx: Tx) -> list[NodeLink]:
    return [NodeLink(*row) for row in tx.execute(LINKS)]


def present_socket(tx: Tx, node: str) -> str | None:
    """Return the node's present connection; None if it has none."""
    rows: list[Any] = tx.execute("SELECT socket FROM links WHERE node = ? AND replica IS NOT NULL", (node,)).fetchall()
    return str(rows[0][0]) if rows else None


def check_link(tx: Tx, node: str, socket: str) -> None:
    """Raise LinkMoved unless this is the node's present connection."""
    if present_socket(tx, node) != socket:
        raise LinkMoved(f"node {node!r} is not connected there any more; the call did not run")


def open_on_link(tx: Tx, call_ids: Sequence[str], node: str, socket: str) -> set[str]:
    """Return those of some calls that are open and may be sent to this connection. Raises LinkMoved."""
    check_link(tx, node, socket)
    return open_among(tx, call_ids)


def begin_fenced(tx: Tx, records: Sequence[CallRecord], sockets: Iterable[str | None]) -> None:
    """Store new calls whose frames are about to go to these connections. Raises LinkMoved."""
    links = {(record.node_id, socket) for record, socket in zip(records, sockets, strict=True)}
    for node, socket in links:
        if socket is not None and node is not None:
            check_link(tx, node, socket)
    begin_all(tx, records)
