"""The table of routes. A route names the scope it needs; None means that anybody may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from farhand.api.server.http import MAX_BODY_BYTES, MAX_SMALL_BODY_BYTES, Problem, Reply, Request
from farhand.api.server.route_docs import About
from farhand.gateway.access.credentials import Credential, Scope
from farhand.protocol.errors import FarhandError

Handler = Callable[[Request], Awaitable[Reply]]


class Route(msgspec.Struct, frozen=True):
    method: str
    # Segments in braces are parameters; a last one `{name...}` takes the rest of the path, which may be empty.
    path: str
    # Of several, one is enough.
    scope: Scope | tuple[Scope, ...] | None
    handler: Handler
    # It reads its body piece by piece, so that may be of any length.
    streams: bool = False
    # Its body may carry the content of files or messages, so it may be long (`http.MAX_BODY_BYTES`).
    content: bool = False
    # It takes a secret of its own: wrong ones (401) are counted, and too many lock the address out.
    guessable: bool = False
    # A credential for some tools or nodes may use it: whatever it does passes the gate as that credential.
    narrow: bool = False
    # It changes or begins something without passing the gate, so a freeze refuses it here.
    acts: bool = False
    # Its errors have the shape of the OpenAI API.
    openai: bool = False
    # What its readers are told; every route of the gateway has it.
    about: About | None = None

    @property
    def scopes(self) -> tuple[Scope, ...]:
        if self.scope is None:
            return ()
        return self.scope if isinstance(self.scope, tuple) else (self.scope,)

    @property
    def repeatable(self) -> bool:
        """A key makes it happen once, and it does not look after that itself. MCP has ids of its own."""
        own = self.about is not None and self.about.idempotent
        whole = self.scope is not None and not self.streams and self.path != "/mcp"
        return self.method == "POST" and whole and not own

    @property
    def changes(self) -> bool:
        """Whether it may change anything. If not, there is no need to store the idempotency keys sent to it."""
        return self.scopes != (Scope.READ,)

    def max_body_bytes(self, credential: Credential) -> int:
        """How long a body may be that is read whole."""
        large = self.content and credential.may((Scope.CHAT, Scope.TOOLS_WRITE))
        return MAX_BODY_BYTES if large else MAX_SMALL_BODY_BYTES

    @property
    def reads(self) -> bool:
        return self.method == "GET" and Scope.READ in self.scopes


# What anybody may ask for. Another route without a scope is a mistake, and the gateway does not start with it.
PUBLIC = frozenset(
    {
        *("/healthz", "/readyz", "/version", "/signin", "/v1/nodes/ws", "/v1/openapi.json", "/v1/pair"),
        *("/", "/console.js", "/console.css", "/console.svg", "/docs", "/docs.js", "/docs.css"),
        *("/hooks/{hook_id}",),
    }
)


class Router:
    """Finds the route of a request; fixed paths by one look-up, the others segment by segment."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[list[str], Route]] = []
        for route in self.routes:
            if not route.scopes and route.path not in PUBLIC:
                raise FarhandError(
                    f"{route.method} {route.path} declares no scope; the gateway does not start like this"
                )
            if "{" in route.path:
                self._patterns.append((route.path.split("/"), route))
            else:
                self._fixed[route.method, route.path] = route

    def find(self, method: str, path: str) -> tuple[Route | None, dict[str, str]]:
        if method == "HEAD":
            method = "GET"
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        segments = path.split("/")
        for pattern, route in self._patterns:
            if route.method == method and (params := _match(pattern, segments)) is not None:
                return route, params
        return None, {}

    def missing(self, method: str, path: str) -> Problem:
        """404, or 405 where the path exists for another method."""
        segments = path.split("/")
        methods = {route.method for route in self.routes if _match(route.path.split("/"), segments) is not None}
        if not methods:
            return Problem(404, "not_found", f"there is nothing at {path[:200]}")
        allowed = ", ".join(sorted(methods))
        return Problem(
            405,
            "method_not_allowed",
            f"{path[:200]} takes {allowed}, not {method}",
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
