"""The credentials of a node: as a header, a WebSocket subprotocol or in the query of the node socket."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import unquote

from farhand.api.server.http import Problem
from farhand.gateway.access.credentials import Credentials, NodeGrant
from farhand.protocol.key_auth import SCHEME, read_key

BEARER = "bearer."
INVALID_TOKEN = "invalid or missing node token"  # noqa: S105

Headers = Sequence[tuple[bytes, bytes]]


def node_grant(credentials: Credentials, headers: Headers, query_string: bytes) -> tuple[NodeGrant | None, str | None]:
    """Return the grant of a node, and the subprotocol to answer with. A grant with a public key still needs its proof.

    Raises Problem for a request that names its token or node twice, or presents a malformed key.
    """
    query = _query(query_string.decode("latin-1"))
    presented, subprotocol = _secrets(headers, query)
    key = _presented_key(headers)
    claimed = query.get("node_id", "")
    for claim in {unquote(claimed), unquote(claimed.replace("+", " "))}:
        if key is not None:
            grant = credentials.recognise_key(key, claim)
            if grant is not None:
                return grant, subprotocol
            continue
        for secret in presented:
            grant = credentials.recognise_node(secret, claim)
            if grant is not None:
                return grant, subprotocol
    return None, subprotocol


def _query(text: str) -> dict[str, str]:
    """Return the undecoded query values. Raises Problem if `token` or `node_id` is repeated."""
    values: dict[str, str] = {}
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if key in values and key in ("token", "node_id"):
            raise Problem(400, "invalid_request", f"the query names {key} twice")
        values[key] = value
    return values


def _secrets(headers: Headers, query: dict[str, str]) -> tuple[list[str], str | None]:
    """Return the possible readings of the token, the likeliest first, and the subprotocol to answer with."""
    offered = [value for name, value in headers if name == b"sec-websocket-protocol"]
    subprotocols = [part.strip() for value in offered for part in value.decode("latin-1").split(",")]
    answer = next((name for name in subprotocols if not name.startswith(BEARER)), None)
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return [value[7:].decode("latin-1").strip()], answer
    for subprotocol in subprotocols:
        if subprotocol.startswith(BEARER):
            try:
                encoded = subprotocol.removeprefix(BEARER)
                secret = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, ValueError):
                continue
            return [secret], answer or subprotocol
    token = query.get("token")
    if not token:
        return [""], answer
    # A client that follows the plug-in guide sends the token unencoded, so a plus may be a plus or stand for a space.
    return list(dict.fromkeys([unquote(token), unquote(token.replace("+", " ")), token])), answer


def _presented_key(headers: Headers) -> bytes | None:
    for name, value in headers:
        scheme, _, key = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == SCHEME.lower():
            try:
                return read_key(key)
            except ValueError as error:
                raise Problem(400, "invalid_request", str(error)) from None
    return None
