"""Tools of the gateway: functions with a schema."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec

from farhand.machine.files.undo_log import call_id
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.tools.schema import Parameters, canonical_names

_MISSING = re.compile(r"missing required parameter '([^']+)'")


class CallContext(msgspec.Struct, frozen=True):
    """The call that a tool serves, and its caller."""

    call_id: str
    session_key: str | None = None
    agent_id: str | None = None
    # The id of the calling credential.
    credential: str = "owner"
    timeout_ms: int | None = None
    # Who acts and on whose behalf: a `gateway.access.principal.Principal`, used only within the gateway.
    principal: object = None
    # Where the call comes from, for the policy.
    origins: tuple[str, ...] = ()
    # Reports how far the call is: a number, what it is a part of if that is known, and a message.
    progress: Callable[[float, float | None, str], None] = lambda _progress, _total, _message: None
    # Values of the secret handles in the arguments.
    secrets: Mapping[str, str] = {}
    # A name of the caller of a trial; empty for the owner.
    trial_caller: str = ""


Run = Callable[[Mapping[str, Any], CallContext], Awaitable[Any]]
ShowEffects = Callable[[Mapping[str, Any], CallContext], Awaitable[Any]]


class Tool(msgspec.Struct, frozen=True, dict=True):
    """A tool of the gateway: its description, and the function that runs.

    `check`, `preview` and `run` receive arguments under the parameters' own names, as `canonical` returns them. `run`
    returns a JSON-encodable result or raises ToolError. A stopped call is cancelled as an asyncio task; the error that
    `run` raises then (Cancelled, saying what it ended) becomes the outcome of the call.
    """

    name: str
    # Creates `spec` on demand: reading all signatures would take a tenth of the gateway's start.
    describe: Callable[[], ToolSpec]
    run: Run
    # A repeated call, after a restart of the gateway, continues what the first one started.
    continues: bool = False
    # Additional names of parameters, and the parameters they denote.
    aliases: Mapping[str, str] = {}
    # The names of all parameters; defaults to those in `spec`.
    names: Callable[[], Collection[str]] | None = None
    # Raises InvalidArgs for arguments that `run` would reject.
    check: Callable[[Mapping[str, Any]], object] | None = None
    # Returns a `Preview` of `run` with the same arguments. May raise ToolError.
    preview: ShowEffects | None = None
    # Files and folders of the agent's workspace that it reads although no argument names them, for the policy.
    reads: tuple[str, ...] = ()
    # Parameters that are lists of files of the agent's workspace, which rules of the policy compare as `path`.
    files: tuple[str, ...] = ()
    # The MCP server whose tool this is, and the node that runs the server; empty for the gateway.
    server: str = ""
    node: str = ""
    # It reads `CallContext.secrets` itself, or stores or sends its arguments, where values would be seen. Other tools
    # get arguments with values instead of secret handles.
    takes_handles: bool = False

    def canonical(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments under the parameters' own names. Raises InvalidArgs, see `canonical_names`.

        If the schema lists the values of a parameter, another casing of one becomes that value: `" ADD "` becomes
        `add`, for policy rules as for the tool.
        """
        properties = self.spec.parameters["properties"]
        named = canonical_names(arguments, properties if self.names is None else self.names(), self.aliases)
        for name, value in named.items():
            listed = properties.get(name, {}).get("enum")
            if listed and isinstance(value, str) and value not in listed:
                meant = value.strip().casefold()
                named[name] = next((one for one in listed if one.casefold() == meant), value)
        return named

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
    preview: Callable[..., Any] | None = None,
    reads: tuple[str, ...] = (),
    takes_handles: bool = False,
    files: tuple[str, ...] = (),
) -> Tool:
    """Create a tool from a typed function. Its parameters are the schema, its docstring is the description.

    A parameter named `context` receives the CallContext and is hidden from callers. A plain function runs in a thread.
    A returned string becomes `{"content": text}`. `aliases` maps additional, hidden names to parameters; `unlisted`
    parameters are accepted but hidden. `preview` takes the same parameters as the function and returns a `Preview`. An
    unsupported signature raises ValueError when the tool is first described or called.
    """
    chosen = name or function.__name__
    renamed = dict(aliases or {})

    @functools.cache
    def parameters() -> Parameters:
        return Parameters(function, without=("context",), aliases=renamed)

    def parse(arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return parameters().convert(arguments)
        except InvalidArgs as error:
            raise InvalidArgs(_MISSING.sub(rf"{chosen} parameter \1 is required", error.message)) from None

    @functools.cache
    def wants_context(acting: Callable[..., Any]) -> bool:
        return "context" in inspect.signature(acting).parameters

    async def call(acting: Callable[..., Any], arguments: Mapping[str, Any], context: CallContext) -> Any:
        read = parse(arguments)
        if wants_context(acting):
            read["context"] = context
        if inspect.iscoroutinefunction(acting):
            return await acting(**read)
        return await asyncio.to_thread(acting, **read)

    async def run(arguments: Mapping[str, Any], context: CallContext) -> Any:
        if not read_only:
            call_id.set(context.call_id)
        result = await call(function, arguments, context)
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

    return Tool(
        chosen,
        describe,
        run,
        continues,
        renamed,
        names=lambda: parameters().names,
        check=parse,
        preview=None if preview is None else functools.partial(call, preview),
        reads=reads,
        takes_handles=takes_handles,
        files=files,
    )


def _shown(schema: dict[str, Any], unlisted: Collection[str]) -> dict[str, Any]:
    shown = {name: _given(value) for name, value in schema["properties"].items() if name not in unlisted}
    return {**schema, "properties": shown}


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter without null, which is equivalent to omitting it."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == len(schema.get("anyOf", ())):
        return schema
    plain = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    if kinds == [{"type": "integer"}, {"type": "number"}]:
        kinds = kinds[1:]
    return {**plain, **kinds[0]} if len(kinds) == 1 else {**plain, "anyOf": kinds}
