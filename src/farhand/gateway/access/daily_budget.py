"""Limit how many bytes a token, a hook or a person on a channel may store in a day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farhand.gateway.access.credentials import Credential, Scope
from farhand.protocol.errors import Failed

DAY_MS: Final = 24 * 3600 * 1000


class OverBudget(Failed):
    """Report that a daily limit is used up."""


class DailyBudget:
    """Count the bytes stored per token and day, except for the owner and admin tokens.

    What hooks and people on channels send is counted by `take_from`.
    """

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
        if _is_counted(credential):
            self.take_from(credential.id, size, now, who="this token")

    def take_from(self, name: str, size: int, now: int, *, who: str, share: int = 1) -> None:
        """Count data that `who` sent, under a name. Raises OverBudget if it exceeds the limit divided by `share`."""
        most, used = self._most_bytes() // share, self._used_by(name, now)
        if self._most_bytes() and used + size > most:
            raise OverBudget(
                f"{self._what} of {who} take {used} bytes today; with this one they exceed "
                f"{self._setting} ({most}); try again tomorrow"
            )
        self._used[name] = used + size

    def add(self, credential: Credential, size: int, now: int) -> None:
        """Count data that must be stored, regardless of the limit."""
        if _is_counted(credential):
            self._used[credential.id] = self._used_by(credential.id, now) + size

    def _used_by(self, name: str, now: int) -> int:
        if now // DAY_MS != self._day:
            self._day = now // DAY_MS
            self._used.clear()
        return self._used.get(name, 0)


def _is_counted(credential: Credential) -> bool:
    return credential.is_token and not credential.may(Scope.ADMIN)


def message_budget(most_bytes: Callable[[], int] = lambda: 0) -> DailyBudget:
    return DailyBudget("messages", "[retention] message_bytes_per_credential", most_bytes)


def keyed_call_budget(most_bytes: Callable[[], int] = lambda: 0) -> DailyBudget:
    """Limit calls with an idempotency key and fan-outs, which are kept for a day regardless of the history's size."""
    return DailyBudget(
        "calls with an idempotency key and fan-outs", "[retention] keyed_bytes_per_credential", most_bytes
    )
