"""Apply a policy to recorded or possible calls: which rule decides, and what a new policy would stop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.calls.catalog import Catalog, Target
from farhand.gateway.calls.policy import Policy, Verdict
from farhand.gateway.calls.policy_check import always_allowed
from farhand.gateway.calls.policy_subject import HTTP, Subject, subject_of
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ToolError
from farhand.protocol.names import split_tool
from farhand.store.ports import Store, Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import find_approval, origin_of
from farhand.tools.node_family import resolved

MOST_REPLAYED = 100_000
READ_AT_ONCE = 16
MOST_SHOWN = 1000


class Explanation(msgspec.Struct, frozen=True):
    """The verdict on a call, and every rule that matches it, the deciding one first."""

    decision: str
    rule: str
    reason: str
    tool: str
    node_id: str | None
    origins: tuple[str, ...]
    credential: str
    session_key: str | None
    fitting: list[Verdict]
    # The credential on whose behalf `credential` acts, if any.
    on_behalf_of: str | None = None
    call_id: str | None = None
    # State of a recorded call.
    state: str | None = None
    # The answer to its approval, if it needed one.
    approval: str | None = None
    # The rule that stopped it when it was made, possibly a different one.
    decided_by_rule: str | None = None


class StoppedCall(msgspec.Struct, frozen=True):
    """A recorded call that the policy would not have allowed without approval."""

    call_id: str
    at: int
    tool: str
    node_id: str | None
    credential: str
    origin: str
    state: str
    decision: str
    rule: str
    on_behalf_of: str | None = None


class Replay(msgspec.Struct, frozen=True):
    since: int
    calls: int
    allow: int
    ask: int
    deny: int
    trial: int
    # The newest stopped calls, at most 1000.
    stopped: list[StoppedCall]


class PolicyReview:
    """Evaluates policies without side effects."""

    def __init__(
        self,
        database: Store,
        node_registry: NodeRegistry,
        catalog: Catalog,
        makers: Callable[[Iterable[str]], tuple[str, ...]] = lambda _: (),
        standing: StandingApprovals | None = None,
    ) -> None:
        """`makers` as `Credentials.makers`. `standing` are the permanent approvals."""
        self._standing = standing
        self._makers = makers
        # Only one replay runs at a time.
        self._replaying = asyncio.Lock()
        self._database = database
        self._node_registry = node_registry
        self._catalog = catalog

    def explain(
        self,
        policy: Policy,
        tool: str,
        args: msgspec.Raw,
        *,
        credential: str,
        on_behalf_of: str | None = None,
        session_key: str | None = None,
        origins: Sequence[str] = HTTP,
    ) -> Explanation:
        """Return the verdict on a possible call. Raises ToolError if the call is invalid."""
        call = resolved(ToolCall("", tool, args))
        tool, args = call.tool, call.args
        own = self._catalog.own(tool)
        target = (
            self._catalog.find_known(tool) if own is None else Target(None, tool, own.spec.capability, own.spec, own)
        )
        args = self._catalog.named(target, args)
        subject = self._made(target, args, credential, on_behalf_of, session_key, origins)
        return self._explained(policy, subject, args, tool, None)

    async def explain_call(self, policy: Policy, call_id: str) -> Explanation | None:
        """Return the verdict on a recorded call; None if there is no call with this id."""
        found = await self._database.read(lambda store: (calls.find(store, call_id), find_approval(store, call_id)))
        record, approval = found
        if record is None:
            return None
        origin = await self._database.read(lambda store: origin_of(store, record))
        explained = self._explained(policy, self._subject(record, origin), record.args, record.tool, record.agent_id)
        answered = f"{approval.state} by {approval.decided_by}" if approval and approval.decided_by else None
        return msgspec.structs.replace(
            explained,
            call_id=record.id,
            state=record.state.value,
            approval=answered or (approval.state.value if approval else None),
            decided_by_rule=approval.rule if approval else _denied_by(record),
        )

    async def replay(self, policy: Policy, since: int) -> Replay:
        """Evaluate a policy on every call recorded since a time, yielding to other tasks between calls."""
        async with self._replaying:
            return await self._replay(policy, since)

    async def _replay(self, policy: Policy, since: int) -> Replay:
        ids = await self._database.read(lambda store: calls.since(store, since, MOST_REPLAYED))
        counts = {"allow": 0, "ask": 0, "deny": 0, "trial": 0}
        stopped: list[StoppedCall] = []
        async for record, origin in self._recorded(ids):
            subject = self._subject(record, origin)
            verdict = policy.judge(subject)
            if verdict.decision == "ask":
                verdict = always_allowed(self._standing, subject, record.args, record.agent_id) or verdict
            counts[verdict.decision] += 1
            if verdict.decision != "allow" and len(stopped) < MOST_SHOWN:
                stopped.append(
                    StoppedCall(
                        call_id=record.id,
                        at=record.created_at,
                        tool=record.tool,
                        node_id=record.node_id,
                        credential=record.credential,
                        on_behalf_of=record.on_behalf_of,
                        origin=origin or HTTP[0],
                        state=record.state.value,
                        decision=verdict.decision,
                        rule=verdict.rule,
                    )
                )
        return Replay(since=since, calls=sum(counts.values()), stopped=stopped, **counts)

    async def _recorded(self, ids: Sequence[str]) -> AsyncIterator[tuple[CallRecord, str | None]]:
        """Yield calls with their origin, a few at a time, since arguments and results may be long."""

        def read(store: Tx, some: Sequence[str]) -> list[tuple[CallRecord, str | None]]:
            found = [record for call_id in some if (record := calls.find(store, call_id)) is not None]
            return [(record, origin_of(store, record)) for record in found]

        for start in range(0, len(ids), READ_AT_ONCE):
            some = ids[start : start + READ_AT_ONCE]
            for found in await self._database.read(functools.partial(read, some=some)):
                yield found
                await asyncio.sleep(0)

    def _subject(self, record: CallRecord, origin: str | None) -> Subject:
        """Return a recorded call as the rules see it; if its node is gone, from the record alone."""
        origins = HTTP if origin is None else (origin,)
        own = self._catalog.own(record.tool) if record.route in ("local", "native") else None
        node = self._node_registry.nodes.get(record.node_id or "")
        named = split_tool(record.tool)
        bare = named[1] if named and own is None and record.route != "mcp" else record.tool
        if node is not None:
            spec = node.specs.get(bare.casefold())
            bare = spec.name if spec else bare
        target = Target(node, bare, record.capability, None, own)
        try:  # earlier versions recorded the names that the caller used
            args = self._catalog.named(target, record.args)
        except ToolError:
            args = record.args
        made_by = record.credential, record.on_behalf_of, record.session_key, origins, record.agent_id
        try:
            subject = self._made(target, args, *made_by)
        except ToolError:
            subject = self._made(target, msgspec.Raw(b"{}"), *made_by)
        names = {*subject.names, record.tool.casefold()}
        return msgspec.structs.replace(subject, names=tuple(sorted(names)), route=record.route, node_id=record.node_id)

    def _explained(
        self, policy: Policy, subject: Subject, args: msgspec.Raw, tool: str, agent_id: str | None
    ) -> Explanation:
        fitting = policy.all_matching(subject)
        if fitting[0].decision == "ask":
            always = always_allowed(self._standing, subject, args, agent_id)
            fitting = fitting if always is None else [always, *fitting]
        return Explanation(
            decision=fitting[0].decision,
            rule=fitting[0].rule,
            reason=fitting[0].reason,
            tool=tool,
            node_id=subject.node_id,
            origins=subject.origins,
            credential=subject.credential,
            on_behalf_of=next(iter(subject.askers), None),
            session_key=subject.session_key,
            fitting=fitting,
        )

    def _made(
        self,
        target: Target,
        args: msgspec.Raw,
        credential: str,
        on_behalf_of: str | None,
        session_key: str | None,
        origins: Sequence[str],
        agent_id: str | None = None,
    ) -> Subject:
        askers = () if on_behalf_of is None else (on_behalf_of,)
        return subject_of(
            target,
            args,
            credential=credential,
            askers=askers,
            makers=self._makers((credential, *askers)),
            session_key=session_key,
            origins=origins,
            agent_id=agent_id,
            nodes=self._node_registry.nodes,
        )


def _denied_by(record: CallRecord) -> str | None:
    """Return the rule named in the call's error."""
    return record.error_message if record.state is CallState.DENIED else None
