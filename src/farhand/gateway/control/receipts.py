"""Receipts: export what the record and the node say about a call that has ended, signed by the gateway."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from functools import partial
from typing import Final

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.calls.gate import Gate
from farhand.protocol.calls import NULL, ToolFailure
from farhand.protocol.errors import Failed
from farhand.protocol.key_auth import to_text
from farhand.protocol.receipts import (
    FORMAT,
    CallStatement,
    GatewayPart,
    NodePart,
    Receipt,
    ReceiptContent,
    SigningKey,
    digest,
    gateway_bytes,
    outcome_bytes,
)
from farhand.store.ports import Store
from farhand.store.tables.accounts.receipts import SignedAnswer, find_receipt
from farhand.store.tables.calls import CallRecord, CallState

_PURPOSE: Final = b"farhand receipt key 1"


def receipt_seed(journal_key: bytes) -> bytes:
    """Return the seed of the gateway's key: gateways that share a journal sign with the same one."""
    return hmac.digest(journal_key, _PURPOSE, hashlib.sha256)


class Receipts:
    def __init__(
        self,
        gateway_id: str,
        seed: bytes,
        database: Store,
        gate: Gate,
        credentials: Credentials,
        clock: Callable[[], int],
    ) -> None:
        self._gateway_id = gateway_id
        self._seed = seed
        self._database = database
        self._gate = gate
        self._credentials = credentials
        self._clock = clock

    @property
    def key(self) -> str:
        return SigningKey(self._seed).public

    async def find(self, call_id: str) -> CallRecord | None:
        return await self._gate.find(call_id)

    async def make(self, record: CallRecord, *, content: bool = False) -> Receipt:
        """Return the receipt of a call, with its arguments and result if wanted. Raises Failed while it is open."""
        if record.ended_at is None:
            raise Failed(f"call {record.id} is {record.state.value}; a receipt can be made once it has ended")
        signed = await self._database.read(partial(find_receipt, call_id=record.id))
        key = SigningKey(self._seed)
        call, node = _call(record), self._node(record, signed)
        gateway = GatewayPart(self._gateway_id, key.public, self._clock())
        signature = to_text(key.sign(gateway_bytes(call, node, gateway)))
        shown = ReceiptContent(bytes(record.args).decode(), _outcome(record).decode()) if content else None
        return Receipt(FORMAT, call, node, gateway, signature, shown)

    def _node(self, record: CallRecord, signed: SignedAnswer | None) -> NodePart:
        if signed is not None:
            registered = self._credentials.has_registered(record.node_id or "", signed.node_key)
            return NodePart(signed.statement, signed.signature, signed.node_key, registered)
        if record.route != "node":
            return NodePart(note="no node ran this call: it is a tool of the gateway, or was refused")
        if record.state is CallState.DENIED:
            return NodePart(note="no node ran this call: the gateway denied it")
        if record.state in (CallState.OK, CallState.ERROR):
            return NodePart(
                note="the node did not sign its answer: its version does not sign, or it did not run the call"
            )
        return NodePart(note=f"the node's answer did not arrive before the call ended as {record.state.value}")


def _call(record: CallRecord) -> CallStatement:
    return CallStatement(
        id=record.id,
        tool=record.tool,
        node=record.node_id,
        credential=record.credential,
        on_behalf_of=record.on_behalf_of,
        session_key=record.session_key,
        state=record.state.value,
        created_at=record.created_at,
        ended_at=record.ended_at or 0,
        args_sha256=digest(record.args),
        result_sha256=digest(_outcome(record)),
    )


def _outcome(record: CallRecord) -> bytes:
    error = ToolFailure(record.error_kind or "failed", record.error_message or "")
    return outcome_bytes(record.state is CallState.OK, NULL if record.result is None else record.result, error)
