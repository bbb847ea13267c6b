"""Assembly of the receipts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from farhand.api.routes.calls import ReceiptRoutes
from farhand.gateway.access.credentials import Credentials
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.receipts import Receipts, receipt_seed
from farhand.store.journal.seal import load_key
from farhand.store.ports import Store


def open_receipts(
    home: Path, gateway_id: str, database: Store, gate: Gate, credentials: Credentials, clock: Callable[[], int]
) -> ReceiptRoutes:
    """Return the routes; the gateway's key is derived from that of its journal."""
    return ReceiptRoutes(Receipts(gateway_id, receipt_seed(load_key(home)), database, gate, credentials, clock))
