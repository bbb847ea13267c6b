"""OAuth clients: their redirect addresses, and metadata documents that name a client by its URL."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from farhand.protocol.errors import FarhandError

MAX_URI: Final = 2048
MAX_URIS: Final = 10
# Of all redirect addresses of a client, in characters.
MAX_URI_CHARS: Final = 4096
MAX_NAME: Final = 100
MAX_DOCUMENT_BYTES: Final = 16 * 1024
FETCH_SECONDS: Final = 5.0
# Schemes that a browser or the operating system handles itself.
_REFUSED_SCHEMES: Final = frozenset(
    {"about", "blob", "chrome", "data", "file", "ftp", "javascript", "mailto", "view-source", "vbscript", "ws", "wss"}
)
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{1,60}")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class OAuthError(FarhandError):
    """A request that the authorization server refuses, with the error code of RFC 6749."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class ClientMetadata(msgspec.Struct):
    """What a client says of itself (RFC 7591). Untrusted text."""

    redirect_uris: list[str] = []
    client_name: str | None = None
    token_endpoint_auth_method: str | None = None
    client_id: str | None = None
    grant_types: list[str] | None = None
    response_types: list[str] | None = None


def check_redirect_uris(uris: list[str]) -> None:
    """Raise OAuthError unless each is an address to which codes may be sent."""
    if not 1 <= len(uris) <= MAX_URIS:
        raise OAuthError("invalid_redirect_uri", f"redirect_uris has 1 to {MAX_URIS} addresses, not {len(uris)}")
    if sum(map(len, uris)) > MAX_URI_CHARS:
        raise OAuthError("invalid_redirect_uri", f"redirect_uris has at most {MAX_URI_CHARS} characters in all")
    for uri in uris:
        parts = _split(uri)
        if parts is None or not _acceptable(parts):
            raise OAuthError(
                "invalid_redirect_uri",
                f"{uri[:200]!r} is not a redirect address: use https, http to this machine (127.0.0.1, [::1] or "
                "localhost), or a scheme of the client's own",
            )


def matches_redirect_uri(asked: str, registered: list[str]) -> bool:
    """Return whether an address is a registered one: exactly, but for the port on the client's own machine."""
    if asked in registered:
        return True
    wanted = _split(asked)
    return (
        wanted is not None and _is_loopback(wanted) and any(_same_but_port(wanted, _split(one)) for one in registered)
    )


def display_name(given: str | None, fallback: str) -> str:
    """Return a client's name as one printable line."""
    shown = " ".join("".join(one if one.isprintable() else " " for one in given or "").split())
    return shown[:MAX_NAME] or fallback[:MAX_NAME]


def is_document_url(client_id: str) -> bool:
    return client_id.startswith("https://")


def _split(uri: str) -> SplitResult | None:
    if len(uri) > MAX_URI or not uri.isascii() or any(one.isspace() or not one.isprintable() for one in uri):
        return None
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _acceptable(parts: SplitResult) -> bool:
    if "#" in parts.geturl() or "\\" in parts.geturl() or parts.username is not None or parts.password is not None:
        return False
    if parts.scheme == "https":
        return bool(parts.hostname)
    if parts.scheme == "http":
        return _is_loopback(parts)
    return bool(_SCHEME.fullmatch(parts.scheme)) and parts.scheme not in _REFUSED_SCHEMES


def _is_loopback(parts: SplitResult) -> bool:
    return parts.scheme == "http" and parts.hostname in _LOOPBACK and parts.username is None


def _same_but_port(one: SplitResult, other: SplitResult | None) -> bool:
    if other is None or not _is_loopback(other):
        return False
    return (one.hostname, one.path, one.query, one.fragment) == (
        other.hostname,
        other.path,
        other.query,
        other.fragment,
    )


def is_public_address(text: str) -> bool:
    """Return whether an IP address belongs to the public internet, and leads to no private one by translation."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public_address(str(address.ipv4_mapped))
        if address in _NAT64 or address.sixtofour is not None or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast


class ClientDocuments:
    """Fetches client metadata documents: from public addresses only, without redirects, and only a little at a time."""

    def __init__(
        self,
        *,
        permitted: Callable[[str], bool] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`permitted` returns whether an IP address may be asked, by default a public one. `tls` replaces the usual
        trust in certificates.
        """
        self._permitted = permitted or is_public_address
        self._tls = tls

    async def fetch(self, url: str) -> ClientMetadata:
        """Return the metadata of the client that a URL names. Raises OAuthError."""
        parts = _split(url)
        if parts is None or parts.scheme != "https" or not parts.hostname or parts.path in ("", "/"):
            raise _unusable(url, "it is not an https URL with a path")
        if parts.username is not None or "#" in url or any(part in (".", "..") for part in parts.path.split("/")):
            raise _unusable(url, "it has a user name, a fragment or a dot segment")
        address = await self._resolve(url, parts.hostname, parts.port or 443)
        body = await self._get(url, parts, address)
        try:
            found = msgspec.json.decode(body, type=ClientMetadata)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _unusable(url, f"its document is not client metadata: {error}") from None
        if found.client_id != url:
            raise _unusable(url, "its document has another client_id")
        if found.token_endpoint_auth_method not in (None, "none"):
            raise _unusable(url, "its token_endpoint_auth_method is not 'none'")
        check_redirect_uris(found.redirect_uris)
        return found

    async def _resolve(self, url: str, host: str, port: int) -> str:
        """Return an address of the host, so that the name is not resolved a second time."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise _unusable(url, f"its host {host!r} is not known") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(self._permitted(address) for address in addresses):
            raise _unusable(url, f"its host {host!r} is not a public address")
        return addresses[0]

    async def _get(self, url: str, parts: SplitResult, address: str) -> bytes:
        import httpx2  # noqa: PLC0415 (takes long; few gateways need it)

        shown = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{shown}:{parts.port or 443}").geturl()
        headers = {"host": parts.netloc, "accept": "application/json"}
        verify: Any = True if self._tls is None else self._tls
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                httpx2.AsyncClient(
                    verify=verify, follow_redirects=False, trust_env=False, timeout=FETCH_SECONDS
                ) as client,
                client.stream("GET", target, headers=headers, extensions={"sni_hostname": parts.hostname}) as answer,
            ):
                if answer.status_code != 200:
                    raise _unusable(url, f"its server answered {answer.status_code}")
                body = b""
                async for piece in answer.aiter_bytes(4096):
                    body += piece
                    if len(body) > MAX_DOCUMENT_BYTES:
                        raise _unusable(url, f"its document has more than {MAX_DOCUMENT_BYTES} bytes")
                return body
        except (httpx2.HTTPError, TimeoutError) as error:
            raise _unusable(url, f"its document cannot be fetched: {error or 'no answer in time'}") from None


def _unusable(url: str, reason: str) -> OAuthError:
    return OAuthError("invalid_client", f"the client {url[:200]!r} cannot be used: {reason}")
