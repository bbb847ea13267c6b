"""Secrets: their encrypted values, and where they may be used."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx


class SecretRecord(msgspec.Struct, frozen=True):
    name: str
    # Encrypted.
    value: bytes
    # Names of nodes and patterns of tools; empty: all.
    nodes: str
    tools: str
    made_by: str
    created_at: int
    last_used_at: int | None = None
    # The call that used it last.
    last_call: str | None = None
    # Hosts whose requests get it from the egress proxies of nodes, and the header; such a secret has no other use.
    hosts: str = ""
    header: str = ""


ALL: Final = """
    SELECT name, value, nodes, tools, made_by, created_at, last_used_at, last_call, hosts, header FROM secrets
    ORDER BY name"""
PUT: Final = """
    INSERT INTO secrets (name, value, nodes, tools, made_by, created_at, hosts, header) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, nodes = excluded.nodes, tools = excluded.tools,
        made_by = excluded.made_by, created_at = excluded.created_at, hosts = excluded.hosts,
        header = excluded.header"""


def all_secrets(tx: Tx) -> list[SecretRecord]:
    return [SecretRecord(*row) for row in tx.execute(ALL)]


def put_secret(tx: Tx, secret: SecretRecord) -> None:
    """Add a secret or replace it. The journal records its name, never its value."""
    values = (secret.name, secret.value, secret.nodes, secret.tools, secret.made_by, secret.created_at)
    tx.execute(PUT, (*values, secret.hosts, secret.header))
    data: dict[str, Any] = {"nodes": secret.nodes.split(), "tools": secret.tools.split(), "by": secret.made_by}
    if secret.hosts:
        data |= {"hosts": secret.hosts.split(), "header": secret.header}
    append_event(tx, secret.created_at, "secret.set", secret.name, data)


def remove_secret(tx: Tx, name: str, by: str, now: int) -> bool:
    tx.execute("DELETE FROM secrets WHERE name = ?", (name,))
    removed = bool(tx.changes())
    if removed:
        append_event(tx, now, "secret.removed", name, {"by": by})
    return removed


def secret_used(tx: Tx, names: tuple[str, ...], call_id: str, now: int) -> None:
    tx.executemany(
        "UPDATE secrets SET last_used_at = ?, last_call = ? WHERE name = ?", [(now, call_id, name) for name in names]
    )
