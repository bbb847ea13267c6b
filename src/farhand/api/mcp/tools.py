"""Convert tools and their outcomes to MCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import offered_to
from farhand.gateway.calls.catalog import EMPTY, OWN_HOST, Catalog
from farhand.gateway.calls.open_call import result_of
from farhand.gateway.nodes.machines_tool import NODE_LIST
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.llm.tool_names import ToolNames
from farhand.protocol.calls import ToolSpec
from farhand.protocol.json_limits import decode_bounded
from farhand.protocol.names import split_tool
from farhand.store.tables.calls import CallRecord, CallState
from farhand.tools.model_view import without_repeats
from farhand.tools.node_family import families, family_of

# Maximum tools in one answer; its cursor leads to more.
PAGE: Final = 1000
CALL_KEY: Final = "farhand/call_id"


class Names:
    """The two-way mapping of tool names for MCP clients, which accept letters, digits and `_ . -`."""

    def __init__(self, node_registry: NodeRegistry, catalog: Catalog) -> None:
        self._node_registry = node_registry
        self._catalog = catalog
        self._version = -1
        self._names = ToolNames(())

    def meant(self, name: str) -> str:
        """Return the tool for a client's name; a tool's own name is always accepted."""
        if self._version != self._node_registry.version:
            self._version = self._node_registry.version
            self._names = ToolNames(self._catalog.specs(), dots=True)
        return self._names.meant(name)


def tools(catalog: Catalog, principal: Principal, cursor: str | None, *, with_tasks: bool = False) -> dict[str, Any]:
    """Return the tools that a principal may use, by name, starting after `cursor`; `with_tasks` says that each may be
    called as a task."""
    specs = catalog.specs()
    names = ToolNames(specs, dots=True)
    offered = {name: spec for name, (spec, host) in specs.items() if offered_to(principal, name, spec, host)}
    found = {names.sent(name): spec for name, spec in offered.items()}
    if principal.actor.profile == "compact" and not principal.actor.tools:  # such a token names its tools itself
        found = {name: spec for name, spec in found.items() if family_of(spec) is None}
        found |= {spec.name: spec for spec in _common(catalog, principal, offered)}
    rest = sorted(name for name in found if cursor is None or name > cursor)
    listed = [_tool(name, found[name]) for name in rest[:PAGE]]
    if with_tasks:
        listed = [{**tool, "execution": {"taskSupport": "optional"}} for tool in listed]
    page: dict[str, Any] = {"tools": listed}
    return {**page, "nextCursor": rest[PAGE - 1]} if len(rest) > PAGE else page


def _common(catalog: Catalog, principal: Principal, offered: Mapping[str, ToolSpec]) -> list[ToolSpec]:
    """Return the tools of all machines under one name each, and the tool that lists the machines."""
    members = {name: spec for name, spec in offered.items() if family_of(spec) is not None}
    nodes = {named[0] for name in members if (named := split_tool(name)) is not None}
    listing = catalog.own(NODE_LIST)
    lists = nodes and listing is not None and offered_to(principal, NODE_LIST, listing.spec, OWN_HOST["native"])
    return [*families(members.values(), nodes), *([listing.spec] if lists and listing is not None else [])]


def _tool(name: str, spec: ToolSpec) -> dict[str, Any]:
    return {
        "name": name,
        "description": spec.description,
        "inputSchema": {"properties": {}, **(spec.parameters or EMPTY), "type": "object"},
        "annotations": {"title": name, "readOnlyHint": spec.read_only, "destructiveHint": not spec.read_only},
    }


def outcome(record: CallRecord) -> dict[str, Any]:
    """Return the outcome of a call as the result of `tools/call`."""
    meta = {CALL_KEY: record.id}
    if record.state is not CallState.OK:
        failure = result_of(record).error
        assert failure is not None
        return {"content": [_text(f"{failure.kind}: {failure.message}")], "isError": True, "_meta": meta}
    raw = b"null" if record.result is None else bytes(record.result)
    try:
        value = decode_bounded(raw)
    except msgspec.DecodeError:  # too many values to decode: pass it on as text
        value = None
    blocks = value.get("content") if isinstance(value, dict) else None
    if isinstance(value, dict) and "content" in value and value.keys() <= {"content", "structuredContent"}:
        if isinstance(blocks, str):
            blocks = [_text(blocks)]
        if isinstance(blocks, list) and (blocks or len(value) > 1) and all(_is_block(block) for block in blocks):
            return {**value, "content": blocks, "isError": False, "_meta": meta}
    once = without_repeats(value)
    text = value if isinstance(value, str) else raw.decode() if once is value else msgspec.json.encode(once).decode()
    return {"content": [_text(text)], "isError": False, "_meta": meta}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_block(block: Any) -> bool:
    """Return whether a block is one of MCP: text, an image, audio, a resource, or a link to one."""
    match block:
        case {"type": "text", "text": str()}:
            return True
        case {"type": "image" | "audio", "data": str(), "mimeType": str()}:
            return True
        case {"type": "resource", "resource": {"uri": str(), "text": str()} | {"uri": str(), "blob": str()}}:
            return True
        case {"type": "resource_link", "uri": str(), "name": str()}:
            return True
    return False
