"""Limit how many bytes a token may store in a day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farhand.gateway.access.credentials import Credential, Scope
from farhand.protocol.errors import Failed

DAY_MS: Final = 24 * 3600 * 1000


class OverBudget(Failed):
    """Report that a token has used up its daily limit."""


class DailyBudget:
    """Count the bytes stored per token and day, except for the owner, admin tokens and channels."""

    def __init__(self, what: str, setting: str, most_bytes: Callable[[], int] = lambda: 0) -> None:
        """Create the budget.

        `what` names the counted data in errors. `most_bytes` returns the current value of `setting`, the limit per
        token and day; 0 means no limit.
        """
        self._what = what
        self._setting = setting
        self._most_bytes = most_bytes
        self._day = 0
        self._used: dict[str, int] = {}

    def take(self, credential: Credential, size: int, now: int) -> None:
        """Count data that is about to be stored. Raises OverBudget if it exceeds the limit."""
        most, used = self._most_bytes(), self._used_by(credential, now)
        if used is None:
            return
        if most and used + size > most:
            raise OverBudget(
                f"{self._what} of this token take {used} bytes today; with this one they exceed "
                f"{self._setting} ({most}); try again tomorrow"
            )
        self._used[credential.id] = used + size

    def add(self, credential: Credential, size: int, now: int) -> None:
        """Count data that must be stored, regardless of the limit."""
        used = self._used_by(credential, now)
        if used is not None:
            self._used[credential.id] = used + size

    def _used_by(self, credential: Credential, now: int) -> int | None:
        """Return what a token has used today; None for a credential that is not counted."""
        if not credential.is_token or credential.may(Scope.ADMIN):
            return None
        if now // DAY_MS != self._day:
            self._day = now // DAY_MS
            self._used.clear()
        return self._used.get(credential.id, 0)


def message_budget(most_bytes: Callable[[], int] = lambda: 0) -> DailyBudget:
    return DailyBudget("messages", "[retention] message_bytes_per_credential", most_bytes)


def keyed_call_budget(most_bytes: Callable[[], int] = lambda: 0) -> DailyBudget:
    """Limit calls with an idempotency key and fan-outs, which are kept for a day regardless of the history's size."""
    return DailyBudget(
        "calls with an idempotency key and fan-outs", "[retention] keyed_bytes_per_credential", most_bytes
    )
