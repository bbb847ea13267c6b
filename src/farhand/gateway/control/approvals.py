"""Approvals: a waiting call is shown to its owner exactly as it would run, and runs exactly so or not at all.

A hash binds what is shown: the call, the tool as its node registered it, the identity of the node, and what the call
would do, which includes the digest of each file in a diff and the folder and environment of a command. All of it is
checked again before the call starts; any difference refuses the call.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential, Scope
from farhand.gateway.access.principal import Principal, decode_principal
from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.calls.catalog import Target
from farhand.gateway.calls.open_call import OpenCall, Waiting
from farhand.gateway.calls.waiting import WaitingCalls
from farhand.gateway.control.previews import CallPreviews
from farhand.gateway.control.trial_previews import TrialPreviews, with_trial
from farhand.gateway.nodes.registry import Node
from farhand.protocol.errors import FarhandError
from farhand.store.ports import Store
from farhand.store.tables import waiting_calls as store
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.waiting_calls import Approval, ApprovalState
from farhand.tools.preview import Preview

log = logging.getLogger(__name__)

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
LENGTH = 6
MOST_REMARK = 1000


class Bound(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a call that must not change between the request for approval and the start."""

    call_id: str
    tool: str
    # Digest of the bytes.
    args: str
    credential: str
    on_behalf_of: str | None = None
    # Digest of the registered tool.
    spec: str
    node_id: str | None = None
    # The token or key of the node; for a node that has neither, the id of its process.
    life: str | None = None
    preview: Preview = Preview()
    # The trial that is kept instead of running the call.
    trial: str = ""
    # Why it could not be tried, where the policy wants that.
    untried: str = ""

    @property
    def hash(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def change(self, now: Bound) -> str | None:
        """Return what has changed, in words; None if nothing has."""
        if self == now:
            return None
        if self.node_id != now.node_id or self.life != now.life:
            return f"node {self.node_id!r} was replaced, or restarted without a token or key of its own"
        if self.spec != now.spec:
            return f"the tool {self.tool!r} was registered again, with another description or other parameters"
        before = {effect.path: effect.before for effect in self.preview.files}
        after = {effect.path: effect.before for effect in now.preview.files}
        for path in before | after:
            if before.get(path, "") != after.get(path, ""):
                return f"{path} has changed"
        if (self.preview.cwd, self.preview.folder) != (now.preview.cwd, now.preview.folder):
            return f"the folder {self.preview.cwd} was replaced"
        if now.preview.note and now.preview.note != self.preview.note:
            return f"the call can no longer be previewed as it was asked ({now.preview.note}), which has changed"
        return "what the call would do has changed"


class ApprovalRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the owner is asked to approve."""

    bound: Bound
    args: msgspec.Raw
    session_key: str | None = None
    agent_id: str | None = None
    origins: tuple[str, ...] = ()


class ApprovalRequested(msgspec.Struct, frozen=True, tag="approval_requested"):
    """A call waits until `deadline_at` to be approved; `GET /v1/approvals/{id}` shows what would run."""

    approval_id: str
    call_id: str
    tool: str
    rule: str
    reason: str
    deadline_at: int

    @classmethod
    def of(cls, approval: Approval) -> ApprovalRequested:
        tool = request_of(approval).bound.tool
        return cls(approval.id, approval.call_id, tool, approval.rule, approval.reason, approval.deadline_at)


class NoApproval(FarhandError):
    """There is no such approval."""


class NotYours(FarhandError):
    """A credential cannot approve its own calls."""


class NotEntitled(FarhandError):
    """A credential may approve calls, but not permanently."""


class AnswerConflict(FarhandError):
    """The approval was answered before, its call no longer waits, or the hash differs."""


class Approvals:
    def __init__(
        self,
        database: Store,
        waiting_calls: Callable[[], WaitingCalls],
        previews: CallPreviews,
        trials: TrialPreviews,
        clock: Callable[[], int],
        standing: StandingApprovals,
        *,
        lineage: Callable[[str], frozenset[str]],
        notify: Callable[[Approval], Awaitable[None]],
    ) -> None:
        """`waiting_calls` returns the calls that wait, which in turn ask here. `standing` stores permanent
        approvals. `lineage` returns a credential with those that made it. `notify` sends the question to the approvers
        in the settings, on their channels, once."""
        self._database = database
        self._waiting_calls = waiting_calls
        self._clock = clock
        self._standing = standing
        self._previews = previews
        self._trials = trials
        self._lineage = lineage
        self._notify = notify

    # -- asking --------------------------------------------------------------------------------------

    async def find(self, name: str) -> Approval | None:
        """Return the approval with an id, ignoring case, or of the call with that id."""
        wanted = name.upper() if len(name) == LENGTH else name
        return await self._database.read(lambda connection: store.find_approval(connection, wanted))

    async def all(self, state: ApprovalState | None, limit: int) -> list[Approval]:
        """Return approvals, newest first."""
        return await self._database.read(lambda connection: store.list_approvals(connection, state, limit))

    async def attempt(self, opened: OpenCall, waiting: Waiting, target: Target) -> CallRecord | None:
        """Run a call as a trial before its owner is asked; return how that ended, None if the call ended first."""
        return await self._trials.run(opened, waiting, target)

    async def ask(
        self, opened: OpenCall, waiting: Waiting, target: Target, tried: CallRecord | None = None
    ) -> Approval | None:
        """Ask for approval of a waiting call; return None if the call has ended. Raises StoreError.

        `tried`: the call's trial; approving the call keeps it, if it succeeded.
        """
        record = opened.record
        bound = await self._bound(opened, target)
        if tried is not None:
            preview, problem = with_trial(bound.preview, tried)
            bound = msgspec.structs.replace(bound, preview=preview, trial="" if problem else tried.id, untried=problem)
        request = ApprovalRequest(bound, record.args, record.session_key, record.agent_id, waiting.origins)
        approval = Approval(
            id="".join(secrets.choice(LETTERS) for _ in range(LENGTH)),
            call_id=record.id,
            hash=bound.hash,
            rule=waiting.rule,
            reason=waiting.reason,
            request=msgspec.Raw(msgspec.json.encode(request)),
            asked_at=self._clock(),
            deadline_at=record.deadline_at,
        )
        who = {"tool": record.tool, "by": record.credential, "origin": list(waiting.origins)}
        if record.on_behalf_of is not None:
            who["on_behalf_of"] = record.on_behalf_of
        if not await self._database.write(lambda connection: store.ask(connection, approval, who)):
            return await self.find(record.id)
        await self._notify_approvers(approval)
        return approval

    async def notify_pending(self) -> None:
        """Notify the approvers of all pending approvals; each is sent once."""
        for approval in await self.all(ApprovalState.PENDING, 1000):
            await self._notify_approvers(approval)

    async def _notify_approvers(self, approval: Approval) -> None:
        try:
            await self._notify(approval)
        except FarhandError as error:
            log.error("failed to send approval %s to a channel: %s", approval.id, error)

    async def change(self, opened: OpenCall, approval: Approval, target: Target) -> str | None:
        """Return what has changed since an approval was asked for, in words; None if nothing has."""
        asked = request_of(approval).bound
        if asked.hash != approval.hash:
            return "the request for approval itself has changed"
        return asked.change(await self._bound(opened, target, asked))

    def follow(self, opened: OpenCall, approval: Approval) -> None:
        """Discard the trial of an approval if its call ends without keeping it."""
        if trial := request_of(approval).bound.trial:
            self._trials.follow(opened, trial)

    async def _bound(self, opened: OpenCall, target: Target, asked: Bound | None = None) -> Bound:
        """`asked`: what was asked about the call before. Whether the files that its trial changed are still the same
        is checked by the machine that keeps the trial."""
        record, node = opened.record, target.node
        spec = b"" if target.spec is None else msgspec.json.encode(target.spec)
        return Bound(
            call_id=record.id,
            tool=record.tool,
            args=hashlib.sha256(bytes(record.args)).hexdigest(),
            credential=record.credential,
            on_behalf_of=record.on_behalf_of,
            spec=hashlib.sha256(spec).hexdigest(),
            node_id=node.card.node_id if node else None,
            life=_identity(node),
            preview=(
                asked.preview if asked and asked.trial else await self._previews.of(target, record, opened.principal)
            ),
            trial=asked.trial if asked else "",
            untried=asked.untried if asked else "",
        )

    def _is_own(self, involved: Iterable[str], credential: Credential) -> bool:
        """Return whether a call was made by a credential or one of its lineage, since tokens can make others."""
        makers = frozenset[str]().union(*(self._lineage(name) for name in involved))
        return not makers.isdisjoint(self._lineage(credential.id))

    async def _involved(self, approval: Approval, opened: OpenCall | None) -> frozenset[str] | None:
        """Return the credentials that cannot approve a call; None if the call no longer waits.

        A call that is not open here may wait at another gateway of the fleet.
        """
        if opened is not None:
            return None if opened.over else _involved(opened.record, opened.principal)
        found = await self._database.read(lambda tx: store.find_waiting(tx, approval.call_id))
        return None if found is None else _involved(found[0], decode_principal(found[1].credential))

    # -- answering ----------------------------------------------------------------------------------------

    async def answer(
        self,
        name: str,
        *,
        approve: bool,
        by: str,
        credential: Credential | None = None,
        hash: str | None = None,  # noqa: A002
        remark: str = "",
        always: bool = False,
    ) -> Approval:
        """Approve or deny a call; the first answer counts. `by` names the approver, `credential` is theirs, if any.

        To approve, `hash` must be that of what was shown. With `always`, later calls that are exactly the same need no
        approval; this changes the policy, so the credential needs the scope `admin`. Raises NoApproval, NotYours,
        NotEntitled, CannotStand, AnswerConflict.
        """
        if always and (credential is None or not credential.may(Scope.ADMIN)):
            raise NotEntitled("approving a call permanently changes the policy and needs the scope 'admin'")
        approval = await self.find(name)
        if approval is None:
            raise NoApproval(f"there is no approval {name[:100]!r}; `farhand approvals` lists those that wait")
        opened = self._waiting_calls().calls.get(approval.call_id)
        if approval.state is not ApprovalState.PENDING:
            raise _answered(approval)
        involved = await self._involved(approval, opened)
        if involved is None or self._clock() >= approval.deadline_at:
            raise AnswerConflict(f"approval {approval.id} has ended: its call no longer waits")
        if credential is not None and credential.id != OWNER.id and self._is_own(involved, credential):
            raise NotYours(
                f"call {approval.call_id} was made by or on behalf of this credential, or by a token of the same "
                "lineage; another credential must answer"
            )
        if (approve or hash is not None) and hash != approval.hash:
            raise AnswerConflict(
                f"the hash does not match approval {approval.id}; look at it again and answer with its current hash"
            )
        if always:
            self._standing.check(bytes(request_of(approval).args))
        state = ApprovalState.APPROVED if approve else ApprovalState.DENIED
        now, said = self._clock(), remark[:MOST_REMARK] or None
        if not await self._database.write(
            lambda connection: store.decide(connection, approval, state, by=by, now=now, remark=said)
        ):
            raise _answered(await self.find(approval.id) or approval)
        decided = msgspec.structs.replace(approval, state=state, decided_by=by, decided_at=now, remark=said)
        if always and approve:
            await self._stand(decided, by)
        if opened is not None:
            self._take(opened, decided)
        return decided

    async def answered(self, approval_id: str) -> None:
        """Take an answer that another gateway of the fleet has stored, if the call waits here."""
        approval = await self.find(approval_id)
        opened = None if approval is None else self._waiting_calls().calls.get(approval.call_id)
        if approval is None or opened is None or opened.waiting is None:
            return
        known = opened.waiting.approval
        if known is None or known.state is ApprovalState.PENDING:
            self._take(opened, approval)

    def _take(self, opened: OpenCall, decided: Approval) -> None:
        if decided.state is ApprovalState.APPROVED:
            self._waiting_calls().approve(opened, decided)
        elif decided.state is ApprovalState.DENIED:
            self._waiting_calls().deny(opened, decided)

    async def _stand(self, approval: Approval, by: str) -> None:
        """Let later calls run that are exactly the same."""
        request = request_of(approval)
        await self._standing.add(
            approval,
            tool=request.bound.tool,
            node_id=request.bound.node_id,
            args=bytes(request.args),
            credential=request.bound.credential,
            on_behalf_of=request.bound.on_behalf_of,
            origins=request.origins,
            agent_id=request.agent_id,
            session_key=request.session_key,
            made_by=by,
        )


def _identity(node: Node | None) -> str | None:
    """Return what identifies a connected node: its token or key, or else its process."""
    connection = node.connection if node is not None else None
    if connection is None:
        return None
    return connection.boot if connection.token_id is None else f"credential:{connection.token_id}"


def _involved(record: CallRecord, principal: Principal | None) -> frozenset[str]:
    """Return the credentials that cannot approve a call."""
    named = {record.credential, record.on_behalf_of or record.credential}
    return frozenset(named) if principal is None else principal.ids | named


def request_of(approval: Approval) -> ApprovalRequest:
    return msgspec.json.decode(approval.request, type=ApprovalRequest)


def shown_request(approval: Approval) -> Mapping[str, Any]:
    """Return what is to be approved, as the API shows it."""
    request = request_of(approval)
    preview = request.bound.preview
    return {
        "tool": request.bound.tool,
        "node_id": request.bound.node_id,
        "args": request.args,
        "credential": request.bound.credential,
        "on_behalf_of": request.bound.on_behalf_of,
        "origins": list(request.origins),
        "session_key": request.session_key,
        "agent_id": request.agent_id,
        "command": preview.command,
        "cwd": preview.cwd,
        "env": preview.env,
        "stdin": preview.stdin,
        "summary": preview.summary,
        "output": preview.output,
        "trial_id": request.bound.trial or None,
        "files": [msgspec.to_builtins(effect) for effect in preview.files],
        "diff": "".join(effect.diff for effect in preview.files),
        "note": " ".join(
            [
                request.bound.untried,
                preview.note,
                *(f"{one.path}: {one.note}" for one in preview.files if one.note and not one.diff),
            ]
        ).strip(),
    }


def _answered(approval: Approval) -> AnswerConflict:
    by = f" by {approval.decided_by}" if approval.decided_by else ""
    return AnswerConflict(f"approval {approval.id} was answered before: {approval.state}{by}")
