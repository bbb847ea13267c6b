"""What is stored of refused calls: a little of each, and a limited amount per credential and day."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from farhand.protocol.redaction import KnownSecrets
from farhand.store.tables.calls import CallRecord

log = logging.getLogger(__name__)

# Limit for the arguments, and for the error message.
STORED_BYTES: Final = 4096
# Limit for names that the caller chose, in characters.
STORED_NAME: Final = 256
# What a row and its event take besides the arguments.
ROW_BYTES: Final = 512
DAY_MS: Final = 24 * 3600 * 1000
MOST_CREDENTIALS: Final = 10_000


class RefusedArguments(msgspec.Struct, frozen=True):
    """Stored in place of arguments longer than STORED_BYTES."""

    original_bytes: int = msgspec.field(name="_original_bytes")
    sha256: str = msgspec.field(name="_sha256")
    partial: str
    truncated: bool = msgspec.field(name="_truncated", default=True)


def shortened(record: CallRecord, secrets: KnownSecrets) -> CallRecord:
    """Return the record of a refused call with long arguments, names and messages shortened."""
    message = record.error_message
    return msgspec.structs.replace(
        record,
        args=short_arguments(record.args, secrets),
        tool=record.tool[:STORED_NAME],
        session_key=_name(record.session_key),
        agent_id=_name(record.agent_id),
        error_message=message if message is None else secrets.truncate(message, STORED_BYTES),
    )


def short_arguments(args: msgspec.Raw, secrets: KnownSecrets) -> msgspec.Raw:
    """Return what to store of the arguments of a call that did nothing: of long ones, a digest and the beginning."""
    data = bytes(args)
    if len(data) <= STORED_BYTES:
        return args
    # More than is kept, since hiding secrets may make it shorter.
    beginning = data[: 4 * STORED_BYTES].decode(errors="ignore")
    kept = RefusedArguments(len(data), hashlib.sha256(data).hexdigest(), secrets.truncate(beginning, STORED_BYTES))
    return msgspec.Raw(msgspec.json.encode(kept))


def _name(text: str | None) -> str | None:
    return text if text is None else text[:STORED_NAME]


class RefusalBudget:
    """Counts what refused calls of each credential store in a day; beyond the limits they are not recorded."""

    def __init__(self, limits: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        """`limits` returns the bytes and rows per credential and day in the current settings; 0 means no limit."""
        self._limits = limits
        self._day = 0
        self._used: dict[str, tuple[int, int]] = {}
        self._omitted: dict[str, int] = {}

    def take(self, record: CallRecord, now: int) -> bool:
        """Count a refused call; return whether to store it."""
        if now // DAY_MS != self._day:
            self._day = now // DAY_MS
            self._used.clear()
            self._omitted.clear()
        most_bytes, most_rows = self._limits()
        used, rows = self._used.get(record.credential, (0, 0))
        size = ROW_BYTES + len(bytes(record.args)) + len(record.error_message or "")
        if (most_bytes and used + size > most_bytes) or (most_rows and rows >= most_rows):
            self._omit(record.credential)
            return False
        if record.credential in self._used or len(self._used) < MOST_CREDENTIALS:
            self._used[record.credential] = (used + size, rows + 1)
        return True

    def _omit(self, credential: str) -> None:
        count = self._omitted[credential] = self._omitted.get(credential, 0) + 1
        if count == 1:
            log.warning(
                "refused calls of %s exceed [retention] refused_bytes_per_credential or refused_calls_per_credential; "
                "further ones are refused without a record until tomorrow",
                credential,
            )

    @property
    def omitted(self) -> dict[str, int]:
        """How many refused calls of each credential were not recorded today."""
        return dict(self._omitted)
