"""OAuth clients, their grants, and the hashes of codes and tokens."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx

ADD_CLIENT: Final = """
    INSERT INTO oauth_clients
    (id, client_id, name, redirect_uris, auth_method, secret_hash, created_at, consented_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"""
ONE_CLIENT: Final = """
    SELECT id, client_id, name, redirect_uris, auth_method, secret_hash, created_at, consented_at
    FROM oauth_clients WHERE client_id = ?"""
CONSENTED: Final = """
    SELECT id, client_id, name, redirect_uris, auth_method, secret_hash, created_at, consented_at
    FROM oauth_clients WHERE consented_at IS NOT NULL ORDER BY created_at, id"""
CONSENT: Final = "UPDATE oauth_clients SET consented_at = ?, name = ?, redirect_uris = ? WHERE id = ?"
REMOVE_CLIENT: Final = "DELETE FROM oauth_clients WHERE id = ?"
EVICT: Final = """
    DELETE FROM oauth_clients WHERE consented_at IS NULL AND id NOT IN (
        SELECT id FROM oauth_clients WHERE consented_at IS NULL AND created_at >= ? ORDER BY created_at DESC LIMIT ?)"""
ADD_GRANT: Final = "INSERT INTO oauth_grants (token_id, client, resource, scope, created_at) VALUES (?, ?, ?, ?, ?)"
ONE_GRANT: Final = "SELECT token_id, client, resource, scope, created_at FROM oauth_grants WHERE token_id = ?"
GRANTS: Final = "SELECT token_id, client, resource, scope, created_at FROM oauth_grants ORDER BY created_at, token_id"
ADD_ISSUED: Final = """
    INSERT INTO oauth_secrets (hash, kind, client, token_id, facts, expires_at, used_at) VALUES (?, ?, ?, ?, ?, ?, ?)"""
ONE_ISSUED: Final = "SELECT hash, kind, client, token_id, facts, expires_at, used_at FROM oauth_secrets WHERE hash = ?"
USE: Final = "UPDATE oauth_secrets SET used_at = ? WHERE hash = ? AND used_at IS NULL"
NAME_GRANT: Final = "UPDATE oauth_secrets SET token_id = ? WHERE hash = ? AND kind = 'code'"
VOID: Final = "UPDATE oauth_secrets SET kind = 'void' WHERE hash = ? AND token_id IS NULL"
FORGET: Final = "DELETE FROM oauth_secrets WHERE expires_at < ?"
REMOVE_ISSUED: Final = "DELETE FROM oauth_secrets WHERE client = ?"
REMOVE_GRANTS: Final = "DELETE FROM oauth_grants WHERE client = ?"


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


def add_client(tx: Tx, client: OAuthClient) -> None:
    tx.execute(ADD_CLIENT, msgspec.structs.astuple(client))


def find_client(tx: Tx, client_id: str) -> OAuthClient | None:
    rows = tx.execute(ONE_CLIENT, (client_id,)).fetchall()
    return OAuthClient(*rows[0]) if rows else None


def consented_clients(tx: Tx) -> list[OAuthClient]:
    return [OAuthClient(*row) for row in tx.execute(CONSENTED)]


def consent(tx: Tx, client: OAuthClient, now: int) -> None:
    """Note that a client was given access; adds it if it is not known yet."""
    add_client(tx, client)
    tx.execute(CONSENT, (now, client.name, client.redirect_uris, client.id))


def evict_clients(tx: Tx, since: int, most: int) -> None:
    """Remove clients that registered but were given no access: all from before a moment, and all but the newest."""
    tx.execute(EVICT, (since, most))


def remove_client(tx: Tx, client: str) -> None:
    tx.execute(REMOVE_CLIENT, (client,))
    tx.execute(REMOVE_ISSUED, (client,))
    tx.execute(REMOVE_GRANTS, (client,))


def add_grant(tx: Tx, grant: OAuthGrant) -> None:
    tx.execute(ADD_GRANT, msgspec.structs.astuple(grant))


def find_grant(tx: Tx, token_id: str) -> OAuthGrant | None:
    rows = tx.execute(ONE_GRANT, (token_id,)).fetchall()
    return OAuthGrant(*rows[0]) if rows else None


def all_grants(tx: Tx) -> list[OAuthGrant]:
    return [OAuthGrant(*row) for row in tx.execute(GRANTS)]


def add_secret(tx: Tx, secret: OAuthSecret) -> None:
    tx.execute(ADD_ISSUED, msgspec.structs.astuple(secret))


def find_secret(tx: Tx, digest: bytes) -> OAuthSecret | None:
    rows = tx.execute(ONE_ISSUED, (digest,)).fetchall()
    return OAuthSecret(*rows[0]) if rows else None


def use_secret(tx: Tx, digest: bytes, now: int) -> bool:
    """Mark a code or refresh token as used; return False if it was used before."""
    tx.execute(USE, (now, digest))
    return tx.changes() == 1


def name_grant(tx: Tx, digest: bytes, token_id: str) -> bool:
    """Note which grant a code led to, so that its reuse can revoke it; return False if it was reused already."""
    tx.execute(NAME_GRANT, (token_id, digest))
    return tx.changes() == 1


def void_code(tx: Tx, digest: bytes) -> None:
    """Note that a code was reused while its first use is still in progress."""
    tx.execute(VOID, (digest,))


def forget_secrets(tx: Tx, before: int) -> None:
    tx.execute(FORGET, (before,))
