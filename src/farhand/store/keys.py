"""Idempotency keys of requests that are no calls."""

from __future__ import annotations

from typing import Final

import apsw

RELEASE: Final = "DELETE FROM idempotency WHERE credential = ? AND key = ? AND call_id = ?"


def release(connection: apsw.Connection, credential: str, key: str, request_id: str) -> None:
    """A request that was refused does not use its key up."""
    connection.execute(RELEASE, (credential, key, request_id))
