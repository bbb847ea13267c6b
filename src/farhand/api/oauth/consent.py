"""The owner's side of OAuth: the consent page, what it shows and decides, and the clients that have access.

`/oauth/authorize` is a static page without data, see `api/routes/console.py`. It asks `/v1/oauth/consent` as the
signed-in owner; the cookie alone is not enough, so a request from another site can neither read nor decide anything.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from farhand.api.oauth.endpoints import base_of
from farhand.api.server.http import Problem, Reply, Request, copied, invalid
from farhand.api.server.public_url import PublicUrl
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.oauth import (
    LEVELS,
    AuthorizationRequest,
    CheckedAuthorization,
    GivenAccess,
    OAuth,
    RefusedRequest,
)
from farhand.gateway.access.oauth_clients import OAuthError
from farhand.gateway.nodes.registry import NodeRegistry

MAX_QUERY: Final = 16 * 1024


class ConsentRequest(msgspec.Struct, forbid_unknown_fields=True):
    # The query of the request to `/oauth/authorize`.
    request: str
    allow: bool
    scope: str = ""
    # None: all machines, also later ones, and the gateway's own tools.
    nodes: list[str] | None = None
    # Names of tools without their machine; None: all.
    tools: list[str] | None = None
    expires_seconds: float | None = None


class ConsentAnswer(msgspec.Struct):
    # Where the browser goes next, with the code or the refusal.
    redirect: str


class LentMachine(msgspec.Struct):
    id: str
    online: bool
    tools: list[str]


class ConsentView(msgspec.Struct):
    """What the owner decides on. For an invalid request: the error, and the address that tells the client of it, which
    is opened only if the owner chooses so."""

    name: str = ""
    client_id: str = ""
    redirect_host: str = ""
    scopes: list[str] = []
    nodes: list[LentMachine] = []
    error: str | None = None
    redirect: str | None = None


class GrantView(msgspec.Struct):
    token_id: str
    scopes: list[str]
    nodes: list[str]
    tools: list[str]
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    made_by: str


class ClientView(msgspec.Struct):
    id: str
    client_id: str
    name: str
    redirect_uris: list[str]
    created_at: int
    grants: list[GrantView]


class ClientList(msgspec.Struct):
    clients: list[ClientView]
    count: int


class Revoked(msgspec.Struct):
    revoked: str
    grants: int


class ConsentRoutes:
    def __init__(self, oauth: OAuth, node_registry: NodeRegistry, public_url: PublicUrl) -> None:
        self._oauth = oauth
        self._node_registry = node_registry
        self._public_url = public_url

    @route(
        "GET /v1/oauth/consent",
        Scope.ADMIN,
        "What a client asks for; takes the query of /oauth/authorize.",
        query=(Query("client_id", "The client.", required=True),),
    )
    async def show(self, request: Request) -> ConsentView:
        try:
            asked = await self._asked(request, request.query_string.decode("latin-1"))
        except RefusedRequest as refused:
            host = _host(refused.redirect)
            return ConsentView(redirect_host=host, error=str(refused), redirect=refused.redirect)
        return ConsentView(
            asked.client.name,
            asked.client.client_id,
            _host(asked.redirect_uri),
            list(LEVELS[: LEVELS.index(asked.scope) + 1]),
            self._machines(),
        )

    @route("POST /v1/oauth/consent", Scope.ADMIN, "Give a client access, or refuse it.", answer=ConsentAnswer)
    async def decide(self, request: Request, wanted: ConsentRequest) -> Reply:
        try:
            asked = await self._asked(request, wanted.request)
        except RefusedRequest as refused:
            return _redirect(refused.redirect)
        if not wanted.allow:
            return _redirect(await self._oauth.deny(asked, request.credential))
        known = {machine.id for machine in self._machines()}
        for name in wanted.nodes or ():
            if name not in known:
                raise invalid(f"there is no machine {name[:100]!r}; `farhand nodes` lists them")
        try:
            redirect = await self._oauth.allow(
                asked,
                request.credential,
                scope=wanted.scope or asked.scope,
                nodes=wanted.nodes,
                tools=wanted.tools,
                expires_seconds=wanted.expires_seconds,
            )
        except OAuthError as error:
            raise Problem(error.status, error.code, str(error)) from None
        return _redirect(redirect)

    @route("GET /v1/oauth/clients", Scope.ADMIN, "OAuth clients that have access.")
    async def clients(self, _request: Request) -> ClientList:
        views = [_client(given) for given in await self._oauth.listed()]
        return ClientList(views, len(views))

    @route("DELETE /v1/oauth/clients/{id}", Scope.ADMIN, "Revoke an OAuth client's access.")
    async def remove(self, request: Request) -> Revoked:
        name = request.params["id"]
        grants = await self._oauth.remove_client(name)
        if grants is None:
            raise Problem(
                404, "not_found", f"no OAuth client {name[:100]!r} has access; `farhand oauth list` lists them"
            )
        return Revoked(name, grants)

    async def _asked(self, request: Request, query: str) -> CheckedAuthorization:
        """Return the checked request of a client. Raises Problem, RefusedRequest."""
        if len(query) > MAX_QUERY:
            raise invalid(f"the request has at most {MAX_QUERY} characters")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=50)
        except ValueError:
            raise invalid("the request has at most 50 parameters") from None
        names = AuthorizationRequest.__struct_fields__
        fields = [(name, value) for name, value in pairs if name in names]
        if len({name for name, _ in fields}) < len(fields):
            raise invalid("a parameter is given twice")
        try:
            return await self._oauth.check(
                AuthorizationRequest(**dict(fields)), f"{base_of(request, self._public_url)}/mcp"
            )
        except RefusedRequest:
            raise
        except OAuthError as error:
            raise Problem(400, error.code, str(error)) from None

    def _machines(self) -> list[LentMachine]:
        return [
            LentMachine(name, node.online, sorted({tool.name for tool in node.lent}))
            for name, node in sorted(self._node_registry.nodes.items())
        ]


def _host(address: str) -> str:
    parts = urlsplit(address)
    return parts.netloc or f"{parts.scheme}:"


def _redirect(address: str) -> Reply:
    return Reply(msgspec.json.encode(ConsentAnswer(address)), bare=True)  # it may carry a code


def _client(given: GivenAccess) -> ClientView:
    grants = [
        copied(
            GrantView,
            token,
            token_id=token.id,
            scopes=token.scopes.split(),
            nodes=token.nodes.split(),
            tools=token.tools.split(),
            created_at=grant.created_at,
        )
        for grant, token in given.grants
    ]
    uris = msgspec.json.decode(given.client.redirect_uris, type=list[str])
    return copied(ClientView, given.client, redirect_uris=uris, grants=grants)
