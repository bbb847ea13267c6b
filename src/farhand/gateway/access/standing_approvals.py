"""Standing approvals: calls that the owner approved permanently.

A standing approval turns `ask` into `allow` for a call with the same tool, node and arguments, for the same agent, made
by the same credential on behalf of the same one, from the same origins. It never lifts a `deny`, and it ends with the
token that made it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from farhand.gateway.journal import EventJournal
from farhand.protocol.canonical_json import canonical
from farhand.protocol.errors import FarhandError
from farhand.store.ports import Store
from farhand.store.tables.standing_approvals import (
    StandingApproval,
    add_standing,
    agent_of,
    all_standing,
    remove_standing,
)
from farhand.store.tables.waiting_calls import Approval

# What is not shown to a person in full cannot be approved permanently.
MAX_ARGUMENT_BYTES: Final = 64 * 1024
MAX_STANDING: Final = 1000
RULE: Final = "always:"
# Tools whose arguments may leave out what the session of the call adds: the recipient.
OF_SESSIONS: Final = frozenset({"message", "gsv__message"})


class CannotStand(FarhandError):
    """A call cannot be approved permanently."""


class StandingApprovals:
    """Holds the standing approvals of a gateway; `known` are those in the store."""

    def __init__(
        self,
        known: Iterable[StandingApproval],
        journal: EventJournal,
        clock: Callable[[], int],
        ended: Callable[[Iterable[str]], str | None],
    ) -> None:
        """`ended` returns why one of some credentials is no longer valid, as `Credentials.ended`."""
        self._by_id = {one.id: one for one in known}
        self._journal = journal
        self._clock = clock
        self._ended = ended

    def all(self) -> list[StandingApproval]:
        """Return them, oldest first."""
        return sorted(self._by_id.values(), key=lambda one: (one.created_at, one.id))

    async def refresh(self, database: Store) -> None:
        """Read them again: another gateway of the fleet has added or removed one."""
        self._by_id = {one.id: one for one in await database.read(all_standing)}

    def covering(
        self,
        names: Sequence[str],
        node_id: str | None,
        args: bytes,
        *,
        credential: str,
        on_behalf_of: str | None,
        origins: Sequence[str],
        agent_id: str | None,
        session_key: str | None,
    ) -> StandingApproval | None:
        """Return the standing approval of a call; `names` are those of the tool, in lower case."""
        agent, session = agent_of(agent_id, credential), None if OF_SESSIONS.isdisjoint(names) else session_key
        candidates = [
            one
            for one in self._by_id.values()
            if one.tool in names
            and one.node_id == node_id
            and (one.credential, one.on_behalf_of) == (credential, on_behalf_of)
            and (agent_of(one.agent_id, one.credential), one.session_key) == (agent, session)
            and set(origins) <= set(one.origins)
        ]
        if not candidates or len(args) > MAX_ARGUMENT_BYTES:
            return None
        same = canonical(args)
        found = (one for one in candidates if bytes(one.args) == same and self._ended((one.made_by,)) is None)
        return next(found, None)

    def check(self, args: bytes) -> None:
        """Raise CannotStand if a call with these arguments cannot be approved permanently."""
        if len(args) > MAX_ARGUMENT_BYTES:
            raise CannotStand(
                f"the arguments have {len(args)} bytes, and at most {MAX_ARGUMENT_BYTES} can be approved permanently; "
                "approve the call without `always`"
            )
        if len(self._by_id) >= MAX_STANDING:
            raise CannotStand(
                f"there are {len(self._by_id)} standing approvals, which is the limit; remove some with "
                "`farhand policy forget ID`, or approve the call without `always`"
            )

    async def add(
        self,
        approval: Approval,
        *,
        tool: str,
        node_id: str | None,
        args: bytes,
        credential: str,
        on_behalf_of: str | None,
        origins: Sequence[str],
        agent_id: str | None,
        session_key: str | None,
        made_by: str,
    ) -> StandingApproval:
        standing = StandingApproval(
            id=secrets.token_hex(4),
            tool=tool.casefold(),
            node_id=node_id,
            args=msgspec.Raw(canonical(args)),
            credential=credential,
            on_behalf_of=on_behalf_of,
            origins=tuple(origins),
            rule=approval.rule,
            approval_id=approval.id,
            made_by=made_by,
            created_at=self._clock(),
            agent_id=agent_of(agent_id, credential),
            session_key=session_key if tool.casefold() in OF_SESSIONS else None,
        )
        data = {"tool": standing.tool, "node_id": node_id, "approval": approval.id, "by": made_by}
        await self._journal.record(
            lambda store: add_standing(store, standing), "policy.always_added", standing.id, data
        )
        self._by_id[standing.id] = standing
        return standing

    async def remove(self, standing_id: str, by: str) -> StandingApproval | None:
        """Remove one and return it; None if there is none with this id."""
        standing = self._by_id.pop(standing_id, None)
        if standing is not None:
            await self._journal.record(
                lambda store: remove_standing(store, standing_id),
                "policy.always_removed",
                standing_id,
                {"tool": standing.tool, "node_id": standing.node_id, "by": by},
            )
        return standing
