"""Approvals that hold for every later call which is exactly the same."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.store.ports import Tx


class StandingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """The answer "always" to a request for approval."""

    id: str
    # In lower case, as the caller named it.
    tool: str
    node_id: str | None
    # Canonical JSON.
    args: msgspec.Raw
    credential: str
    on_behalf_of: str | None
    # A later call must not have any other origin.
    origins: tuple[str, ...]
    # The rule that asked, for people; it holds for other rules that ask, too.
    rule: str
    approval_id: str
    made_by: str
    created_at: int


_FIELDS: Final = StandingApproval.__struct_fields__
ADD: Final = f"INSERT INTO standing_approvals ({', '.join(_FIELDS)}) VALUES ({', '.join('?' * len(_FIELDS))})"  # noqa: S608
ALL: Final = f"SELECT {', '.join(_FIELDS)} FROM standing_approvals ORDER BY created_at, id"  # noqa: S608
REMOVE: Final = "DELETE FROM standing_approvals WHERE id = ?"


def add_standing(tx: Tx, standing: StandingApproval) -> None:
    values = msgspec.structs.asdict(standing)
    values |= {"args": bytes(standing.args), "origins": "\n".join(standing.origins)}
    tx.execute(ADD, tuple(values[name] for name in _FIELDS))


def all_standing(tx: Tx) -> list[StandingApproval]:
    return [_standing(dict(zip(_FIELDS, row, strict=True))) for row in tx.execute(ALL)]


def remove_standing(tx: Tx, standing_id: str) -> None:
    tx.execute(REMOVE, (standing_id,))


def _standing(values: dict[str, Any]) -> StandingApproval:
    values |= {"args": msgspec.Raw(values["args"]), "origins": tuple(values["origins"].split("\n"))}
    return StandingApproval(**values)
