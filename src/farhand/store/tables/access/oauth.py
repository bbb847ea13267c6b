"""OAuth clients, their grants, and the hashes of codes and tokens."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

EVICT: Final = """
    DELETE FROM oauth_clients WHERE consented_at IS NULL AND id NOT IN (
        SELECT id FROM oauth_clients WHERE consented_at IS NULL AND created_at >= ? ORDER BY created_at DESC LIMIT ?)"""


class OAuthClient(msgspec.Struct, frozen=True):
    """A client. Its `client_id` is random, or the URL of its metadata document."""

    # A short form of `client_id`, for people and paths.
    id: str
    client_id: str
    name: str
    # As a JSON array.
    redirect_uris: bytes
    auth_method: str
    secret_hash: bytes | None
    created_at: int
    # When an owner last gave it access; None: never.
    consented_at: int | None = None


class OAuthGrant(msgspec.Struct, frozen=True):
    """What an owner gave a client: the token whose rights its access tokens have."""

    token_id: str
    # The client's short id.
    client: str
    resource: str
    scope: str
    created_at: int


class OAuthSecret(msgspec.Struct, frozen=True):
    """An authorization code (`code`; `void` once reused), access token (`access`) or refresh token (`refresh`)."""

    hash: bytes
    kind: str
    client: str
    # The grant; of a code, only after its use.
    token_id: str | None
    # Of a code: what was consented to, as JSON.
    facts: bytes
    expires_at: int
    used_at: int | None = None


_CLIENTS: Final = Table("oauth_clients", OAuthClient)
_GRANTS: Final = Table("oauth_grants", OAuthGrant)
_SECRETS: Final = Table("oauth_secrets", OAuthSecret)


def add_client(tx: Tx, client: OAuthClient) -> None:
    _CLIENTS.add(tx, client, "ON CONFLICT (id) DO NOTHING")


def find_client(tx: Tx, client_id: str) -> OAuthClient | None:
    return _CLIENTS.find(tx, "client_id = ?", client_id)


def consented_clients(tx: Tx) -> list[OAuthClient]:
    return _CLIENTS.all(tx, "WHERE consented_at IS NOT NULL ORDER BY created_at, id")


def consent(tx: Tx, client: OAuthClient, now: int) -> None:
    """Note that a client was given access; adds it if it is not known yet."""
    add_client(tx, client)
    tx.execute(
        "UPDATE oauth_clients SET consented_at = ?, name = ?, redirect_uris = ? WHERE id = ?",
        (now, client.name, client.redirect_uris, client.id),
    )


def evict_clients(tx: Tx, since: int, most: int) -> None:
    """Remove clients that registered but were given no access: all from before a moment, and all but the newest."""
    tx.execute(EVICT, (since, most))


def remove_client(tx: Tx, client: str) -> None:
    tx.execute("DELETE FROM oauth_clients WHERE id = ?", (client,))
    tx.execute("DELETE FROM oauth_secrets WHERE client = ?", (client,))
    tx.execute("DELETE FROM oauth_grants WHERE client = ?", (client,))


def add_grant(tx: Tx, grant: OAuthGrant) -> None:
    _GRANTS.add(tx, grant)


def find_grant(tx: Tx, token_id: str) -> OAuthGrant | None:
    return _GRANTS.find(tx, "token_id = ?", token_id)


def all_grants(tx: Tx) -> list[OAuthGrant]:
    return _GRANTS.all(tx, "ORDER BY created_at, token_id")


def add_secret(tx: Tx, secret: OAuthSecret) -> None:
    _SECRETS.add(tx, secret)


def find_secret(tx: Tx, digest: bytes) -> OAuthSecret | None:
    return _SECRETS.find(tx, "hash = ?", digest)


def use_secret(tx: Tx, digest: bytes, now: int) -> bool:
    """Mark a code or refresh token as used; return False if it was used before."""
    tx.execute("UPDATE oauth_secrets SET used_at = ? WHERE hash = ? AND used_at IS NULL", (now, digest))
    return tx.changes() == 1


def name_grant(tx: Tx, digest: bytes, token_id: str) -> bool:
    """Note which grant a code led to, so that its reuse can revoke it; return False if it was reused already."""
    tx.execute("UPDATE oauth_secrets SET token_id = ? WHERE hash = ? AND kind = 'code'", (token_id, digest))
    return tx.changes() == 1


def void_code(tx: Tx, digest: bytes) -> None:
    """Note that a code was reused while its first use is still in progress."""
    tx.execute("UPDATE oauth_secrets SET kind = 'void' WHERE hash = ? AND token_id IS NULL", (digest,))


def forget_secrets(tx: Tx, before: int) -> None:
    tx.execute("DELETE FROM oauth_secrets WHERE expires_at < ?", (before,))
