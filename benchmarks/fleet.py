"""What a fleet costs and gives: PostgreSQL beside SQLite, three gateways beside one, and a gateway that is killed.

    .venv/bin/python -m benchmarks.fleet [--seconds N] [--rounds N] [--kills N] [--json]

Real gateways and nodes on this machine, with PostgreSQL, NATS and S3 servers of the test packages. 64
callers make durable calls one after another of a node's tool that only answers. What is compared runs in turns, in the
same run. Figures of a busy machine mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from tests.support.fleet_servers import fleet_environment, running_nats, running_postgres
from tests.support.harness import GatewayProcess, NodeProcess, PluginProcess, free_port, wait_until

CALLERS = 64
SINGLE_CALLS = 300
NODE = """
import asyncio, os
from farhand.sdk import NodeClient, Shutdown, ToolContext, ToolRegistry
registry = ToolRegistry()
@registry.tool("echo")
async def echo(ctx: ToolContext, text: str) -> dict[str, str]:
    return {"text": text}
async def serve() -> None:
    client = NodeClient(os.environ["GATEWAY"], os.environ["SA_NODE_TOKEN"], node_id=os.environ["NODE_ID"])
    try:
        await client.run(registry)
    except Shutdown:
        pass
asyncio.run(serve())
"""
# The lowest or highest value that is wanted of each ratio or time.
WANTED = {
    "postgres_to_sqlite": (">=", 0.35),
    "three_to_one": (">=", 1.0),
    "one_caller_to_sqlite": ("<=", 4.0),
    "other_gateway_extra_ms": ("<=", 1.0),
    "kill_to_answer_p95_s": ("<=", 3.0),
    "freeze_to_answer_s": ("<=", 15.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measured run (3)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--kills", type=int, default=5, help="how often a gateway is killed (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        figures = Comparison(stack, arguments.seconds).measured(arguments.rounds, arguments.kills)
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        wanted = WANTED.get(name)
        verdict = ""
        if wanted is not None:
            sign, limit = wanted
            met = value >= limit if sign == ">=" else value <= limit
            verdict = f"  wanted {sign} {limit:g}: {'met' if met else 'MISSED'}"
        print(f"{name:26} {value:10,.2f}{verdict}")
    return 0


class Comparison:
    """A gateway on SQLite and a fleet of three, each with a node that answers at once."""

    def __init__(self, stack: contextlib.ExitStack, seconds: float) -> None:
        self._seconds = seconds
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp")))
        postgres = stack.enter_context(running_postgres(sync=True))
        nats = stack.enter_context(running_nats())
        bucket = stack.enter_context(running_bucket(self._folder))
        env = fleet_environment(postgres.new_database(), nats, bucket, "bench")
        self.alone = stack.enter_context(GatewayProcess(self._folder / "alone"))
        self.fleet = [stack.enter_context(GatewayProcess(self._folder / f"gateway{n}", env=env)) for n in range(3)]
        stack.enter_context(self._node(self.alone, "bench"))
        for number, gateway in enumerate(self.fleet):
            stack.enter_context(self._node(gateway, f"bench{number}"))
        self.alone.wait_for_node("bench")
        for gateway in self.fleet:
            for number in range(3):
                gateway.wait_for_node(f"bench{number}")

    def _node(self, gateway: GatewayProcess, name: str) -> PluginProcess:
        env = {"GATEWAY": gateway.ws_url, "NODE_ID": name, "SA_NODE_TOKEN": gateway.environment["SA_NODE_TOKEN"]}
        return PluginProcess(NODE, self._folder / f"node-{name}", env)

    def measured(self, rounds: int, kills: int) -> dict[str, float]:
        alone, first, others = self.alone, self.fleet[0], self.fleet
        rates: dict[str, list[float]] = {"sqlite": [], "one": [], "three": []}
        times: dict[str, list[float]] = {"sqlite": [], "own": [], "other": []}
        for _ in range(rounds):
            rates["sqlite"].append(asyncio.run(rate([(alone, "bench")], self._seconds)))
            rates["one"].append(asyncio.run(rate([(first, "bench0")], self._seconds)))
            pairs = [(gateway, f"bench{number}") for number, gateway in enumerate(others)]
            rates["three"].append(asyncio.run(rate(pairs, self._seconds)))
            times["sqlite"].append(asyncio.run(latency(alone, "bench")))
            times["own"].append(asyncio.run(latency(first, "bench0")))
            times["other"].append(asyncio.run(latency(first, "bench1")))
        found = self._losses(kills) if kills else {}
        if not rounds:
            return found
        found |= {f"calls_per_second_{name}": median(values) for name, values in rates.items()}
        found |= {f"one_caller_ms_{name}": 1000 * median(values) for name, values in times.items()}
        ratios = {
            "postgres_to_sqlite": [one / other for one, other in zip(rates["one"], rates["sqlite"], strict=True)],
            "three_to_one": [one / other for one, other in zip(rates["three"], rates["one"], strict=True)],
            "one_caller_to_sqlite": [one / other for one, other in zip(times["own"], times["sqlite"], strict=True)],
            "other_gateway_extra_ms": [
                1000 * (one - other) for one, other in zip(times["other"], times["own"], strict=True)
            ],
        }
        found |= {name: median(values) for name, values in ratios.items()}
        return found

    def _losses(self, kills: int) -> dict[str, float]:
        waits = [self._lost(f"mover{number}") for number in range(kills)]
        p95 = max(waits) if kills < 2 else quantiles(waits, n=20)[-1]
        return {"kill_to_answer_p95_s": p95, "freeze_to_answer_s": self._lost("frozen", freeze=True)}

    def _lost(self, name: str, *, freeze: bool = False) -> float:
        """Kill or freeze the gateway that holds a node; return the seconds until the node answers through another."""
        lost, kept = self.fleet[0], self.fleet[1]
        assert lost.process is not None
        with NodeProcess(lost, self._folder / name, name, "--gateway", kept.url):
            kept.wait_for_node(name)
            lost.process.send_signal(signal.SIGSTOP) if freeze else lost.kill()
            began = time.monotonic()
            while not kept.invoke(f"{name}__Bash", {"command": "true"}, timeout_ms=1000)["ok"]:
                time.sleep(0.02)
            waited = time.monotonic() - began
            lost.process.send_signal(signal.SIGCONT) if freeze else lost.start()
        return waited


@contextlib.contextmanager
def running_bucket(folder: Path) -> Iterator[tuple[str, str]]:
    """Start an S3 server; yield the URL of a bucket and the server's address."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "s3.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)

    def made() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.put(f"{endpoint}/bucket", timeout=5).status_code == 200
        return False

    try:
        wait_until(made, 60, "the S3 server")
        yield "s3://bucket", endpoint
    finally:
        server.kill()
        server.wait()


async def rate(targets: list[tuple[GatewayProcess, str]], seconds: float) -> float:
    """Return the calls a second of 64 callers, spread over gateways and their nodes."""
    done = 0
    end = time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS)

    async def caller(client: httpx.AsyncClient, gateway: GatewayProcess, node: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await invoke(client, gateway, node)
            done += 1

    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        chosen = itertools.islice(itertools.cycle(targets), CALLERS)
        began = time.perf_counter()
        await asyncio.gather(*(caller(client, gateway, node) for gateway, node in chosen))
    return done / (time.perf_counter() - began)


async def latency(gateway: GatewayProcess, node: str) -> float:
    """Return the median seconds of a call of one caller."""
    times = []
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(SINGLE_CALLS):
            began = time.perf_counter()
            await invoke(client, gateway, node)
            times.append(time.perf_counter() - began)
    return median(times)


async def invoke(client: httpx.AsyncClient, gateway: GatewayProcess, node: str) -> Any:
    answer = await client.post(
        f"{gateway.url}/v1/tools/invoke",
        json={"tool": f"{node}__echo", "args": {"text": "x"}},
        headers={"Authorization": f"Bearer {gateway.token}"},
    )
    said = answer.json()
    if answer.status_code != 200 or not said["ok"]:
        raise SystemExit(f"a call failed: {answer.status_code} {said}")
    return said


if __name__ == "__main__":
    sys.exit(main())
