"""Sign what a node answers, so that its gateway can export receipts of calls."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
from msgspec import UNSET

from farhand.protocol.key_auth import to_text
from farhand.protocol.messages import SignedStatement, ToolRequest, ToolResponse
from farhand.protocol.receipts import NodeStatement, digest, node_bytes, outcome_bytes, written


class ReceiptKey(Protocol):
    """Signs for a node, such as its login key or `farhand.protocol.receipts.SigningKey`."""

    @property
    def public(self) -> str: ...

    def sign(self, data: bytes) -> bytes: ...


class Signer:
    """Signs the answers of one node."""

    def __init__(self, key: ReceiptKey, node_id: str) -> None:
        self._key = key
        self._node_id = node_id

    @property
    def public(self) -> str:
        return self._key.public

    def signed(self, request: ToolRequest, response: ToolResponse, started_at: int) -> ToolResponse:
        """Return the response with a signed statement about the call."""
        result = None if response.result is UNSET else response.result
        statement = written(
            NodeStatement(
                call=request.request_id,
                node=self._node_id,
                tool=request.tool,
                ok=response.ok,
                args_sha256=digest(request.args),
                result_sha256=digest(outcome_bytes(response.ok, result, response.error or None)),
                started_at=started_at,
                ended_at=max(started_at, time.time_ns() // 1_000_000),
            )
        )
        signature = to_text(self._key.sign(node_bytes(statement)))
        return msgspec.structs.replace(response, receipt=SignedStatement(statement, signature))
