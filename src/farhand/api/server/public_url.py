"""The address under which clients see this gateway."""

from __future__ import annotations

from urllib.parse import urlsplit

from farhand.api.server.origins import parse_host

PROTECTED_RESOURCE = "/.well-known/oauth-protected-resource/mcp"


class PublicUrl:
    """Returns the base URL of a request: as it was addressed, or the public one if a proxy passed it on."""

    def __init__(self, setting: str = "") -> None:
        """Raises ValueError if `setting` is not a URL such as `https://gateway.example/prefix`."""
        self._url = setting.rstrip("/")
        self._host = None
        if setting:
            parts = urlsplit(setting)
            if parts.scheme not in ("http", "https") or parts.query or parts.fragment or "@" in parts.netloc:
                raise ValueError(f"[gateway] public_url: {setting!r} is not a URL such as 'https://gateway.example'")
            try:
                self._host = parse_host(parts.netloc).name
            except ValueError:
                raise ValueError(f"[gateway] public_url: {parts.netloc!r} is not a host name") from None

    def base(self, scheme: str, host: str) -> str:
        """Return the base URL, without a trailing slash; `host` is a Host header that the guard admitted."""
        if self._host is not None and parse_host(host).name == self._host:
            return self._url
        return f"{scheme}://{host.lower()}"

    def challenge(self, scheme: str, host: str, *, invalid: bool) -> bytes:
        """Return the `WWW-Authenticate` header that tells an MCP client where to get an access token."""
        error = 'error="invalid_token", ' if invalid else ""
        return f'Bearer {error}resource_metadata="{self.base(scheme, host)}{PROTECTED_RESOURCE}"'.encode()
