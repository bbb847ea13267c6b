"""Runs that are pinned to a node, or to the nodes with a tag: they reach no other machine.

In such a run, tool names without a node mean the tools of those nodes, and the gateway's own machine is out of reach.
Tools that belong to no machine stay available: messages, memory, sessions, the schedule, the workspace. Whatever the
run starts has the same pin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog, own_kind
from farhand.gateway.nodes.endpoints import read_endpoint
from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import NotAllowed
from farhand.protocol.names import NATIVE, join_tool, split_tool

TRANSFER = "gsv__Transfer"
LOGS = "gsv__LogsGet"


class Pin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The nodes that a run may reach: those with this id and this tag, as far as either is given."""

    node: str | None = None
    tag: str | None = None

    @classmethod
    def of(cls, node: str | None, tag: str | None) -> Pin | None:
        return cls(node, tag) if node or tag else None

    @classmethod
    def of_caller(cls, principal: Principal) -> Pin | None:
        """Return what the work that makes a call is pinned to."""
        return cls.of(principal.actor.pin_node, principal.actor.pin_tag)

    def __str__(self) -> str:
        if self.node is None:
            return f"nodes with the tag {self.tag!r}"
        return f"the node {self.node!r}" + (f" (with the tag {self.tag!r})" if self.tag else "")

    def fits(self, node: Node) -> bool:
        return self.node in (None, node.card.node_id) and (self.tag is None or self.tag in node.tags)

    def check(self, job: Mapping[str, Any]) -> None:
        """Raise NotAllowed for a job that the run may not make, change, remove or run: one with another pin."""
        if Pin.of(job.get("node"), job.get("tag")) != self:
            raise NotAllowed(f"this run is pinned to {self}; it can use only jobs with the same pin")


def of_a_machine(name: str, spec: ToolSpec) -> bool:
    """Whether a gateway tool works on the machine the gateway runs on."""
    return own_kind(name) == "local" and spec.capability is not None


class Pinned:
    """The calls of one pinned run."""

    def __init__(self, pin: Pin, catalog: Catalog, node_registry: NodeRegistry) -> None:
        self._pin = pin
        self._catalog = catalog
        self._node_registry = node_registry

    @property
    def nodes(self) -> list[Node]:
        """The connected nodes within reach, by id."""
        return [
            node
            for _, node in sorted(self._node_registry.nodes.items())
            if node.connection is not None and self._pin.fits(node)
        ]

    def specs(self) -> dict[str, tuple[ToolSpec, str]]:
        """Return the tools within reach by name, each with its host."""
        found = self._catalog.specs(self._pin.fits)
        return {
            name: (spec, host) for name, (spec, host) in found.items() if host != "local" or spec.capability is None
        }

    def families(self) -> list[tuple[ToolSpec, str]]:
        """Return stand-ins for the tools of nodes within reach that list none."""
        return self._catalog.families(self._pin.fits)

    def absent(self) -> list[tuple[str, ToolSpec, Node]]:
        """Return the tools of nodes within reach that are offline."""
        return self._catalog.absent(self._pin.fits)

    def names(self) -> list[str]:
        """Return the names of the tools of the node that names without a node mean."""
        first = {node.card.node_id for node in self.nodes[:1]}
        return [name for name, (_, host) in self.specs().items() if host in first]

    def principal(self, principal: Principal) -> Principal:
        """Return the principal with its actor limited to the nodes that are within reach now.

        An actor with limits of its own keeps them: it then also acts on its own behalf, without the pin.
        """
        reach, actor = tuple(node.card.node_id for node in self.nodes), principal.actor
        asker = actor if principal.on_behalf_of is None and actor.narrowed else principal.on_behalf_of
        pin = self._pin
        actor = msgspec.structs.replace(
            actor, nodes=reach, tools=(), pinned=str(pin), pin_node=pin.node, pin_tag=pin.tag
        )
        return Principal(actor, asker)

    def name(self, name: str) -> str:
        """Return the full name of the tool that a name means in this run."""
        own = self._catalog.own(name)
        if (own is not None and not of_a_machine(name, own.spec)) or split_tool(name) is not None:
            return name
        for node in self.nodes:
            spec = node.specs.get(name.casefold())
            if spec is not None:
                return join_tool(node.card.node_id, spec.name)
            if self._node_registry.serving_on(node, name) is not None:
                return join_tool(node.card.node_id, name)
        return name

    def reads_on_a_node(self, name: str) -> bool:
        """Whether a name is that of a read-only tool on a node within reach."""
        node_id, tool = split_tool(name) or ("", "")
        specs = [node.specs.get(tool.casefold()) for node in self.nodes if node.card.node_id == node_id]
        return any(spec is not None and spec.read_only for spec in specs)

    def arguments(self, name: str, arguments: str) -> str:
        """Return the arguments of a call, which may name nodes. Raises NotAllowed for one out of reach, ToolError."""
        if name not in (TRANSFER, LOGS):
            return arguments
        try:
            given = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return arguments  # the tool reports the error
        if not isinstance(given, dict):
            return arguments
        if name == LOGS:
            asked = given.get("nodeId") or next((node.card.node_id for node in self.nodes), None)
            if isinstance(asked, str):
                self._reach(asked)
                return msgspec.json.encode({**given, "nodeId": asked}).decode()
            return arguments
        for role in ("source", "destination"):
            if isinstance(raw := given.get(role), str):
                endpoint = read_endpoint(raw, role, self._node_registry)
                if endpoint.node_id != NATIVE:
                    self._reach(endpoint.node_id)
        return arguments

    def _reach(self, node_id: str) -> None:
        node = self._node_registry.nodes.get(node_id)
        if node is None or not self._pin.fits(node):
            raise NotAllowed(f"this run is pinned to {self._pin}; {node_id!r} is out of its reach")
