"""The plug-in node of these tests, on the public SDK. The environment names it: SA_NODE_ID, PREFIX, FOLDER.

It appends what it does to FOLDER/log, one line per step: `start <call>`, `cancel <call>`, `end <call>`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from farhand.sdk import Cancelled, NodeClient, NodeInfo, NotAllowed, ReconnectBackoff, ToolContext, ToolRegistry

prefix = os.environ["PREFIX"]
folder = Path(os.environ["FOLDER"])
registry = ToolRegistry()


def note(word: str, ctx: ToolContext) -> None:
    with (folder / "log").open("a") as file:
        file.write(f"{word} {ctx.request_id}\n")


@registry.tool(f"{prefix}.echo", read_only=True)
async def echo(ctx: ToolContext, text: str, count: int = 1) -> dict[str, Any]:
    """Repeat a text."""
    return {"text": text * count, "session": ctx.session_key}


@registry.tool(f"{prefix}.effect")
async def effect(ctx: ToolContext, text: str = "") -> dict[str, Any]:
    """Leave one line behind."""
    note("start", ctx)
    note("end", ctx)
    return {"call": ctx.request_id, "text": text}


@registry.tool(f"{prefix}.hold")
async def hold(ctx: ToolContext, until: str, stubborn: bool = False) -> dict[str, Any]:
    """Work until the file `until` exists in the folder. A stubborn one does not listen to being cancelled."""
    note("start", ctx)
    while not (folder / until).exists():
        if ctx.cancel.is_cancelled():
            note("cancel", ctx)
            if not stubborn:
                raise Cancelled(f"stopped after: {ctx.cancel.reason}")
        await asyncio.sleep(0.01)
    note("end", ctx)
    return {"call": ctx.request_id, "until": until}


@registry.tool(f"{prefix}.blob")
async def blob(ctx: ToolContext, size: int) -> str:
    """Return a text of this many characters."""
    return "x" * size


@registry.tool(f"{prefix}.denied")
async def denied(ctx: ToolContext) -> None:
    """Refuse."""
    raise NotAllowed("TCC denied access to Notes")


@registry.tool(f"{prefix}.crash")
async def crash(ctx: ToolContext) -> None:
    """Fail in a way its author did not foresee."""
    raise RuntimeError("boom")


async def main() -> None:
    client = NodeClient(
        node_info=NodeInfo.from_env("test", "0.1.0"),
        reconnect_backoff=ReconnectBackoff(initial_delay=0.05, max_delay=0.2),
        max_response_bytes=32 * 1024 * 1024,
    )
    await client.run(registry)


if __name__ == "__main__":
    asyncio.run(main())
