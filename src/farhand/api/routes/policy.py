"""The policy over HTTP: the rule that decides a call, and what a policy would have stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from farhand.api.server.http import Problem, Reply, Request, existing, invalid, refusing
from farhand.api.server.router import route
from farhand.gateway.access.credentials import OWNER, Scope
from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.calls.policy import Policy, PolicySettings
from farhand.gateway.calls.policy_subject import HTTP
from farhand.gateway.control.policy_file import PolicyConflict, PolicyFile, version_of
from farhand.gateway.control.policy_review import Explanation, PolicyReview, Replay
from farhand.protocol.calls import NULL
from farhand.protocol.errors import ErrorKind
from farhand.store.tables.standing_approvals import StandingApproval


class ExplainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A recorded call, or a possible one."""

    call_id: str | None = None
    tool: str | None = None
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    origin: str = HTTP[0]
    # The acting credential; by default the caller's.
    credential: str | None = None
    # The credential on whose behalf it would act, as in an agent's call.
    on_behalf_of: str | None = None
    session_key: str | None = None
    # Used instead of the policy in force; needs the scope `admin`.
    policy: PolicySettings | None = None


class ReplayRequest(msgspec.Struct, forbid_unknown_fields=True):
    # Milliseconds since 1970.
    since: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
    # Used instead of the policy in force; needs the scope `admin`.
    policy: PolicySettings | None = None


class StandingAnswer(msgspec.Struct):
    approvals: list[StandingApproval]
    count: int


@dataclass(frozen=True)
class PolicyRoutes:
    """`settings` returns those in force. `workspace` and `agents` as for `Policy`."""

    review: PolicyReview
    settings: Callable[[], PolicySettings]
    workspace: str
    agents: str
    standing: StandingApprovals
    file: PolicyFile

    @route(
        "GET /v1/policy", Scope.READ, "The policy in force; its `ETag` is for saving another.", answer=PolicySettings
    )
    async def show(self, _request: Request) -> Reply:
        return _answer(self.settings())

    @route(
        "PUT /v1/policy",
        Scope.ADMIN,
        "Write a policy into `farhand.toml`; only the owner may, with the `ETag` of the policy in force as `If-Match`.",
        answer=PolicySettings,
        errors=(409, 412, 428),
    )
    async def save(self, request: Request, wanted: PolicySettings) -> Reply:
        if request.credential.id != OWNER.id:
            raise Problem(403, "forbidden", "only the owner may change the policy")
        match = request.header(b"if-match")
        if match is None:
            raise Problem(428, "precondition_required", "give the ETag of GET /v1/policy as If-Match")
        version = match.strip().strip('"')
        if version != version_of(self.settings()):
            raise Problem(412, "precondition_failed", "the policy has changed since you read it; nothing was saved")
        self._compiled(wanted)
        with refusing(PolicyConflict, status=409, code="conflict"), refusing(ValueError):
            await self.file.save(wanted, version, request.credential.id)
        return _answer(wanted)

    def _compiled(self, settings: PolicySettings) -> Policy:
        """Raises Problem for settings that are no policy."""
        with refusing(ValueError):
            return Policy(settings, self.workspace, self.agents)

    def _tried(self, request: Request, settings: PolicySettings | None) -> Policy:
        """Return the policy that a request wants to try, or the one in force. Raises Problem."""
        # Evaluating many rules on many calls takes long and runs on the event loop.
        if settings is not None and not request.credential.may(Scope.ADMIN):
            raise Problem(403, "forbidden", "trying a policy other than the one in force needs the scope 'admin'")
        return self._compiled(settings or self.settings())

    @route("GET /v1/policy/always", (Scope.APPROVE, Scope.READ), "Calls that are approved permanently.")
    async def always(self, _request: Request) -> StandingAnswer:
        found = self.standing.all()
        return StandingAnswer(found, len(found))

    @route("DELETE /v1/policy/always/{standing_id}", Scope.ADMIN, "Remove a permanent approval.")
    async def forget(self, request: Request) -> dict[str, Any]:
        standing_id = request.params["standing_id"]
        existing(await self.standing.remove(standing_id, request.credential.id), "standing approval", standing_id)
        return {"removed": standing_id}

    @route(
        "POST /v1/policy/explain",
        Scope.READ,
        "The rule that decides a call, recorded or hypothetical.",
        errors=(404,),
        statuses=dict.fromkeys(ErrorKind, 400) | {ErrorKind.NOT_FOUND: 404},
    )
    async def explain(self, request: Request, wanted: ExplainRequest) -> Explanation:
        policy = self._tried(request, wanted.policy)
        if (wanted.call_id is None) == (wanted.tool is None):
            raise invalid("give call_id, of a call that was made, or tool, of one that might be")
        if wanted.call_id is not None:
            return existing(await self.review.explain_call(policy, wanted.call_id), "call", wanted.call_id)
        return self.review.explain(
            policy,
            wanted.tool or "",
            wanted.args,
            credential=wanted.credential or request.credential.id,
            on_behalf_of=wanted.on_behalf_of,
            session_key=wanted.session_key,
            origins=(wanted.origin,),
        )

    @route("POST /v1/policy/replay", Scope.READ, "What a policy would have stopped or asked about.")
    async def replay(self, request: Request, wanted: ReplayRequest) -> Replay:
        return await self.review.replay(self._tried(request, wanted.policy), wanted.since)


def _answer(policy: PolicySettings) -> Reply:
    return Reply(msgspec.json.encode(policy), headers=[(b"etag", f'"{version_of(policy)}"'.encode())])
