"""Assembly of the budgets."""

from __future__ import annotations

from collections.abc import Callable

from farhand.config import LiveConfig
from farhand.gateway.access.budgets import Budgets
from farhand.gateway.access.credentials import Credentials
from farhand.store.group_commit import GroupCommit
from farhand.store.tables.accounts.budgets import all_limits


def open_budgets(
    database: GroupCommit, credentials: Credentials, live: LiveConfig, clock: Callable[[], int]
) -> Budgets:
    budgets = Budgets(database, credentials, lambda: live.now.budgets, clock)
    budgets.load(database.query(all_limits))
    return budgets
