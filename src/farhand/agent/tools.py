"""The tools of a run: what the model is offered, and the function that calls them."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from farhand.agent.tool_outcome import Outcome
from farhand.llm.messages import Message, ToolUse
from farhand.protocol.calls import ToolSpec
from farhand.protocol.names import MAX_COMPARED_LENGTH, MAX_COMPARED_NAMES, SEPARATOR

# Runs a tool to its end. Its arguments are a JSON object. It may raise ToolError; cancelling it ends the tool.
Call = Callable[[ToolUse], Awaitable[Outcome]]


class AgentTool(ToolSpec, frozen=True, omit_defaults=True):
    """A tool under its callable name, with the state of its machine.

    `machine`: the id of the node it runs on; empty for the gateway's own. `offline`: why it cannot be called now,
    such as "last seen 2026-11-17T09:41:12Z"; empty while its machine is connected.
    """

    machine: str = ""
    offline: str = ""

    @classmethod
    def of(cls, spec: ToolSpec, name: str = "", *, machine: str = "", offline: str = "") -> AgentTool:
        fields = msgspec.structs.asdict(spec) | {"machine": machine, "offline": offline}
        return cls(**(fields | {"name": name or spec.name}))


class Tools(Protocol):
    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:
        """Return the tools to offer; called before each step, since machines come and go during a run."""

    async def call(self, use: ToolUse) -> Outcome: ...


class ToolList:
    """A fixed list of tools, all offered, as for a sub-agent."""

    def __init__(self, specs: Sequence[ToolSpec], call: Call) -> None:
        self._specs = tuple(specs)
        self._names = {spec.name for spec in specs}
        self._call = call

    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:  # noqa: ARG002
        return self._specs

    async def call(self, use: ToolUse) -> Outcome:
        if use.name not in self._names:
            return not_found(use.name, self._names)
        return await self._call(use)


class WithClients:
    """The agent's tools and those that the client of a run carries out; on equal names the client's wins."""

    def __init__(self, own: Tools, clients: Sequence[ToolSpec]) -> None:
        self._own = own
        self._clients = tuple(clients)
        self._names = {spec.name for spec in clients}

    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:
        return [*(spec for spec in self._own.offered(messages) if spec.name not in self._names), *self._clients]

    async def call(self, use: ToolUse) -> Outcome:
        return await self._own.call(use)


def not_found(name: str, known: Iterable[str]) -> Outcome:
    """Report that a tool does not exist. A similar name is suggested only if it belongs to the same machine."""
    # Names come from nodes and from the model; comparing many long ones is slow.
    same = [one for one in known if len(one) <= MAX_COMPARED_LENGTH and machine_part(one) == machine_part(name)]
    near = difflib.get_close_matches(name[:MAX_COMPARED_LENGTH], same[:MAX_COMPARED_NAMES], 3)
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    return Outcome.failed("not_found", f"tool not found: {name}{hint}")


def machine_part(name: str) -> str:
    """Return the machine of a tool name, such as `laptop` of `laptop__Bash`; empty if it names none."""
    machine, separator, _ = name.partition(SEPARATOR)
    return machine if separator else ""
