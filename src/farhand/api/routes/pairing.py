"""Pairing: a code for somebody with the right to pair, and a token for whoever says it."""

from __future__ import annotations

import asyncio

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.route_docs import About
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.hub import Hub
from farhand.gateway.nodes.pairing import LIFE_SECONDS, Pairing
from farhand.protocol.key_auth import read_key
from farhand.protocol.names import spellings, validate_node_id

LONGEST_SECONDS = 24 * 3600


class PairingRequest(msgspec.Struct):
    # For this node alone; without, for any that is not known yet.
    node_id: str | None = None
    label: str = ""
    seconds: float = LIFE_SECONDS


class PairingMade(msgspec.Struct):
    code: str
    node_id: str | None
    expires_at: int


class PairRequest(msgspec.Struct):
    code: str
    node_id: str
    # With it the node logs in by its key from now on, and there is no token.
    public_key: str | None = None


class Paired(msgspec.Struct):
    node_id: str
    # Empty for a node that gave its public key.
    token: str
    gateway_id: str


_make_decoder = msgspec.json.Decoder(PairingRequest)
_pair_decoder = msgspec.json.Decoder(PairRequest)


def pairing_routes(hub: Hub) -> list[Route]:
    pairing = Pairing()
    # One machine is paired at a time: two codes never give out the same id or register the same key.
    one_at_a_time = asyncio.Lock()

    def known(node_id: str) -> str | None:
        """Return the known node that has this id, or one that a reader could take for it."""
        ids = hub.node_registry.nodes.keys() | hub.credentials.named_nodes
        if node_id in ids:
            return node_id
        said = spellings(node_id)
        return next((other for other in sorted(ids) if not said.isdisjoint(spellings(other))), None)

    async def make(request: Request) -> Reply:
        wanted: PairingRequest = await request.json(_make_decoder)
        if not 1 <= wanted.seconds <= LONGEST_SECONDS:
            raise Problem(400, "invalid_request", f"seconds must be between 1 and {LONGEST_SECONDS}")
        if wanted.node_id is not None:
            _check(wanted.node_id)
            other = known(wanted.node_id)
            if other is not None and not request.credential.may(Scope.ADMIN):
                # The right to add machines is not the right to replace one. Checked again when the code is used.
                reason = f"{_described(wanted.node_id, other)}; another token for it needs the scope 'admin'"
                raise Problem(403, "forbidden", reason)
        code = pairing.make(wanted.node_id, wanted.label, request.credential.id, wanted.seconds)
        hub.note("pairing.opened", wanted.node_id or "", {"credential": request.credential.id})
        expires_at = hub.node_registry.clock() + round(wanted.seconds * 1000)
        return json_reply(PairingMade(code, wanted.node_id, expires_at), 201)

    async def pair(request: Request) -> Reply:
        wanted: PairRequest = await request.json(_pair_decoder)
        _check(wanted.node_id)
        key = None if wanted.public_key is None else _key(wanted.public_key)
        async with one_at_a_time:
            secret = await admit(wanted, key)
        return json_reply(Paired(wanted.node_id, secret, hub.gateway_id), 201, bare=True)

    async def admit(wanted: PairRequest, key: bytes | None) -> str:
        """Use the code and return the new token. Raises Problem."""
        code = pairing.find(wanted.code[:100])
        # The rights its maker has now: a code ends with the token that made it.
        maker = None if code is None else hub.credentials.named(code.made_by)
        wrong_node = code is not None and code.node_id not in (None, wanted.node_id)
        if code is None or maker is None or not maker.may(Scope.PAIR) or wrong_node:
            reason = "this code is wrong, was used, or is too old; `farhand node pair` makes another"
            raise Problem(401, "unauthorized", reason)
        other = known(wanted.node_id)
        if other is not None and (code.node_id is None or not maker.may(Scope.ADMIN)):
            reason = f"choose another --id, or pair with `--id {wanted.node_id}` and the scope 'admin'"
            raise Problem(409, "conflict", f"{_described(wanted.node_id, other)}; {reason}")
        if key is not None and hub.credentials.knows_key(key):
            raise Problem(409, "conflict", "this public key is registered; a key is that of one node")
        if not pairing.use(code):
            raise Problem(401, "unauthorized", "this code was used a moment ago")
        label = code.label or f"paired by {code.made_by}"
        _, secret = await hub.create_token(
            node_id=wanted.node_id, label=label, scopes=[], public_key=key, made_by=code.made_by
        )
        return secret

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


def _described(node_id: str, known: str) -> str:
    if node_id == known:
        return f"node {node_id!r} is known here"
    return f"node id {node_id!r} looks like {known!r}, which is known here"


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
