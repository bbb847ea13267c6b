"""The outermost guard. Every request passes it in this order; no route can stand before it or opt out.

connections (`lobby`) -> Host -> Origin -> size -> throttle -> credential -> scope -> freeze -> route
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from farhand.api.http import (
    JSON,
    MAX_BODY_BYTES,
    Problem,
    Receive,
    Reply,
    Request,
    Scope,
    Send,
    new_request_id,
    respond,
    too_large,
)
from farhand.api.repeats import Repeats
from farhand.api.router import Route, Router
from farhand.api.sessions import Sessions
from farhand.api.throttle import TOKENLESS_ALLOWED, TOKENLESS_LOCK_SECONDS, Throttle
from farhand.gateway.credentials import OWNER, Credential, Credentials
from farhand.protocol.freezing import FreezeOrder
from farhand.protocol.known_secrets import KnownSecrets, Veil

log = logging.getLogger("farhand.guard")

NODE_SOCKET = "/v1/nodes/ws"
FILES_SOCKET = "/v1/nodes/files"
ADMITTED = "farhand.admitted"
"""What to call, in a request's scope, once its sender is known."""
NOBODY = Credential("nobody", frozenset())


class GuardSettings(msgspec.Struct, frozen=True):
    """Names under which this gateway may be addressed besides loopback and IP addresses, and pages that may call it."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


class Admission(msgspec.Struct, frozen=True):
    """Who is asking, by which token; without one, anybody may. With a body of how many bytes."""

    secret: str | None
    credential: Credential
    length: int


_PLAIN_HEADERS = frozenset({b"cookie", b"expect", b"idempotency-key", b"transfer-encoding", b"upgrade"})
"""With one of these a head does not say everything about its request."""


class Guard:
    """An ASGI application around the router; the node socket asks it as well."""

    def __init__(
        self,
        router: Router,
        credentials: Credentials,
        sessions: Sessions,
        settings: GuardSettings,
        secrets: KnownSecrets,
        *,
        held: Callable[[], FreezeOrder | None] = lambda: None,
        note: Callable[[str, str, Mapping[str, Any]], None] = lambda *_: None,
    ) -> None:
        """`held`: by which order nothing may be changed now. `secrets` are hidden in every answer. `note` puts
        something that happened into the journal."""
        self.secrets = secrets
        self.repeats: Repeats | None = None
        """Where requests that are sent again are known."""
        self._router = router
        self._held = held
        self._credentials = credentials
        self._sessions = sessions
        self._settings = settings
        self._known_hosts: set[bytes] = set()
        self._throttle = Throttle(note=note)
        self._tokenless = Throttle(
            allowed=TOKENLESS_ALLOWED, lock_seconds=TOKENLESS_LOCK_SECONDS, what="requests without a token", note=note
        )
        self._streams: dict[str, set[asyncio.Event]] = {}
        """Under way, by the token they were asked for with."""
        credentials.on_removed.append(self._revoked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = ""
        credential = NOBODY
        method: str = scope["method"]
        try:
            headers = self._admit(scope)
            route, params = self._router.find(method, scope["path"])
            length = int(headers.get(b"content-length", b"0") or b"0")
            if length > MAX_BODY_BYTES and (route is None or not route.streams):
                raise too_large()
            if route is not None and route.guessable:
                self._throttle.check(scope)
            if route is None or route.scope is not None:
                credential = self._authenticate(scope, headers, method)
                admitted = scope.get(ADMITTED)
                if admitted is not None:
                    admitted()
            if route is None:
                raise self._router.missing(method, scope["path"])
            if route.scope is not None and not credential.may(route.scope):
                wanted = " or ".join(repr(scope.value) for scope in route.scopes)
                raise Problem(403, "forbidden", f"this credential lacks the scope {wanted}")
            if credential.narrowed and route.scope is not None and not route.narrow and not route.reads:
                reason = "this credential is for some tools or nodes alone; use POST /v1/tools/invoke"
                raise Problem(403, "forbidden", reason)
            if route.acts and (order := self._held()) is not None:
                raise Problem(423, "frozen", order.refusal().message)
            if credential not in (NOBODY, OWNER):
                receive = self._received_while_valid(receive, headers)
            request = Request(scope, receive, headers, credential)
            request.params = params
            reply = await self._serve(route, request)
            request_id = request.id
            if route.guessable and reply.status == 401:
                self._throttle.failed(scope)
        except Problem as problem:
            reply = problem.reply()
        except Exception:
            request_id = new_request_id()
            log.exception("a request failed in the guard (request %s)", request_id)
            reply = Problem(500, "internal", f"the gateway failed; its log has request {request_id}").reply()
        if reply.pieces is not None and credential not in (NOBODY, OWNER):
            reply.pieces = self._while_valid(reply.pieces, credential)
        if not reply.bare:
            if reply.pieces is None:
                reply.body = self.secrets.hide(reply.body)
            else:
                reply.pieces = _veiled(reply.pieces, self.secrets)
        await respond(reply, send, request_id or new_request_id(), head=method == "HEAD")

    def _received_while_valid(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive:
        """A body counts only while its token does: else one could be kept back until after the token was revoked."""
        secret = _secret(headers)

        async def received() -> Any:
            message = await receive()
            if message["type"] == "http.request" and secret and self._credentials.recognise(secret) is None:
                raise Problem(401, "unauthorized", "this token came to its end before the request had come whole")
            return message

        return received

    async def _while_valid(self, pieces: AsyncIterator[bytes], credential: Credential) -> AsyncIterator[bytes]:
        """A stream ends when the token it was asked for with is revoked, or comes to its end."""
        over = asyncio.ensure_future(self._end_of(credential.id))
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

    async def _end_of(self, token_id: str) -> None:
        """Returns when a token is no longer good."""
        revoked = asyncio.Event()
        self._streams.setdefault(token_id, set()).add(revoked)
        try:
            while (left := self._credentials.seconds_left(token_id)) > 0:
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

    async def _serve(self, route: Route, request: Request) -> Reply:
        try:
            if self.repeats is not None and b"idempotency-key" in request.headers and route.repeatable:
                return await self.repeats.answer(request, route.handler)
            return await route.handler(request)
        except Problem as problem:
            return problem.reply()
        except Exception:
            request.id = request.id or new_request_id()
            log.exception("%s %s failed (request %s)", route.method, route.path, request.id)
            return Problem(500, "internal", f"the gateway failed; its log has request {request.id}").reply()

    # -- a client that sends the same head again ------------------------------------------------------------

    def admission(self, scope: Scope) -> Admission | None:
        """As whom every request with this head is admitted; None where it depends on more than the head."""
        try:
            headers = self._admit(scope)
            route, _ = self._router.find(scope["method"], scope["path"])
        except Problem:
            return None
        secret = _secret(headers)
        length = headers.get(b"content-length", b"")
        credential = OWNER if secret is None and self._credentials.open else self._credentials.recognise(secret or "")
        if (
            route is None
            or credential is None
            or route.scope is None
            or not credential.may(route.scope)
            or (credential.narrowed and not route.narrow)
            or not length.isdigit()
            or not headers.get(b"content-type", JSON).startswith(JSON)
            or not _PLAIN_HEADERS.isdisjoint(headers)
        ):
            return None
        return Admission(secret, credential, int(length))

    def still_admits(self, admission: Admission) -> bool:
        if admission.secret is None:
            return self._credentials.open
        return self._credentials.recognise(admission.secret) is admission.credential

    # -- the node socket asks these itself: it is not behind ASGI ------------------------------------------

    def admit_node(self, scope: Scope) -> None:
        """Raises Problem for an upgrade that may not even present a token."""
        self._admit(scope)
        if scope["path"] not in (NODE_SOCKET, FILES_SOCKET):
            raise Problem(404, "not_found", f"there is no socket at {scope['path'][:200]}")
        self._throttle.check(scope)

    def node_failed(self, scope: Scope) -> None:
        self._throttle.failed(scope)

    # -- the checks -------------------------------------------------------------------------------------

    def _admit(self, scope: Scope) -> dict[bytes, bytes]:
        """The headers of a request that is addressed to us, by us. Raises Problem."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(headers) != len(scope["headers"]):
            _refuse_repeats(scope)
        host = headers.get(b"host", b"")
        if host not in self._known_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None and not self._own_origin(scope, origin, host):
            raise Problem(403, "origin_not_allowed", f"pages of {_shown(origin)} may not use this gateway")
        return headers

    def _check_host(self, host: bytes) -> None:
        # A page can make a name of its own point at this machine, but not make the browser send another Host.
        # Addresses cannot be rebound, so they are always fine.
        name = _host_name(host.decode("latin-1"))
        if not (_is_address(name) or name == "localhost" or name in self._settings.hosts):
            raise Problem(
                403,
                "host_not_allowed",
                f"this gateway is not known as {_shown(host)}; add the name to [gateway] hosts to allow it",
            )
        if len(self._known_hosts) < 64:
            self._known_hosts.add(host)

    def _own_origin(self, scope: Scope, origin: bytes, host: bytes) -> bool:
        text = origin.decode("latin-1").rstrip("/")
        if text in self._settings.origins:
            return True
        try:
            parts = urlsplit(text)
        except ValueError:
            return False
        scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
        return parts.scheme == scheme and parts.netloc.encode("latin-1") == host and bool(parts.netloc)

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes], method: str) -> Credential:
        secret = _secret(headers)
        if secret is not None:
            self._throttle.check(scope)
            credential = self._credentials.recognise(secret)
            if credential is not None:
                self._throttle.succeeded(scope)
                return credential
            self._throttle.failed(scope)
            if not self._credentials.open:
                raise _unauthorized("this token is not known here")
        session = _cookie(headers, self._sessions.cookie)
        if session is not None and session in self._sessions:
            _require_json(headers, method)
            return OWNER
        if self._credentials.open:
            _require_json(headers, method)
            return OWNER
        self._tokenless.check(scope)
        self._tokenless.failed(scope)
        raise _unauthorized("a token is needed: Authorization: Bearer, or X-API-Key")


async def _veiled(pieces: AsyncIterator[bytes], known: KnownSecrets) -> AsyncIterator[bytes]:
    veil = Veil(known)
    async for piece in pieces:
        if shown := veil.feed(piece):
            yield shown
    if rest := veil.end():
        yield rest


def _refuse_repeats(scope: Scope) -> None:
    # Of two, a proxy may have checked one and we would believe the other.
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
    # A form on any page can send these without asking; it cannot send this content type. Nor PUT, of any type.
    if method not in ("GET", "HEAD", "DELETE", "PUT") and not headers.get(b"content-type", b"").startswith(
        b"application/json"
    ):
        raise Problem(415, "unsupported_media_type", "send Content-Type: application/json")


def _unauthorized(message: str) -> Problem:
    return Problem(401, "unauthorized", message, headers=[(b"www-authenticate", b"Bearer")])


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])
