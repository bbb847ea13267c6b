"""The tools of a node and the capabilities under which it announces them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import msgspec

from farhand.machine.threads import in_own_thread
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import validate_capability
from farhand.sdk.context import ToolContext
from farhand.sdk.docstrings import split_docstring
from farhand.sdk.serve import serve
from farhand.tools.schema import Parameters

Handler = Callable[[ToolContext, Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@runtime_checkable
class NodeTool(Protocol):
    """A tool as an object."""

    async def call(self, ctx: ToolContext, args: Any) -> Any: ...


class RegisteredTool(msgspec.Struct, frozen=True):
    """A tool of this node: its description, and the function that runs."""

    spec: ToolSpec
    run: Callable[[ToolContext, msgspec.Raw], Awaitable[Any]]
    # The object that was registered.
    handler: Callable[..., Any] | NodeTool
    # A repeated call continues what it started, even after this program was killed; it never starts twice.
    continues: bool = False
    # Announced only by name, as a feature: a gateway that knows it may call it, but it is not offered to callers.
    unlisted: bool = False
    # Previews `run` with the same arguments, for a gateway whose owner must approve the call.
    preview: Callable[[msgspec.Raw], Awaitable[Any]] | None = None
    # It reads the secrets of the context itself, and gets arguments with their handles.
    takes_handles: bool = False


class ToolRegistry:
    """Maps tool names to handlers. Names are lower-case dotted namespaces; lookup ignores case."""

    def __init__(self, namespace: str = "") -> None:
        """Create a registry. `namespace` precedes the names of functions that `@registry.tool` registers without one.

        Raises ValueError for a namespace that is not valid.
        """
        self._namespace = validate_capability(namespace.lower().removesuffix(".")) if namespace else ""
        self._tools: dict[str, RegisteredTool] = {}
        self._prefixes: set[str] = set()
        self._on_change: list[Callable[[], None]] = []

    @classmethod
    def with_defaults(cls, root: str) -> ToolRegistry:
        """Return a registry that announces `root`."""
        return cls(root).add_capability_prefix(root)

    def register(self, name: str, handler: Handler | NodeTool, *, spec: ToolSpec | None = None) -> ToolRegistry:
        """Register `handler(ctx, args)`, or an object with such a `call` method. An existing name is replaced.

        A plain function runs in a thread. Raises ValueError for a name that is not a dotted namespace.
        """
        name = validate_capability(name.lower())
        target: Handler = handler.call if isinstance(handler, NodeTool) else handler
        if not callable(target):
            raise ValueError(f"the handler of {name!r} cannot be called: {handler!r}")
        call = _awaitable(target)

        async def run(ctx: ToolContext, args: msgspec.Raw) -> Any:
            try:
                value = msgspec.json.decode(args)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise InvalidArgs(f"invalid arguments: {error}") from None
            return await call(ctx, value)

        described = spec or ToolSpec(name=name, description=inspect.getdoc(handler) or "")
        return self.add(RegisteredTool(described, run, handler))

    @overload
    def tool(self, name: Function, /) -> Function: ...

    @overload
    def tool(
        self,
        name: str | None = None,
        *,
        description: str | None = None,
        read_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Callable[[Function], Function]: ...

    def tool(
        self,
        name: str | Callable[..., Any] | None = None,
        *,
        description: str | None = None,
        read_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Any:
        """Register a typed function: its parameters after the context become the schema, its docstring the description.

        `@registry.tool` without a name uses that of the function, in the registry's namespace. Texts about parameters
        come from `Annotated[int, "How many."]` or from the docstring's `Args:` (Google) or `Parameters` (NumPy). A
        plain function runs in a thread. Raises ValueError for an invalid name or signature.
        """
        given = name if isinstance(name, str) else None

        def decorate(function: Function) -> Function:
            summary, texts = split_docstring(inspect.getdoc(function) or "")
            parameters = Parameters(function, skip=1, descriptions=texts)
            call = _awaitable(function)
            own = getattr(function, "__name__", "")
            chosen = given if given is not None else f"{self._namespace}.{own}" if self._namespace else own
            spec = ToolSpec(
                name=validate_capability(chosen.lower()),
                description=summary if description is None else description,
                parameters=parameters.schema,
                read_only=read_only,
                timeout_ms=timeout_ms,
            )

            async def run(ctx: ToolContext, args: msgspec.Raw) -> Any:
                return await call(ctx, **parameters.read(args))

            self.add(RegisteredTool(spec, run, function))
            return function

        if name is None or isinstance(name, str):
            return decorate
        if not callable(name):
            raise ValueError(f"@registry.tool takes a name or a function, not {name!r}")
        return decorate(name)

    def run(
        self, name: str = "", *, version: str = "0.1.0", gateway: str | None = None, token: str | None = None
    ) -> None:
        """Serve the tools until SIGINT or SIGTERM: what a plug-in's program does.

        `name` is the kind of node, by default the first segment of its tools' names. The address defaults to
        `SA_GATEWAY_WS_URL`, then `FARHAND_URL`, then this machine; the token to `SA_NODE_TOKEN`; the node's id to
        `SA_NODE_ID`. Logs a line when it is connected. A refusal, or an invalid setting, ends the program with one
        line and status 1.
        """
        serve(self, name, version, gateway, token)

    def add(self, tool: RegisteredTool) -> ToolRegistry:
        """Register a tool under the name of its spec."""
        self._tools[tool.spec.name.lower()] = tool
        self._changed()
        return self

    def add_capability_prefix(self, prefix: str) -> ToolRegistry:
        """Announce a namespace; one trailing dot is accepted. Raises ValueError for an invalid one."""
        self._prefixes.add(validate_capability(prefix.lower().removesuffix(".")))
        self._changed()
        return self

    def derive_capabilities_from_tools(self) -> ToolRegistry:
        """Announce the namespace of every dotted tool: its name without the last segment."""
        self._prefixes.update(self._derived())
        self._changed()
        return self

    def tool_names(self) -> list[str]:
        return sorted(self._tools)

    def capabilities(self) -> list[str]:
        """Return the sorted prefixes; derived from the tools if none was added explicitly."""
        return sorted(self._prefixes or self._derived())

    def specs(self) -> list[ToolSpec]:
        return [tool.spec for name in self.tool_names() if not (tool := self._tools[name]).unlisted]

    def unlisted(self) -> list[str]:
        """Return the names of the tools that are not offered."""
        return [tool.spec.name for tool in self._tools.values() if tool.unlisted and not tool.spec.withheld]

    def get(self, name: str) -> Callable[..., Any] | NodeTool | None:
        """Return the handler registered under `name`, ignoring case."""
        tool = self._tools.get(name.lower())
        return tool.handler if tool else None

    def find(self, name: str) -> RegisteredTool | None:
        return self._tools.get(name.lower())

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change, until the returned function is called."""
        self._on_change.append(listener)
        return lambda: self._on_change.remove(listener)

    def _changed(self) -> None:
        for listener in list(self._on_change):
            listener()

    def _derived(self) -> set[str]:
        # A name of one segment has no namespace, so it is announced itself.
        return {tool.spec.capability or name.rpartition(".")[0] or name for name, tool in self._tools.items()}


def _awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return an awaitable version of a function: a plain one runs in a thread."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        return function

    async def call(*args: Any, **kwargs: Any) -> Any:
        result = await in_own_thread(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return call
