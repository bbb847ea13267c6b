"""A tool of the gateway's own: a function with a schema. No labels, no hooks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec

from farhand.machine.kept import call_id
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.tools.schema import Parameters

LEAVING = "the gateway is leaving"
"""The message with which a call is cancelled only because the gateway stops: it stays open, what it began goes on."""

_MISSING = re.compile(r"missing required parameter '([^']+)'")


class CallContext(msgspec.Struct, frozen=True):
    """Which call a tool serves, and for whom."""

    call_id: str
    session_key: str | None = None
    agent_id: str | None = None
    credential: str = "owner"
    """The id of the credential whose call it is."""
    timeout_ms: int | None = None


Run = Callable[[Mapping[str, Any], CallContext], Awaitable[Any]]


AtOnce = Callable[[Mapping[str, Any]], Any]


class Tool(msgspec.Struct, frozen=True, dict=True):
    """What callers are told of a tool, and what runs.

    `run` takes the arguments as they came, decoded, and checks them itself; it returns what becomes the JSON result
    and raises ToolError. A call that nobody wants any more is cancelled as an asyncio task; what `run` then raises
    (Cancelled, saying what it ended) is the end of the call.
    """

    name: str
    describe: Callable[[], ToolSpec]
    """Makes `spec` when it is first wanted: reading all signatures would be a tenth of the gateway's start."""
    run: Run
    continues: bool = False
    """The same call again, after the gateway was restarted, takes up what the first one began."""
    at_once: AtOnce | None = None
    """What `run` would return, where that needs no waiting at all; None where it does, or something is wrong."""
    aliases: Mapping[str, str] = {}
    """Further names of parameters, and those they stand for."""

    @functools.cached_property
    def spec(self) -> ToolSpec:
        return self.describe()

    @property
    def description(self) -> str:
        return self.spec.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self.spec.parameters


def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    aliases: Mapping[str, str] | None = None,
    unlisted: Collection[str] = (),
    read_only: bool = False,
    capability: str | None = None,
    timeout_ms: int | None = None,
    timeout_parameter: str | None = None,
    continues: bool = False,
    at_once: AtOnce | None = None,
) -> Tool:
    """The tool that a typed function is. Its parameters are the schema, its docstring is the description.

    A parameter named `context` is given the CallContext and is not shown to callers. A plain function runs in a
    thread. A text it returns becomes `{"content": text}`. `aliases` maps further names of parameters, which are
    accepted but not shown, to theirs; `unlisted` are parameters that are taken and not shown. A signature that cannot
    be described to a caller raises ValueError when the tool is first described or called.
    """
    chosen = name or function.__name__
    renamed = dict(aliases or {})
    asynchronous = inspect.iscoroutinefunction(function)

    @functools.cache
    def parameters() -> Parameters:
        return Parameters(function, without=("context",))

    @functools.cache
    def wants_context() -> bool:
        return "context" in inspect.signature(function).parameters

    async def run(arguments: Mapping[str, Any], context: CallContext) -> Any:
        try:
            read = parameters().convert(by_their_names(arguments, renamed))
        except InvalidArgs as error:
            raise InvalidArgs(_MISSING.sub(rf"{chosen} parameter \1 is required", error.message)) from None
        if wants_context():
            read["context"] = context
        if not read_only:
            call_id.set(context.call_id)
        result = await (function(**read) if asynchronous else asyncio.to_thread(function, **read))
        return {"content": result} if isinstance(result, str) else result

    def describe() -> ToolSpec:
        return ToolSpec(
            name=chosen,
            description=inspect.getdoc(function) or "" if description is None else description,
            parameters=_shown(parameters().schema, unlisted),
            read_only=read_only,
            capability=capability,
            timeout_ms=timeout_ms,
            timeout_parameter=timeout_parameter,
        )

    return Tool(chosen, describe, run, continues, at_once, renamed)


def _shown(schema: dict[str, Any], unlisted: Collection[str]) -> dict[str, Any]:
    shown = {name: _given(value) for name, value in schema["properties"].items() if name not in unlisted}
    return {**schema, "properties": shown}


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter as it is when it is given; that null counts as left out need not be told."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == len(schema.get("anyOf", ())):
        return schema
    plain = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    if kinds == [{"type": "integer"}, {"type": "number"}]:
        kinds = kinds[1:]
    return {**plain, **kinds[0]} if len(kinds) == 1 else {**plain, "anyOf": kinds}


def by_their_names(arguments: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """A parameter's own name wins over its aliases."""
    own = {name: value for name, value in arguments.items() if name not in aliases}
    for alias, name in aliases.items():
        if alias in arguments:
            own.setdefault(name, arguments[alias])
    return own
