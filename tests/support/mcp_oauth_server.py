"""A remote MCP server with OAuth, on the official package.

`python -m tests.support.mcp_oauth_server PORT [SECONDS [ACCEPTED]]`
It is its own authorization server and consents to everything. Access tokens are announced to be valid for SECONDS
(default 3600) and accepted for ACCEPTED (default: a minute longer); a refresh token is good once.
"""

from __future__ import annotations

import secrets
import sys
import time

from mcp.server.auth.provider import AccessToken, AuthorizationCode, AuthorizationParams, RefreshToken
from mcp.server.auth.provider import construct_redirect_uri as redirected
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

port = int(sys.argv[1])
seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 3600
accepted = int(sys.argv[3]) if len(sys.argv) > 3 else seconds + 60
url = f"http://127.0.0.1:{port}"


class Provider:
    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        assert client_info.client_id is not None
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        code = secrets.token_urlsafe(20)
        self.codes[code] = AuthorizationCode(
            code=code,
            client_id=client.client_id or "",
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            expires_at=time.time() + 60,
            scopes=params.scopes or [],
            code_challenge=params.code_challenge,
            resource=params.resource,
        )
        return redirected(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        del self.codes[authorization_code.code]
        return self.issue(client.client_id or "", authorization_code.resource)

    def issue(self, client_id: str, resource: str | None) -> OAuthToken:
        token, again = f"access-{secrets.token_urlsafe(20)}", f"refresh-{secrets.token_urlsafe(20)}"
        expires = int(time.time()) + accepted
        self.access[token] = AccessToken(
            token=token, client_id=client_id, scopes=[], expires_at=expires, resource=resource
        )
        self.refresh[again] = RefreshToken(token=again, client_id=client_id, scopes=[])
        return OAuthToken(access_token=token, refresh_token=again, expires_in=seconds, token_type="Bearer")

    async def load_refresh_token(self, client: OAuthClientInformationFull, refresh_token: str) -> RefreshToken | None:
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        del self.refresh[refresh_token.token]
        return self.issue(client.client_id or "", f"{url}/mcp")

    async def load_access_token(self, token: str) -> AccessToken | None:
        found = self.access.get(token)
        return found if found is not None and (found.expires_at or 0) > time.time() else None

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access.pop(token.token, None)


server = MCPServer(
    "private",
    auth_server_provider=Provider(),  # type: ignore[arg-type]
    auth=AuthSettings(
        issuer_url=url,  # type: ignore[arg-type]
        resource_server_url=f"{url}/mcp",  # type: ignore[arg-type]
        client_registration_options=ClientRegistrationOptions(enabled=True),
    ),
)


@server.tool()
def whisper() -> str:
    """Return something private."""
    return "only for friends"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=port)
