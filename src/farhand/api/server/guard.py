"""The outermost guard. Every request passes these checks in this order; no route can opt out.

connection limits -> Host -> Origin -> size -> throttle -> credential -> scope -> open requests -> freeze -> route
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from farhand.api.server.browser_sessions import BrowserSessions
from farhand.api.server.http import (
    JSON,
    MAX_BODY_BYTES,
    Problem,
    Reply,
    Request,
    Scope,
    new_request_id,
    respond,
    too_large,
)
from farhand.api.server.http_exchange import HttpExchange
from farhand.api.server.id_prefixes import IdPrefixes
from farhand.api.server.idempotency import Repeats
from farhand.api.server.large_bodies import PIECE_BYTES, redacted
from farhand.api.server.origins import DEFAULT_PORTS, Host, Origin, parse_host, parse_origin
from farhand.api.server.public_url import PublicUrl
from farhand.api.server.router import Route, Router
from farhand.api.server.socket_secrets import with_offered_secrets
from farhand.api.server.throttle import (
    REGISTRATIONS_ALLOWED,
    REGISTRATIONS_LOCK_SECONDS,
    TOKENLESS_ALLOWED,
    TOKENLESS_LOCK_SECONDS,
    Throttle,
)
from farhand.gateway.access.credentials import OWNER, Credential, Credentials
from farhand.gateway.access.credentials import Scope as CredentialScope
from farhand.gateway.access.principal import Principal
from farhand.machine import tracing
from farhand.machine.files import steering_files as steering
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.redaction import KnownSecrets, StreamRedactor

log = logging.getLogger(__name__)

NODE_SOCKET = "/v1/nodes/ws"
FILES_SOCKET = "/v1/nodes/files"
# Key of the function in a request's scope to call once its sender is authenticated, with the id of a token other than
# the owner's.
ADMITTED = "farhand.admitted"
# The authority of a request whose target is a whole URL.
AUTHORITY = "farhand.authority"
NOBODY = Credential("nobody", frozenset())
# Maximum concurrent requests of one token, including streams: each holds a connection of the gateway.
MAX_OPEN_REQUESTS = 256
_COUNTED = "farhand.counted"
PAGE_HEADER = b"x-farhand-page"
# Maximum remembered rights of credentials on routes.
MOST_RIGHTS = 4096
MIN_COMPRESSED_BYTES = 2048
MAX_COMPRESSED_ON_LOOP = 64 * 1024
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
# Clients probe these before they have a credential, and handle 404 but not 401.
_DISCOVERY = ("/.well-known/", "/register")
_ALLOWED_HEADERS = (
    b"Authorization, X-API-Key, Content-Type, Accept, Idempotency-Key, If-Match, If-None-Match, If-Range, Range, "
    b"Last-Event-ID, X-Request-Id, X-Session-Key, Mcp-Session-Id, Mcp-Protocol-Version, Mcp-Method, Mcp-Name"
)
# Headers that the OpenAI clients for browsers add to each request.
_CLIENT_HEADER = re.compile(rb"(?:x-stainless|openai)-[a-z0-9-]{1,50}")
MAX_CLIENT_HEADERS = 32
_EXPOSED = (
    b"access-control-expose-headers",
    b"X-Request-Id, ETag, Content-Range, Retry-After, X-Offset, X-Next-Offset, X-Over, Mcp-Session-Id",
)


class GuardSettings(msgspec.Struct, frozen=True):
    """Host names of this gateway besides `localhost` and IP addresses, and other origins whose pages may call it."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[Origin] = frozenset()

    @classmethod
    def of(cls, hosts: Iterable[str], origins: Iterable[str]) -> GuardSettings:
        """Parse the settings. Raises ValueError that names an invalid host name or origin."""
        names, pages = set(), set()
        for entry in hosts:
            try:
                names.add(parse_host(_to_ascii(entry)).name)
            except ValueError:
                raise ValueError(f"[gateway] hosts: {entry!r} is not a host name such as 'gateway.example'") from None
        for entry in origins:
            try:
                scheme, separator, host = entry.rstrip("/").partition("://")
                pages.add(parse_origin(f"{scheme.lower()}{separator}{_to_ascii(host)}"))
            except ValueError:
                reason = f"[gateway] origins: {entry!r} is not an origin such as 'https://page.example'"
                raise ValueError(reason) from None
        return cls(frozenset(names), frozenset(pages))


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request; `session_id` if it came from a signed-in browser."""

    credential: Credential
    session_id: str | None = None

    @property
    def ending(self) -> str | None:
        """Return the id of the token or session on which the request depends; None if it cannot be revoked."""
        if self.session_id is not None:
            return self.session_id
        return None if self.credential in (OWNER, NOBODY) else self.credential.id


_STRANGER = Caller(NOBODY)


class _Rights(msgspec.Struct, frozen=True):
    """What a credential may do with a route."""

    principal: Principal
    route: Route
    # Why it may not use it; empty if it may.
    refusal: str
    max_body_bytes: int
    may_steer: bool

    @classmethod
    def of(cls, credential: Credential, route: Route) -> _Rights:
        refusal = ""
        if route.scope is not None and not credential.may(route.scope):
            wanted = " or ".join(repr(scope.value) for scope in route.scopes)
            refusal = f"this credential lacks the scope {wanted}"
        elif credential.narrowed and route.scope is not None and not route.narrow and not route.reads:
            refusal = "this credential is for some tools or nodes alone; use POST /v1/tools/invoke"
        principal = Principal(credential)
        return cls(principal, route, refusal, route.max_body_bytes(credential), principal.may_steer)


class Guard:
    """Serves the requests of all connections; the node socket uses it as well."""

    def __init__(
        self,
        router: Router,
        credentials: Credentials,
        sessions: BrowserSessions,
        settings: GuardSettings,
        secrets: KnownSecrets,
        repeats: Repeats,
        access_token: Callable[[str], Awaitable[Credential | None]],
        public_url: PublicUrl,
        *,
        id_prefixes: IdPrefixes,
        held: Callable[[], FreezeOrder | None] = lambda: None,
        note: Callable[[str, str, Mapping[str, Any]], None] = lambda *_: None,
        catch_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`access_token` returns the credential of an OAuth client. `held` returns the freeze order that is in force.
        `secrets` are redacted in every answer. `note` writes an event to the journal. `catch_up` returns once
        everything is known here that other gateways of the fleet have recorded by now.
        """
        self._catch_up = catch_up
        self._catching_up: asyncio.Future[None] | None = None
        self._next_catch_up: asyncio.Future[None] | None = None
        self.secrets = secrets
        self._repeats = repeats
        self._id_prefixes = id_prefixes
        self._access_token = access_token
        self._public_url = public_url
        self._router = router
        self._held = held
        self._credentials = credentials
        self._sessions = sessions
        self._settings = settings
        self._throttle = Throttle(note=note)
        self._tokenless = Throttle(
            allowed=TOKENLESS_ALLOWED, lock_seconds=TOKENLESS_LOCK_SECONDS, what="requests without a token", note=note
        )
        self._registrations = Throttle(
            allowed=REGISTRATIONS_ALLOWED, lock_seconds=REGISTRATIONS_LOCK_SECONDS, what="new clients", note=note
        )
        # By credential and route.
        self._known_rights: dict[tuple[int, int], _Rights] = {}
        # Open requests, by the id of their token.
        self._open: Counter[str] = Counter()
        # Open streams, by the id of the token or session they depend on.
        self._streams: dict[str, set[asyncio.Event]] = {}
        credentials.subscribe(self._revoked)
        sessions.subscribe(self._revoked)

    async def __call__(self, scope: Scope, exchange: HttpExchange) -> None:
        """Serve a request."""
        try:
            await self._http(scope, exchange)
        finally:
            if _COUNTED in scope:
                self._uncount(scope)

    async def _http(self, scope: Scope, exchange: HttpExchange) -> None:
        request_id = ""
        asked_id: str | None = None
        ending: str | None = None
        route: Route | None = None
        method: str = scope["method"]
        headers: dict[bytes, bytes] = {}
        cross_origin: list[tuple[bytes, bytes]] = []
        try:
            headers = self._admit(scope)
            asked_id = _client_request_id(headers)
            if b"origin" in headers:
                cross_origin = self._cross_origin_headers(headers[b"origin"])
            if cross_origin and method == "OPTIONS" and b"access-control-request-method" in headers:
                reply = Reply(status=204, headers=[*cross_origin, *_preflight(headers)])
                await respond(reply, exchange, asked_id or new_request_id())
                return
            route, params = self._router.find(method, scope["path"])
            if route is None and scope["path"].startswith(_DISCOVERY):
                raise self._router.missing(method, scope["path"])
            length = int(headers.get(b"content-length", b"0") or b"0")
            if length > MAX_BODY_BYTES and (route is None or not route.streams):
                raise too_large(MAX_BODY_BYTES)
            if route is not None and route.code:
                self._throttle.check(scope)
            if route is not None and route.registers:
                self._registrations.check(scope)
                self._registrations.failed(scope)
            public = route is not None and route.scope is None
            if public:
                caller = _STRANGER
            else:
                granted = None
                if self._catch_up is not None or (route is not None and route.oauth):
                    granted = await self._granted_or_known(headers, route)
                caller = self._authenticate(scope, headers, method, granted, route)
                if ADMITTED in scope:
                    scope[ADMITTED](None if caller.credential == OWNER else caller.credential.id)
            ending = caller.ending
            if route is None:
                raise self._router.missing(method, scope["path"])
            rights = self._rights(caller, route)
            if rights.refusal:
                raise Problem(403, "forbidden", rights.refusal)
            if length > rights.max_body_bytes and not route.streams:
                raise too_large(rights.max_body_bytes)
            if ending is not None:
                self._count(scope, caller)
            if route.acts and (order := self._held()) is not None:
                raise Problem(423, "frozen", order.refusal().message)
            request = Request(scope, exchange, headers, rights.principal, rights.max_body_bytes)
            request.session_id = caller.session_id
            if ending is not None:
                request.valid = lambda: self._seconds_left(ending) > 0
            if params:
                known = route.scope is not None
                request.params = await self._id_prefixes.complete(params, caller.credential) if known else params
            # Each request is a task of its own.
            if tracing.is_on():
                tracing.incoming.set(request.header(b"traceparent") or "")
            steering.allowed.set(rights.may_steer)
            reply = await self._serve(route, request, asked_id)
            request_id = request.id
            if (route.guessable or route.code) and reply.status == 401:
                self._count_guess(scope)
        except Problem as problem:
            reply = problem.reply(openai=route is not None and route.openai)
        except Exception:
            request_id = asked_id or new_request_id()
            log.exception("a request failed in the guard (request %s)", request_id)
            failure = Problem(500, "internal", f"the gateway failed; its log has request {request_id}")
            reply = failure.reply(openai=route is not None and route.openai)
        if reply.pieces is not None and ending is not None:
            reply.pieces = self._while_valid(reply.pieces, ending)
        if not reply.bare:
            if reply.pieces is None:
                reply.body = await redacted(reply.body, self.secrets)
            else:
                reply.pieces = _veiled(reply.pieces, self.secrets)
            if len(reply.body) >= MIN_COMPRESSED_BYTES:
                await _compress(reply, headers)
        if cross_origin:
            reply.headers = [*reply.headers, *cross_origin]
        await respond(reply, exchange, asked_id or request_id or new_request_id(), head=method == "HEAD")

    async def _granted_or_known(self, headers: dict[bytes, bytes], route: Route | None) -> Credential | None:
        """Return the credential of an OAuth client, for the routes that accept one; wait until this gateway knows any
        other, which another gateway of the fleet may have made a moment ago."""
        oauth = route is not None and route.oauth
        granted = await self._granted(headers) if oauth else None
        # Not only for addresses that are not locked out: behind a proxy, all clients share one (see `_authenticate`).
        if self._catch_up is not None and granted is None and not self._known(headers):
            await self._caught_up(self._catch_up)
            granted = await self._granted(headers) if oauth else None
        return granted

    async def _caught_up(self, catch_up: Callable[[], Awaitable[None]]) -> None:
        """Return when a `catch_up` has ended that began after this call. One runs at a time: requests that arrive
        meanwhile share the next, so that wrong tokens cost little, from however many clients and addresses.
        """

        async def after(earlier: asyncio.Future[None] | None) -> None:
            if earlier is not None:
                await asyncio.wait({earlier})
            self._catching_up, self._next_catch_up = self._next_catch_up, None
            await catch_up()

        if self._next_catch_up is None:
            self._next_catch_up = asyncio.ensure_future(after(self._catching_up))
        await asyncio.shield(self._next_catch_up)

    def _rights(self, caller: Caller, route: Route) -> _Rights:
        """Return what a caller may do with a route; remembered, since it depends on nothing else."""
        # Identities are safe and cheap keys while the cache holds the objects.
        known = self._known_rights.get((id(caller.credential), id(route)))
        if known is not None and known.principal.actor is caller.credential:
            return known
        if len(self._known_rights) > MOST_RIGHTS:
            self._known_rights.clear()
        found = _Rights.of(caller.credential, route)
        self._known_rights[id(caller.credential), id(route)] = found
        return found

    def _count(self, scope: Scope, caller: Caller) -> None:
        """Count an open request. Raises Problem if a token has too many; the owner is not limited."""
        if caller.credential in (NOBODY, OWNER):
            return
        name = caller.credential.id
        if self._open[name] >= MAX_OPEN_REQUESTS:
            reason = f"this token has {MAX_OPEN_REQUESTS} requests open; end some of them first"
            raise Problem(429, "too_many_requests", reason, headers=[(b"retry-after", b"1")])
        self._open[name] += 1
        scope[_COUNTED] = name

    def _uncount(self, scope: Scope) -> None:
        name = scope.get(_COUNTED)
        if name is not None:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    async def _while_valid(self, pieces: AsyncIterator[bytes], ending: str) -> AsyncIterator[bytes]:
        """End a stream when its token or session is revoked or expires."""
        over = asyncio.ensure_future(self._end_of(ending))
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(pieces))
                await asyncio.wait({following, over}, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    return
                try:
                    yield following.result()
                except StopAsyncIteration:
                    return
        finally:
            over.cancel()
            if following is not None and not following.done():
                following.cancel()
                await asyncio.wait({following})
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    def _seconds_left(self, ending: str) -> float:
        return max(self._credentials.seconds_left(ending), self._sessions.seconds_left(ending))

    async def _end_of(self, token_id: str) -> None:
        """Return when a token or session has ended."""
        revoked = asyncio.Event()
        self._streams.setdefault(token_id, set()).add(revoked)
        try:
            while (left := self._seconds_left(token_id)) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, 3600.0)):
                        await revoked.wait()
        finally:
            self._streams[token_id].discard(revoked)
            if not self._streams[token_id]:
                del self._streams[token_id]

    def _revoked(self, token_id: str) -> None:
        for revoked in self._streams.get(token_id, ()):
            revoked.set()

    async def _serve(self, route: Route, request: Request, asked_id: str | None) -> Reply:
        try:
            keyed = b"idempotency-key" in request.headers and route.repeatable and route.changes
            if keyed:
                return await self._repeats.answer(request, route.reply)
            return await route.reply(request)
        except Problem as problem:
            return problem.reply(openai=route.openai)
        except Exception:
            request.id = asked_id or request.id or new_request_id()
            log.exception("%s %s failed (request %s)", route.method, route.path, request.id)
            failure = Problem(500, "internal", f"the gateway failed; its log has request {request.id}")
            return failure.reply(openai=route.openai)

    # -- for the node socket, which is not behind ASGI ------------------------------------------------------

    def admit_node(self, scope: Scope) -> None:
        """Raise Problem for an upgrade that may not even present a token."""
        self._admit(scope)
        if scope["path"] not in (NODE_SOCKET, FILES_SOCKET):
            raise Problem(404, "not_found", f"there is no socket at {scope['path'][:200]}")

    def check_lockout(self, scope: Scope) -> None:
        """Raise Problem while the address of a node is locked out."""
        self._throttle.check(scope)

    def node_failed(self, scope: Scope) -> None:
        """Count a wrong token from this address."""
        self._throttle.failed(scope)

    # -- for the sockets of clients, which are not behind ASGI either -----------------------------------------

    def admit_client(self, scope: Scope, wanted: CredentialScope) -> tuple[Caller, str | None]:
        """Return the sender of an upgrade that acts, and the subprotocol to answer with. Raises Problem.

        The credential may be in a subprotocol, see `socket_secrets`. The connection counts as an open request until
        `client_left`.
        """
        headers, subprotocol = with_offered_secrets(self._admit(scope))
        caller = self._authenticate(scope, headers, "GET")
        if not caller.credential.may(wanted):
            raise Problem(403, "forbidden", f"this credential lacks the scope {wanted.value!r}")
        if (order := self._held()) is not None:
            raise Problem(423, "frozen", order.refusal().message)
        self._count(scope, caller)
        return caller, subprotocol

    def client_left(self, scope: Scope) -> None:
        self._uncount(scope)

    async def access_ended(self, caller: Caller) -> None:
        """Return when the caller's token or session has ended, which the owner's does not."""
        if caller.ending is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._end_of(caller.ending)

    # -- the checks -------------------------------------------------------------------------------------

    def _admit(self, scope: Scope) -> dict[bytes, bytes]:
        """Return the headers of a request with a valid target, Host and Origin. Raises Problem."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(headers) != len(scope["headers"]):
            _refuse_repeats(scope)
        if b"transfer-encoding" in headers and any(
            name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in scope["headers"]
        ):
            # Another server may find the end of such a body elsewhere, so nothing after it is read.
            reason = "a body has no Transfer-Encoding but chunked"
            raise Problem(400, "invalid_request", reason, headers=[(b"connection", b"close")])
        host = self._check_host(headers.get(b"host", b""))
        authority = scope.get(AUTHORITY)
        if authority is not None and self._check_host(authority) != host:
            # A proxy may have checked one of them while we use the other.
            raise Problem(400, "invalid_request", f"the target is for {_shown(authority)}, the Host header for another")
        origin = headers.get(b"origin")
        if origin is not None and not self._origin_allowed(scope, origin, host):
            raise Problem(403, "origin_not_allowed", f"pages of {_shown(origin)} may not use this gateway")
        return headers

    def _check_host(self, header: bytes) -> Host:
        # A page can make a name of its own point at this machine, but not make the browser send another Host.
        # Addresses cannot be rebound, so they are always allowed.
        try:
            host = parse_host(header.decode("latin-1"))
        except ValueError:
            raise Problem(403, "host_not_allowed", f"{_shown(header)} is not a valid Host header") from None
        if not (host.is_address or host.name == "localhost" or host.name in self._settings.hosts):
            raise Problem(
                403,
                "host_not_allowed",
                f"this gateway is not known as {_shown(header)}; add the name to [gateway] hosts to allow it",
            )
        return host

    def _origin_allowed(self, scope: Scope, header: bytes, host: Host) -> bool:
        try:
            origin = parse_origin(header.decode("latin-1"))
        except ValueError:
            return False
        scheme: str = {"ws": "http", "wss": "https"}.get(scope["scheme"]) or scope["scheme"]
        own = Origin(scheme, host.name, host.port or DEFAULT_PORTS.get(scheme))
        return origin == own or origin in self._settings.origins

    def _cross_origin_headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a page of a listed origin read the answer.

        Credentials are never allowed: such a page has a token.
        """
        if parse_origin(origin.decode("latin-1")) not in self._settings.origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), _EXPOSED]

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the credential of a request is known here; True without one."""
        secret = _secret(headers)
        if secret is not None:
            return self._credentials.recognise(secret) is not None
        cookie, page_secret = _cookie(headers, self._sessions.cookie), headers.get(PAGE_HEADER)
        if cookie is None or page_secret is None:
            return True
        return self._sessions.recognise(cookie, page_secret.decode("latin-1")) is not None

    async def _granted(self, headers: dict[bytes, bytes]) -> Credential | None:
        """Return the credential of an OAuth client's access token, for the routes that accept one."""
        secret = _secret(headers)
        return None if secret is None else await self._access_token(secret)

    def _authenticate(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        method: str,
        granted: Credential | None = None,
        route: Route | None = None,
    ) -> Caller:
        secret = _secret(headers)
        oauth = route is not None and route.oauth
        if secret is not None:
            # Before the lockout is looked at: behind a proxy, all clients share an address, and no client that guesses
            # tokens may lock out those that have one. These tokens are too long to be guessed.
            credential = self._credentials.recognise(secret) or granted
            if credential is not None:
                return Caller(credential)
            self._count_guess(scope)
            if not self._credentials.open:
                raise self._unauthorized("this token is not known here", scope, headers, oauth=oauth, invalid=True)
        cookie, page_secret = _cookie(headers, self._sessions.cookie), headers.get(PAGE_HEADER)
        if cookie is not None and page_secret is not None:
            recognised = self._sessions.recognise(cookie, page_secret.decode("latin-1"))
            if recognised is not None:
                _require_json(headers, method)
                session_id, credential = recognised
                return Caller(credential, session_id)
        if self._credentials.open:
            _require_json(headers, method)
            return Caller(OWNER)
        self._tokenless.check(scope)
        self._tokenless.failed(scope)
        reason = "a token is needed: Authorization: Bearer, or X-API-Key"
        raise self._unauthorized(reason, scope, headers, oauth=oauth, invalid=False)

    def _count_guess(self, scope: Scope) -> None:
        """Count a wrong secret. Raises Problem while the address is locked out."""
        self._throttle.check(scope)
        self._throttle.failed(scope)

    def _unauthorized(
        self, message: str, scope: Scope, headers: dict[bytes, bytes], *, oauth: bool, invalid: bool
    ) -> Problem:
        challenge = b"Bearer"
        if oauth:
            host = headers[b"host"].decode("latin-1")
            challenge = self._public_url.challenge(scope["scheme"], host, invalid=invalid)
        return Problem(401, "unauthorized", message, headers=[(b"www-authenticate", challenge)])


def _preflight(headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that answer a preflight request."""
    asked = headers.get(b"access-control-request-headers", b"").lower().split(b",", MAX_CLIENT_HEADERS)
    more = [name for one in asked if _CLIENT_HEADER.fullmatch(name := one.strip())]
    return [
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        (b"access-control-allow-headers", b", ".join([_ALLOWED_HEADERS, *more])),
        (b"access-control-max-age", b"600"),
    ]


async def _compress(reply: Reply, headers: dict[bytes, bytes]) -> None:
    """Compress a large body of text for a client that accepts it; never one that carries secrets (`bare`)."""
    if not reply.content_type.startswith((b"text/", JSON, b"image/svg+xml")):
        return
    reply.headers = [*reply.headers, (b"vary", b"Accept-Encoding")]
    if not _accepts_gzip(headers.get(b"accept-encoding", b"")):
        return
    compress = functools.partial(gzip.compress, reply.body, 5, mtime=0)
    reply.body = compress() if len(reply.body) < MAX_COMPRESSED_ON_LOOP else await asyncio.to_thread(compress)
    reply.headers.append((b"content-encoding", b"gzip"))


def _accepts_gzip(header: bytes) -> bool:
    for part in header.lower().split(b","):
        name, _, weight = part.strip().partition(b";")
        if name.strip() in (b"gzip", b"*"):
            return not re.fullmatch(rb"\s*q=0(\.0*)?\s*", weight)
    return False


def _client_request_id(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id")
    return given.decode("ascii") if given is not None and _REQUEST_ID.fullmatch(given) else None


async def _veiled(pieces: AsyncIterator[bytes], known: KnownSecrets) -> AsyncIterator[bytes]:
    veil = StreamRedactor(known)
    async for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            if shown := veil.feed(part):
                yield shown
            if len(part) < len(piece):
                await asyncio.sleep(0)
    if rest := veil.finish():
        yield rest


def _refuse_repeats(scope: Scope) -> None:
    # Of two headers, a proxy may have checked one while we use the other.
    for name in (b"host", b"origin", b"authorization", b"x-api-key"):
        if sum(header == name for header, _ in scope["headers"]) > 1:
            raise Problem(400, "invalid_request", f"a request has one {name.decode().title()} header")


def _secret(headers: dict[bytes, bytes]) -> str | None:
    authorization = headers.get(b"authorization")
    if authorization is not None:
        scheme, _, secret = authorization.decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            return secret.strip()
    key = headers.get(b"x-api-key")
    return None if key is None else key.decode("latin-1").strip()


def _cookie(headers: dict[bytes, bytes], name: str) -> str | None:
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return None


def _require_json(headers: dict[bytes, bytes], method: str) -> None:
    # A form on any page can send these methods without a preflight, but not this content type; nor can it send PUT.
    if method not in ("GET", "HEAD", "DELETE", "PUT") and not headers.get(b"content-type", b"").startswith(
        b"application/json"
    ):
        raise Problem(415, "unsupported_media_type", "send Content-Type: application/json")


def _to_ascii(name: str) -> str:
    """Return a host name of the settings as browsers send it: international names in their `xn--` form."""
    return name if name.isascii() else name.encode("idna").decode()


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])
