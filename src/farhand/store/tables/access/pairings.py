"""Unknown senders on channels, and the owner's decision about each."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


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


_PAIRINGS: Final = Table("pairings", Pairing)


def save_pairing(tx: Tx, pairing: Pairing) -> None:
    _PAIRINGS.add(tx, pairing, _PAIRINGS.replace("channel", "account", "sender"))
    kind = "channel.pairing_requested" if pairing.decided_at is None else f"channel.pairing_{pairing.state.value}"
    data = {"channel": pairing.channel, "account": pairing.account, "sender": pairing.sender, "name": pairing.name}
    append_event(tx, pairing.decided_at or pairing.requested_at, kind, pairing.sender, data)


def find_pairing(tx: Tx, channel: str, account: str, sender: str) -> Pairing | None:
    return _PAIRINGS.find(tx, "channel = ? AND account = ? AND sender = ?", channel, account, sender)


def list_pairings(tx: Tx) -> list[Pairing]:
    """Return pairings, newest first."""
    return _PAIRINGS.all(tx, "ORDER BY requested_at DESC")


def forget_pairing(tx: Tx, pairing: Pairing) -> None:
    tx.execute(
        "DELETE FROM pairings WHERE channel = ? AND account = ? AND sender = ?",
        (pairing.channel, pairing.account, pairing.sender),
    )
