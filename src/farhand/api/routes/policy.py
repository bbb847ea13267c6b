"""The policy over HTTP: the rule that decides a call, and what a policy would have stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.route_docs import About
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.policy import Policy, PolicySettings
from farhand.gateway.calls.policy_subject import HTTP
from farhand.gateway.control.policy_review import Explanation, PolicyReview, Replay
from farhand.gateway.hub import Hub
from farhand.protocol.calls import NULL
from farhand.protocol.errors import ErrorKind, ToolError


class ExplainRequest(msgspec.Struct):
    """A call that was made, or one that might be."""

    call_id: str | None = None
    tool: str | None = None
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    origin: str = HTTP[0]
    # The acting credential; by default the one that asks.
    credential: str | None = None
    # The credential on whose behalf it would act, as of an agent's call.
    on_behalf_of: str | None = None
    session_key: str | None = None


class ReplayRequest(msgspec.Struct):
    # Milliseconds since 1970.
    since: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
    # Instead of the one in force; needs the scope `admin`.
    policy: PolicySettings | None = None


_explain_decoder = msgspec.json.Decoder(ExplainRequest)
_replay_decoder = msgspec.json.Decoder(ReplayRequest)


def policy_routes(hub: Hub, settings: Callable[[], PolicySettings], workspace: str) -> list[Route]:
    """`settings`: those in force."""
    review = PolicyReview(hub.database, hub.node_registry, hub.catalog, hub.credentials.makers)

    async def shown(_request: Request) -> Reply:
        return json_reply(settings())

    async def explain(request: Request) -> Reply:
        wanted: ExplainRequest = await request.json(_explain_decoder)
        policy = Policy(settings(), workspace)
        if (wanted.call_id is None) == (wanted.tool is None):
            raise Problem(
                400, "invalid_request", "give call_id, of a call that was made, or tool, of one that might be"
            )
        if wanted.call_id is not None:
            found = await review.explain_call(policy, wanted.call_id)
            if found is None:
                raise Problem(404, "not_found", f"there is no call {wanted.call_id[:100]!r}")
            return json_reply(found)
        try:
            explained = review.explain(
                policy,
                wanted.tool or "",
                wanted.args,
                credential=wanted.credential or request.credential.id,
                on_behalf_of=wanted.on_behalf_of,
                session_key=wanted.session_key,
                origins=(wanted.origin,),
            )
        except ToolError as error:
            status = 404 if error.kind is ErrorKind.NOT_FOUND else 400
            raise Problem(status, error.kind.value, error.message) from None
        return json_reply(explained)

    async def replay(request: Request) -> Reply:
        wanted: ReplayRequest = await request.json(_replay_decoder)
        # Many rules over many calls take long, and they are judged on the event loop.
        if wanted.policy is not None and not request.credential.may(Scope.ADMIN):
            raise Problem(403, "forbidden", "replaying a policy other than the one in force needs the scope 'admin'")
        try:
            policy = Policy(wanted.policy or settings(), workspace)
        except ValueError as error:
            raise Problem(400, "invalid_request", str(error)) from None
        return json_reply(await review.replay(policy, wanted.since))

    return [
        Route("GET", "/v1/policy", Scope.READ, shown, about=About("The policy in force.", answer=PolicySettings)),
        Route(
            "POST",
            "/v1/policy/explain",
            Scope.READ,
            explain,
            about=About(
                "The rule that decides a call, one that was made or one that might be.",
                body=ExplainRequest,
                answer=Explanation,
                errors=(404,),
            ),
        ),
        Route(
            "POST",
            "/v1/policy/replay",
            Scope.READ,
            replay,
            about=About("What a policy would have stopped or asked about.", body=ReplayRequest, answer=Replay),
        ),
    ]
