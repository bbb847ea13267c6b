"""A plug-in with the two tools that are measured.

python -m benchmarks.echo_node --gateway ws://127.0.0.1:PORT/v1/nodes/ws     (token in SA_NODE_TOKEN)
"""

import argparse
import os

import uvloop

from farhand.sdk import NodeClient, Shutdown, ToolContext, ToolRegistry

registry = ToolRegistry()


@registry.tool("bench.echo")
async def echo(ctx: ToolContext, text: str) -> dict[str, str]:
    """Send the text back; as far as the gateway knows, with effects."""
    return {"text": text}


@registry.tool("bench.look", read_only=True)
async def look(ctx: ToolContext, text: str) -> dict[str, str]:
    """Send the text back; declared to have no effects."""
    return {"text": text}


async def serve(gateway: str, token: str) -> None:
    client = NodeClient(gateway_ws_url=gateway, token=token, node_id="bench")
    try:
        await client.run(registry)
    except Shutdown:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", required=True)
    gateway = parser.parse_args().gateway
    uvloop.run(serve(gateway, os.environ["SA_NODE_TOKEN"]))


if __name__ == "__main__":
    main()
