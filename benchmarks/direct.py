"""The direct door beside a bare Starlette route that reads the same file: `python -m benchmarks.direct`.

The route does nothing but read the file and answer with its text. The door knows who asks, judges the path, reads the
same file, keeps what was said in the chat before and after, and writes the call down. It is to reach at least two
thirds of the route's calls a second.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.load import Sample, Target, measure
from benchmarks.processes import free_port, plain_environment, running, stop_on_signals
from benchmarks.targets import gateway_command

TEXT = "The quick brown fox jumps over the lazy dog and comes back again.\n" * 8
FILE = "notes/today.md"
CALLERS = 64


def start_door(stack: ExitStack, folder: Path) -> Target:
    port, home = free_port(), folder / "home"
    environment = {**plain_environment(), "FARHAND_HOME": str(home)}
    gateway = stack.enter_context(
        running(gateway_command(sys.executable, port), folder / "gateway.log", "farhand ready on ", environment)
    )
    path = home / "agents" / "main" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
    body = {
        "input": [{"role": "user", "type": "message", "content": [{"type": "text", "text": f"Read {FILE}"}]}],
        "session_id": "s1",
        "user_id": "u1",
        "channel": "console",
        "stream": False,
        "biz_params": {"tool": {"name": "read_file", "input": {"path": FILE}}},
    }
    url = f"http://127.0.0.1:{port}/agent/process"
    return Target("door", "Farhand, read_file", url, json.dumps(body), headers, TEXT[:60], (gateway.pid,))


def start_starlette(stack: ExitStack, folder: Path) -> list[Target]:
    path = folder / "today.md"
    path.write_text(TEXT)
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.direct", "--serve", str(path), "--port", str(port)]
    server = stack.enter_context(running(command, folder / "starlette.log", "ready on "))
    headers = {"Content-Type": "application/json"}
    body = json.dumps({"path": str(path)})
    url = f"http://127.0.0.1:{port}"
    return [
        Target("bare", "Starlette, one fixed file as text", f"{url}/bare", body, headers, TEXT[:60], (server.pid,)),
        Target("json", "Starlette, named file as JSON", f"{url}/json", body, headers, TEXT[:60], (server.pid,)),
    ]


def serve(path: Path, port: int) -> None:
    """The bare routes, on uvicorn with uvloop and httptools."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    async def bare(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(path.read_text())

    async def named(request: Request) -> JSONResponse:
        wanted = await request.json()
        return JSONResponse({"ok": True, "content": Path(wanted["path"]).read_text()})

    routes = [Route("/bare", bare, methods=["POST"]), Route("/json", named, methods=["POST"])]
    config = uvicorn.Config(
        Starlette(routes=routes), port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )
    print(f"ready on {port}", flush=True)
    asyncio.run(uvicorn.Server(config).serve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.port)
        return
    stop_on_signals()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        targets = [start_door(stack, Path(name)), *start_starlette(stack, Path(name))]
        samples = [
            measure(target, CALLERS, options.seconds, number) for number in range(options.rounds) for target in targets
        ]
    if options.json:
        print(json.dumps([sample.__dict__ for sample in samples]))
        return
    rates: dict[str, float] = {}
    for target in targets:
        rates[target.name] = show(target, [sample for sample in samples if sample.target == target.name])
    print(f"the bare route answers {rates['bare'] / rates['door']:.2f} times as many calls a second; at most 1.5")


def show(target: Target, samples: list[Sample]) -> float:
    rate = statistics.median(sample.calls_per_second for sample in samples)
    cpu = statistics.median(sum(sample.cpu_per_call) for sample in samples)
    p50 = statistics.median(sample.p50 for sample in samples)
    other = statistics.median(sample.other_cpu for sample in samples)
    print(f"{target.title:36} {rate:8.0f} calls/s  {cpu:6.1f} µs CPU/call  p50 {p50:6.0f} µs  other CPU {other:.2f}")
    return rate


if __name__ == "__main__":
    main()
