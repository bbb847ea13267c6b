"""Pairing: create a one-time code, exchange it for a node token, and install Farhand on the machine that has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from farhand.api.server.http import Problem, Reply, Request, invalid, json_reply, refusing
from farhand.api.server.router import BYTES, route
from farhand.gateway.access.credentials import Credentials, Scope
from farhand.gateway.access.tokens import Tokens, check_label
from farhand.gateway.journal import EventJournal
from farhand.gateway.nodes.addresses import GatewayAddress
from farhand.gateway.nodes.installers import Installers, install_command, install_script
from farhand.gateway.nodes.pairing import LIFE_SECONDS, PairingCode, PairingCodes
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.node.stored_limits import LendingError, LendingLimits
from farhand.protocol.errors import FarhandError
from farhand.protocol.join_codes import JoinCode
from farhand.protocol.key_auth import read_key
from farhand.protocol.names import NATIVE, spellings, validate_node_id

# A route whose request contains a one-time code.
code_route = partial(route, errors=(401, 429), code=True)
LONGEST_SECONDS = 24 * 3600
WRONG_CODE = "this code is wrong, was used, or is too old; `farhand node pair` makes another"
PIECE = 256 * 1024
LONGEST_CODE = 100
MOST_LIMITS = 100


class PairingRequest(msgspec.Struct, forbid_unknown_fields=True):
    # Only for this node; by default, for any node id not yet known.
    node_id: str | None = None
    label: str = ""
    seconds: float = LIFE_SECONDS
    # What the machine lends at most, and its tags; it stores them, and cannot lend more when it joins.
    limits: LendingLimits = LendingLimits()


class PairingMade(msgspec.Struct):
    code: str
    node_id: str | None
    expires_at: int
    limits: LendingLimits
    # Addresses of this gateway for other machines, the best first.
    addresses: list[str]
    # Digest of the gateway's certificate if that is self-signed; codes contain it.
    pin: str | None
    # Digest of its public key, for `curl --pinnedpubkey`.
    public_key_pin: str | None
    # For the best address: the argument of `farhand join`, and the line that installs Farhand and joins.
    join_code: str
    install: str


class CodeShown(msgspec.Struct):
    code: str


class CodeOffered(msgspec.Struct):
    """What a code gives; asking does not use it."""

    node_id: str | None
    limits: LendingLimits
    gateway_id: str


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


@dataclass(frozen=True)
class PairingRoutes:
    node_registry: NodeRegistry
    credentials: Credentials
    tokens: Tokens
    journal: EventJournal
    gateway_id: str
    address: GatewayAddress
    installers: Installers
    codes: PairingCodes
    # One machine is paired at a time: two codes never give out the same id or register the same key.
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @route("POST /v1/pairings", Scope.PAIR, "Create a one-time code for a machine.", status=201)
    async def make(self, request: Request, wanted: PairingRequest) -> PairingMade:
        if not 1 <= wanted.seconds <= LONGEST_SECONDS:
            raise invalid(f"seconds must be between 1 and {LONGEST_SECONDS}")
        with refusing(ValueError):
            check_label(wanted.label)
        if wanted.node_id is not None:
            with refusing(ValueError):
                validate_node_id(wanted.node_id)
            other = self._known(wanted.node_id)
            if other is not None and not request.credential.may(Scope.ADMIN):
                # The right to add machines is not the right to replace one. Checked again when the code is used.
                reason = f"{_described(wanted.node_id, other)}; another token for it needs the scope 'admin'"
                raise Problem(403, "forbidden", reason)
        limits = _limits(wanted.limits)
        code = await self.codes.make(wanted.node_id, wanted.label, request.credential.id, wanted.seconds, limits)
        self.journal.note("pairing.opened", wanted.node_id or "", {"credential": request.credential.id})
        pins, urls = self.address.pins, await asyncio.to_thread(self.address.urls)
        pin, public_key = (None, None) if pins is None else (pins.certificate, pins.public_key)
        join = JoinCode(code, urls[0], pin)
        return PairingMade(
            code=code,
            node_id=wanted.node_id,
            expires_at=self.node_registry.clock() + round(wanted.seconds * 1000),
            limits=limits,
            addresses=urls,
            pin=pin,
            public_key_pin=public_key,
            join_code=str(join),
            install=install_command(join, public_key),
        )

    @code_route("POST /v1/pair/offer", None, "What a one-time code gives, without using it.")
    async def offer(self, _request: Request, wanted: CodeShown) -> CodeOffered:
        code = await self._valid(wanted.code)
        return CodeOffered(code.facts.node_id, code.facts.limits, self.gateway_id)

    @code_route(
        "GET /join/{code}",
        None,
        "A script that installs Farhand from this gateway and joins.",
        media=("text/x-shellscript",),
    )
    async def script(self, request: Request) -> Reply:
        await self._valid(request.params["code"])
        # The address that the machine has just used, which the guard has checked.
        place = f"{'https' if self.address.tls else 'http'}://{request.headers[b'host'].decode()}"
        pins = self.address.pins
        pin, public_key = (None, None) if pins is None else (pins.certificate, pins.public_key)
        text = install_script(JoinCode(request.params["code"], place, pin), public_key)
        return Reply(text.encode(), content_type=b"text/x-shellscript; charset=utf-8", bare=True)

    @code_route(
        "GET /join/{code}/{file}", None, "A file that the script installs.", media=(BYTES,), errors=(401, 404, 429, 500)
    )
    async def installer(self, request: Request) -> Reply:
        await self._valid(request.params["code"])
        try:
            path = await self.installers.file(request.params["file"])
        except (FarhandError, OSError) as error:
            raise Problem(500, "failed", f"cannot make {request.params['file'][:100]}: {error}") from None
        if path is None:
            raise Problem(404, "not_found", f"there is no file {request.params['file'][:100]!r} to install")
        return Reply(content_type=BYTES.encode(), pieces=_pieces(path), bare=True)

    async def _valid(self, text: str) -> PairingCode:
        """Return an open code whose maker may still add machines. Raises Problem."""
        code = await self.codes.find(text) if len(text) <= LONGEST_CODE else None
        # The rights its maker has now: a code ends with the token that made it.
        maker = None if code is None else self.credentials.named(code.facts.made_by)
        if code is None or maker is None or not maker.may(Scope.PAIR):
            raise Problem(401, "unauthorized", WRONG_CODE)
        return code

    @code_route(
        "POST /v1/pair",
        None,
        "Exchange a one-time code for a node token, or for the right to log in with a key.",
        status=201,
        answer=Paired,
        errors=(401, 409, 429),
    )
    async def pair(self, _request: Request, wanted: PairRequest) -> Reply:
        with refusing(ValueError):
            validate_node_id(wanted.node_id)
            key = None if wanted.public_key is None else read_key(wanted.public_key)
        async with self.one_at_a_time:
            secret = await self._admit(wanted, key)
        return json_reply(Paired(wanted.node_id, secret, self.gateway_id), 201, bare=True)

    async def _admit(self, wanted: PairRequest, key: bytes | None) -> str:
        """Use the code and return the new token. Raises Problem."""
        code = await self._valid(wanted.code)
        maker = self.credentials.named(code.facts.made_by)
        if maker is None or code.facts.node_id not in (None, wanted.node_id):
            raise Problem(401, "unauthorized", WRONG_CODE)
        other = self._known(wanted.node_id)
        if other is not None and (code.facts.node_id is None or not maker.may(Scope.ADMIN)):
            reason = f"choose another --id, or pair with `--id {wanted.node_id}` and the scope 'admin'"
            raise Problem(409, "conflict", f"{_described(wanted.node_id, other)}; {reason}")
        if key is not None and self.credentials.knows_key(key):
            raise Problem(409, "conflict", "this public key is already registered; each node needs its own key")
        if not await self.codes.use(code):
            raise Problem(401, "unauthorized", "this code was used a moment ago")
        label = code.facts.label or f"paired by {code.facts.made_by}"
        _, secret = await self.tokens.create(
            node_id=wanted.node_id, label=label, scopes=[], public_key=key, made_by=code.facts.made_by
        )
        return secret

    def _known(self, node_id: str) -> str | None:
        """Return the known node that has this id, or one that a reader or a transfer could take for it."""
        ids = self.node_registry.nodes.keys() | self.credentials.named_nodes
        if node_id in ids:
            return node_id
        said = spellings(node_id)
        return next(
            (
                one
                for one in (NATIVE, *sorted(ids))
                if one.startswith(f"{node_id}:") or node_id.startswith(f"{one}:") or not said.isdisjoint(spellings(one))
            ),
            None,
        )


def _limits(given: LendingLimits) -> LendingLimits:
    """Return the limits of a code. Raises Problem for those that no machine could apply."""
    with refusing(LendingError):
        given.check()
    for name in ("root", "allow_tools", "deny_tools", "tags"):
        values = getattr(given, name)
        if len(values) > MOST_LIMITS or any(not one or len(one) > 4096 or not one.isprintable() for one in values):
            raise invalid(f"limits.{name}: at most {MOST_LIMITS} printable texts")
    for root in given.root:
        if not root.startswith(("/", "~")):
            raise invalid(f"limits.root: {root!r} must be an absolute path on the other machine")
    return given


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


def _described(node_id: str, known: str) -> str:
    if node_id == known:
        return f"node {node_id!r} is known here"
    return f"node id {node_id!r} looks like {known!r}, which is known here"
