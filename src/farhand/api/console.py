"""Signing a browser in, and the page it then sees."""

from __future__ import annotations

from importlib import resources

import msgspec

from farhand.api.about import About, Query
from farhand.api.http import Problem, Reply, Request
from farhand.api.router import Route
from farhand.api.sessions import Sessions
from farhand.gateway.credentials import Scope

_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [(b"content-security-policy", _POLICY), (b"referrer-policy", b"no-referrer")]
_FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/console.js": ("console.js", b"text/javascript; charset=utf-8"),
    "/console.css": ("console.css", b"text/css; charset=utf-8"),
    "/console.svg": ("console.svg", b"image/svg+xml"),
    "/docs": ("docs.html", b"text/html; charset=utf-8"),
    "/docs.js": ("docs.js", b"text/javascript; charset=utf-8"),
    "/docs.css": ("docs.css", b"text/css; charset=utf-8"),
}


class SignInLink(msgspec.Struct):
    path: str


def console_routes(sessions: Sessions) -> list[Route]:
    async def sign_in(request: Request) -> Reply:
        """Trade the one-time code of the sign-in link for a cookie no script can read."""
        # A HEAD is somebody looking whether the link is there, a chat program for one; it must not use it up.
        cookie = sessions.redeem(request.query("code") or "") if request.method == "GET" else None
        if cookie is None:
            if "text/html" in (request.header(b"accept") or ""):
                return _file("/", status=401)  # a person clicked: the page says what to do
            raise Problem(401, "unauthorized", "this sign-in link was used before or is too old; get a new one")
        headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), *_HEADERS]
        return Reply(b"", status=303, content_type=b"text/plain", headers=headers)

    async def link(_request: Request) -> Reply:
        return Reply(b'{"path":"/signin?code=%b"}' % sessions.new_code().encode(), status=201)

    async def page(request: Request) -> Reply:
        return _file(request.path)

    return [
        Route(
            "GET",
            "/signin",
            None,
            sign_in,
            about=About(
                "Sign a browser in by a one-time link.",
                status=303,
                media=(),
                query=(Query("code", "The code of the link."),),
                also={401: "Used before, or too old."},
            ),
        ),
        Route(
            "POST", "/v1/signin", Scope.ADMIN, link, about=About("A new sign-in link.", status=201, answer=SignInLink)
        ),
        *(
            Route("GET", path, None, page, about=About(f"{name} of the console.", media=(_media(kind),)))
            for path, (name, kind) in _FILES.items()
        ),
    ]


def _media(content_type: bytes) -> str:
    return content_type.decode().partition(";")[0]


def _file(path: str, status: int = 200) -> Reply:
    name, content_type = _FILES[path]
    body = resources.files("farhand.console").joinpath(name).read_bytes()
    return Reply(body, status=status, content_type=content_type, headers=list(_HEADERS))
