"""Messages of the node socket and their codec: text in, one message out, or `ProtocolError`.

The first six are the plug-in guide's, and all that a plain peer ever sees. The rest is sent only to a peer
that announced the feature named beside it, in the `farhand` object of its hello or welcome.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from farhand.protocol.calls import NULL, ToolFailure, ToolSpec
from farhand.protocol.errors import ProtocolError
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.version import PROTOCOL_VERSION

Version = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Millis = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

FEATURE_CANCEL = "cancel"
FEATURE_RESUME = "resume"
FEATURE_TOOLS = "tools"
FEATURE_QUERY = "query."
FEATURE_TRANSFER = "transfer"
# A long transfer may have a connection of its own, beside the node socket.
FEATURE_FILES = "files"
FEATURE_FREEZE = "freeze"
# Before the name of a tool that is not among those a node offers, and can be called all the same.
FEATURE_UNLISTED = "tool."
# What every Farhand peer can do; `transfer` is announced by those that move files.
FEATURES: Final = (FEATURE_CANCEL, FEATURE_RESUME, FEATURE_TOOLS, FEATURE_FREEZE)


class NodeInfo(Struct, frozen=True, omit_defaults=True):
    """Who a node is."""

    id: str
    name: str
    node_type: str
    version: str
    tags: list[str] = []

    @classmethod
    def from_env(cls, node_type: str, version: str, environ: Mapping[str, str] | None = None) -> Self:
        """Identity from `SA_NODE_ID`, `SA_NODE_NAME` and `SA_NODE_TAGS`, with the guide's fallbacks."""
        env = os.environ if environ is None else environ
        host = env.get("HOSTNAME") or env.get("HOST") or platform.node() or "unknown"
        return cls(
            id=env.get("SA_NODE_ID") or f"{node_type}:{host}",
            name=env.get("SA_NODE_NAME") or f"sa-node-{node_type}",
            node_type=node_type,
            version=version,
            tags=[tag for part in env.get("SA_NODE_TAGS", "").split(",") if (tag := part.strip())],
        )


class Resume(Struct, frozen=True, omit_defaults=True):
    """What a returning node still knows of calls it accepted earlier."""

    # Names one life of the node program: what another life accepted, this one cannot speak for.
    boot: str
    running: list[str] = []
    finished: list[str] = []
    # Accepted by an earlier life of the program: asked again, the node tells what became of them.
    earlier: list[str] = []


class NodeExtras(Struct, frozen=True, omit_defaults=True):
    """What a Farhand node adds to its hello."""

    features: list[str] = []
    tools: list[ToolSpec] = []
    runtime: dict[str, Any] = {}
    role: str = "specialized"
    max_request_bytes: int | None = None
    resume: Resume | None = None
    # By whose order this node takes no call.
    frozen: FreezeOrder | None = None


class GatewayExtras(Struct, frozen=True, omit_defaults=True):
    """What a Farhand gateway adds to its welcome, for a node that announced features."""

    features: list[str] = []
    gateway_id: str = ""
    max_response_bytes: int | None = None


class NodeHello(Struct, frozen=True, kw_only=True, tag_field="type", tag="node_hello"):
    protocol_version: Version = PROTOCOL_VERSION
    node: NodeInfo
    capabilities: list[str]
    farhand: NodeExtras | UnsetType = UNSET


class GatewayWelcome(Struct, frozen=True, kw_only=True, tag_field="type", tag="gateway_welcome"):
    protocol_version: Version = PROTOCOL_VERSION
    gateway_version: str
    farhand: GatewayExtras | UnsetType = UNSET


class GatewayChallenge(Struct, frozen=True, tag_field="type", tag="gateway_challenge"):
    """Gateway -> a node that came with a key instead of a token: sign this (see `login`), then say hello."""

    gateway_id: str
    nonce: str
    time: Millis


class NodeProof(Struct, frozen=True, tag_field="type", tag="node_proof"):
    """Node -> gateway: the signature that was asked for, in base64url."""

    signature: str


class ToolRequest(Struct, frozen=True, tag_field="type", tag="tool_request"):
    request_id: str
    tool: str
    args: Raw = NULL
    session_key: str | UnsetType | None = UNSET
    timeout_ms: int | UnsetType = UNSET


class ToolResponse(Struct, frozen=True, tag_field="type", tag="tool_response"):
    request_id: str
    ok: bool
    result: Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType | None = UNSET


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    timestamp: Millis


class Pong(Struct, frozen=True, tag_field="type", tag="pong"):
    timestamp: Millis


class ToolCancel(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="tool_cancel"):
    """Gateway -> node (`cancel`): stop working on this call."""

    request_id: str
    reason: str = ""
    # Also end what the call started and left running, even though the call itself is over.
    all: bool = False


class ToolAck(Struct, frozen=True, tag_field="type", tag="tool_ack"):
    """Gateway -> node (`resume`): these results are on disk; forget them."""

    request_ids: list[str]


class ToolsUpdate(Struct, frozen=True, tag_field="type", tag="tools_update"):
    """Node -> gateway (`tools`): what this node offers has changed."""

    capabilities: list[str]
    tools: list[ToolSpec] = []


class NodeQuery(Struct, frozen=True, tag_field="type", tag="node_query"):
    """Gateway -> node (`query.<kind>`): a question beside the tool calls, such as a command's output so far."""

    query_id: int
    kind: str
    params: Raw = NULL


class NodeAnswer(Struct, frozen=True, tag_field="type", tag="node_answer"):
    """Node -> gateway: the answer to a query."""

    query_id: int
    result: Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType = UNSET


class NodeFreeze(Struct, frozen=True, tag_field="type", tag="node_freeze"):
    """Gateway -> node (`freeze`): end everything, and take no call until this gateway lifts it."""

    number: int
    order: FreezeOrder


class NodeThaw(Struct, frozen=True, tag_field="type", tag="node_thaw"):
    """Gateway -> node (`freeze`): take calls again. A node frozen by another gateway stays so."""

    number: int
    gateway_id: str


class FreezeReport(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="freeze_report"):
    """Node -> gateway: what came of a freeze or a thaw of this number."""

    number: int
    frozen: bool
    ended_processes: int = 0
    stopped_calls: int = 0
    error: str | None = None


class TransferOffer(Struct, frozen=True, omit_defaults=True):
    """What a sender has: the stream is its manifest, then the content of every file, in the manifest's order."""

    # The last part of the source's path.
    name: str
    folder: bool
    files: int
    # Bytes of all files.
    size: int
    manifest_bytes: int
    manifest_digest: str
    mime: str | None = None
    # The source is for its owner alone.
    private: bool = False


class TransferOpen(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_open"):
    """Gateway -> node (`transfer`): be the sender or the receiver of a transfer, perhaps once more after a break."""

    stream: int
    transfer_id: str
    role: Literal["send", "receive"]
    path: str
    # For the receiver: what the sender has.
    offer: TransferOffer | None = None
    # Admits one connection of the node's to the files socket, for the bytes of this try (`files`).
    ticket: str | None = None


class TransferReady(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_ready"):
    """Node -> gateway: a sender's offer; a receiver's place to begin, or that it has the whole already."""

    stream: int
    offer: TransferOffer | None = None
    offset: int = 0
    complete: bool = False


class TransferCredit(Struct, frozen=True, tag_field="type", tag="transfer_credit"):
    """Receiver -> gateway -> sender: all before `offset` is written; send as far as `until`. The first one starts."""

    stream: int
    offset: int
    until: int


class TransferDone(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_done"):
    """Node -> gateway: the receiver has the whole in its place, or either end cannot go on."""

    stream: int
    error: ToolFailure | None = None
    # The receiver threw away what it had, since it was not what the sender has: from the start it may go well.
    again: bool = False


class TransferStop(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_stop"):
    """Gateway -> node: send or write nothing more of this transfer. Unless `keep`, remove what is left of it."""

    transfer_id: str
    keep: bool = False


Message = (
    NodeHello
    | GatewayWelcome
    | ToolRequest
    | ToolResponse
    | Ping
    | Pong
    | ToolCancel
    | ToolAck
    | ToolsUpdate
    | NodeQuery
    | NodeAnswer
    | NodeFreeze
    | NodeThaw
    | FreezeReport
    | TransferOpen
    | TransferReady
    | TransferCredit
    | TransferDone
    | TransferStop
    | GatewayChallenge
    | NodeProof
)

TRANSFER_MESSAGES: Final = (TransferReady, TransferCredit, TransferDone, TransferOpen, TransferStop)

# Field order on the wire is the guide's, which is also the order of the array form.
_ORDER: Final[dict[str, tuple[str, ...]]] = {
    "node_hello": ("protocol_version", "node", "capabilities"),
    "gateway_welcome": ("protocol_version", "gateway_version"),
    "tool_request": ("request_id", "tool", "args", "session_key"),
    "tool_response": ("request_id", "ok", "result", "error"),
    "ping": ("timestamp",),
    "pong": ("timestamp",),
}
_NODE_ORDER: Final = ("id", "name", "node_type", "version", "tags")

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_TAG_FIRST: Final = b'{"type":"'
_fields_decoder: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])
_items_decoder: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])


def encode(message: Message) -> bytes:
    """The text frame of a message: compact JSON, the tag first."""
    return _encoder.encode(message)


def decode(data: bytes | str) -> Message:
    """The message in a text frame. Whatever is wrong with the frame is a ProtocolError, nothing else."""
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if not raw.isascii():
            raw.decode()  # bodies are passed on unread, so a broken character must be caught here
        if raw.startswith(_TAG_FIRST):
            # Nearly every frame is as we would write it, and then no key in it is repeated.
            try:
                message = _decoder.decode(raw)
                if _encoder.encode(message) == raw:
                    return message
            except msgspec.MsgspecError:
                pass  # some forms of a message are read below alone
        if raw.lstrip(b" \t\r\n")[:1] == b"[":
            raw = _from_array(raw)
        raw = _checked(raw)
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def _checked(raw: bytes) -> bytes:
    """The frame itself, once no key repeats; a node in array form is turned into an object."""
    fields = _fields_decoder.decode(raw)
    _refuse_repeats(raw, fields)
    for name in ("node", "error"):
        inner = fields.get(name)
        if inner is None:
            continue
        text = bytes(inner)
        if text[:1] == b"{":
            _refuse_repeats(text, _fields_decoder.decode(text))
        elif name == "node" and text[:1] == b"[":
            items = _items_decoder.decode(text)
            fields[name] = Raw(_encoder.encode(dict(zip(_NODE_ORDER, items, strict=False))))
            raw = _encoder.encode(fields)
    return raw


def _refuse_repeats(raw: bytes, fields: dict[str, Raw]) -> None:
    # A parser keeps the last of two equal keys in silence. Every byte of a compact frame belongs to a field we
    # hold, and in any other frame so does every quotation mark: what is left over is a repeated key.
    compact = 1 + sum(len(key.encode()) + len(value) + 4 for key, value in fields.items())
    if len(raw) == compact:
        return
    held = sum(2 + key.count('"') + bytes(value).count(b'"') for key, value in fields.items())
    # A quotation mark inside a key can be written without one: such a frame cannot be counted, so it is refused.
    hidden = b"\\u0022" in raw and any('"' in key for key in fields)
    if raw.count(b'"') != held or hidden:
        raise ProtocolError("not a message: a key is repeated")


def _from_array(raw: bytes) -> bytes:
    items = _items_decoder.decode(raw)
    tag = msgspec.json.decode(items[0], type=str) if items else ""
    order = _ORDER.get(tag)
    if order is None or len(items) - 1 > len(order):
        raise ProtocolError(f"not a message: array of {len(items)} items tagged {tag!r}")
    return _encoder.encode({"type": tag, **dict(zip(order, items[1:], strict=False))})
