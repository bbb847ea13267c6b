"""The registry: names, capabilities, lookup, and typed functions as tools."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import msgspec
import pytest

from farhand.protocol.calls import ToolSpec
from farhand.sdk import CancelToken, Failed, InvalidArgs, ToolContext, ToolError, ToolRegistry


async def echo(ctx: ToolContext, args: Any) -> Any:
    """Give the arguments back."""
    return args


def context(tool: str = "t") -> ToolContext:
    return ToolContext(request_id="r", tool_name=tool, session_key=None, cancel=CancelToken())


def run(registry: ToolRegistry, tool: str, args: str = "null") -> Any:
    async def main() -> Any:
        found = registry.find(tool)
        assert found is not None
        return await found.run(context(tool), msgspec.Raw(args.encode()))

    return asyncio.run(main())


def test_register_and_lookup() -> None:
    registry = ToolRegistry().register("macos.notes.search", echo)
    assert registry.get("macos.notes.search") is echo
    assert registry.get("macos.notes") is None
    assert registry.get("") is None


@pytest.mark.parametrize("name", ["macos.notes.search", "MACOS.NOTES.SEARCH", "Macos.Notes.Search"])
def test_lookup_in_any_casing(name: str) -> None:
    assert ToolRegistry().register("Macos.NOTES.search", echo).get(name) is echo


def test_registering_chains_and_replaces() -> None:
    async def other(ctx: ToolContext, args: Any) -> Any:
        return "other"

    registry = ToolRegistry().register("a.b", echo).register("a.c", echo).register("A.B", other)
    assert registry.tool_names() == ["a.b", "a.c"]
    assert registry.get("a.b") is other
    assert run(registry, "a.b") == "other"


def test_names_are_sorted() -> None:
    registry = ToolRegistry().register("z.a", echo).register("a.z", echo).register("m.m", echo)
    assert registry.tool_names() == ["a.z", "m.m", "z.a"]
    assert [spec.name for spec in registry.specs()] == ["a.z", "m.m", "z.a"]
    assert registry.capabilities() == ["a", "m", "z"]


@pytest.mark.parametrize("name", ["", " ", "a b", "a..b", ".a", "a.", ".", "a\t", "\n"])
def test_a_name_the_guide_rejects_raises_value_error(name: str) -> None:
    registry = ToolRegistry()
    with pytest.raises(ValueError):
        registry.register(name, echo)
    with pytest.raises(ValueError):
        registry.tool(name)(echo)
    assert registry.tool_names() == []


def test_a_handler_that_cannot_be_called_is_refused_at_registration() -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        ToolRegistry().register("a.b", 5)  # type: ignore[arg-type]


def test_capabilities_derived_from_tools() -> None:
    registry = ToolRegistry()
    for name in ("macos.notes.search", "macos.notes.create", "macos.clipboard.get"):
        registry.register(name, echo)
    assert registry.derive_capabilities_from_tools() is registry
    assert registry.capabilities() == ["macos.clipboard", "macos.notes"]


def test_capabilities_derive_themselves_when_none_was_added_by_hand() -> None:
    registry = ToolRegistry().register("macos.notes.search", echo)
    assert registry.capabilities() == ["macos.notes"]
    registry.register("macos.clipboard.get", echo)
    assert registry.capabilities() == ["macos.clipboard", "macos.notes"]


def test_derived_and_added_are_one_set() -> None:
    registry = ToolRegistry().add_capability_prefix("macos.notes").register("macos.notes.search", echo)
    assert registry.derive_capabilities_from_tools().capabilities() == ["macos.notes"]


def test_a_tool_of_one_segment_is_reachable() -> None:
    assert ToolRegistry().register("solo", echo).derive_capabilities_from_tools().capabilities() == ["solo"]


def test_with_defaults_announces_the_root() -> None:
    registry = ToolRegistry.with_defaults("MacOS")
    assert registry.capabilities() == ["macos"]
    assert registry.register("macos.notes.search", echo).capabilities() == ["macos"]


@pytest.mark.parametrize(
    ("given", "announced"),
    [("macos.notes", "macos.notes"), ("MACOS.Notes", "macos.notes"), ("macos.notes.", "macos.notes"), ("a", "a")],
)
def test_prefixes_are_normalised(given: str, announced: str) -> None:
    assert ToolRegistry().add_capability_prefix(given).capabilities() == [announced]


def test_the_dotted_form_of_a_prefix_collapses() -> None:
    registry = ToolRegistry().add_capability_prefix("macos").add_capability_prefix("macos.")
    assert registry.capabilities() == ["macos"]


@pytest.mark.parametrize("prefix", ["", ".", "a..", "a b", ".a"])
def test_an_invalid_prefix_raises_value_error(prefix: str) -> None:
    with pytest.raises(ValueError):
        ToolRegistry().add_capability_prefix(prefix)


def test_a_handler_gets_the_arguments_as_sent() -> None:
    registry = ToolRegistry().register("a.echo", echo)
    assert run(registry, "a.echo", '{"x":[1,null,"ü"]}') == {"x": [1, None, "ü"]}
    assert run(registry, "a.echo") is None


def test_the_error_of_a_handler_passes_through() -> None:
    async def fail(ctx: ToolContext, args: Any) -> Any:
        raise Failed("as told")

    with pytest.raises(ToolError, match="as told"):
        run(ToolRegistry().register("a.fail", fail), "a.fail")


def test_a_tool_as_an_object() -> None:
    class Search:
        """Search the notes."""

        async def call(self, ctx: ToolContext, args: Any) -> Any:
            return [ctx.tool_name, args]

    tool = Search()
    registry = ToolRegistry().register("notes.search", tool)
    assert run(registry, "notes.search", "5") == ["notes.search", 5]
    assert registry.specs() == [ToolSpec("notes.search", "Search the notes.")]
    assert registry.get("Notes.Search") is tool


def test_arguments_that_are_json_but_no_python_value_are_the_callers_fault() -> None:
    with pytest.raises(InvalidArgs):
        run(ToolRegistry().register("a.echo", echo), "a.echo", "9" * 5000)


def test_a_typed_function_is_described_and_called() -> None:
    registry = ToolRegistry()

    @registry.tool("Notes.Search", read_only=True, timeout_ms=500)
    async def search(ctx: ToolContext, query: str, limit: int = 20) -> dict[str, Any]:
        """Search the notes of this machine."""
        return {"query": query, "limit": limit, "id": ctx.request_id}

    assert registry.get("notes.search") is search
    assert registry.specs() == [
        ToolSpec(
            "notes.search",
            "Search the notes of this machine.",
            {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "default": 20}},
                "required": ["query"],
                "additionalProperties": False,
            },
            read_only=True,
            timeout_ms=500,
        )
    ]
    assert run(registry, "notes.search", '{"query":"x"}') == {"query": "x", "limit": 20, "id": "r"}
    with pytest.raises(InvalidArgs, match="missing required parameter 'query'"):
        run(registry, "notes.search")
    with pytest.raises(InvalidArgs, match="parameter 'limit': expected 'int', got 'str'"):
        run(registry, "notes.search", '{"query":"x","limit":"y"}')


def test_a_description_of_its_own() -> None:
    registry = ToolRegistry()

    @registry.tool("a.b", description="Short.")
    async def tool(ctx: ToolContext) -> None:
        """Long."""

    assert registry.specs()[0].description == "Short."


def test_the_decorator_gives_the_function_back_unchanged() -> None:
    async def function(ctx: ToolContext) -> None: ...

    assert ToolRegistry().tool("a.b")(function) is function


def test_a_plain_function_runs_in_a_thread() -> None:
    registry = ToolRegistry()

    @registry.tool("a.where")
    def where(ctx: ToolContext) -> int:
        return threading.get_ident()

    assert run(registry, "a.where") != threading.get_ident()


class Callable:
    """A tool that is called itself."""

    async def __call__(self, ctx: ToolContext, args: dict[str, int]) -> Any:
        return args

    async def method(self, ctx: ToolContext, args: Any) -> Any:
        return args


class PlainTool:
    def call(self, ctx: ToolContext, args: Any) -> Any:
        return args


def plain(ctx: ToolContext, args: Any) -> Any:
    return args


def indirect(ctx: ToolContext, args: Any) -> Any:
    return echo(ctx, args)


@pytest.mark.parametrize(
    "handler",
    [
        plain,
        indirect,
        Callable(),
        Callable().method,
        functools.partial(echo),
        functools.partial(Callable()),
        functools.partial(functools.partial(plain)),
        PlainTool(),
    ],
    ids=[
        "plain",
        "returns an awaitable",
        "object",
        "method",
        "partial",
        "partial of an object",
        "partial of a partial",
        "call",
    ],
)
def test_whatever_can_be_called_is_a_handler(handler: Any) -> None:
    registry = ToolRegistry().register("a.registered", handler)
    assert run(registry, "a.registered", '{"x":1}') == {"x": 1}
    if not isinstance(handler, PlainTool):
        registry.tool("a.typed")(handler)
        assert run(registry, "a.typed", '{"args":{"x":1}}') == {"x": 1}


def test_a_plain_handler_runs_in_a_thread() -> None:
    def where(ctx: ToolContext, args: Any) -> int:
        return threading.get_ident()

    assert run(ToolRegistry().register("a.where", where), "a.where") != threading.get_ident()


def test_a_signature_without_a_context_is_refused_at_registration() -> None:
    async def nothing() -> None: ...

    async def by_name(*, ctx: ToolContext) -> None: ...

    for function in (nothing, by_name):
        with pytest.raises(ValueError):
            ToolRegistry().tool("a.b")(function)


def test_changes_are_reported_until_unsubscribed() -> None:
    registry = ToolRegistry()
    heard: list[list[str]] = []
    unsubscribe = registry.on_change(lambda: heard.append(registry.tool_names()))
    registry.register("a.b", echo)
    registry.add_capability_prefix("c")
    unsubscribe()
    registry.register("a.c", echo)
    assert heard == [["a.b"], ["a.b"]]


def test_the_cancel_token() -> None:
    async def main() -> None:
        token = CancelToken()
        assert not token.is_cancelled()
        waiting = asyncio.ensure_future(token.cancelled())
        await asyncio.sleep(0)
        assert not waiting.done()
        token.cancel("first")
        token.cancel("second")
        await waiting
        assert token.is_cancelled()
        assert token.reason == "first"

    asyncio.run(main())
