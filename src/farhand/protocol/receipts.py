"""Receipts of calls: what a node and its gateway sign, and how a receipt is checked offline.

Statements are JSON with sorted keys and without whitespace, in UTF-8. Signatures are Ed25519 over a purpose line and
the statement. Arguments and results are covered by their SHA-256 digests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from farhand.protocol.calls import NULL, ToolFailure
from farhand.protocol.key_auth import SIGNATURE_BYTES, from_text, key_text, read_key

FORMAT: Final = "farhand-receipt-1"
NODE_PURPOSE: Final = b"farhand receipt of a node 1\n"
GATEWAY_PURPOSE: Final = b"farhand receipt of a gateway 1\n"
MOST_STATEMENT_BYTES: Final = 4096

Verdict = Literal["ok", "mismatch", "absent"]
_sorted = msgspec.json.Encoder(order="sorted").encode


class NodeStatement(msgspec.Struct, frozen=True):
    """What a node signs when it answers. Times are those of its clock, in milliseconds since 1970."""

    call: str
    node: str
    # The tool's name on the node.
    tool: str
    ok: bool
    args_sha256: str
    result_sha256: str
    started_at: int
    ended_at: int


class CallStatement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway signs of the call in its record."""

    id: str
    tool: str
    node: str | None
    # The credential that acted, and the one on whose behalf.
    credential: str
    on_behalf_of: str | None
    session_key: str | None
    state: str
    created_at: int
    ended_at: int
    args_sha256: str
    result_sha256: str


class NodePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node's statement, its signature and the key to check it; or why there is none."""

    statement: str | None = None
    signature: str | None = None
    key: str | None = None
    # Whether the key is registered for this node at the gateway; otherwise the node only announced it.
    registered: bool = False
    note: str = ""


class GatewayPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    key: str
    signed_at: int


class ReceiptContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments and the result as they are recorded, as JSON texts."""

    args: str
    result: str


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    format: str
    call: CallStatement
    node: NodePart
    gateway: GatewayPart
    # The gateway's, over everything above.
    signature: str
    content: ReceiptContent | None = None


class ReceiptFinding(msgspec.Struct, frozen=True):
    """What was found about one part of a receipt."""

    part: str
    verdict: Verdict
    message: str


class SigningKey:
    """An Ed25519 key, from its 32 secret bytes."""

    def __init__(self, seed: bytes) -> None:
        # Imported late: it takes 2.5 MB, which programs that sign nothing save.
        from nacl.signing import SigningKey as Ed25519  # noqa: PLC0415

        self._key = Ed25519(seed)

    @property
    def public(self) -> str:
        return key_text(bytes(self._key.verify_key))

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data).signature


def digest(data: bytes | msgspec.Raw | memoryview) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else bytes(data)).hexdigest()


def outcome_bytes(ok: bool, result: msgspec.Raw | None, error: ToolFailure | None) -> bytes:
    """Return what the digest of a result covers: the result's JSON, or the error as a statement."""
    if ok:
        return bytes(NULL if result is None else result)
    return _sorted({"kind": error.kind if error else "failed", "message": error.message if error else ""})


def node_bytes(statement: str) -> bytes:
    return NODE_PURPOSE + statement.encode()


def written(statement: NodeStatement) -> str:
    return _sorted(statement).decode()


def gateway_bytes(call: CallStatement, node: NodePart, gateway: GatewayPart) -> bytes:
    return GATEWAY_PURPOSE + _sorted({"call": call, "format": FORMAT, "gateway": gateway, "node": node})


def fingerprint(key: str) -> str:
    """Return a short name of a public key: `SHA256:` and the digest in base64. Raises ValueError."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(read_key(key)).digest()).decode().rstrip("=")


def signed(key: str, data: bytes, signature: str) -> bool:
    """Whether this key signed the data; False for anything that is not a key or a signature."""
    from nacl.exceptions import CryptoError  # noqa: PLC0415
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        raw = from_text(signature)
        if len(raw) != SIGNATURE_BYTES:
            return False
        VerifyKey(read_key(key)).verify(data, raw)
    except (CryptoError, ValueError):
        return False
    return True


def is_key(key: str, pinned: str) -> bool:
    """Whether a key is the pinned one, which is given as a key or as a fingerprint."""
    try:
        return fingerprint(key) == (pinned.strip() if pinned.strip().startswith("SHA256:") else fingerprint(pinned))
    except ValueError:
        return False


def check(receipt: Receipt, pinned: Mapping[str, str]) -> list[ReceiptFinding]:
    """Check every part of a receipt. `pinned`: the expected keys or fingerprints of `gateway` and `node`, if known."""
    findings = [
        _key("gateway key", receipt.gateway.key, pinned.get("gateway")),
        _found(
            "gateway signature",
            signed(receipt.gateway.key, gateway_bytes(receipt.call, receipt.node, receipt.gateway), receipt.signature),
            "covers the call, the node's part and the gateway's part",
            "does not match: the call, the node's part or the gateway's part was changed",
        ),
    ]
    if receipt.format != FORMAT:
        findings.append(ReceiptFinding("format", "mismatch", f"is {receipt.format[:40]!r}, not {FORMAT!r}"))
    findings += _check_node(receipt, pinned.get("node"))
    if receipt.content is not None:
        for part, text, expected in (
            ("arguments", receipt.content.args, receipt.call.args_sha256),
            ("result", receipt.content.result, receipt.call.result_sha256),
        ):
            same = digest(text.encode()) == expected
            findings.append(
                _found(
                    f"content: {part}",
                    same,
                    "as the gateway signed it",
                    "not as the gateway signed it: it was changed, or a secret in it was masked",
                )
            )
    return findings


def _check_node(receipt: Receipt, pinned: str | None) -> list[ReceiptFinding]:
    node, call = receipt.node, receipt.call
    if node.statement is None or node.signature is None or node.key is None:
        verdict: Verdict = "absent" if pinned is None else "mismatch"
        return [ReceiptFinding("node signature", verdict, node.note or "the node did not sign")]
    findings = [
        _key("node key", node.key, pinned, registered=node.registered),
        _found(
            "node signature",
            signed(node.key, node_bytes(node.statement), node.signature),
            "covers the node's statement",
            "does not match: the node's statement was changed, or another key signed it",
        ),
    ]
    try:
        statement = msgspec.json.decode(node.statement, type=NodeStatement)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return [*findings, ReceiptFinding("node statement", "mismatch", f"cannot be read: {error}")]
    pairs: list[tuple[str, Any, Any]] = [
        ("call id", statement.call, call.id),
        ("node", statement.node, call.node),
        ("arguments", statement.args_sha256, call.args_sha256),
    ]
    if call.state in ("ok", "error"):
        pairs += [
            ("outcome", statement.ok, call.state == "ok"),
            ("result", statement.result_sha256, call.result_sha256),
        ]
    for part, said, recorded in pairs:
        findings.append(
            _found(
                part,
                said == recorded,
                "node and gateway say the same",
                f"the node signed {said!r}, the gateway {recorded!r}"
                + ("; a gateway masks secrets in a result before it stores it" if part == "result" else ""),
            )
        )
    if not (call.tool == statement.tool or call.tool.endswith(f"__{statement.tool}")):
        findings.append(
            ReceiptFinding("tool", "mismatch", f"the node signed {statement.tool!r}, the gateway {call.tool!r}")
        )
    if statement.started_at > statement.ended_at:
        findings.append(ReceiptFinding("times", "mismatch", "the node's statement ends before it starts"))
    return findings


def _key(part: str, key: str, pinned: str | None, *, registered: bool = True) -> ReceiptFinding:
    try:
        name = fingerprint(key)
    except ValueError as error:
        return ReceiptFinding(part, "mismatch", str(error))
    if pinned is None:
        origin = "" if registered else ", announced by the node and not registered at the gateway"
        return ReceiptFinding(part, "absent", f"not pinned; the receipt names {name}{origin}")
    return _found(part, is_key(key, pinned), f"{name}, as expected", f"is {name}, not the expected {pinned[:80]}")


def _found(part: str, right: bool, yes: str, no: str) -> ReceiptFinding:
    return ReceiptFinding(part, "ok", yes) if right else ReceiptFinding(part, "mismatch", no)
