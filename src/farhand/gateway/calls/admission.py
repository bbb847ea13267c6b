"""Which tools a caller may use, how long a call may take, and the frame that carries it to its node."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from farhand.gateway.access.credentials import OWNER, Credential, Scope
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import EMPTY, OWN_HOST, Catalog, Offer, Target, read_arguments
from farhand.gateway.nodes.registry import SIMILAR, Connection, Node
from farhand.gateway.nodes.server_tools import MCP
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import InvalidArgs, NotAllowed
from farhand.protocol.json_limits import plain_peer_error
from farhand.protocol.messages import ToolRequest, encode
from farhand.protocol.names import MAX_COMPARED_LENGTH, MAX_COMPARED_NAMES
from farhand.protocol.version import MAX_NODE_ID_LENGTH
from farhand.store.tables.calls import CallRecord
from farhand.tools import trial

DEFAULT_TIMEOUT_MS = 300_000
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
OWN_LIMIT_GRACE_MS = 10_000
_OWN = frozenset(OWN_HOST.values())


class Denied(NotAllowed):
    """A credential of the caller does not allow the call."""


def scope_of(spec: ToolSpec | None) -> Scope:
    """Return the scope that a tool needs: the least for one that only reads, the most for any that is not known."""
    if spec is not None and spec.read_only:
        return Scope.TOOLS_READ
    if spec is not None and spec.capability in ("filesystem.write", "filesystem.edit"):
        return Scope.TOOLS_WRITE
    return Scope.TOOLS_EXEC


def allow(target: Target, principal: Principal) -> None:
    """Check that both the acting credential and the one it acts for may call a tool. Raises Denied."""
    for credential in principal.credentials:
        _allow(target, credential)


def check_known(principal: Principal, node_id: str, tool: str = "") -> None:
    """Raise Denied for a node beyond the limits of a principal, whether there is such a node or not."""
    if not principal.may_know(node_id):
        what = (tool or node_id)[:MAX_NODE_ID_LENGTH]
        raise Denied(f"this credential does not include {what!r}; it is limited to some tools or nodes")


def may_know_call(principal: Principal, record: CallRecord, node_id: str | None) -> bool:
    """Return whether a principal may be told of a call that changed something on a node: one that is limited to some
    tools or nodes, of its own calls and of those on its nodes."""
    if not principal.narrowed or principal.asker.id in (record.credential, record.on_behalf_of):
        return True
    return node_id is not None and principal.may_know(node_id)


def _allow(target: Target, credential: Credential) -> None:
    if credential is OWNER:
        return
    needed = scope_of(target.spec)
    if not credential.may(needed):
        whose = "this credential" if credential.is_token else f"the credential {credential.id!r}"
        raise Denied(f"{whose} lacks the scope {needed.value!r}, which {target.tool!r} needs")
    if not credential.narrowed:
        return
    if credential.pinned:
        _stay(target, credential)
    elif not _reaches(target, credential):
        raise Denied(f"this credential does not include {target.tool!r}; it is limited to some tools or nodes")


def _reaches(target: Target, credential: Credential) -> bool:
    if target.own is not None and target.own.server:
        return credential.reaches(target.own.server, target.own.spec.name, of_server=True)
    return credential.reaches(target.node.card.node_id if target.node else None, target.tool)


def offered_to(principal: Principal, name: str, spec: ToolSpec, host: str) -> bool:
    """Whether a principal may call a listed tool by `name`. `host` is where it runs: a node, an MCP server, `gsv` or
    `local`."""
    if not principal.may(scope_of(spec)):
        return False
    own, of_server = host in _OWN, spec.capability == MCP
    return not principal.narrowed or principal.reaches(
        None if own else host, name if own else spec.name, of_server=of_server
    )


class Lookup(msgspec.Struct, frozen=True):
    """The tools that a name means to a caller: one, or none and names that are spelled alike."""

    tools: list[Offer]
    similar: list[str] = []
    # Other names of its parameters.
    aliases: Mapping[str, str] = {}


def offers_to(catalog: Catalog, principal: Principal) -> list[Offer]:
    """Return the tools of the gateway and of connected nodes: all for `read`, else those the principal may call."""
    every = principal.may(Scope.READ) and not principal.narrowed
    return [
        Offer(name, spec.description, spec.parameters or EMPTY, host)
        for name, (spec, host) in catalog.specs().items()
        if every or offered_to(principal, name, spec, host)
    ]


def look_up(catalog: Catalog, principal: Principal, name: str) -> Lookup:
    """Return the tool that a caller means by a name, also on a node that is offline.

    A name without a node, such as `Bash`, means the tool of the first node that has it.
    """
    offers = offers_to(catalog, principal)
    every = principal.may(Scope.READ) and not principal.narrowed
    offers += [
        Offer(full, spec.description, spec.parameters or EMPTY, node.card.node_id)
        for full, spec, node in catalog.absent()
        if every or offered_to(principal, full, spec, node.card.node_id)
    ]
    own = catalog.own(name)
    for spelled in (str, str.casefold):
        for offer in offers:
            if spelled(name) in (spelled(offer.name), spelled(offer.name).removeprefix(spelled(f"{offer.host}__"))):
                return Lookup([offer], aliases={} if own is None or offer.name != name else own.aliases)
    known = {offer.name.casefold(): offer.name for offer in offers if len(offer.name) <= MAX_COMPARED_LENGTH}
    text = name.casefold()[:MAX_COMPARED_LENGTH]
    near = difflib.get_close_matches(text, list(known)[:MAX_COMPARED_NAMES], 3, SIMILAR)
    return Lookup([], [known[one] for one in near])


def _stay(target: Target, credential: Credential) -> None:
    """Raise Denied for a tool on a machine that a pinned run may not reach."""
    if target.node is None:
        if target.kind == "native" or target.spec is None or target.spec.capability is None:
            return
        if target.own is not None and target.own.server and target.own.node in credential.nodes:
            return
        place = "the gateway's own machine"
        if target.own is not None and target.own.server:
            place = f"the MCP server {target.own.server!r}"
    elif target.node.card.node_id in credential.nodes:
        return
    else:
        place = f"the node {target.node.card.node_id!r}"
    here = f"use the tools of {', '.join(map(repr, credential.nodes))}" if credential.nodes else "none is connected"
    raise Denied(f"this run is pinned to {credential.pinned}, and {target.tool!r} works on {place}; {here}")


def time_limit(call: ToolCall, target: Target) -> int:
    """Return the time limit of a call in milliseconds. Raises InvalidArgs."""
    wanted = call.timeout_ms
    if wanted is None:
        spec = target.spec
        wanted = (spec.timeout_ms if spec else None) or DEFAULT_TIMEOUT_MS
        if spec is not None and spec.timeout_parameter is not None:
            wanted = _own_limit(call, spec.timeout_parameter, wanted)
    if not 1 <= wanted <= MAX_TIMEOUT_MS:
        raise InvalidArgs(f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {wanted}")
    return wanted


def _own_limit(call: ToolCall, parameter: str, default: int) -> int:
    """Return the limit of a tool that ends by itself, plus a grace period to report how; 0 means no limit."""
    args = read_arguments(call.args)
    limit = args.get(parameter, default) if isinstance(args, dict) else default
    if not isinstance(limit, int | float) or limit < 0:
        return default
    return min(int(limit) + OWN_LIMIT_GRACE_MS, MAX_TIMEOUT_MS) if limit else MAX_TIMEOUT_MS


def unambiguous(call: ToolCall) -> ToolCall:
    """Return the call with each name in its arguments once.

    Of a repeated name the policy would check the last value, and a node in another language might use the first.
    """
    return msgspec.structs.replace(call, args=msgspec.Raw(msgspec.json.encode(read_arguments(call.args))))


def request_frame(call: ToolCall, target: Target, node: Node, timeout_ms: int, keeps: str = "") -> bytes:
    """Return the frame that sends a call to its node. `keeps`: the trial to keep instead of running it."""
    connection = node.connection
    return encode(
        ToolRequest(
            request_id=call.id,
            tool=trial.NAME if keeps else target.tool,
            args=trial.keeping(keeps) if keeps else call.args,
            session_key=UNSET if call.session_key is None else call.session_key,
            timeout_ms=timeout_ms if connection is not None and connection.resume is not None else UNSET,
            trace=call.trace if call.trace and connection is not None and connection.resume is not None else UNSET,
            caller=_trial_caller(call) if connection is not None and connection.resume is not None else UNSET,
        )
    )


def _trial_caller(call: ToolCall) -> str | UnsetType:
    if b"trial" not in bytes(call.args):
        return UNSET
    arguments = read_arguments(call.args)
    is_trial = isinstance(arguments, dict) and arguments.get("trial") is True
    return trial.caller_name(call.asker) or UNSET if is_trial else UNSET


def unread(connection: Connection, request: bytes, args: msgspec.Raw) -> str | None:
    """Return why a node would drop a request without an answer; None if it can read it."""
    if len(request) > connection.max_request_bytes:
        most = connection.max_request_bytes
        return f"the request has {len(request)} bytes, node {connection.node_id!r} accepts at most {most}"
    if connection.plain and (fault := plain_peer_error(args)) is not None:
        return f"arguments: {fault}, which the plain node {connection.node_id!r} cannot read"
    return None


def repeated_frame(record: CallRecord, keeps: str = "") -> bytes:
    """Return the frame of a call that was open when the gateway stopped, for a node that never received it."""
    _, separator, bare = record.tool.partition("__")
    return encode(
        ToolRequest(
            request_id=record.id,
            tool=trial.NAME if keeps else bare if separator else record.tool,
            args=trial.keeping(keeps) if keeps else record.args,
            session_key=UNSET if record.session_key is None else record.session_key,
            timeout_ms=record.deadline_at - record.created_at,
            caller=_trial_caller(ToolCall(record.id, record.tool, record.args, asker=record.asker)),
        )
    )
