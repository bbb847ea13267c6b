"""Declare routes beside their handlers with `@route`, and find the route of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec

from farhand.api.server.http import (
    MAX_BODY_BYTES,
    MAX_SMALL_BODY_BYTES,
    Problem,
    Reply,
    Request,
    json_reply,
    read_json,
    tool_problem,
)
from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import OverBudget
from farhand.gateway.calls.gate import IdempotencyConflict
from farhand.protocol.errors import ErrorKind, FarhandError, ToolError
from farhand.store.ports import StoreError

JSON = "application/json"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
FORM = "application/x-www-form-urlencoded"
# Further answers of routes that honour `Range` and `If-None-Match`.
PARTIAL = {206: "The range that was asked for.", 304: "The client has this version."}

Handler = Callable[..., Awaitable[Any]]
H = TypeVar("H", bound=Handler)


class Query(msgspec.Struct, frozen=True):
    """A parameter of the query or a header."""

    name: str
    description: str
    type: Any = str
    required: bool = False


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A declared route. The OpenAPI document is generated from these fields.

    Errors that any route may return (401 without a credential, 403 without the scope, 400 for an unknown parameter …)
    are not declared; `errors` names the statuses of others.
    """

    method: str
    # Segments in braces are parameters; a last one `{name...}` takes the rest of the path, which may be empty.
    path: str
    # Any one of several is enough; None: no credential is needed.
    scope: Scope | tuple[Scope, ...] | None
    summary: str
    handler: Handler
    # The type of a JSON body; the handler gets the decoded body after the request.
    body: Any = None
    # Whether a blank body means `body()`.
    body_optional: bool = False
    # The handler reads the body itself; `body` only describes it.
    body_raw: bool = False
    # The media type of a body that is not JSON; `*/*` for any.
    takes: str | None = None
    # The type of the answer; None for an untyped object.
    answer: Any = None
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    # Further statuses other than errors in the common format, with their meaning.
    also: Mapping[int, str] = {}
    errors: tuple[int, ...] = ()
    query: tuple[Query, ...] = ()
    # It handles an `Idempotency-Key` itself.
    idempotent: bool = False
    # It reads its body piece by piece, so the body may have any length.
    streams: bool = False
    # Its body may carry the content of files or messages, so it may be long (`http.MAX_BODY_BYTES`).
    content: bool = False
    # It takes a secret of its own: wrong ones (401) are counted, and too many lock the address out.
    guessable: bool = False
    # Likewise, and the secret is short enough to be guessed: while the address is locked out, a right one is refused.
    code: bool = False
    # It stores something for clients without a credential, so each address may use it only so often.
    registers: bool = False
    # A credential restricted to some tools or nodes may use it: all its actions pass the gate as that credential.
    narrow: bool = False
    # It changes or starts something without passing the gate, so a freeze refuses it here.
    acts: bool = False
    # Its errors have the format of the OpenAI API.
    openai: bool = False
    # The statuses of tool errors that differ from `http.STATUSES`.
    statuses: Mapping[ErrorKind, int] = {}

    @property
    def scopes(self) -> tuple[Scope, ...]:
        if self.scope is None:
            return ()
        return self.scope if isinstance(self.scope, tuple) else (self.scope,)

    @property
    def repeatable(self) -> bool:
        """Return whether the guard makes it take effect once per idempotency key. MCP has its own ids."""
        whole = self.scope is not None and not self.streams and self.path != "/mcp"
        return self.method == "POST" and whole and not self.idempotent

    @property
    def oauth(self) -> bool:
        """Return whether it accepts the access tokens of OAuth clients."""
        return self.path == "/mcp"

    @property
    def changes(self) -> bool:
        """Return whether it may change anything. If not, its idempotency keys need not be stored."""
        return self.scopes != (Scope.READ,)

    def max_body_bytes(self, credential: Credential) -> int:
        """Return the maximum length of a body that is read whole."""
        large = self.content and credential.may((Scope.CHAT, Scope.TOOLS_WRITE))
        return MAX_BODY_BYTES if large else MAX_SMALL_BODY_BYTES

    @property
    def reads(self) -> bool:
        return self.method == "GET" and Scope.READ in self.scopes

    async def reply(self, request: Request) -> Reply:
        """Run the handler and return its answer. Raises Problem for errors that callers cause or the store reports."""
        try:
            if self.body is None or self.body_raw:
                answer = await self.handler(request)
            else:
                body = await request.body()
                blank = self.body_optional and not body.strip()
                answer = await self.handler(request, self.body() if blank else read_json(body, decoder_of(self.body)))
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except OverBudget as error:
            raise Problem(429, "too_many_requests", error.message) from None
        except ToolError as error:
            raise tool_problem(error, self.statuses) from None
        except StoreError as error:
            if self.reads:
                raise
            raise Problem(503, "not_recorded", f"nothing was done: {error}") from None
        return answer if isinstance(answer, Reply) else json_reply(answer, self.status)


def route(operation: str, scope: Scope | tuple[Scope, ...] | None, summary: str, **options: Any) -> Callable[[H], H]:
    """Declare that a method answers an operation such as `GET /v1/nodes`; `options` are the fields of `Route`.

    The type of a body is that of the method's parameter after the request, and the type of the answer, if it is a
    struct, that which the method returns.
    """
    method, _, path = operation.partition(" ")

    def declare(handler: H) -> H:
        declared = Route(method=method, path=path, scope=scope, summary=summary, handler=handler, **options)
        handler.__dict__["routes"] = (declared, *handler.__dict__.get("routes", ()))
        return handler

    return declare


def routes_of(*doors: object) -> list[Route]:
    """Return the routes that the methods of these objects declare."""
    return [
        _bound(declared, getattr(door, name))
        for door in doors
        for name, member in vars(type(door)).items()
        for declared in getattr(member, "routes", ())
    ]


def _bound(declared: Route, handler: Handler) -> Route:
    types = get_type_hints(handler)
    answer = types.pop("return", None)
    _, *bodies = types.values()
    is_struct = isinstance(answer, type) and issubclass(answer, msgspec.Struct)
    return msgspec.structs.replace(
        declared,
        handler=handler,
        body=declared.body or (bodies[0] if bodies else None),
        answer=declared.answer or (answer if is_struct else None),
    )


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


# Paths that need no credential. The gateway refuses to start with any other route that has no scope.
PUBLIC = frozenset(
    {
        *("/healthz", "/readyz", "/version", "/signin", "/v1/nodes/ws", "/v1/openapi.json", "/v1/pair"),
        *("/", "/assets/{name}", "/console.svg", "/icon-192.png", "/icon-512.png", "/manifest.webmanifest"),
        *("/docs", "/docs.js", "/docs.css"),
        *("/hooks/{hook_id}", "/v1/mcp/callback"),
        # Each needs a one-time code.
        *("/v1/pair/offer", "/join/{code}", "/join/{code}/{file}"),
        *("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource/mcp"),
        *("/.well-known/oauth-authorization-server", "/oauth/register", "/oauth/token", "/oauth/revoke"),
        *("/oauth/authorize", "/oauth/consent.js", "/oauth/consent.css"),
    }
)


class Router:
    """Finds the route of a request: fixed paths by a dictionary, the others segment by segment."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[list[str], Route]] = []
        for declared in self.routes:
            if not declared.scopes and declared.path not in PUBLIC:
                raise FarhandError(
                    f"{declared.method} {declared.path} declares no scope; add one, or list the path in PUBLIC"
                )
            if "{" in declared.path:
                self._patterns.append((declared.path.split("/"), declared))
            else:
                self._fixed[declared.method, declared.path] = declared
        # A pattern that takes the rest of a path is tried after the more specific ones.
        self._patterns.sort(key=lambda one: one[0][-1].endswith("...}"))

    def find(self, method: str, path: str) -> tuple[Route | None, dict[str, str]]:
        if method == "HEAD":
            method = "GET"
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        segments = path.split("/")
        for pattern, declared in self._patterns:
            if declared.method == method and (params := _match(pattern, segments)) is not None:
                return declared, params
        return None, {}

    def missing(self, method: str, path: str) -> Problem:
        """Return 404, or 405 if the path exists for another method."""
        segments = path.split("/")
        methods = {one.method for one in self.routes if _match(one.path.split("/"), segments) is not None}
        if not methods:
            return Problem(404, "not_found", f"there is nothing at {path[:200]}")
        allowed = ", ".join(sorted(methods))
        return Problem(
            405,
            "method_not_allowed",
            f"{path[:200]} supports {allowed}, not {method}",
            headers=[(b"allow", allowed.encode())],
        )


def _match(pattern: list[str], segments: list[str]) -> dict[str, str] | None:
    params = {}
    if pattern[-1].endswith("...}"):
        *pattern, rest = pattern
        if len(segments) < len(pattern):
            return None
        params[rest[1:-4]] = "/".join(segments[len(pattern) :])
        segments = segments[: len(pattern)]
    if len(pattern) != len(segments):
        return None
    for expected, actual in zip(pattern, segments, strict=True):
        if expected.startswith("{"):
            if not actual:
                return None
            params[expected[1:-1]] = actual
        elif expected != actual:
            return None
    return params
