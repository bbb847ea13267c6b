"""Finds the tool that a name means, and checks arguments against its schema."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import msgspec

from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.gateway.nodes.server_tools import Offered, ServerTools
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.names import (
    ANY_BELOW,
    MAX_COMPARED_LENGTH,
    MAX_COMPARED_NAMES,
    MAX_TOOL_NAME_CHARS,
    acceptable_name,
    join_tool,
    split_tool,
)
from farhand.tools import trial, undo
from farhand.tools.argument_schemas import ArgumentSchema
from farhand.tools.node_family import family_of
from farhand.tools.schema import unknown_parameter
from farhand.tools.tool import Tool

NATIVE_PREFIX = "gsv__"
MAX_FOUND = 1000
MAX_NAMED = 5
MAX_AWAY = 100
MAX_SCHEMAS = 10_000
# Tools that a node serves to people and programs and does not list.
UNLISTED = {spec.name: spec for spec in (undo.SPEC, trial.SPEC)}
OWN_HOST = {"native": "gsv", "local": "local"}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
OPEN: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}

Kind = Literal["node", "native", "local", "mcp"]


class Target(msgspec.Struct, frozen=True):
    """Where a call goes: to a node or a gateway tool, under which name, and with which schema."""

    node: Node | None
    tool: str
    capability: str | None
    spec: ToolSpec | None
    own: Tool | None = None

    @property
    def kind(self) -> Kind:
        if self.own is None:
            return "node"
        return "mcp" if self.own.server else own_kind(self.tool)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that calls this tool."""
        if self.node is None:
            return (self.tool,)
        full = join_tool(self.node.card.node_id, self.tool)
        # A tool of a machine always carries the node in its name; `read` is another tool than `laptop__Read`.
        of_machine = self.spec is not None and self.spec.capability is not None
        return (full,) if of_machine else (full, self.tool)

    def called(self, name: str) -> str:
        """Return the canonical spelling of a name that a caller used."""
        if name == self.tool or self.node is None or split_tool(name) is None:
            return self.tool
        return join_tool(self.node.card.node_id, self.tool)


def own_kind(name: str) -> Kind:
    """Return `native` for the gateway's storage and services, `local` for tools of the machine it runs on."""
    return "native" if name.startswith(NATIVE_PREFIX) else "local"


class Offer(msgspec.Struct, frozen=True):
    """A tool as callers see it."""

    name: str
    description: str
    parameters: dict[str, Any]
    host: str


class SwitchedOff(NotAllowed):
    """The settings switch this tool off."""


class Catalog:
    """The tools of the gateway and of the nodes."""

    def __init__(self, node_registry: NodeRegistry, disabled: Callable[[], Collection[str]] = tuple) -> None:
        """`disabled` returns the names of the tools that are switched off; it is asked at each call."""
        self._node_registry = node_registry
        self._own: dict[str, Tool] = {}
        self._unoffered: dict[str, Tool] = {}
        self._servers = ServerTools()
        self._own_targets: dict[str, Target] = {}
        self._disabled = disabled
        # Targets by name, and at which version of the node registry and with which tools switched off they were found.
        self._found: dict[str, Target] = {}
        self._found_at = -1
        self._found_without: Collection[str] = ()
        self._schemas: dict[int, tuple[ToolSpec, ArgumentSchema | None]] = {}

    def serve(self, tools: Iterable[Tool], *, offered: bool = True) -> None:
        """Add tools of the gateway. A tool of a node cannot replace one of them.

        A tool that is not offered has no public name: only the code that holds it can call it.
        """
        for tool in tools:
            assert self.own(tool.name) is None, f"the tool {tool.name!r} is served twice"
            (self._own if offered else self._unoffered)[tool.name] = tool

    def set_server(self, server: str, offered: Offered | None) -> None:
        """Replace what an MCP server offers; None forgets the server."""
        self._servers.set(server, offered)
        self._node_registry.tools_changed()

    def own(self, name: str) -> Tool | None:
        """Return a tool of the gateway, offered or not, or of a connected MCP server."""
        return self._own.get(name) or self._unoffered.get(name) or self._servers.get(name)

    def switched_off(self, *names: str) -> bool:
        """Whether the settings disable a tool with one of these names, ignoring case and surrounding blanks."""
        disabled = {name.strip().casefold() for name in self._disabled()}
        return any(name.casefold() in disabled for name in names)

    def _refuse_switched_off(self, target: Target) -> Target:
        common = family_of(target.spec) if target.node is not None and target.spec is not None else None
        self.refuse_switched_off(*target.names, *((common,) if common else ()))
        return target

    def refuse_switched_off(self, *names: str) -> None:
        """Raise SwitchedOff if the settings disable a tool with one of these names; the first is shown."""
        if self.switched_off(*names):
            raise SwitchedOff(f"the tool {names[0]!r} is disabled by the settings ([tools] disabled)")

    def find(self, name: str, own: Tool | None = None) -> Target:
        """Return the tool that a name calls.

        `own`: the gateway tool to use instead. Raises NotFound for an unknown name, SwitchedOff, and Failed for a node
        that is offline.
        """
        if own is not None:
            return self._refuse_switched_off(self._of_own(name, own))
        disabled, version = self._disabled(), self._node_registry.version
        if version != self._found_at or disabled is not self._found_without or len(self._found) > MAX_FOUND:
            self._found.clear()
            self._found_at, self._found_without = version, disabled
        known = self._found.get(name)
        if known is None:
            known, lasts = self._look_for(name)
            self._refuse_switched_off(known)
            if lasts:
                self._found[name] = known
        return known

    def _of_own(self, name: str, own: Tool) -> Target:
        known = self._own_targets.get(name)
        if known is None or known.own is not own:
            known = self._own_targets[name] = Target(None, name, own.spec.capability, own.spec, own)
        return known

    def _look_for(self, name: str) -> tuple[Target, bool]:
        """Return the target, and whether it is valid until a node connects, leaves or changes."""
        own = self._own.get(name)
        if own is not None:
            return self._of_own(name, own), True
        if len(name) > MAX_TOOL_NAME_CHARS:  # do not search for it, which is slow, nor repeat it
            raise NotFound(f"no tool has a name of {len(name)} characters; `farhand tools` lists all tools")
        if name.startswith(NATIVE_PREFIX):
            raise NotFound(f"the gateway has no tool {name!r}; `farhand tools` lists all tools")
        served = self._servers.find(name)
        if served is not None:
            return self._of_own(name, served), True
        named = split_tool(name)
        if named is not None:
            return self._on_node(*named), True
        found = self._node_registry.serving(name)
        if found is None:
            raise self._unserved(name)
        node, capability, alone = found
        spec = node.specs.get(name.casefold())
        return Target(node, _unlisted(name) if spec is None else spec.name, capability, spec), alone

    def find_known(self, name: str) -> Target:
        """Like `find`, but also return tools of nodes that are offline."""
        return self._refuse_switched_off(self._find_known(name))

    def _find_known(self, name: str) -> Target:
        if self.own(name) is not None or not self.away(name):
            return self._look_for(name)[0]
        named = split_tool(name)
        nodes = self._node_registry.nodes
        for node in [nodes[named[0]]] if named else [nodes[node_id] for node_id in sorted(nodes)]:
            tool = named[1] if named else name
            spec = node.specs.get(tool.casefold())
            if spec is not None and (named or spec.capability is None):
                return Target(node, spec.name, spec.capability, spec)
            capability = self._node_registry.serving_on(node, tool)
            if capability is not None:
                return Target(node, _unlisted(tool), capability, None)
        if named:
            raise NotFound(f"node {named[0]!r} has no tool {named[1]!r}")
        return self._look_for(name)[0]

    def away(self, name: str) -> bool:
        """Whether no connected node has the tool; for a name with a node, whether that node is known and offline."""
        named = split_tool(name)
        if named:
            node = self._node_registry.nodes.get(named[0])
            return node is not None and not node.online
        return self._node_registry.serving(name) is None

    def find_again(self, name: str, node_id: str | None, own: Tool | None = None) -> Target:
        """Like `find`, on the node that was found before."""
        if own is not None or node_id is None:
            return self.find(name, own)
        named = split_tool(name)
        return self._refuse_switched_off(self._on_node(node_id, named[1] if named else name))

    def awaited(self, name: str) -> Node | None:
        """Return the node in a tool's name if it is known and offline."""
        named = split_tool(name)
        node = self._node_registry.nodes.get(named[0]) if named else None
        return node if node is not None and not node.online else None

    def _on_node(self, node_id: str, tool: str) -> Target:
        node = self._node_registry.nodes.get(node_id)
        if node is None:
            raise NotFound(self._node_registry.unknown(node_id))
        if node.connection is None:
            raise Failed(f"{node.absence}; the call did not run")
        if (hidden := UNLISTED.get(tool)) is not None and self.serves_unlisted(node, hidden):
            return Target(node, tool, hidden.capability, hidden)
        spec = node.specs.get(tool.casefold())
        if spec is not None:
            return Target(node, spec.name, spec.capability, spec)
        found = self._node_registry.serving_on(node, tool)
        if found is None:
            known = [spec.name for spec in node.card.tools if len(spec.name) <= MAX_COMPARED_LENGTH]
            near = difflib.get_close_matches(tool[:MAX_COMPARED_LENGTH], known[:MAX_COMPARED_NAMES], 3)
            hint = f"; did you mean {', '.join(join_tool(node_id, name) for name in near)}?" if near else ""
            raise NotFound(f"node {node_id!r} has no tool {tool!r}{hint}")
        return Target(node, _unlisted(tool), found, None)

    def _unserved(self, name: str) -> NotFound:
        """Return why no node serves a dotted name: they are offline, or there is none."""
        away = self._node_registry.away_serving(name)
        if not away:
            return NotFound(f"no connected node serves the tool {name!r}; `farhand tools` lists all tools")
        states = ", ".join(f"{node.card.node_id!r} (last seen {node.seen})" for node in away[:MAX_NAMED])
        more = f" and {len(away) - MAX_NAMED} more" if len(away) > MAX_NAMED else ""
        plural = "nodes that serve it are" if len(away) > 1 else "node that serves it is"
        return NotFound(
            f"the tool {name!r} is not available: the {plural} offline: {states}{more}; the call did not run"
        )

    @staticmethod
    def serves_unlisted(node: Node, spec: ToolSpec) -> bool:
        """Whether a connected node has a tool that it does not list, and may use what the tool needs."""
        connection = node.connection
        return connection is not None and spec.name in connection.unlisted and spec.capability in node.card.capabilities

    def checked(self, target: Target, call: ToolCall) -> ToolCall:
        """Return the call with the canonical names of the tool and its parameters.

        Each name is in the arguments once: of a repeated name the policy would check the last value, and a node in
        another language might use the first. Arguments of a tool without a schema are not changed. Raises InvalidArgs.
        """
        name = target.called(call.tool)
        if name != call.tool:
            call = msgspec.structs.replace(call, tool=name)
        if _open(target):
            return call
        arguments = read_arguments(call.args)
        named = _named(target, arguments)
        if target.own is None or target.own.server:
            assert target.spec is not None
            if (schema := self._schema(target.spec)) is not None:
                schema.check(named, len(call.args))
        elif target.own.check is not None:
            target.own.check(named)
        return call if arguments is None else msgspec.structs.replace(call, args=written(named))

    def named(self, target: Target, args: msgspec.Raw) -> msgspec.Raw:
        """Like `checked`, without validating the values: for a call that is not going to be made."""
        return args if _open(target) else written(_named(target, read_arguments(args)))

    def offers(self) -> list[Offer]:
        """Return the tools of the gateway and of all connected nodes."""
        return [
            Offer(name, spec.description, spec.parameters or EMPTY, host) for name, (spec, host) in self.specs().items()
        ]

    def specs(self, among: Callable[[Node], bool] | None = None) -> dict[str, tuple[ToolSpec, str]]:
        """Return each offered tool by name, with its host. `among` selects nodes."""
        specs: dict[str, tuple[ToolSpec, str]] = {
            name: (tool.spec, OWN_HOST[own_kind(name)]) for name, tool in self._own.items()
        }
        for node_id in sorted(self._node_registry.nodes):
            node = self._node_registry.nodes[node_id]
            if node.connection is None or (among is not None and not among(node)):
                continue
            for spec in node.lent:
                name = spec.name if self._shared(node, spec) else join_tool(node_id, spec.name)
                specs.setdefault(name, (spec, node_id))
            for spec in _announced(node):
                specs.setdefault(spec.name, (spec, node_id))
        for name, tool in self._servers:
            node_of_server = self._node_registry.nodes.get(tool.node)
            if among is None or (node_of_server is not None and among(node_of_server)):
                specs[name] = (tool.spec, tool.server)
        return {name: found for name, found in specs.items() if not self._is_off(name, *found)}

    def _is_off(self, name: str, spec: ToolSpec, host: str) -> bool:
        own = host in OWN_HOST.values()
        return self.switched_off(name) if own else self.switched_off(name, join_tool(host, spec.name))

    def families(self, among: Callable[[Node], bool] | None = None) -> list[tuple[ToolSpec, str]]:
        """Return stand-ins for the tools of connected nodes that list none: `macos.notes.*` for each capability, with
        the first node that serves it. `among` selects nodes."""
        hosts: dict[str, list[str]] = {}
        for node_id, node in sorted(self._node_registry.nodes.items()):
            if node.online and not node.card.tools and (among is None or among(node)):
                for capability in (each for each in node.card.capabilities if split_tool(each) is None):
                    hosts.setdefault(capability, []).append(node_id)
        return [
            (
                ToolSpec(
                    capability + ANY_BELOW,
                    f"On {', '.join(ids[:MAX_NAMED])}: names and parameters of these tools are not announced.",
                ),
                ids[0],
            )
            for capability, ids in sorted(hosts.items())
        ]

    def absent(self, among: Callable[[Node], bool] | None = None) -> list[tuple[str, ToolSpec, Node]]:
        """Return the tools that only offline nodes have: name, spec and node. `among` selects nodes; of many, those
        that were seen last are listed."""
        away = [
            node for node in self._node_registry.nodes.values() if not node.online and (among is None or among(node))
        ]
        away = sorted(away, key=lambda node: (-node.last_seen, node.card.node_id))[:MAX_AWAY]
        found: dict[str, tuple[str, ToolSpec, Node]] = {}
        disabled = self._disabled()
        for node in away:
            families = [ToolSpec(f"{capability}{ANY_BELOW}") for capability in node.card.capabilities]
            for spec in node.lent if node.card.tools else families:
                shared = self._shared(node, spec) or not node.card.tools
                name = spec.name if shared else join_tool(node.card.node_id, spec.name)
                if shared and self._node_registry.serving(spec.name.removesuffix(ANY_BELOW)) is not None:
                    continue
                if name not in disabled:
                    found.setdefault(name, (name, spec, node))
        return list(found.values())

    def _shared(self, node: Node, spec: ToolSpec) -> bool:
        """Whether a tool has one name on all nodes that serve it, as those of plug-ins do, and no node in its name.

        Only a node that serves the tool may describe it.
        """
        dotted = spec.capability is None and split_tool(spec.name) is None
        return dotted and self._node_registry.serving_on(node, spec.name) is not None

    def _schema(self, spec: ToolSpec) -> ArgumentSchema | None:
        # The identity of a spec is a safe and cheap key while the cache holds the spec.
        known = self._schemas.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1]
        if len(self._schemas) > MAX_SCHEMAS:
            self._schemas.clear()
        schema = ArgumentSchema.of(_accepted(spec))
        self._schemas[id(spec)] = (spec, schema)
        return schema


def _open(target: Target) -> bool:
    """Whether the parameters of a tool are not known."""
    return (target.own is None or bool(target.own.server)) and (target.spec is None or not target.spec.parameters)


def _named(target: Target, arguments: Any) -> Any:
    """Return the arguments under the canonical parameter names. Raises InvalidArgs for an unknown name."""
    arguments = {} if arguments is None else arguments
    if target.own is not None:
        if not isinstance(arguments, dict):
            raise InvalidArgs(f"arguments: expected an object, got {type(arguments).__name__}")
        if not target.own.server:
            return target.own.canonical(arguments)
    schema = {} if target.spec is None else target.spec.parameters
    unlisted = {} if target.spec is None else target.spec.unlisted
    names = schema.get("properties", {})
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if closed and isinstance(arguments, dict) and isinstance(names, dict):
        for given in arguments:
            if given not in names and given not in unlisted:
                raise unknown_parameter(given, names)
    return arguments


def _accepted(spec: ToolSpec) -> dict[str, Any]:
    """Return the schema of a tool with the parameters that it accepts but does not list."""
    listed = spec.parameters.get("properties", {})
    if not spec.unlisted or not isinstance(listed, dict):
        return spec.parameters
    return {**spec.parameters, "properties": {**spec.unlisted, **listed}}


def _unlisted(tool: str) -> str:
    """Return the name of a tool that its node does not list. Raises NotFound for one that is not a valid name."""
    if not acceptable_name(tool):
        raise NotFound(f"{tool[:100]!r} cannot be the name of a tool; `farhand tools` lists all tools")
    return tool


def written(arguments: Any) -> msgspec.Raw:
    """Return arguments as JSON. Raises InvalidArgs for values that JSON does not have."""
    try:
        return msgspec.Raw(msgspec.json.encode(arguments))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgs(f"arguments: {error}") from None


def _announced(node: Node) -> list[ToolSpec]:
    """Return the presumed tools of a node that lists none: its capabilities, which may be tool names, and names below
    them that have worked."""
    if node.card.tools:
        return []
    node_id = node.card.node_id
    names = [name for name in node.card.capabilities if split_tool(name) is None]
    known = [name for name in node.card.learned if name not in names]
    return [
        *(
            ToolSpec(name, f"{node_id} announces this name, and tools below it, without a description.", OPEN)
            for name in names
        ),
        *(
            ToolSpec(name, f"A tool of {node_id} that was called before; it has no description.", OPEN)
            for name in known
        ),
    ]


def read_arguments(args: msgspec.Raw) -> Any:
    """Return decoded arguments. Raises InvalidArgs for JSON that cannot be read, such as a number out of range."""
    try:
        check_value_count(args)
        return msgspec.json.decode(args)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgs(f"arguments: {error}") from None
