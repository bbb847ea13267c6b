"""Approvals over HTTP: what waits to be approved, and the answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.route_docs import About, Query
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.control.approvals import AnswerConflict, NoApproval, NotYours, shown_request
from farhand.gateway.hub import Hub
from farhand.store.ports import StoreError
from farhand.store.tables.waiting_calls import Approval, ApprovalState


class FileShown(msgspec.Struct, omit_defaults=True):
    path: str
    before: str | None = None
    diff: str = ""
    note: str = ""


class ApprovalShown(msgspec.Struct):
    """A question: what would run, exactly, and the hash to approve it by. Moments are milliseconds since 1970."""

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
    files: list[FileShown]
    diff: str
    note: str


class ApprovalsAnswer(msgspec.Struct):
    approvals: list[ApprovalShown]
    count: int


class Decision(msgspec.Struct):
    decision: Literal["approve", "deny"]
    # Of what was shown; an approval needs it.
    hash: str | None = None
    reason: str = ""


_decision_decoder = msgspec.json.Decoder(Decision)

APPROVALS_QUERY = (
    Query("state", "In this state; `pending` by default, `all` for every one.", str),
    Query("limit", "How many at most: 1 to 1000, 100 by default.", int),
)


def approval_routes(hub: Hub) -> list[Route]:
    approvals = hub.approvals

    async def listed(request: Request) -> Reply:
        wanted = request.query("state") or ApprovalState.PENDING.value
        if wanted != "all" and wanted not in {state.value for state in ApprovalState}:
            known = ", ".join(state.value for state in ApprovalState)
            raise Problem(400, "invalid_request", f"state must be all or one of {known}, not {wanted[:50]!r}")
        limit = request.query_int("limit", 100, 1, 1000)
        found = await approvals.all(None if wanted == "all" else ApprovalState(wanted), limit)
        return json_reply({"approvals": [_view(one) for one in found], "count": len(found)})

    async def one(request: Request) -> Reply:
        found = await approvals.find(request.params["approval_id"])
        if found is None:
            raise Problem(404, "not_found", f"there is no approval {request.params['approval_id'][:100]!r}")
        return json_reply(_view(found))

    async def answer(request: Request) -> Reply:
        wanted: Decision = await request.json(_decision_decoder)
        approve = wanted.decision == "approve"
        if approve and not wanted.hash:
            raise Problem(400, "invalid_request", "an approval names the hash of what was shown: {decision, hash}")
        try:
            decided = await approvals.answer(
                request.params["approval_id"],
                approve=approve,
                by=request.credential.id,
                credential=request.credential,
                hash=wanted.hash,
                remark=wanted.reason,
            )
        except NoApproval as error:
            raise Problem(404, "not_found", str(error)) from None
        except NotYours as error:
            raise Problem(403, "forbidden", str(error)) from None
        except AnswerConflict as error:
            raise Problem(409, "conflict", str(error)) from None
        except StoreError as error:
            raise Problem(503, "not_recorded", f"the answer was not kept: {error}") from None
        return json_reply(_view(decided))

    return [
        Route(
            "GET",
            "/v1/approvals",
            (Scope.APPROVE, Scope.READ),
            listed,
            about=About("Calls that wait to be approved, newest first.", answer=ApprovalsAnswer, query=APPROVALS_QUERY),
        ),
        Route(
            "GET",
            "/v1/approvals/{approval_id}",
            (Scope.APPROVE, Scope.READ),
            one,
            about=About("One approval, by its id or its call's.", answer=ApprovalShown),
        ),
        Route(
            "POST",
            "/v1/approvals/{approval_id}",
            Scope.APPROVE,
            answer,
            about=About(
                "Approve or deny a call that waits; the first answer counts.",
                body=Decision,
                answer=ApprovalShown,
                errors=(409, 503),
            ),
        ),
    ]


def _view(approval: Approval) -> dict[str, Any]:
    return {
        "id": approval.id,
        "call_id": approval.call_id,
        "state": approval.state.value,
        "hash": approval.hash,
        "rule": approval.rule,
        "reason": approval.reason,
        "asked_at": approval.asked_at,
        "deadline_at": approval.deadline_at,
        "decided_by": approval.decided_by,
        "decided_at": approval.decided_at,
        "remark": approval.remark,
        **shown_request(approval),
    }
