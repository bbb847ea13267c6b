"""The gateway in memory: what a plug-in's author tests with it is what a real gateway does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farhand.sdk import Cancelled, Failed, InvalidArgs, NotFound, ToolContext, ToolRegistry
from farhand.sdk.testing import LocalGateway, call

registry = ToolRegistry("lab")


@registry.tool
async def add(ctx: ToolContext, a: int, b: int = 1) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


@registry.tool
def work(ctx: ToolContext, steps: int) -> str:
    """Work in a thread, and say how far it is."""
    ctx.log("begins with %d", steps)
    for step in range(steps):
        ctx.progress(step + 1, steps, f"step {step + 1}")
    ctx.log("careful", level="warning")
    return "done"


@registry.tool
async def wait(ctx: ToolContext) -> None:
    """Wait until cancelled."""
    await ctx.cancel.cancelled()
    raise Cancelled(ctx.cancel.reason)


@registry.tool
async def wrong(ctx: ToolContext, how: str) -> Any:
    """Report something that is not valid."""
    return ctx.log("x", level=how) if how else ctx.progress(2)  # type: ignore[arg-type,func-returns-value]


def test_results_and_errors_are_those_of_a_gateway() -> None:
    assert call(registry, "lab.add", {"a": 2}) == {"sum": 3}
    assert call(registry, "LAB.add", {"a": 2, "b": 2}) == {"sum": 4}
    for args, kind in (({"a": "2"}, InvalidArgs), ({}, InvalidArgs), ({"a": 1, "c": 2}, InvalidArgs)):
        with pytest.raises(kind):
            call(registry, "lab.add", args)
    with pytest.raises(NotFound):
        call(registry, "lab.nothing")
    for how in ("", "loud"):
        with pytest.raises(Failed, match="panicked: ValueError"):
            call(registry, "lab.wrong", {"how": how})


def test_progress_and_log_are_listed() -> None:
    async def act() -> LocalGateway:
        async with LocalGateway(registry) as gateway:
            assert await gateway.call("lab.work", {"steps": 1000}) == "done"
            assert set(gateway.tools) == {"lab.add", "lab.work", "lab.wait", "lab.wrong"}
        return gateway

    gateway = asyncio.run(act())
    assert gateway.progress[0] == ("call-1", 1.0, 1000.0, "step 1")
    assert gateway.progress[-1] == ("call-1", 1000.0, 1000.0, "step 1000")
    assert len(gateway.progress) < 1000  # what comes too fast is left out
    assert gateway.log == [("call-1", "info", "begins with 1000"), ("call-1", "warning", "careful")]


def test_cancelling_reaches_the_tool() -> None:
    async def act() -> None:
        async with LocalGateway(registry) as gateway:
            task = asyncio.ensure_future(gateway.call("lab.wait"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(act())


def test_it_is_used_with_async_with() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(LocalGateway(registry).call("lab.add"))
