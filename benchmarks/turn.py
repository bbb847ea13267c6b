"""What a turn of the agent adds to the model's own time: one message, one tool call, one answer.

    .venv/bin/python -m benchmarks.turn [--turns N] [--json]

A scripted model answers at once over HTTP: the first time with a call of a tool, the second time with words. A turn is
`POST /v1/sessions/{key}/messages` until its answer is there; everything in between is on disk. The model's own time is
that of the same two requests, byte for byte, sent to it directly. What a turn adds is the difference of the two.
"""

import argparse
import http.client
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.processes import cpu_seconds
from tests.support.harness import GatewayProcess, NodeProcess
from tests.support.model_server import ModelServer, Reply, Request, calls, text

LIMIT_MS = 50.0
WARM_UP = 10


def answer(request: Request) -> Reply:
    if request.messages[-1]["role"] == "tool":
        return text("It says hello.")
    return calls(("bench__Read", {"path": "hello.txt"}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.turn", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=200, help="how many turns are measured (200)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    report = run(arguments.turns)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{arguments.turns} turns with one tool call on a node, each in a session of its own")
        for name in ("turn", "model", "added"):
            print(f"{name:>6}  p50 {report[name]['p50']:7.2f} ms   p95 {report[name]['p95']:7.2f} ms")
        print(f"CPU of the gateway for each: {report['gateway_cpu_ms']:.1f} ms")
        print(f"target: adds at most {LIMIT_MS:g} ms at p50: {'met' if report['met'] else 'MISSED'}")
    return 0 if report["met"] else 1


def run(turns: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = stack.enter_context(ModelServer(answer=answer))
        gateway = stack.enter_context(GatewayProcess(folder / "home", env=dict(model.environment)))
        node = stack.enter_context(NodeProcess(gateway, folder / "node", "bench"))
        (node.workspace / "hello.txt").write_text("hello\n")
        whole, own = [], []
        process = gateway.process
        assert process is not None
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
        direct = http.client.HTTPConnection("127.0.0.1", int(model.url.split(":")[2].split("/")[0]))
        for number in range(WARM_UP + turns):
            if number == WARM_UP:
                cpu = cpu_seconds(process.pid)
            model.requests.clear()
            whole.append(_turn(connection, gateway.token, f"bench-{number}"))
            own.append(sum(_ask(direct, request) for request in model.requests[:2]))
        cpu = (cpu_seconds(process.pid) - cpu) / turns * 1000
    added = [turn - model_time for turn, model_time in zip(whole, own, strict=True)]
    report: dict[str, Any] = {
        name: {"p50": median(values[WARM_UP:]), "p95": quantiles(values[WARM_UP:], n=20)[-1]}
        for name, values in (("turn", whole), ("model", own), ("added", added))
    }
    return {
        **report,
        "gateway_cpu_ms": cpu,
        "turns": turns,
        "limit_ms": LIMIT_MS,
        "met": report["added"]["p50"] <= LIMIT_MS,
    }


def _turn(connection: http.client.HTTPConnection, token: str, key: str) -> float:
    body = json.dumps({"message": "What does hello.txt say?", "wait_seconds": 30}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    began = time.perf_counter()
    connection.request("POST", f"/v1/sessions/{key}/messages", body, headers)
    answered = json.loads(connection.getresponse().read())
    took = time.perf_counter() - began
    assert answered["reply"] == "It says hello." and answered["steps"] == 2, answered
    return took * 1000


def _ask(connection: http.client.HTTPConnection, request: Request) -> float:
    began = time.perf_counter()
    connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
    connection.getresponse().read()
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    sys.exit(main())
