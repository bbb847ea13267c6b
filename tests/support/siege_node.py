"""`python tests/support/siege_node.py`: a node whose only tool writes a line each time it runs.

The environment: NODE_ID, GATEWAYS (addresses, separated by blanks), STATE (a folder for what it has to remember),
EFFECTS (the file), SIEGE_MUTANT (`ledger`: it forgets the calls that its earlier process accepted).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from farhand.sdk import NodeClient, ReconnectBackoff, Shutdown, ToolContext, ToolRegistry
from farhand.sdk.accepted_calls import AcceptedCallsFile

registry = ToolRegistry()
effects = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@registry.tool(f"{os.environ['NODE_ID']}.act")
async def act(ctx: ToolContext, name: str, seconds: float = 0.0) -> str:
    """Leave a line behind, and take some time."""
    os.write(effects, f"{name} {ctx.request_id}\n".encode())
    await asyncio.sleep(seconds)
    return name


async def serve() -> None:
    ledger = AcceptedCallsFile(Path(os.environ["STATE"]) / "ledger", "boot")
    if os.environ.get("SIEGE_MUTANT") == "ledger":
        ledger.earlier = set()
    first, *others = os.environ["GATEWAYS"].split()
    client = NodeClient(
        first,
        os.environ["SA_NODE_TOKEN"],
        node_id=os.environ["NODE_ID"],
        max_concurrent_tools=64,
        reconnect_backoff=ReconnectBackoff(initial_delay=0.5, max_delay=5.0),
        ledger=ledger,
        other_gateways=others,
    )
    with contextlib.suppress(Shutdown):
        await client.run(registry)


if __name__ == "__main__":
    asyncio.run(serve())
