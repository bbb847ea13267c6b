"""How long a freeze takes until every node has ended what it ran and said so.

    .venv/bin/python -m benchmarks.freeze [--nodes N] [--rounds N] [--json]

A gateway and N nodes (50), all real: each keeps the order on its own disk and has its own keeper. The nodes share a few
processes, since this machine stands in for fifty. In each round every node runs a command of two processes in the
background; then everything is frozen, and thawed again. The time is that of the whole request.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import BenchmarkError, free_port, plain_environment, running, stop_on_signals
from benchmarks.targets import gateway_command
from farhand.node.program import NodeOptions, run_node

GOAL_SECONDS = 1.0
JOIN_SECONDS = 120.0
NODES_PER_PROCESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.freeze", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=50, help="how many (50)")
    parser.add_argument("--rounds", type=int, default=5, help="how often (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--serve", nargs=3, metavar=("URL", "FIRST", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*arguments.serve, arguments.nodes))
        return 0
    stop_on_signals()
    try:
        report = run(arguments.nodes, arguments.rounds)
    except BenchmarkError as error:
        print(json.dumps({"error": str(error)}) if arguments.json else f"failed: {error}")
        return 1
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    return 0


async def serve(url: str, first: str, folder: str, count: int) -> None:
    """Some nodes of one process."""
    shutdown = asyncio.Event()
    place = Path(folder)
    await asyncio.gather(
        *(
            run_node(
                NodeOptions(
                    gateway_ws_url=url,
                    node_id=f"n{number}",
                    token=os.environ["SA_NODE_TOKEN"],
                    workspace=place,
                    home=place / f"n{number}",
                ),
                shutdown,
            )
            for number in range(int(first), int(first) + count)
        )
    )


def run(nodes: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        environment = {
            **plain_environment(),
            "FARHAND_HOME": str(folder / "home"),
            "SA_NODE_TOKEN": secrets.token_hex(16),
            "HOME": str(folder),  # a login shell that is killed must leave nothing in the home of whoever measures
            "SHELL": "/bin/sh",
        }
        ready = "farhand ready on "
        stack.enter_context(running(gateway_command(sys.executable, port), folder / "gateway.log", ready, environment))
        for first in range(0, nodes, NODES_PER_PROCESS):
            count = min(NODES_PER_PROCESS, nodes - first)
            socket = f"ws://127.0.0.1:{port}/v1/nodes/ws"
            command = [sys.executable, "-m", "benchmarks.freeze", "--nodes", str(count)]
            command += ["--serve", socket, str(first), str(folder)]
            stack.enter_context(running(command, folder / f"nodes-{first}.log", None, environment))
        gateway = Gateway(port, (folder / "home" / "token").read_text().strip())
        gateway.wait_for(nodes)
        seen = [one_round(gateway, nodes) for _ in range(rounds)]
    seconds = [each["seconds"] for each in seen]
    figures = {"median_s": median(seconds), "worst_s": max(seconds)}
    return {"nodes": nodes, "rounds": seen, "figures": figures, "met": figures["worst_s"] < GOAL_SECONDS}


def one_round(gateway: "Gateway", nodes: int) -> dict[str, float]:
    for number in range(nodes):
        body = {"tool": f"n{number}__Bash", "args": {"command": "sleep 1000 & sleep 1000", "background": True}}
        if not gateway.post("/v1/tools/invoke", body)["ok"]:
            raise BenchmarkError(f"node n{number} did not run its command")
    began = time.perf_counter()
    answer = gateway.post("/v1/freeze", {"reason": "benchmark"})
    seconds = time.perf_counter() - began
    silent = [fate for fate in answer["nodes"] if not fate["confirmed"]]
    ended = sum(fate["ended_processes"] for fate in answer["nodes"])
    if silent or ended < 2 * nodes:
        raise BenchmarkError(f"{len(silent)} nodes did not confirm, {ended} processes ended: {silent[:3]}")
    gateway.post("/v1/thaw", {})
    return {"seconds": seconds, "ended_processes": ended}


class Gateway:
    def __init__(self, port: int, token: str) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), self._headers)
        with self._opener.open(request, timeout=60) as answer:
            return json.load(answer)

    def wait_for(self, nodes: int) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            request = urllib.request.Request(f"{self._url}/v1/health", headers=self._headers)
            with self._opener.open(request, timeout=60) as answer:
                online = json.load(answer)["nodes"]["online"]
            if online == nodes:
                return
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{online} of {nodes} nodes joined")
            time.sleep(0.1)


def as_text(report: dict[str, Any]) -> str:
    figures = report["figures"]
    verdict = "met" if report["met"] else "NOT met"
    return (
        f"{report['nodes']} nodes, {len(report['rounds'])} rounds: "
        f"median {figures['median_s']:.3f} s, worst {figures['worst_s']:.3f} s "
        f"until all had confirmed (goal: below {GOAL_SECONDS:g} s, {verdict})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
