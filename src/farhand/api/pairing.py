"""Pairing: a code for somebody with the right to pair, and a token for whoever says it."""

from __future__ import annotations

import msgspec

from farhand.api.about import About
from farhand.api.http import Problem, Reply, Request, json_reply
from farhand.api.router import Route
from farhand.gateway.credentials import Scope
from farhand.gateway.hub import Hub
from farhand.gateway.pairing import LIFE_SECONDS, Pairing
from farhand.protocol.login import read_key
from farhand.protocol.names import validate_node_id

LONGEST_SECONDS = 24 * 3600


class PairingRequest(msgspec.Struct):
    node_id: str | None = None
    """For this node alone; without, for any that is not known yet."""
    label: str = ""
    seconds: float = LIFE_SECONDS


class PairingMade(msgspec.Struct):
    code: str
    node_id: str | None
    expires_at: int


class PairRequest(msgspec.Struct):
    code: str
    node_id: str
    public_key: str | None = None
    """With it the node logs in by its key from now on, and there is no token."""


class Paired(msgspec.Struct):
    node_id: str
    token: str
    """Empty for a node that gave its public key."""
    gateway_id: str


_make_decoder = msgspec.json.Decoder(PairingRequest)
_pair_decoder = msgspec.json.Decoder(PairRequest)


def pairing_routes(hub: Hub) -> list[Route]:
    pairing = Pairing()

    def known(node_id: str) -> bool:
        return node_id in hub.roster.nodes or hub.credentials.has_own_token(node_id)

    async def make(request: Request) -> Reply:
        wanted: PairingRequest = await request.json(_make_decoder)
        if not 1 <= wanted.seconds <= LONGEST_SECONDS:
            raise Problem(400, "invalid_request", f"seconds must be between 1 and {LONGEST_SECONDS}")
        if wanted.node_id is not None:
            _check(wanted.node_id)
            if known(wanted.node_id) and not request.credential.may(Scope.ADMIN):
                # Whoever may add machines may not take the place of one that is there.
                reason = f"node {wanted.node_id!r} is known here; another token for it needs the scope 'admin'"
                raise Problem(403, "forbidden", reason)
        code = pairing.make(wanted.node_id, wanted.label, request.credential.id, wanted.seconds)
        hub.note("pairing.opened", wanted.node_id or "", {"credential": request.credential.id})
        expires_at = hub.roster.clock() + round(wanted.seconds * 1000)
        return json_reply(PairingMade(code, wanted.node_id, expires_at), 201)

    async def pair(request: Request) -> Reply:
        wanted: PairRequest = await request.json(_pair_decoder)
        _check(wanted.node_id)
        key = None if wanted.public_key is None else _key(wanted.public_key)
        code = pairing.find(wanted.code[:100])
        if code is None or (code.node_id is not None and code.node_id != wanted.node_id):
            reason = "this code is wrong, was used, or is too old; `farhand node pair` makes another"
            raise Problem(401, "unauthorized", reason)
        if code.node_id is None and known(wanted.node_id):
            reason = f"node {wanted.node_id!r} is known here; choose another --id, or pair with `--id {wanted.node_id}`"
            raise Problem(409, "conflict", reason)
        if key is not None and hub.credentials.knows_key(key):
            raise Problem(409, "conflict", "this public key is registered; a key is that of one node")
        if not pairing.use(code):
            raise Problem(401, "unauthorized", "this code was used a moment ago")
        label = code.label or f"paired by {code.made_by}"
        _, secret = await hub.create_token(node_id=wanted.node_id, label=label, scopes=[], public_key=key)
        return json_reply(Paired(wanted.node_id, secret, hub.gateway_id), 201, bare=True)

    return [
        Route(
            "POST",
            "/v1/pairings",
            Scope.PAIR,
            make,
            about=About("A one-time code for a machine.", body=PairingRequest, status=201, answer=PairingMade),
        ),
        Route(
            "POST",
            "/v1/pair",
            None,
            pair,
            guessable=True,
            about=About(
                "Trade a one-time code for a node token, or for the right to log in by a key.",
                body=PairRequest,
                status=201,
                answer=Paired,
                errors=(401, 409, 429),
            ),
        ),
    ]


def _key(text: str) -> bytes:
    try:
        return read_key(text)
    except ValueError as error:
        raise Problem(400, "invalid_request", str(error)) from None


def _check(node_id: str) -> None:
    try:
        validate_node_id(node_id)
    except ValueError as error:
        raise Problem(400, "invalid_request", str(error)) from None
