"""What OAuth clients talk to: metadata, `/oauth/register`, `/oauth/token` and `/oauth/revoke`."""

from __future__ import annotations

import base64
import binascii
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_plus

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.public_url import PROTECTED_RESOURCE, PublicUrl
from farhand.api.server.router import FORM, JSON, route
from farhand.gateway.access.oauth import AUTH_METHODS, LEVELS, OAuth
from farhand.gateway.access.oauth_clients import ClientMetadata, OAuthError

MAX_FORM_BYTES: Final = 16 * 1024
MAX_FIELDS: Final = 20
REFUSED: Final = {400: "An error of RFC 6749.", 401: "The client is not known, or its secret is wrong."}
form_route = partial(route, takes=FORM, media=(JSON,), also=REFUSED, guessable=True)


class EndpointRoutes:
    def __init__(self, oauth: OAuth, public_url: PublicUrl) -> None:
        self._oauth = oauth
        self._public_url = public_url

    @route("GET /.well-known/oauth-protected-resource", None, "Where to get access tokens for /mcp (RFC 9728).")
    @route(f"GET {PROTECTED_RESOURCE}", None, "Where to get access tokens for /mcp (RFC 9728).")
    async def resource(self, request: Request) -> dict[str, Any]:
        base = base_of(request, self._public_url)
        return {
            "resource": f"{base}/mcp",
            "authorization_servers": [base],
            "scopes_supported": list(LEVELS),
            "bearer_methods_supported": ["header"],
            "resource_name": "Farhand",
        }

    @route("GET /.well-known/oauth-authorization-server", None, "Metadata of the authorization server (RFC 8414).")
    async def server(self, request: Request) -> dict[str, Any]:
        base = base_of(request, self._public_url)
        return {
            "issuer": base,
            "authorization_endpoint": f"{base}/oauth/authorize",
            "token_endpoint": f"{base}/oauth/token",
            "registration_endpoint": f"{base}/oauth/register",
            "revocation_endpoint": f"{base}/oauth/revoke",
            "scopes_supported": list(LEVELS),
            "response_types_supported": ["code"],
            "response_modes_supported": ["query"],
            "grant_types_supported": ["authorization_code", "refresh_token"],
            "token_endpoint_auth_methods_supported": list(AUTH_METHODS),
            "revocation_endpoint_auth_methods_supported": list(AUTH_METHODS),
            "code_challenge_methods_supported": ["S256"],
            "client_id_metadata_document_supported": True,
            "authorization_response_iss_parameter_supported": True,
        }

    @route(
        "POST /oauth/register",
        None,
        "Register an OAuth client (RFC 7591).",
        status=201,
        also={400: "Invalid metadata."},
        errors=(429,),
        registers=True,
    )
    async def register(self, _request: Request, metadata: ClientMetadata) -> Reply:
        try:
            client, secret = await self._oauth.register(metadata)
        except OAuthError as error:
            return _refusal(error)
        answer = {
            "client_id": client.client_id,
            "client_id_issued_at": client.created_at // 1000,
            "client_name": client.name,
            "redirect_uris": metadata.redirect_uris,
            "token_endpoint_auth_method": client.auth_method,
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            **({} if secret is None else {"client_secret": secret, "client_secret_expires_at": 0}),
        }
        return json_reply(answer, 201, bare=True)

    @form_route("POST /oauth/token", None, "Get access tokens.")
    async def token(self, request: Request) -> Reply:
        try:
            return json_reply(await self._oauth.exchange(await _form(request), _basic(request)), bare=True)
        except OAuthError as error:
            return _refusal(error)

    @form_route("POST /oauth/revoke", None, "Revoke access (RFC 7009).")
    async def revoke(self, request: Request) -> Reply:
        try:
            await self._oauth.revoke(await _form(request), _basic(request))
        except OAuthError as error:
            return _refusal(error)
        return json_reply({})


def base_of(request: Request, public_url: PublicUrl) -> str:
    return public_url.base(request.scheme, request.header(b"host") or "")


def _refusal(error: OAuthError) -> Reply:
    body = msgspec.json.encode({"error": error.code, "error_description": str(error)})
    headers = [(b"www-authenticate", b"Basic")] if error.status == 401 else []
    return Reply(body, status=error.status, headers=headers)


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises OAuthError, also for a field that is given twice."""
    if not (request.header(b"content-type") or "").lower().startswith(FORM):
        raise Problem(415, "unsupported_media_type", f"send Content-Type: {FORM}")
    body = await request.body()
    try:
        pairs = parse_qsl(body[: MAX_FORM_BYTES + 1].decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise OAuthError("invalid_request", "the body is not a form of at most 20 fields in UTF-8") from None
    fields = dict(pairs)
    if len(body) > MAX_FORM_BYTES or len(fields) < len(pairs):
        raise OAuthError("invalid_request", f"a form has at most {MAX_FORM_BYTES} bytes, and each field once")
    return fields


def _basic(request: Request) -> tuple[str, str] | None:
    """Return the client's id and secret from the Authorization header, if it has one."""
    scheme, _, given = (request.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, secret = base64.b64decode(given.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise OAuthError("invalid_client", "the Authorization header is not valid", status=401) from None
    return unquote_plus(name), unquote_plus(secret)
