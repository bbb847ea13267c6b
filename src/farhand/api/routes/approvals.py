"""Approvals over HTTP: what waits to be approved, and the answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from farhand.api.server.http import Request, copied, existing, invalid, refusing
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.standing_approvals import CannotStand
from farhand.gateway.control.approvals import (
    AnswerConflict,
    Approvals,
    NoApproval,
    NotEntitled,
    NotYours,
    shown_request,
)
from farhand.store.tables.waiting_calls import Approval, ApprovalState


class FileShown(msgspec.Struct, omit_defaults=True):
    path: str
    before: str | None = None
    diff: str = ""
    note: str = ""


class ApprovalShown(msgspec.Struct):
    """An approval: exactly what would run, and the hash to approve it with. Times are milliseconds since 1970."""

    id: str
    call_id: str
    state: ApprovalState
    hash: str
    rule: str
    reason: str
    asked_at: int
    deadline_at: int
    decided_by: str | None
    decided_at: int | None
    remark: str | None
    tool: str
    node_id: str | None
    args: Any
    credential: str
    on_behalf_of: str | None
    origins: list[str]
    session_key: str | None
    agent_id: str | None
    command: str | None
    cwd: str | None
    env: dict[str, str]
    stdin: str | None
    summary: str
    # What the command wrote when it was tried.
    output: str
    # The trial that is kept instead of running the command again.
    trial_id: str | None
    files: list[FileShown]
    diff: str
    note: str


class ApprovalsAnswer(msgspec.Struct):
    approvals: list[ApprovalShown]
    count: int


class Decision(msgspec.Struct, forbid_unknown_fields=True):
    decision: Literal["approve", "deny"]
    # Hash of what was shown; required to approve.
    hash: str | None = None
    reason: str = ""
    # Approve later calls too that are exactly the same; needs the scope `admin`.
    always: bool = False


APPROVALS_QUERY = (
    Query("state", "Only approvals in this state; `pending` by default, `all` for every state.", str),
    Query("limit", "How many at most: 1 to 1000, 100 by default.", int),
)


class ApprovalRoutes:
    def __init__(self, approvals: Approvals) -> None:
        self._approvals = approvals

    @route(
        "GET /v1/approvals",
        (Scope.APPROVE, Scope.READ),
        "Calls that wait to be approved, newest first.",
        query=APPROVALS_QUERY,
    )
    async def listed(self, request: Request) -> ApprovalsAnswer:
        wanted = request.query("state") or ApprovalState.PENDING.value
        if wanted != "all" and wanted not in {state.value for state in ApprovalState}:
            known = ", ".join(state.value for state in ApprovalState)
            raise invalid(f"state must be all or one of {known}, not {wanted[:50]!r}")
        limit = request.query_int("limit", 100, 1, 1000)
        found = await self._approvals.all(None if wanted == "all" else ApprovalState(wanted), limit)
        return ApprovalsAnswer([_shown(one) for one in found], len(found))

    @route("GET /v1/approvals/{approval_id}", (Scope.APPROVE, Scope.READ), "One approval, by its id or its call's.")
    async def show(self, request: Request) -> ApprovalShown:
        approval_id = request.params["approval_id"]
        return _shown(existing(await self._approvals.find(approval_id), "approval", approval_id))

    @route(
        "POST /v1/approvals/{approval_id}",
        Scope.APPROVE,
        "Approve or deny a call that waits; the first answer counts.",
        errors=(409, 503),
    )
    async def answer(self, request: Request, wanted: Decision) -> ApprovalShown:
        approve = wanted.decision == "approve"
        if approve and not wanted.hash:
            raise invalid("an approval names the hash of what was shown: {decision, hash}")
        if wanted.always and not approve:
            raise invalid("always is for approving; rules that deny are in farhand.toml")
        with (
            refusing(NoApproval, status=404, code="not_found"),
            refusing(NotYours, NotEntitled, status=403, code="forbidden"),
            refusing(AnswerConflict, CannotStand, status=409, code="conflict"),
        ):
            decided = await self._approvals.answer(
                request.params["approval_id"],
                approve=approve,
                by=request.credential.id,
                credential=request.credential,
                hash=wanted.hash,
                remark=wanted.reason,
                always=wanted.always,
            )
        return _shown(decided)


def _shown(approval: Approval) -> ApprovalShown:
    return copied(ApprovalShown, approval, **shown_request(approval))
