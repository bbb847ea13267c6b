"""OAuth towards remote MCP servers: stored tokens, and logins that a person completes in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from farhand.machine.files.private_files import replace_private
from farhand.protocol.errors import FarhandError
from farhand.protocol.redaction import KnownSecrets

if TYPE_CHECKING:
    from mcp.client.auth import OAuthClientProvider
    from mcp.client.auth.oauth2 import OAuthContext
    from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthToken

FOLDER: Final = "mcp"
# How long a person may take to log in.
LOGIN_SECONDS: Final = 600.0
MAX_URL_CHARS: Final = 8192
# The part of its life in which an access token is used.
USED_PART: Final = 0.8
PAST: Final = 1.0


class LoginNeeded(FarhandError):
    """The server requires a login, and none is under way."""


class LoginError(FarhandError):
    """A login that cannot be completed."""


class TokenFile:
    """The tokens and the registration for one server, in a private file of the home. The contract of `mcp`."""

    def __init__(self, path: Path, secrets: KnownSecrets) -> None:
        self._path = path
        self._secrets = secrets
        self._context: OAuthContext | None = None
        self._hide(self._read())

    def attach(self, context: OAuthContext) -> None:
        """Give an authentication what it does not ask for: when the token expires, and where to refresh it."""
        from mcp.shared.auth import OAuthMetadata  # noqa: PLC0415

        stored = self._read()
        self._context = context
        context.token_expiry_time = stored.get("expires_at")
        if isinstance(stored.get("metadata"), dict):
            context.oauth_metadata = OAuthMetadata.model_validate(stored["metadata"])

    def expire(self) -> bool:
        """Refresh the token at the next connection; return False if that cannot help or was tried already."""
        stored = self._read()
        if "refresh_token" not in stored.get("tokens", {}) or stored.get("expires_at") == PAST:
            return False
        self._write({**stored, "expires_at": PAST})
        return True

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken  # noqa: PLC0415

        stored = self._read().get("tokens")
        return None if stored is None else OAuthToken.model_validate(stored)

    async def set_tokens(self, tokens: OAuthToken) -> None:
        stored = {**self._read(), "tokens": tokens.model_dump(mode="json", exclude_none=True), "expires_at": None}
        if tokens.expires_in is not None:  # early, so that the server does not refuse it first
            stored["expires_at"] = time.time() + tokens.expires_in * USED_PART
        if self._context is not None:
            self._context.token_expiry_time = stored["expires_at"]
            metadata = self._context.oauth_metadata
            stored["metadata"] = None if metadata is None else metadata.model_dump(mode="json", exclude_none=True)
        self._write(stored)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull  # noqa: PLC0415

        stored = self._read().get("client")
        return None if stored is None else OAuthClientInformationFull.model_validate(stored)

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._write({**self._read(), "client": client_info.model_dump(mode="json", exclude_none=True)})

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        return "tokens" in self._read()

    def _read(self) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self, value: dict[str, Any]) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._hide(value)
        replace_private(self._path, msgspec.json.encode(value))

    def _hide(self, value: dict[str, Any]) -> None:
        """Mask the secrets of the file wherever the gateway shows text."""
        held = [value.get("tokens", {}).get(name) for name in ("access_token", "refresh_token")]
        held.append(value.get("client", {}).get("client_secret"))
        self._secrets.add(*(secret for secret in held if isinstance(secret, str)))


class Login:
    """The login to one server: at most one is under way."""

    def __init__(self, tokens: TokenFile, server_url: str, redirect_url: str) -> None:
        self.tokens = tokens
        self._server_url = server_url
        self._redirect_url = redirect_url
        # Set while a person may be asked.
        self._wanted = False
        # The server refused a connection because it requires a login.
        self.needed = False
        self._url: asyncio.Future[str] | None = None
        self._answer: asyncio.Future[AuthorizationCodeResult] | None = None
        self.wake = asyncio.Event()

    def provider(self) -> OAuthClientProvider:
        """Return the authentication of the HTTP client."""
        from mcp.client.auth import OAuthClientProvider  # noqa: PLC0415
        from mcp.shared.auth import OAuthClientMetadata  # noqa: PLC0415
        from pydantic import AnyUrl  # noqa: PLC0415

        provider = OAuthClientProvider(
            self._server_url,
            OAuthClientMetadata(
                client_name="Farhand",
                redirect_uris=[AnyUrl(self._redirect_url)],
                grant_types=["authorization_code", "refresh_token"],
                response_types=["code"],
            ),
            self.tokens,
            redirect_handler=self._redirect,
            callback_handler=self._callback,
        )
        self.tokens.attach(provider.context)
        return provider

    @property
    def under_way(self) -> bool:
        return self._answer is not None and not self._answer.done()

    async def begin(self) -> str:
        """Connect again and return the address at which a person logs in. Raises LoginError."""
        loop = asyncio.get_running_loop()
        self._wanted = True
        self._url = loop.create_future()
        self._answer = loop.create_future()
        self.wake.set()
        try:
            async with asyncio.timeout(60.0):
                return await asyncio.shield(self._url)
        except TimeoutError:
            raise LoginError("the server did not ask for a login within 60 s; see `farhand mcp list`") from None

    def connected(self) -> None:
        """Note that the server accepted the connection: no login is needed."""
        self._wanted = self.needed = False
        if self._url is not None and not self._url.done():
            self._url.set_exception(LoginError("no login is needed: the server is connected"))
            self._url.exception()  # it may have no reader

    def matches(self, state: str) -> bool:
        """Whether a login with this state is under way."""
        return self.under_way and self._url is not None and self._url.done() and self._state == state

    def complete(self, url: str) -> None:
        """Take the address to which the browser was redirected. Raises LoginError."""
        from mcp.shared.auth import AuthorizationCodeResult  # noqa: PLC0415

        if len(url) > MAX_URL_CHARS:
            raise LoginError(f"the address has more than {MAX_URL_CHARS} characters")
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        if not self.matches(query.get("state", "")) or self._answer is None:
            raise LoginError("no login with this state is under way; begin with `farhand mcp login NAME`")
        if "error" in query:
            said = f"{query['error']}: {query.get('error_description', '')}"[:500]
            self._answer.set_exception(LoginError(f"the authorization server refused the login: {said}"))
        elif "code" in query:
            self._answer.set_result(
                AuthorizationCodeResult(code=query["code"], state=query["state"], iss=query.get("iss"))
            )
        else:
            raise LoginError("the address has no code; copy the whole address of the page")

    @property
    def _state(self) -> str:
        assert self._url is not None
        with contextlib.suppress(Exception):
            return parse_qs(urlsplit(self._url.result()).query).get("state", [""])[0]
        return ""

    async def _redirect(self, url: str) -> None:
        if not self._wanted or self._url is None:
            self.needed = not self.tokens.expire()
            raise LoginNeeded("the server requires a login")
        if urlsplit(url).scheme not in ("http", "https"):
            raise LoginError(f"the authorization server has an address that no browser opens: {url[:200]!r}")
        if not self._url.done():
            self._url.set_result(url)

    async def _callback(self) -> AuthorizationCodeResult:
        assert self._answer is not None
        self._wanted, self.needed = False, True
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                return await self._answer
        except TimeoutError:
            raise LoginError(f"the login was not completed within {LOGIN_SECONDS:.0f} s") from None
