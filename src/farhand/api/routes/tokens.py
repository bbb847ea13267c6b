"""Tokens: list, create, revoke."""

from __future__ import annotations

from typing import Any

import msgspec

from farhand.api.server.http import Problem, Reply, Request, copied, invalid, json_reply, refusing
from farhand.api.server.router import route
from farhand.gateway.access.budgets import Budgets, limit_of
from farhand.gateway.access.credentials import CALLER_SCOPES, NARROW_CALLER_SCOPES, Profile, Scope
from farhand.gateway.access.tokens import Tokens
from farhand.protocol.key_auth import key_text, read_key
from farhand.store.tables.access.tokens import Token
from farhand.store.tables.accounts.budgets import Limit


class TokenLimit(msgspec.Struct, forbid_unknown_fields=True):
    # `money` (US dollars), `tokens`, `calls`, `bytes`, `machines` or `wall_seconds`.
    unit: str
    amount: float
    # `day` or `total`.
    period: str = "day"


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    node_id: str | None = None
    label: str = ""
    # The same as `label`.
    name: str = ""
    scopes: list[Scope] | None = None
    # Patterns (`laptop__*`) of the tools it may use; empty: all.
    tools: list[str] = []
    # The nodes it may use; empty: all.
    nodes: list[str] = []
    expires_seconds: float | None = None
    # Public key of a node, as shown by `farhand node key`; then no secret is created.
    public_key: str | None = None
    # Which tools MCP clients see with it: those of all machines as one family, or those of each machine.
    profile: Profile = "compact"
    # What it may use; `GET /v1/budgets` shows what it has used.
    budget: list[TokenLimit] = []


class TokenShown(msgspec.Struct):
    id: str
    label: str
    node_id: str | None
    scopes: list[str]
    created_at: int
    revoked_at: int | None
    tools: list[str]
    nodes: list[str]
    expires_at: int | None
    public_key: str | None
    last_used_at: int | None
    made_by: str
    profile: str


class TokensAnswer(msgspec.Struct):
    tokens: list[TokenShown]


class TokenMade(TokenShown):
    token: str


class TokenRoutes:
    def __init__(self, tokens: Tokens, budgets: Budgets) -> None:
        self._tokens = tokens
        self._budgets = budgets

    @route("GET /v1/tokens", Scope.ADMIN, "Every token, without its secret.")
    async def listed(self, _request: Request) -> TokensAnswer:
        return TokensAnswer([_shown(token) for token in await self._tokens.all()])

    @route(
        "POST /v1/tokens", Scope.ADMIN, "Create a token; its secret is shown only once.", status=201, answer=TokenMade
    )
    async def create(self, request: Request, wanted: TokenRequest) -> Reply:
        usual = NARROW_CALLER_SCOPES if wanted.tools or wanted.nodes else CALLER_SCOPES
        scopes = [scope.value for scope in (usual if wanted.scopes is None else wanted.scopes)]
        if not scopes:
            raise invalid("a token needs at least one scope")
        with refusing(ValueError):
            key = None if wanted.public_key is None else read_key(wanted.public_key)
            token, secret = await self._tokens.create(
                public_key=key,
                node_id=wanted.node_id,
                label=(wanted.label or wanted.name),
                scopes=scopes,
                tools=wanted.tools,
                nodes=wanted.nodes,
                expires_seconds=wanted.expires_seconds,
                made_by=request.credential.id,
                profile=wanted.profile,
                budget=lambda subject: limits_of(subject, wanted.budget),
            )
            if wanted.budget:
                await self._budgets.refresh()
        return json_reply(copied(TokenMade, _shown(token), token=secret), 201, bare=True)

    @route("DELETE /v1/tokens/{token_id}", Scope.ADMIN, "Revoke a token.")
    async def revoke(self, request: Request) -> dict[str, Any]:
        token_id = request.params["token_id"]
        removed = await self._tokens.revoke(token_id)
        if not removed:
            raise Problem(404, "not_found", f"there is no valid token {token_id!r}; `farhand token list` lists them")
        return {"revoked": token_id, "also": [token.id for token in removed[1:]]}


def limits_of(subject: str, wanted: list[TokenLimit]) -> list[Limit]:
    """Return the limits of a subject. Raises ValueError."""
    limits = [limit_of(subject, one.unit, one.amount, one.period) for one in wanted]
    if len({limit.unit for limit in limits}) < len(limits):
        raise ValueError("a budget has at most one limit for each unit")
    return limits


def _shown(token: Token) -> TokenShown:
    return copied(
        TokenShown,
        token,
        scopes=token.scopes.split(),
        tools=token.tools.split(),
        nodes=token.nodes.split(),
        public_key=None if token.public_key is None else key_text(token.public_key),
    )
