"""Secrets: their encrypted values, and where they may be used."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


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


_SECRETS: Final = Table("secrets", SecretRecord)


def all_secrets(tx: Tx) -> list[SecretRecord]:
    return _SECRETS.all(tx, "ORDER BY name")


def put_secret(tx: Tx, secret: SecretRecord) -> None:
    """Add a secret or replace it. The journal records its name, never its value."""
    # When it was last used stays.
    _SECRETS.add(tx, secret, _SECRETS.replace("name", keep=("last_used_at", "last_call")))
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
