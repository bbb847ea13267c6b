"""Messages of the node socket and their codec.

The first six are those of the plug-in guide, and all that a plain peer ever sees. The others are sent only to a peer
that announced the feature named beside them, in the `farhand` object of its hello or welcome.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from farhand.protocol.calls import NULL, ToolFailure, ToolSpec
from farhand.protocol.errors import ProtocolError
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.version import KIB, MAX_HELLO_BYTES, MAX_PLAIN_FRAME_BYTES, PROTOCOL_VERSION

Version = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Millis = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

FEATURE_CANCEL = "cancel"
FEATURE_RESUME = "resume"
FEATURE_TOOLS = "tools"
FEATURE_QUERY = "query."
FEATURE_TRANSFER = "transfer"
# A long transfer may use a connection of its own beside the node socket.
FEATURE_FILES = "files"
FEATURE_FREEZE = "freeze"
# How far a call is, and what its tool logs.
FEATURE_PROGRESS = "progress"
# The node signs its answers.
FEATURE_RECEIPTS = "receipts"
# Prefix of a tool name that a node does not list but accepts calls for.
FEATURE_UNLISTED = "tool."
# The features of every Farhand peer; `transfer` is announced by peers that move files.
# Several gateways serve together: a node can go to another one.
FEATURE_FLEET = "fleet"
FEATURES: Final = (FEATURE_CANCEL, FEATURE_RESUME, FEATURE_TOOLS, FEATURE_FREEZE, FEATURE_PROGRESS)


class NodeInfo(Struct, frozen=True, omit_defaults=True):
    """Identity of a node."""

    id: str
    name: str
    node_type: str
    version: str
    tags: list[str] = []

    @classmethod
    def from_env(cls, node_type: str, version: str, environ: Mapping[str, str] | None = None) -> Self:
        """Read `SA_NODE_ID`, `SA_NODE_NAME` and `SA_NODE_TAGS`, with the guide's fallbacks."""
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
    """What a returning node knows of calls it accepted earlier."""

    # Identifies one run of the node program: it cannot report on calls that another run accepted.
    boot: str
    running: list[str] = []
    finished: list[str] = []
    # Accepted by an earlier run of the program; their outcome is reported when they are sent again.
    earlier: list[str] = []


class NodeExtras(Struct, frozen=True, omit_defaults=True):
    """Farhand's additions to the hello."""

    features: list[str] = []
    tools: list[ToolSpec] = []
    runtime: dict[str, Any] = {}
    role: str = "specialized"
    max_request_bytes: int | None = None
    resume: Resume | None = None
    # The order by which this node accepts no calls.
    frozen: FreezeOrder | None = None
    # The public key to which secrets are sealed; empty if this node takes none.
    sealing_key: str = ""
    # The public key with which this node signs its answers (`receipts`); empty if it does not.
    receipt_key: str = ""


class GatewayExtras(Struct, frozen=True, omit_defaults=True):
    """Farhand's additions to the welcome, for a node that announced features."""

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
    """Gateway -> a node that logs in by key: sign this (see `key_auth`), then send the hello."""

    gateway_id: str
    nonce: str
    time: Millis


class NodeProof(Struct, frozen=True, tag_field="type", tag="node_proof"):
    """Node -> gateway: the requested signature in base64url."""

    signature: str


class ToolRequest(Struct, frozen=True, tag_field="type", tag="tool_request"):
    request_id: str
    tool: str
    args: Raw = NULL
    session_key: str | UnsetType | None = UNSET
    timeout_ms: int | UnsetType = UNSET
    # Values of the secret handles in the arguments, sealed to the node's `sealing_key`.
    secrets: dict[str, str] | UnsetType = UNSET
    # The span of the call, as in the header `traceparent`; only sent while the gateway makes traces.
    trace: str | UnsetType = UNSET
    # Only for a trial: a name for its caller, so that one caller does not use up the room of all; the
    # owner's have none.
    caller: str | UnsetType = UNSET


class SignedStatement(Struct, frozen=True):
    """What a node states about a call it ran, and its signature; see `receipts`."""

    statement: str
    signature: str


class ToolResponse(Struct, frozen=True, tag_field="type", tag="tool_response"):
    request_id: str
    ok: bool
    result: Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType | None = UNSET
    # To a gateway that announced `receipts`.
    receipt: SignedStatement | UnsetType = UNSET


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    timestamp: Millis


class Pong(Struct, frozen=True, tag_field="type", tag="pong"):
    timestamp: Millis


class ToolCancel(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="tool_cancel"):
    """Gateway -> node (`cancel`): stop this call."""

    request_id: str
    reason: str = ""
    # Also end the processes that the call left running after it ended.
    all: bool = False


class ToolProgress(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="tool_progress"):
    """Node -> gateway (`progress`): how far an open call is or, with a level, a line of its log."""

    request_id: str
    # Of `total`, or of 1.
    progress: float | None = None
    total: float | None = None
    message: str = ""
    level: Literal["", "debug", "info", "warning", "error"] = ""


class ToolAck(Struct, frozen=True, tag_field="type", tag="tool_ack"):
    """Gateway -> node (`resume`): these results are stored; drop them."""

    request_ids: list[str]


class ToolsUpdate(Struct, frozen=True, tag_field="type", tag="tools_update"):
    """Node -> gateway (`tools`): the tools of this node changed."""

    capabilities: list[str]
    tools: list[ToolSpec] = []


class NodeQuery(Struct, frozen=True, tag_field="type", tag="node_query"):
    """Gateway -> node (`query.<kind>`): a question beside tool calls, such as the output of a command so far."""

    query_id: int
    kind: str
    params: Raw = NULL


class NodeAnswer(Struct, frozen=True, tag_field="type", tag="node_answer"):
    """Node -> gateway: the answer to a query."""

    query_id: int
    result: Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType = UNSET


class NodeFreeze(Struct, frozen=True, tag_field="type", tag="node_freeze"):
    """Gateway -> node (`freeze`): end everything, and accept no call until this gateway lifts the freeze."""

    number: int
    order: FreezeOrder


class NodeThaw(Struct, frozen=True, tag_field="type", tag="node_thaw"):
    """Gateway -> node (`freeze`): accept calls again. A freeze by another gateway stays."""

    number: int
    gateway_id: str


class FreezeReport(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="freeze_report"):
    """Node -> gateway: the outcome of the freeze or thaw with this number."""

    number: int
    frozen: bool
    ended_processes: int = 0
    stopped_calls: int = 0
    error: str | None = None


class TransferOffer(Struct, frozen=True, omit_defaults=True):
    """What a sender has. The stream is its manifest, then the content of every file in the manifest's order."""

    # The last component of the source path.
    name: str
    folder: bool
    files: int
    # Size of all files in bytes.
    size: int
    manifest_bytes: int
    manifest_digest: str
    mime: str | None = None
    # The source is readable by its owner only.
    private: bool = False


class TransferOpen(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_open"):
    """Gateway -> node (`transfer`): send or receive a transfer; repeated after an interruption."""

    stream: int
    transfer_id: str
    role: Literal["send", "receive"]
    path: str
    # For the receiver: the sender's offer.
    offer: TransferOffer | None = None
    # Admits one connection of the node to the files socket, for the bytes of this attempt (`files`).
    ticket: str | None = None


class TransferReady(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_ready"):
    """Node -> gateway: the sender's offer; the receiver's starting offset, or that it already has everything."""

    stream: int
    offer: TransferOffer | None = None
    offset: int = 0
    complete: bool = False


class TransferCredit(Struct, frozen=True, tag_field="type", tag="transfer_credit"):
    """Receiver -> gateway -> sender: everything before `offset` is written; send up to `until`."""

    stream: int
    offset: int
    until: int


class TransferDone(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_done"):
    """Node -> gateway: the receiver has everything in place, or one end cannot continue."""

    stream: int
    error: ToolFailure | None = None
    # The receiver discarded its data because it differed from the sender's; a new attempt may succeed.
    again: bool = False


class TransferStop(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transfer_stop"):
    """Gateway -> node: stop this transfer. Unless `keep`, remove its partial data."""

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
    | ToolProgress
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

# The field order of the guide, which is also the order of the array form.
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

# Frames above this size are decoded in steps that bound the work.
LARGE_FRAME_BYTES: Final = 16 * KIB
# In a whole frame. Bodies are skipped, not decoded, which takes 30 to 100 ns for each value.
MAX_FRAME_VALUES: Final = 1_000_000
# In a message without a body, which is decoded as a whole.
_MAX_DECODED_VALUES: Final = 150_000
# In a large frame with more than `LARGE_FRAME_BYTES` beside its body or, if it has none, beside the fields of messages.
_MAX_KEYS: Final = 10_000
# The messages with a body, and the field that holds it. Only they come in frames of more than `MAX_HELLO_BYTES`.
_BODIES: Final = {
    b'"tool_request"': "args",
    b'"tool_response"': "result",
    b'"node_query"': "params",
    b'"node_answer"': "result",
}
_fields_decoder: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])


_FIELD_NAMES: Final = sorted({"type", *(name for kind in get_args(Message) for name in kind.__struct_fields__)})
# Every field of every message, unread. Unlike a dictionary, it takes no memory for other keys.
_Fields: Final = msgspec.defstruct("_Fields", [(name, Raw | UnsetType, UNSET) for name in _FIELD_NAMES])
_known_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Fields)
_Items: Final = msgspec.defstruct("_Items", [(f"item_{n}", Raw | UnsetType, UNSET) for n in range(6)], array_like=True)
_array_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Items)


def encode(message: Message) -> bytes:
    """Return the text frame of a message: compact JSON, the tag first."""
    return _encoder.encode(message)


def decode(data: bytes | str) -> Message:
    """Return the message in a text frame. Raises ProtocolError for any invalid frame.

    Takes time linear in the length of the frame.
    """
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if not raw.isascii():
            raw.decode()  # bodies are forwarded without decoding, so invalid UTF-8 must be detected here
        if len(raw) > LARGE_FRAME_BYTES:
            check_value_count(raw, MAX_FRAME_VALUES)
        if raw.lstrip(b" \t\r\n")[:1] == b"[":
            raw = _from_array(raw)
        if len(raw) > LARGE_FRAME_BYTES and (message := _from_large(raw)) is not None:
            return message
        if raw.startswith(_TAG_FIRST):
            # Nearly every frame equals our own encoding, which has no repeated key.
            try:
                message = _decoder.decode(raw)
                if _encoder.encode(message) == raw:
                    return message
            except msgspec.MsgspecError:
                pass  # some forms of a message are only decoded below
        raw = _checked(raw)
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def _from_large(raw: bytes) -> Message | None:
    """The message in a large frame that is mostly its body; None for another one that `decode` may read.

    The body is skipped once and never decoded. Raises ProtocolError or MsgspecError for a frame that would take long to
    decode.
    """
    known = _known_decoder.decode(raw)
    fields = {name: value for name in _FIELD_NAMES if (value := getattr(known, name)) is not UNSET}
    tag = bytes(fields.get("type", b""))
    if tag not in _BODIES:
        if len(raw) > MAX_HELLO_BYTES:
            raise ProtocolError(f"not a message: one without a body has at most {MAX_HELLO_BYTES} bytes")
        beside = len(raw) - sum(len(name) + len(value) + 4 for name, value in fields.items())
        check_value_count(raw, _MAX_KEYS if beside > LARGE_FRAME_BYTES else _MAX_DECODED_VALUES)
        return None
    name = _BODIES[tag]
    body = bytes(fields.get(name, b""))
    if len(raw) - len(body) > LARGE_FRAME_BYTES:
        check_value_count(raw, _MAX_KEYS)
    else:  # one value is as good as another in its place, so the rest is read with a short one there
        for key in re.finditer(rb'"%s"[ \t\r\n]*:[ \t\r\n]*' % name.encode(), raw[:LARGE_FRAME_BYTES]):
            if raw.startswith(body, key.end()):
                rest = raw[: key.end()] + b"null" + raw[key.end() + len(body) :]
                message = _decoder.decode(_checked(rest))
                if getattr(message, name) == NULL:
                    return msgspec.structs.replace(message, **{name: Raw(body)})
    if len(raw) > MAX_PLAIN_FRAME_BYTES:
        raise ProtocolError(f"not a message: it has {len(raw)} bytes, and its body cannot be separated from the rest")
    return None


def _checked(raw: bytes) -> bytes:
    """Return the frame if no key repeats; a node in array form becomes an object."""
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
            fields[name] = Raw(_encoder.encode(dict(zip(_NODE_ORDER, _items(text), strict=False))))
            raw = _encoder.encode(fields)
    return raw


def _refuse_repeats(raw: bytes, fields: dict[str, Raw]) -> None:
    # The parser silently keeps the last of two equal keys. Every byte of a compact frame, and every quotation mark
    # of any other frame, belongs to a decoded field: anything left over is a repeated key.
    compact = 1 + sum(len(key.encode()) + len(value) + 4 for key, value in fields.items())
    if len(raw) == compact:
        return
    held = sum(2 + key.count('"') + bytes(value).count(b'"') for key, value in fields.items())
    # A quotation mark in a key can be escaped without one; such a frame cannot be counted and is refused.
    hidden = b"\\u0022" in raw and any('"' in key for key in fields)
    if raw.count(b'"') != held or hidden:
        raise ProtocolError("not a message: a key is repeated")


def _from_array(raw: bytes) -> bytes:
    items = _items(raw)
    tag = msgspec.json.decode(items[0], type=str) if items else ""
    order = _ORDER.get(tag)
    if order is None or len(items) - 1 > len(order):
        raise ProtocolError(f"not a message: array of {len(items)} or more items tagged {tag[:100]!r}")
    return _encoder.encode({"type": tag, **dict(zip(order, items[1:], strict=False))})


def _items(raw: bytes) -> list[Raw]:
    """The first six items of an array: no message has more. The others are skipped."""
    first = _array_decoder.decode(raw)
    return [item for name in _Items.__struct_fields__ if (item := getattr(first, name)) is not UNSET]


# -- frames that cannot be decoded ----------------------------------------------------------------------------------

# Peers write the id among the first fields; searching no further bounds the work for a frame of any size.
SEARCHED_BYTES: Final = 64 * 1024
_REQUEST_ID: Final = re.compile(rb'"request_id"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"([\x20\x21\x23-\x5b\x5d-\x7e]{1,128})"')
_TYPE: Final = re.compile(rb'"type"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"([a-z_]{1,64})"')


class _Head(Struct):
    type: Any = None


_head_decoder: msgspec.json.Decoder[_Head] = msgspec.json.Decoder(_Head)


def may_be_response(frame: bytes) -> bool:
    """Return whether a frame that cannot be decoded may be a `tool_response`.

    False only for an object of another type: such messages are ignored, known or not.
    """
    if len(frame) > SEARCHED_BYTES:
        found = _TYPE.search(frame[:SEARCHED_BYTES])
        return found is None or found[1].decode() == ToolResponse.__struct_config__.tag
    try:
        kind = _head_decoder.decode(frame).type
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return True
    return not isinstance(kind, str) or kind == ToolResponse.__struct_config__.tag


def readable_request_id(frame: bytes) -> str | None:
    """Return the first request id in a frame that cannot be decoded."""
    found = _REQUEST_ID.search(frame[:SEARCHED_BYTES])
    return None if found is None else found[1].decode("ascii")
