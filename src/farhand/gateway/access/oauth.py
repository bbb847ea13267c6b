"""The authorization server for `/mcp` (OAuth 2.1).

A consent gives a client a grant: an ordinary token, restricted to machines and tools, made by the credential that
consented and ending with it. Its own secret is discarded. Access tokens have the rights of the grant, at `/mcp` alone,
for an hour; a refresh token is exchanged for a new pair once. A code or refresh token that is used twice has leaked,
so its grant is revoked. Only hashes are stored.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from farhand.gateway.access.credentials import Credential, Credentials, Scope, new_secret
from farhand.gateway.access.oauth_clients import (
    ClientDocuments,
    ClientMetadata,
    OAuthError,
    check_redirect_uris,
    display_name,
    is_document_url,
    matches_redirect_uri,
)
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.journal import EventJournal
from farhand.store.ports import Store, Tx
from farhand.store.tables.access import oauth
from farhand.store.tables.access.oauth import OAuthClient, OAuthGrant, OAuthSecret
from farhand.store.tables.access.tokens import Token, token_hash

# The scopes of grants, least powerful first; each includes those before it.
LEVELS: Final = (Scope.TOOLS_READ.value, Scope.TOOLS_WRITE.value, Scope.TOOLS_EXEC.value)
ACCESS: Final = "fha"
REFRESH: Final = "fhr"
CODE_MS: Final = 60_000
ACCESS_MS: Final = 3_600_000
REFRESH_MS: Final = 60 * 86_400_000
# How long an expired code or token stays known, so that its reuse is noticed.
KEPT_MS: Final = 86_400_000
# Clients that registered but were given no access.
MOST_UNUSED_CLIENTS: Final = 5000
UNUSED_CLIENT_MS: Final = 86_400_000
AUTH_METHODS: Final = ("none", "client_secret_post", "client_secret_basic")
MAX_STATE: Final = 2048
_CHALLENGE: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_VERIFIER: Final = re.compile(r"[A-Za-z0-9._~-]{43,128}")


class AuthorizationRequest(msgspec.Struct, frozen=True):
    """The parameters of a request to `/oauth/authorize`."""

    client_id: str = ""
    redirect_uri: str = ""
    response_type: str = ""
    code_challenge: str = ""
    code_challenge_method: str = ""
    scope: str = ""
    state: str = ""
    resource: str = ""


class CheckedAuthorization(msgspec.Struct, frozen=True):
    """A checked request: who asks, where the answer goes, and for what."""

    client: OAuthClient
    redirect_uri: str
    state: str
    challenge: str
    resource: str
    # The most powerful scope it asks for.
    scope: str


class RefusedRequest(OAuthError):
    """An invalid request whose error is sent to the client, at `redirect`."""

    def __init__(self, code: str, message: str, redirect: str) -> None:
        super().__init__(code, message)
        self.redirect = redirect


class Consent(msgspec.Struct, frozen=True):
    """What an owner consents to. Stored with the code."""

    scope: str
    resource: str
    redirect_uri: str
    challenge: str
    made_by: str
    # None: all machines, also later ones, and the gateway's own tools.
    nodes: tuple[str, ...] | None = None
    # Names of tools without their machine. None: all.
    tools: tuple[str, ...] | None = None
    expires_seconds: float | None = None


class GivenAccess(msgspec.Struct, frozen=True):
    """A client with its grants that are valid."""

    client: OAuthClient
    grants: tuple[tuple[OAuthGrant, Token], ...]


class OAuth:
    def __init__(
        self,
        database: Store,
        journal: EventJournal,
        credentials: Credentials,
        tokens: Tokens,
        documents: ClientDocuments,
        *,
        clock: Callable[[], int],
    ) -> None:
        self._database = database
        self._journal = journal
        self._credentials = credentials
        self._tokens = tokens
        self._documents = documents
        self._clock = clock
        # The grant and the expiry of access tokens that were used lately, by hash.
        self._access: dict[bytes, tuple[str, int]] = {}

    # -- clients ------------------------------------------------------------------------------------------

    async def register(self, metadata: ClientMetadata) -> tuple[OAuthClient, str | None]:
        """Return a new client and its secret, if it wants one. Raises OAuthError."""
        method = metadata.token_endpoint_auth_method or "none"
        if method not in AUTH_METHODS:
            known = ", ".join(AUTH_METHODS)
            raise OAuthError("invalid_client_metadata", f"token_endpoint_auth_method is one of {known}")
        check_redirect_uris(metadata.redirect_uris)
        secret = None if method == "none" else new_secret("fhs")
        now = self._clock()
        name = f"mcp_{secrets.token_hex(8)}"
        client = OAuthClient(
            id=name,
            client_id=name,
            name=display_name(metadata.client_name, name),
            redirect_uris=msgspec.json.encode(metadata.redirect_uris),
            auth_method=method,
            secret_hash=None if secret is None else token_hash(secret),
            created_at=now,
        )

        def write(store: Tx) -> None:
            oauth.add_client(store, client)
            oauth.evict_clients(store, now - UNUSED_CLIENT_MS, MOST_UNUSED_CLIENTS)

        await self._database.write(write)
        return client, secret

    async def listed(self) -> list[GivenAccess]:
        """Return the clients that have access."""
        clients, grants = await self._database.read(lambda tx: (oauth.consented_clients(tx), oauth.all_grants(tx)))
        valid = {token.id: token for token in await self._tokens.all() if token.revoked_at is None}
        now = self._clock()
        found = []
        for client in clients:
            given = [(one, valid[one.token_id]) for one in grants if one.client == client.id and one.token_id in valid]
            current = tuple(pair for pair in given if pair[1].expires_at is None or pair[1].expires_at > now)
            if current:
                found.append(GivenAccess(client, current))
        return found

    async def remove_client(self, name: str) -> int | None:
        """Revoke everything a client was given and forget it; return the number of grants, None if it is not known."""
        found = next((one for one in await self.listed() if one.client.id == name), None)
        if found is None:
            return None
        for grant, _ in found.grants:
            await self._tokens.revoke(grant.token_id)
        await self._journal.record(lambda tx: oauth.remove_client(tx, name), "oauth.client_removed", name, {})
        return len(found.grants)

    # -- consent ------------------------------------------------------------------------------------------

    async def check(self, request: AuthorizationRequest, resource: str) -> CheckedAuthorization:
        """Return a request of a known client; `resource` is the URL of `/mcp`.

        Raises OAuthError if the client or its redirect address is not valid, RefusedRequest for any other error.
        """
        client = await self._client(request.client_id)
        registered = msgspec.json.decode(client.redirect_uris, type=list[str])
        redirect_uri = request.redirect_uri or (registered[0] if len(registered) == 1 else "")
        if not matches_redirect_uri(redirect_uri, registered):
            raise OAuthError("invalid_request", f"the redirect_uri {redirect_uri[:200]!r} is not one of the client's")

        def refused(code: str, message: str) -> RefusedRequest:
            fields = {"error": code, "error_description": message, "iss": _issuer(resource)}
            return RefusedRequest(code, message, _redirect(redirect_uri, fields, request.state))

        if len(request.state) > MAX_STATE:
            raise OAuthError("invalid_request", f"state has at most {MAX_STATE} characters")
        if request.response_type != "code":
            raise refused("unsupported_response_type", "response_type must be code")
        if request.code_challenge_method != "S256" or not _CHALLENGE.fullmatch(request.code_challenge):
            raise refused("invalid_request", "PKCE is required: code_challenge with code_challenge_method S256")
        if request.resource and not _same_resource(request.resource, resource):
            raise refused("invalid_target", f"resource must be {resource}")
        asked = [level for level in LEVELS if level in request.scope.split()]
        scope = asked[-1] if asked else LEVELS[-1]
        return CheckedAuthorization(client, redirect_uri, request.state, request.code_challenge, resource, scope)

    async def allow(
        self,
        asked: CheckedAuthorization,
        credential: Credential,
        *,
        scope: str,
        nodes: list[str] | None,
        tools: list[str] | None,
        expires_seconds: float | None,
    ) -> str:
        """Return the address with a new code, for what the owner chose. Raises OAuthError."""
        if scope not in LEVELS or LEVELS.index(scope) > LEVELS.index(asked.scope):
            raise OAuthError("invalid_scope", f"the client asks for {asked.scope}; {scope[:50]!r} is not part of it")
        for chosen, what in ((nodes, "machine"), (tools, "tool")):
            if chosen is not None and not chosen:
                raise OAuthError("invalid_request", f"choose at least one {what}")
        if expires_seconds is not None and not 60 <= expires_seconds < 1e9:
            raise OAuthError("invalid_request", "expires_seconds must be at least 60")
        decision = Consent(
            scope,
            asked.resource,
            asked.redirect_uri,
            asked.challenge,
            credential.id,
            None if nodes is None else tuple(dict.fromkeys(nodes)),
            None if tools is None else tuple(dict.fromkeys(tools)),
            expires_seconds,
        )
        code = secrets.token_urlsafe(32)
        now = self._clock()
        row = OAuthSecret(token_hash(code), "code", asked.client.id, None, msgspec.json.encode(decision), now + CODE_MS)

        def write(store: Tx) -> None:
            oauth.consent(store, asked.client, now)
            oauth.add_secret(store, row)

        facts = {"name": asked.client.name, "credential": credential.id, "scope": scope, "nodes": nodes, "tools": tools}
        await self._journal.record(write, "oauth.consented", asked.client.id, facts)
        return _redirect(asked.redirect_uri, {"code": code, "iss": _issuer(asked.resource)}, asked.state)

    async def deny(self, asked: CheckedAuthorization, credential: Credential) -> str:
        """Return the address that reports the refusal to the client."""
        facts = {"name": asked.client.name, "credential": credential.id}
        await self._journal.record(lambda _: None, "oauth.denied", asked.client.id, facts)
        fields = {"error": "access_denied", "iss": _issuer(asked.resource)}
        return _redirect(asked.redirect_uri, fields, asked.state)

    async def _client(self, client_id: str) -> OAuthClient:
        """Return a registered client, or one that its URL describes. Raises OAuthError."""
        if is_document_url(client_id):
            metadata = await self._documents.fetch(client_id)
            return OAuthClient(
                id=f"url_{hashlib.sha256(client_id.encode()).hexdigest()[:16]}",
                client_id=client_id,
                name=display_name(metadata.client_name, urlsplit(client_id).netloc),
                redirect_uris=msgspec.json.encode(metadata.redirect_uris),
                auth_method="none",
                secret_hash=None,
                created_at=self._clock(),
            )
        found = None
        if len(client_id) <= 100:
            found = await self._database.read(lambda tx: oauth.find_client(tx, client_id))
        if found is None:
            raise OAuthError("invalid_client", f"no client {client_id[:100]!r} is registered here; register it again")
        return found

    # -- tokens -------------------------------------------------------------------------------------------

    async def exchange(self, form: Mapping[str, str], basic: tuple[str, str] | None) -> dict[str, Any]:
        """Answer a request to `/oauth/token`. Raises OAuthError."""
        client = await self._authenticated(form, basic)
        match form.get("grant_type", ""):
            case "authorization_code":
                return await self._exchange_code(client, form)
            case "refresh_token":
                return await self._refresh(client, form)
            case other:
                raise OAuthError("unsupported_grant_type", f"grant_type {other[:50]!r} is not supported")

    async def revoke(self, form: Mapping[str, str], basic: tuple[str, str] | None) -> None:
        """Revoke the grant of a client's token (RFC 7009). Raises OAuthError if the client is not authenticated."""
        client = await self._authenticated(form, basic)
        found = await self._secret(form.get("token", ""))
        if found is not None and found.client == client.id and found.token_id is not None:
            await self._tokens.revoke(found.token_id)

    async def recognise(self, secret: str) -> Credential | None:
        """Return what an access token permits at `/mcp`; None if it is not valid."""
        if not secret.startswith(f"{ACCESS}_"):
            return None
        digest = token_hash(secret)
        known = self._access.get(digest)
        if known is None:
            found = await self._secret(secret)
            if found is None or found.kind != "access" or found.token_id is None:
                return None
            known = found.token_id, found.expires_at
            self._remember(digest, known)
        token_id, expires_at = known
        if self._clock() >= expires_at or self._credentials.ended([token_id]) is not None:
            self._access.pop(digest, None)
            return None
        self._credentials.note_use(token_id)
        return self._credentials.named(token_id)

    async def _authenticated(self, form: Mapping[str, str], basic: tuple[str, str] | None) -> OAuthClient:
        client_id, secret = basic or (form.get("client_id", ""), form.get("client_secret", ""))
        found = await self._database.read(lambda tx: oauth.find_client(tx, client_id[:2048]))
        if found is None:
            raise OAuthError("invalid_client", f"no client {client_id[:100]!r} is registered here", status=401)
        if found.secret_hash is not None and not hmac.compare_digest(found.secret_hash, token_hash(secret)):
            raise OAuthError("invalid_client", "the client's secret is wrong", status=401)
        return found

    async def _exchange_code(self, client: OAuthClient, form: Mapping[str, str]) -> dict[str, Any]:
        code = await self._secret(form.get("code", ""))
        if code is None or code.kind != "code" or code.client != client.id:
            raise OAuthError("invalid_grant", "the code is not known; ask for a new one")
        decision = msgspec.json.decode(code.facts, type=Consent)
        await self._use(code, "the code")
        if self._clock() >= code.expires_at:
            raise OAuthError("invalid_grant", "the code has expired; ask for a new one")
        if form.get("redirect_uri", decision.redirect_uri) != decision.redirect_uri:
            raise OAuthError("invalid_grant", "redirect_uri is not the one the code was sent to")
        if not _verifies(form.get("code_verifier", ""), decision.challenge):
            raise OAuthError("invalid_grant", "code_verifier does not match the code_challenge")
        _check_resource(form, decision.resource)
        token = await self._grant(client, decision)
        grant = OAuthGrant(token.id, client.id, decision.resource, decision.scope, self._clock())

        def write(store: Tx) -> bool:
            oauth.add_grant(store, grant)
            return oauth.name_grant(store, code.hash, token.id)

        if not await self._database.write(write):
            await self._tokens.revoke(token.id)
            raise OAuthError("invalid_grant", "the code was used twice; authorize again")
        return await self._issue(client, grant)

    async def _grant(self, client: OAuthClient, decision: Consent) -> Token:
        nodes = decision.nodes or ()
        # A node may name a tool as it likes, also `*`; the owner agreed to that tool alone.
        tools = [glob.escape(tool) for tool in decision.tools or ()]
        names = [name for tool in tools for name in ([f"{node}__{tool}" for node in nodes] or [f"*__{tool}", tool])]
        try:
            token, _ = await self._tokens.create(
                node_id=None,
                label=f"OAuth: {client.name}",
                scopes=list(LEVELS[: LEVELS.index(decision.scope) + 1]),
                tools=names,
                nodes=nodes,
                expires_seconds=decision.expires_seconds,
                made_by=decision.made_by,
            )
        except ValueError as error:
            raise OAuthError("invalid_grant", str(error)) from None
        return token

    async def _refresh(self, client: OAuthClient, form: Mapping[str, str]) -> dict[str, Any]:
        found = await self._secret(form.get("refresh_token", ""))
        if found is None or found.kind != "refresh" or found.client != client.id or found.token_id is None:
            raise OAuthError("invalid_grant", "the refresh token is not known")
        token_id = found.token_id
        grant = await self._database.read(lambda tx: oauth.find_grant(tx, token_id))
        if grant is None or (reason := self._credentials.ended([token_id])) is not None:
            raise OAuthError("invalid_grant", "access was revoked" if grant is None else f"{reason}")
        _check_resource(form, grant.resource)
        level = LEVELS.index(grant.scope)
        if not set(form.get("scope", "").split()) <= set(LEVELS[: level + 1]):
            raise OAuthError("invalid_scope", f"the grant has only the scope {grant.scope}")
        await self._use(found, "the refresh token")
        if self._clock() >= found.expires_at:
            raise OAuthError("invalid_grant", "the refresh token has expired")
        return await self._issue(client, grant)

    async def _use(self, secret: OAuthSecret, what: str) -> None:
        """Use a code or refresh token up. A second use revokes its grant. Raises OAuthError."""
        now = self._clock()
        if await self._database.write(lambda tx: oauth.use_secret(tx, secret.hash, now)):
            return

        def reused(store: Tx) -> OAuthSecret | None:
            oauth.void_code(store, secret.hash)
            return oauth.find_secret(store, secret.hash)

        again = await self._database.write(reused)
        if again is not None and again.token_id is not None:
            facts = {"token": again.token_id, "what": what}
            await self._journal.record(lambda _: None, "oauth.reuse_detected", secret.client, facts)
            await self._tokens.revoke(again.token_id)
        raise OAuthError("invalid_grant", f"{what} was used before, so access was revoked; authorize again")

    async def _issue(self, client: OAuthClient, grant: OAuthGrant) -> dict[str, Any]:
        access, refresh = new_secret(ACCESS), new_secret(REFRESH)
        now = self._clock()

        def write(store: Tx) -> None:
            for secret, kind, life in ((access, "access", ACCESS_MS), (refresh, "refresh", REFRESH_MS)):
                oauth.add_secret(
                    store, OAuthSecret(token_hash(secret), kind, client.id, grant.token_id, b"{}", now + life)
                )
            oauth.forget_secrets(store, now - KEPT_MS)

        await self._database.write(write)
        return {
            "access_token": access,
            "token_type": "Bearer",
            "expires_in": ACCESS_MS // 1000,
            "refresh_token": refresh,
            "scope": " ".join(LEVELS[: LEVELS.index(grant.scope) + 1]),
        }

    async def _secret(self, secret: str) -> OAuthSecret | None:
        if not 1 <= len(secret) <= 200:
            return None
        digest = token_hash(secret)
        return await self._database.read(lambda tx: oauth.find_secret(tx, digest))

    def _remember(self, digest: bytes, known: tuple[str, int]) -> None:
        if len(self._access) >= 1024:
            self._access.clear()
        self._access[digest] = known


def _verifies(verifier: str, challenge: str) -> bool:
    if not _VERIFIER.fullmatch(verifier):
        return False
    digest = hashlib.sha256(verifier.encode()).digest()
    return hmac.compare_digest(base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), challenge)


def _check_resource(form: Mapping[str, str], resource: str) -> None:
    if "resource" in form and not _same_resource(form["resource"], resource):
        raise OAuthError("invalid_target", f"resource must be {resource}")


def _same_resource(asked: str, resource: str) -> bool:
    return asked.rstrip("/") == resource


def _issuer(resource: str) -> str:
    return resource.removesuffix("/mcp")


def _redirect(uri: str, fields: Mapping[str, str], state: str) -> str:
    given = {**fields, **({"state": state} if state else {})}
    return f"{uri}{'&' if urlsplit(uri).query else '?'}{urlencode(given)}"
