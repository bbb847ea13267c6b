"""Which tool a name means, and whether arguments fit it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import msgspec

from farhand.gateway.roster import Node, Roster
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.protocol.names import FAMILY, LONGEST_TOOL_NAME, join_tool, split_tool
from farhand.tools import undo
from farhand.tools.tool import Tool

NATIVE_PREFIX = "gsv__"
MOST_FOUND = 1000
OWN_HOST = {"native": "gsv", "local": "local"}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}

Kind = Literal["node", "native", "local"]


class Target(msgspec.Struct, frozen=True):
    """Where a call goes: a node or a tool of the gateway's own, under which name, and what is known of the tool."""

    node: Node | None
    tool: str
    capability: str | None
    spec: ToolSpec | None
    own: Tool | None = None

    @property
    def kind(self) -> Kind:
        return "node" if self.own is None else own_kind(self.tool)


def own_kind(name: str) -> Kind:
    """The gateway's own storage and services are `native`; the tools of the machine it runs on are `local`."""
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
    """Finds tools, the gateway's own and those of the connected nodes, and checks arguments against their schemas."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._own: dict[str, Tool] = {}
        self._unoffered: dict[str, Tool] = {}
        self._own_targets: dict[str, Target] = {}
        self._disabled: Callable[[], Collection[str]] = tuple
        self._found: dict[str, Target] = {}
        self._found_at = -1
        """At which version of the roster `_found` was true."""
        self._validators: dict[int, tuple[ToolSpec, Any]] = {}

    def serve(self, tools: Iterable[Tool], *, offered: bool = True) -> None:
        """Offer tools of the gateway's own. No node's tool takes the place of one of them.

        One that is not offered is called by the door that knows it; nobody finds it by its name.
        """
        for tool in tools:
            assert self.own(tool.name) is None, f"the tool {tool.name!r} is served twice"
            (self._own if offered else self._unoffered)[tool.name] = tool

    def own(self, name: str) -> Tool | None:
        """A tool of the gateway's own, offered or not."""
        return self._own.get(name) or self._unoffered.get(name)

    def obey(self, disabled: Callable[[], Collection[str]]) -> None:
        """`disabled` tells which tools are switched off, by the names that call them; it is asked at each call."""
        self._disabled = disabled

    def switched_off(self, name: str) -> bool:
        return name in self._disabled()

    def find(self, name: str, own: Tool | None = None) -> Target:
        """Raises NotFound for a name nobody serves, SwitchedOff, Failed for a node that is known but offline.

        `own`: the tool of the gateway's own that the caller means.
        """
        if self.switched_off(name):
            raise SwitchedOff(f"the tool {name!r} is disabled by the settings ([tools] disabled)")
        if own is not None:
            return self._of_own(name, own)
        if self._found_at != self._roster.version or len(self._found) > MOST_FOUND:
            self._found.clear()
            self._found_at = self._roster.version
        known = self._found.get(name)
        if known is None:
            known, lasts = self._look_for(name)
            if lasts:
                self._found[name] = known
        return known

    def _of_own(self, name: str, own: Tool) -> Target:
        known = self._own_targets.get(name)
        if known is None or known.own is not own:
            known = self._own_targets[name] = Target(None, name, own.spec.capability, own.spec, own)
        return known

    def _look_for(self, name: str) -> tuple[Target, bool]:
        """The target, and whether it stays the same until a node comes, goes or changes."""
        own = self._own.get(name)
        if own is not None:
            return self._of_own(name, own), True
        if len(name) > LONGEST_TOOL_NAME:  # it need not be looked for, which takes long, nor repeated
            raise NotFound(f"no tool has a name of {len(name)} characters; `farhand tools` lists what there is")
        if name.startswith(NATIVE_PREFIX):
            raise NotFound(f"the gateway has no tool {name!r}; `farhand tools` lists what there is")
        named = split_tool(name)
        if named is not None:
            return self._on_node(*named), True
        served = self._roster.serving(name)
        if served is None:
            raise NotFound(f"no connected node serves the tool {name!r}; `farhand tools` lists what there is")
        node, capability, alone = served
        return Target(node, name, capability, node.specs.get(name.casefold())), alone

    def find_known(self, name: str) -> Target:
        """As `find`, but a node that is known and offline will do: its connection is None then."""
        if self.switched_off(name) or self._own.get(name) is not None or not self.away(name):
            return self.find(name)
        named = split_tool(name)
        nodes = self._roster.nodes
        for node in [nodes[named[0]]] if named else [nodes[node_id] for node_id in sorted(nodes)]:
            tool = named[1] if named else name
            spec = node.specs.get(tool.casefold())
            if spec is not None and (named or spec.capability is None):
                return Target(node, spec.name, spec.capability, spec)
            capability = self._roster.serving_on(node, tool)
            if capability is not None:
                return Target(node, tool, capability, None)
        if named:
            raise NotFound(f"node {named[0]!r} has no tool {named[1]!r}")
        return self.find(name)

    def away(self, name: str) -> bool:
        """Whether a tool's node is one that is known, and none is connected that has the tool."""
        named = split_tool(name)
        if named:
            node = self._roster.nodes.get(named[0])
            return node is not None and not node.online
        return self._roster.serving(name) is None

    def find_again(self, name: str, node_id: str | None, own: Tool | None = None) -> Target:
        """As `find`, on the very node that was found before."""
        if own is not None or node_id is None:
            return self.find(name, own)
        if self.switched_off(name):
            return self.find(name)
        named = split_tool(name)
        return self._on_node(node_id, named[1] if named else name)

    def awaited(self, name: str) -> Node | None:
        """The node a tool's name names, when it is known but offline."""
        named = split_tool(name)
        node = self._roster.nodes.get(named[0]) if named else None
        return node if node is not None and not node.online else None

    def _on_node(self, node_id: str, tool: str) -> Target:
        node = self._roster.nodes.get(node_id)
        if node is None:
            raise NotFound(f"there is no node {node_id!r}; `farhand nodes` lists the known ones")
        if node.connection is None:
            raise Failed(f"node {node_id!r} is offline; the call did not run")
        if tool == undo.NAME and self.can_undo(node):
            return Target(node, tool, undo.SPEC.capability, undo.SPEC)
        spec = node.specs.get(tool.casefold())
        if spec is not None:
            return Target(node, spec.name, spec.capability, spec)
        found = self._roster.serving_on(node, tool)
        if found is None:
            raise NotFound(f"node {node_id!r} has no tool {tool!r}")
        return Target(node, tool, found, None)

    @staticmethod
    def can_undo(node: Node) -> bool:
        """Whether a connected node keeps what calls change, and may write."""
        connection = node.connection
        return (
            connection is not None
            and undo.NAME in connection.unlisted
            and undo.SPEC.capability in node.card.capabilities
        )

    def check(self, target: Target, call: ToolCall) -> None:
        """Raises InvalidArgs naming the parameter at fault."""
        if target.own is not None or target.spec is None or not target.spec.parameters:
            return  # a tool of the gateway's own checks for itself, and takes other names of parameters too
        validator = self._validator(target.spec)
        if validator is None:
            return
        arguments = read_arguments(call.args)
        try:
            validator.validate({} if arguments is None else arguments)  # up to the first fault: there may be many
        except ValueError as failure:
            place = getattr(failure, "instance_path", None)
            if place is None:  # nested deeper than the validator goes
                raise InvalidArgs(f"arguments: they cannot be checked: {failure}") from None
            where = f"parameter '{'.'.join(map(str, place))}': " if place else "arguments: "
            raise InvalidArgs(where + failure.message[:500]) from None  # type: ignore[attr-defined]

    def offers(self) -> list[Offer]:
        """The gateway's own tools and those of every connected node, under the names that call them."""
        return [
            Offer(name, spec.description, spec.parameters or EMPTY, host) for name, (spec, host) in self.specs().items()
        ]

    def specs(self, among: Callable[[Node], bool] | None = None) -> dict[str, tuple[ToolSpec, str]]:
        """By the name that calls it: what is known of each tool that is offered, and whose it is.

        `among`: of these nodes only.
        """
        specs: dict[str, tuple[ToolSpec, str]] = {
            name: (tool.spec, OWN_HOST[own_kind(name)]) for name, tool in self._own.items()
        }
        for node_id in sorted(self._roster.nodes):
            node = self._roster.nodes[node_id]
            if node.connection is None or (among is not None and not among(node)):
                continue
            for spec in node.card.tools:
                name = spec.name if self._shared(node, spec) else join_tool(node_id, spec.name)
                specs.setdefault(name, (spec, node_id))
        disabled = self._disabled()
        return {name: found for name, found in specs.items() if name not in disabled}

    def families(self, among: Callable[[Node], bool] | None = None) -> list[ToolSpec]:
        """What stands for the tools of connected nodes that list none: `macos.notes.*` for each capability.

        `among`: of these nodes only.
        """
        hosts: dict[str, list[str]] = {}
        for node_id, node in sorted(self._roster.nodes.items()):
            if node.online and not node.card.tools and (among is None or among(node)):
                for capability in (each for each in node.card.capabilities if split_tool(each) is None):
                    hosts.setdefault(capability, []).append(node_id)
        return [
            ToolSpec(
                capability + FAMILY, f"On {', '.join(ids)}, which tells neither names nor parameters of its tools."
            )
            for capability, ids in sorted(hosts.items())
        ]

    def _shared(self, node: Node, spec: ToolSpec) -> bool:
        """A plug-in's tool is one name for all nodes that serve it; any other belongs to its machine.

        Else a node could put its own words under the name of a tool it does not serve.
        """
        dotted = spec.capability is None and split_tool(spec.name) is None
        return dotted and self._roster.serving_on(node, spec.name) is not None

    def _validator(self, spec: ToolSpec) -> Any:
        # Specs live as long as a node's card, so their identity is a safe and cheap key while we hold them.
        known = self._validators.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1]
        if len(self._validators) > 10_000:
            self._validators.clear()
        validator = _compile(spec.parameters)
        self._validators[id(spec)] = (spec, validator)
        return validator


def read_arguments(args: msgspec.Raw) -> Any:
    """Raises InvalidArgs for JSON that cannot be held, such as a number out of range."""
    try:
        return msgspec.json.decode(args)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgs(f"arguments: {error}") from None


def _compile(schema: dict[str, Any]) -> Any:
    """A validator that fetches nothing and whose patterns cannot run away; None for a schema that is none.

    Nor for one with references: a few of them can unfold into any amount of work. The node checks its own.
    """
    if b'"$ref"' in (text := msgspec.json.encode(schema)) or b'"$dynamicRef"' in text:
        return None
    import jsonschema_rs  # noqa: PLC0415 - some megabytes that a gateway at rest does without

    try:
        return jsonschema_rs.Draft202012Validator(
            schema, retriever=_fetch_nothing, pattern_options=jsonschema_rs.RegexOptions()
        )
    except ValueError:
        return None


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"a tool's schema may not refer to {uri}")
