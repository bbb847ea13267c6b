"""The tools of a run: what the model is offered, and the one function that calls them."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from farhand.agent.outcome import Outcome
from farhand.llm.messages import Message, ToolUse
from farhand.protocol.calls import ToolSpec

Call = Callable[[ToolUse], Awaitable[Outcome]]
"""Runs a tool to its end. Its arguments are a JSON object. It may raise ToolError; cancelling it ends the tool."""


class Tools(Protocol):
    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:
        """What the model is told of, asked anew before each step: machines come and go during a run."""
        ...

    async def call(self, use: ToolUse) -> Outcome: ...


class ToolList:
    """A fixed list of tools, all of them offered: a sub-agent's."""

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
    """Tools that the client of a run carries out, beside those of the agent; under a name of both, the client's."""

    def __init__(self, own: Tools, clients: Sequence[ToolSpec]) -> None:
        self._own = own
        self._clients = tuple(clients)
        self._names = {spec.name for spec in clients}

    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:
        return [*(spec for spec in self._own.offered(messages) if spec.name not in self._names), *self._clients]

    async def call(self, use: ToolUse) -> Outcome:
        return await self._own.call(use)


def not_found(name: str, known: Iterable[str]) -> Outcome:
    """What the model is told of a tool that is not there."""
    near = difflib.get_close_matches(name, list(known), 3)
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    return Outcome.failed("not_found", f"tool not found: {name}{hint}")
