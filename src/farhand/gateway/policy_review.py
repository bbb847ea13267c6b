"""What a policy says to calls that were made, or might be: the rule that decides, and what a new policy would stop."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farhand.gateway.catalog import Catalog, Target
from farhand.gateway.policy import HTTP, Policy, Subject, Verdict, subject_of
from farhand.gateway.roster import Roster
from farhand.protocol.errors import ToolError
from farhand.protocol.names import split_tool
from farhand.store import calls
from farhand.store.calls import CallRecord, CallState
from farhand.store.database import Database
from farhand.store.parked import find_approval, origin_of

MOST_REPLAYED = 100_000
MOST_SHOWN = 1000


class Explanation(msgspec.Struct, frozen=True):
    """The verdict on a call, and every rule that fits it, the deciding one first."""

    decision: str
    rule: str
    reason: str
    tool: str
    node_id: str | None
    origins: tuple[str, ...]
    credential: str
    session_key: str | None
    fitting: list[Verdict]
    call_id: str | None = None
    state: str | None = None
    """Of a call that was made."""
    approval: str | None = None
    """How it was answered, where it was asked about."""
    decided_by_rule: str | None = None
    """The rule that stopped it when it was made, which may have been another."""


class Replayed(msgspec.Struct, frozen=True):
    """A recorded call that the policy would not have let through by itself."""

    call_id: str
    at: int
    tool: str
    node_id: str | None
    credential: str
    origin: str
    state: str
    decision: str
    rule: str


class Replay(msgspec.Struct, frozen=True):
    since: int
    calls: int
    allow: int
    ask: int
    deny: int
    stopped: list[Replayed]
    """The newest of them, at most 1000."""


class PolicyReview:
    """Judges without doing anything."""

    def __init__(self, database: Database, roster: Roster, catalog: Catalog) -> None:
        self._database = database
        self._roster = roster
        self._catalog = catalog

    def explain(
        self,
        policy: Policy,
        tool: str,
        args: msgspec.Raw,
        *,
        credential: str,
        session_key: str | None = None,
        origins: Sequence[str] = HTTP,
    ) -> Explanation:
        """The verdict on a call that might be made. Raises ToolError for one that could not be."""
        own = self._catalog.own(tool)
        target = (
            self._catalog.find_known(tool) if own is None else Target(None, tool, own.spec.capability, own.spec, own)
        )
        subject = subject_of(target, args, credential=credential, session_key=session_key, origins=origins)
        return _explained(policy, subject, tool)

    async def explain_call(self, policy: Policy, call_id: str) -> Explanation | None:
        """The verdict on a call that was made; None when there is none of this id."""
        found = await self._database.read(lambda store: (calls.find(store, call_id), find_approval(store, call_id)))
        record, approval = found
        if record is None:
            return None
        origin = await self._database.read(lambda store: origin_of(store, record))
        explained = _explained(policy, self._subject(record, origin), record.tool)
        answered = f"{approval.state} by {approval.decided_by}" if approval and approval.decided_by else None
        return msgspec.structs.replace(
            explained,
            call_id=record.id,
            state=record.state.value,
            approval=answered or (approval.state.value if approval else None),
            decided_by_rule=approval.rule if approval else _denied_by(record),
        )

    async def replay(self, policy: Policy, since: int) -> Replay:
        """Every recorded call since a moment, judged by a policy."""
        made = await self._database.read(
            lambda store: [(record, origin_of(store, record)) for record in calls.since(store, since, MOST_REPLAYED)]
        )
        counts = {"allow": 0, "ask": 0, "deny": 0}
        stopped: list[Replayed] = []
        for record, origin in made:
            verdict = policy.judge(self._subject(record, origin))
            counts[verdict.decision] += 1
            if verdict.decision != "allow" and len(stopped) < MOST_SHOWN:
                stopped.append(
                    Replayed(
                        call_id=record.id,
                        at=record.created_at,
                        tool=record.tool,
                        node_id=record.node_id,
                        credential=record.credential,
                        origin=origin or HTTP[0],
                        state=record.state.value,
                        decision=verdict.decision,
                        rule=verdict.rule,
                    )
                )
        return Replay(since=since, calls=len(made), stopped=stopped, **counts)

    def _subject(self, record: CallRecord, origin: str | None) -> Subject:
        """A recorded call as the rules see it; of a node that is gone, as far as the record tells."""
        origins = HTTP if origin is None else (origin,)
        own = self._catalog.own(record.tool) if record.route in ("local", "native") else None
        node = self._roster.nodes.get(record.node_id or "")
        named = split_tool(record.tool)
        bare = named[1] if named and own is None else record.tool
        if node is not None:
            spec = node.specs.get(bare.casefold())
            bare = spec.name if spec else bare
        target = Target(node, bare, record.capability, None, own)
        try:
            subject = subject_of(
                target, record.args, credential=record.credential, session_key=record.session_key, origins=origins
            )
        except ToolError:
            empty = msgspec.Raw(b"{}")
            subject = subject_of(
                target, empty, credential=record.credential, session_key=record.session_key, origins=origins
            )
        names = {*subject.names, record.tool.casefold()}
        return msgspec.structs.replace(subject, names=tuple(sorted(names)), route=record.route, node_id=record.node_id)


def _denied_by(record: CallRecord) -> str | None:
    """As the call was told."""
    return record.error_message if record.state is CallState.DENIED else None


def _explained(policy: Policy, subject: Subject, tool: str) -> Explanation:
    fitting = policy.all_fitting(subject)
    return Explanation(
        decision=fitting[0].decision,
        rule=fitting[0].rule,
        reason=fitting[0].reason,
        tool=tool,
        node_id=subject.node_id,
        origins=subject.origins,
        credential=subject.credential,
        session_key=subject.session_key,
        fitting=fitting,
    )
