"""Sign a browser in, and serve the console page."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import PurePath

import msgspec

from farhand.api.server.browser_sessions import BrowserSessions
from farhand.api.server.http import Problem, Reply, Request, copied, invalid
from farhand.api.server.router import Handler, Query, Route, route
from farhand.gateway.access.credentials import Scope

_PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    b"font-src 'self' data:; connect-src 'self'; manifest-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLAIN_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CONSENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# A relative address of printable ASCII, which cannot lead elsewhere or end the header.
_CONSENT_PAGE = re.compile(r"oauth/authorize\?[!$-;=?-\[\]^_a-z{|}~]{0,8192}")
# Their names contain a hash of their content.
_IMMUTABLE = (b"cache-control", b"public, max-age=31536000, immutable")
_PACKAGE = "farhand.console"
# The output of the console's build, see hatch_build.py.
_BUILT = "static"
_ASSETS = "assets"
_KINDS = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".png": b"image/png",
    ".svg": b"image/svg+xml",
    ".webmanifest": b"application/manifest+json",
}
_BUILT_FILES = {
    "/": "index.html",
    "/console.svg": "console.svg",
    "/icon-192.png": "icon-192.png",
    "/icon-512.png": "icon-512.png",
    "/manifest.webmanifest": "manifest.webmanifest",
}
_FILES = {"/docs": "docs.html", "/docs.js": "docs.js", "/docs.css": "docs.css"}
_CONSENT_FILES = {
    "/oauth/authorize": "consent.html",
    "/oauth/consent.js": "consent.js",
    "/oauth/consent.css": "consent.css",
}
# What `/` shows when the console was not built.
_UNBUILT = "unbuilt.html"


class SignInLink(msgspec.Struct):
    path: str


class SessionView(msgspec.Struct):
    id: str
    created_at: int
    last_used_at: int
    expires_at: int
    address: str
    user_agent: str
    # The credential it acts as.
    credential: str
    # Whether this request came from it.
    current: bool


class SessionList(msgspec.Struct):
    sessions: list[SessionView]
    count: int


class EndedSessions(msgspec.Struct):
    ended: int


class ConsoleRoutes:
    def __init__(self, sessions: BrowserSessions) -> None:
        self._sessions = sessions

    @route(
        "GET /signin",
        None,
        "Sign a browser in by a one-time link.",
        status=303,
        media=(),
        query=(
            Query("code", "The code of the link, or the whole link.", required=True),
            Query("next", "`oauth/authorize?…`: the page to open then, instead of the console."),
        ),
        also={401: "Used before, or expired."},
    )
    async def sign_in(self, request: Request) -> Reply:
        """Exchange the one-time code of the sign-in link for a session."""
        # A HEAD comes from a program that checks the link, such as a chat client; it must not use the link up.
        signed_in = None
        if request.method == "GET":
            agent = request.header(b"user-agent") or ""
            signed_in = await self._sessions.redeem(_code(request.query("code") or ""), request.address, agent)
        if signed_in is None:
            if "text/html" in (request.header(b"accept") or ""):
                return _page("/", status=401)  # a person clicked: the page says what to do
            raise Problem(401, "unauthorized", "this sign-in link was used before or has expired; get a new one")
        # The fragment stays in the browser. It is relative, so that it also works behind a proxy with a path prefix.
        location = f"./{_next(request.query('next') or '')}#page={signed_in.page_secret}"
        headers = [(b"location", location.encode()), (b"set-cookie", signed_in.cookie.encode()), *_headers()]
        return Reply(b"", status=303, content_type=b"text/plain", headers=headers, bare=True)

    @route("POST /v1/signin", Scope.ADMIN, "Create a sign-in link.", status=201)
    async def link(self, request: Request) -> SignInLink:
        return SignInLink(f"/signin?code={await self._sessions.stored_code(request.credential.id)}")

    @route("POST /v1/signout", Scope.ADMIN, "End the console session that sends this request.", answer=EndedSessions)
    async def sign_out(self, request: Request) -> Reply:
        if request.session_id is None:
            raise invalid("this request belongs to no console session")
        await self._sessions.end(request.session_id)
        cookie = (b"set-cookie", self._sessions.expired_cookie.encode())
        return Reply(msgspec.json.encode(EndedSessions(1)), headers=[cookie])

    @route(
        "GET /v1/console/sessions", Scope.ADMIN, "Browsers that are signed in to the console, those used last first."
    )
    async def listed(self, request: Request) -> SessionList:
        views = [
            copied(
                SessionView,
                session,
                last_used_at=last_used_at,
                expires_at=expires_at,
                credential=session.made_by,
                current=session.id == request.session_id,
            )
            for session, last_used_at, expires_at in self._sessions.listed()
        ]
        return SessionList(views, len(views))

    @route("DELETE /v1/console/sessions", Scope.ADMIN, "End every console session.")
    async def end_all(self, _request: Request) -> EndedSessions:
        return EndedSessions(sum([await self._sessions.end(session.id) for session, _, _ in self._sessions.listed()]))

    @route("DELETE /v1/console/sessions/{session_id}", Scope.ADMIN, "End a console session.")
    async def end(self, request: Request) -> EndedSessions:
        session_id = request.params["session_id"]
        if not await self._sessions.end(session_id):
            reason = f"there is no console session {session_id[:100]!r}; GET /v1/console/sessions lists them"
            raise Problem(404, "not_found", reason)
        return EndedSessions(1)


def _code(given: str) -> str:
    """Return the code of a sign-in link, which people paste as a whole."""
    return given.strip().rpartition("code=")[2].partition("&")[0]


def _next(page: str) -> str:
    """Return the page after signing in: that of an OAuth request, or else the console."""
    return page if _CONSENT_PAGE.fullmatch(page) else ""


def page_routes() -> list[Route]:
    """Return the routes of the files of the console and the consent page: public, since only the API knows anything."""
    fixed = [_route(path, _served, name) for path, name in (_BUILT_FILES | _FILES | _CONSENT_FILES).items()]
    return [*fixed, _route("/assets/{name}", _asset, "assets.js")]


def _route(path: str, handler: Handler, name: str) -> Route:
    media = _kind(name).decode().partition(";")[0]
    summary = f"{path.strip('/') or 'index.html'} of the console."
    if path in _CONSENT_FILES:
        summary = f"{name} of the OAuth consent page."
    return Route(method="GET", path=path, scope=None, summary=summary, handler=handler, media=(media,))


async def _served(request: Request) -> Reply:
    return _page(request.path)


async def _asset(request: Request) -> Reply:
    name = request.params["name"]
    folder = resources.files(_PACKAGE).joinpath(_BUILT, _ASSETS)
    # Compared with the names in the folder, so that no spelling of a path leads out of it.
    found = next((file for file in folder.iterdir() if file.name == name), None) if folder.is_dir() else None
    if found is None:
        raise Problem(404, "not_found", f"the console has no file {name[:100]!r}; reload the page")
    return Reply(found.read_bytes(), content_type=_kind(name), headers=[_IMMUTABLE, *_headers()])


def _page(path: str, status: int = 200) -> Reply:
    package = resources.files(_PACKAGE)
    if (name := _FILES.get(path)) is not None:
        return Reply(package.joinpath(name).read_bytes(), content_type=_kind(name), headers=_headers(_PLAIN_POLICY))
    if (name := _CONSENT_FILES.get(path)) is not None:
        headers = [*_headers(_CONSENT_POLICY), (b"x-frame-options", b"DENY")]
        return Reply(package.joinpath(name).read_bytes(), content_type=_kind(name), headers=headers)
    name = _BUILT_FILES[path]
    file = package.joinpath(_BUILT, name)
    if not file.is_file():
        if path != "/":
            raise Problem(404, "not_found", f"{path} does not exist: the console was not built")
        name, file = _UNBUILT, package.joinpath(_UNBUILT)
    return Reply(file.read_bytes(), status=status, content_type=_kind(name), headers=_headers())


def _kind(name: str) -> bytes:
    return _KINDS.get(PurePath(name).suffix, b"application/octet-stream")


def _headers(policy: bytes = _PAGE_POLICY) -> list[tuple[bytes, bytes]]:
    return [(b"content-security-policy", policy), (b"referrer-policy", b"no-referrer")]
