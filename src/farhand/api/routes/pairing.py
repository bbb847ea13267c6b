"""Pairing: create a one-time code, and exchange it for a node token."""

from __future__ import annotations

import asyncio

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Credentials, Scope
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.journal import EventJournal
from farhand.gateway.nodes.pairing import LIFE_SECONDS, Pairing
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.key_auth import read_key
from farhand.protocol.names import spellings, validate_node_id

LONGEST_SECONDS = 24 * 3600


class PairingRequest(msgspec.Struct):
    # Only for this node; by default, for any node id not yet known.
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
    # With it, the node logs in with its key from now on, and gets no token.
    public_key: str | None = None


class Paired(msgspec.Struct):
    node_id: str
    # Empty for a node that sent its public key.
    token: str
    gateway_id: str


class PairingRoutes:
    def __init__(
        self,
        node_registry: NodeRegistry,
        credentials: Credentials,
        tokens: Tokens,
        journal: EventJournal,
        gateway_id: str,
    ) -> None:
        self._node_registry = node_registry
        self._credentials = credentials
        self._tokens = tokens
        self._journal = journal
        self._gateway_id = gateway_id
        self._pairing = Pairing()
        # One machine is paired at a time: two codes never give out the same id or register the same key.
        self._one_at_a_time = asyncio.Lock()

    @route("POST /v1/pairings", Scope.PAIR, "A one-time code for a machine.", status=201)
    async def make(self, request: Request, wanted: PairingRequest) -> PairingMade:
        if not 1 <= wanted.seconds <= LONGEST_SECONDS:
            raise Problem(400, "invalid_request", f"seconds must be between 1 and {LONGEST_SECONDS}")
        if wanted.node_id is not None:
            _check(wanted.node_id)
            other = self._known(wanted.node_id)
            if other is not None and not request.credential.may(Scope.ADMIN):
                # The right to add machines is not the right to replace one. Checked again when the code is used.
                reason = f"{_described(wanted.node_id, other)}; another token for it needs the scope 'admin'"
                raise Problem(403, "forbidden", reason)
        code = self._pairing.make(wanted.node_id, wanted.label, request.credential.id, wanted.seconds)
        self._journal.note("pairing.opened", wanted.node_id or "", {"credential": request.credential.id})
        return PairingMade(code, wanted.node_id, self._node_registry.clock() + round(wanted.seconds * 1000))

    @route(
        "POST /v1/pair",
        None,
        "Trade a one-time code for a node token, or for the right to log in by a key.",
        status=201,
        answer=Paired,
        errors=(401, 409, 429),
        guessable=True,
    )
    async def pair(self, _request: Request, wanted: PairRequest) -> Reply:
        _check(wanted.node_id)
        key = None if wanted.public_key is None else _key(wanted.public_key)
        async with self._one_at_a_time:
            secret = await self._admit(wanted, key)
        return json_reply(Paired(wanted.node_id, secret, self._gateway_id), 201, bare=True)

    async def _admit(self, wanted: PairRequest, key: bytes | None) -> str:
        """Use the code and return the new token. Raises Problem."""
        code = self._pairing.find(wanted.code[:100])
        # The rights its maker has now: a code ends with the token that made it.
        maker = None if code is None else self._credentials.named(code.made_by)
        wrong_node = code is not None and code.node_id not in (None, wanted.node_id)
        if code is None or maker is None or not maker.may(Scope.PAIR) or wrong_node:
            reason = "this code is wrong, was used, or is too old; `farhand node pair` makes another"
            raise Problem(401, "unauthorized", reason)
        other = self._known(wanted.node_id)
        if other is not None and (code.node_id is None or not maker.may(Scope.ADMIN)):
            reason = f"choose another --id, or pair with `--id {wanted.node_id}` and the scope 'admin'"
            raise Problem(409, "conflict", f"{_described(wanted.node_id, other)}; {reason}")
        if key is not None and self._credentials.knows_key(key):
            raise Problem(409, "conflict", "this public key is already registered; each node needs its own key")
        if not self._pairing.use(code):
            raise Problem(401, "unauthorized", "this code was used a moment ago")
        label = code.label or f"paired by {code.made_by}"
        _, secret = await self._tokens.create(
            node_id=wanted.node_id, label=label, scopes=[], public_key=key, made_by=code.made_by
        )
        return secret

    def _known(self, node_id: str) -> str | None:
        """Return the known node that has this id, or one that a reader could take for it."""
        ids = self._node_registry.nodes.keys() | self._credentials.named_nodes
        if node_id in ids:
            return node_id
        said = spellings(node_id)
        return next((other for other in sorted(ids) if not said.isdisjoint(spellings(other))), None)


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
