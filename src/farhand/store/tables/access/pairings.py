"""Unknown senders on channels, and the owner's decision about each."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx


class PairingState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    channel: str
    account: str
    sender: str
    name: str
    code: str
    state: PairingState = PairingState.PENDING
    # The peer to which replies go.
    peer: str
    first_text: str
    requested_at: int
    decided_at: int | None = None


_COLUMNS: Final = Pairing.__struct_fields__
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM pairings"  # noqa: S608


def save_pairing(tx: Tx, pairing: Pairing) -> None:
    tx.execute(
        f"INSERT INTO pairings ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608
        "ON CONFLICT (channel, account, sender) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[3:]),
        [str(value) if isinstance(value, StrEnum) else value for value in msgspec.structs.astuple(pairing)],
    )
    kind = "channel.pairing_requested" if pairing.decided_at is None else f"channel.pairing_{pairing.state.value}"
    data = {"channel": pairing.channel, "account": pairing.account, "sender": pairing.sender, "name": pairing.name}
    append_event(tx, pairing.decided_at or pairing.requested_at, kind, pairing.sender, data)


def find_pairing(tx: Tx, channel: str, account: str, sender: str) -> Pairing | None:
    rows = tx.execute(
        f"{_SELECT} WHERE channel = ? AND account = ? AND sender = ?", (channel, account, sender)
    ).fetchall()
    return _pairing(rows[0]) if rows else None


def list_pairings(tx: Tx) -> list[Pairing]:
    """Return pairings, newest first."""
    return [_pairing(row) for row in tx.execute(f"{_SELECT} ORDER BY requested_at DESC")]


def forget_pairing(tx: Tx, pairing: Pairing) -> None:
    tx.execute(
        "DELETE FROM pairings WHERE channel = ? AND account = ? AND sender = ?",
        (pairing.channel, pairing.account, pairing.sender),
    )


def _pairing(row: tuple[Any, ...]) -> Pairing:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["state"] = PairingState(values["state"])
    return Pairing(**values)
