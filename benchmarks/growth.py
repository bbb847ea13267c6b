"""What grows when Farhand does: the price of a call with more nodes and a longer record, and memory.

    .venv/bin/python -m benchmarks.growth [--nodes 1 10 100 500] [--calls 1000 10000 100000 1000000] [--json]

The price of a call is the gateway's CPU time for it, at 16 callers, since that is less noisy than any time on a clock;
gateways of all sizes run side by side and take turns.
Nodes are plain sockets of one process, so that the machine has room for 500 of them; the one that is called is a real
plug-in. The record is filled as the gateway would have, before it is started. Sessions are made by talking to a model
that answers at once. The lag of the event loop is how late `GET /healthz` is answered on a connection of its own
while 64 callers call. What a search of the memory costs with 100 to 100,000 chunks is measured by `benchmarks.memory`.
"""

import argparse
import asyncio
import http.client
import json
import secrets
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import websockets

from benchmarks.load import Target, measure
from benchmarks.processes import cpu_seconds, free_port, memory_megabytes, plain_environment, running, stop_on_signals
from benchmarks.targets import JSON, TEXT, gateway_command, invoke_body, node_command, wait_until_answered
from farhand.gateway.calls.open_call import new_call_id
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState
from tests.support.model_server import ModelServer, text

FLAT = 1.3
NODE_KILOBYTES = 60
LAG_MS = 20
CALLERS = 16
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.growth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--calls", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--seconds", type=int, default=2, help="length of one measured run (2)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    stop_on_signals()
    report = {
        "nodes": with_nodes(arguments.nodes, arguments.sessions, arguments.seconds),
        "calls": with_records(arguments.calls, arguments.seconds),
    }
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    return 0


@contextmanager
def gateway(folder: Path, more: Mapping[str, str] | None = None) -> Iterator[tuple[Target, int, dict[str, str]]]:
    """A gateway with one plug-in: the call to measure, the gateway's process, and its environment."""
    home = folder / "home"
    port = free_port()
    environment = {**plain_environment(), "FARHAND_HOME": str(home), "SA_NODE_TOKEN": secrets.token_hex(16)}
    environment |= more or {}
    with ExitStack() as stack:
        command = gateway_command(sys.executable, port)
        process = stack.enter_context(running(command, folder / "gateway.log", "farhand ready on ", environment))
        node = node_command(sys.executable, port)
        stack.enter_context(running(node, folder / "node.log", None, environment))
        headers = {**JSON, "Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        url = f"http://127.0.0.1:{port}/v1/tools/invoke"
        expect = json.dumps({"text": TEXT}, separators=(",", ":"))
        target = Target("farhand", "", url, invoke_body("bench.echo"), headers, expect, (process.pid,))
        wait_until_answered(target, folder / "node.log")
        yield target, process.pid, environment


def prices(targets: Sequence[Target], seconds: int) -> list[float]:
    """CPU microseconds of each gateway for one call; the least of a few runs, as the least disturbed.

    They take turns, so that a slow moment of the machine hits all of them.
    """
    rounds = [
        [measure(target, CALLERS, seconds, number).cpu_per_call[0] for target in targets] for number in range(ROUNDS)
    ]
    return [min(each) for each in zip(*rounds, strict=True)]


# -- nodes and sessions -----------------------------------------------------------------------------------


def with_nodes(counts: list[int], sessions: int, seconds: int) -> dict:
    """A gateway for each number of nodes; the one with the most is then talked to."""
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name, ExitStack() as stack:
        model = stack.enter_context(ModelServer(answer=lambda _: text("hello")))
        rows, targets = [], []
        for count in sorted(counts):
            folder = Path(name) / str(count)
            folder.mkdir()
            target, process, environment = stack.enter_context(gateway(folder, model.environment))
            crowd = stack.enter_context(Crowd(target.url, environment["SA_NODE_TOKEN"]))
            measure(target, CALLERS, seconds, 0)  # what a gateway takes once is not the nodes'
            time.sleep(1)
            before = memory_megabytes(process)["rss"]
            crowd.grow(count - 1)
            time.sleep(1)
            memory = memory_megabytes(process)["rss"] - before
            rows.append({"nodes": count, "kb_per_node": memory * 1024 / count})
            targets.append(target)
        for row, cost in zip(rows, prices(targets, seconds), strict=True):
            row["cpu_us"] = cost
        talk(target, sessions)
        lag = lag_under_load(target, seconds)
        return {"rows": rows, "sessions": sessions, "rss_mb": memory_megabytes(process)["rss"], "lag_p99_ms": lag}


class Crowd:
    """Nodes that join and rest: sockets of one thread that say hello and answer pings."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.replace("http://", "ws://").replace("/v1/tools/invoke", "/v1/nodes/ws")
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._sockets: list[websockets.ClientConnection] = []
        self._tasks: list[asyncio.Task] = []

    def __enter__(self) -> "Crowd":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def grow(self, count: int) -> None:
        asyncio.run_coroutine_threadsafe(self._grow(count), self._loop).result(120)

    async def _grow(self, count: int) -> None:
        while len(self._sockets) < count:
            number = len(self._sockets)
            socket = await websockets.connect(
                f"{self._url}?token={self._token}&node_id=crowd-{number}", compression=None, ping_interval=None
            )
            hello = {
                "type": "node_hello",
                "protocol_version": 1,
                "node": {"id": f"crowd-{number}", "name": "crowd", "node_type": "bench", "version": "1", "tags": []},
                "capabilities": ["crowd"],
            }
            await socket.send(json.dumps(hello))
            await socket.recv()
            self._sockets.append(socket)
            self._tasks.append(self._loop.create_task(self._answer(socket)))

    async def _answer(self, socket: websockets.ClientConnection) -> None:
        async for message in socket:
            if json.loads(message).get("type") == "ping":
                await socket.send('{"type":"pong"}')

    async def _leave(self) -> None:
        await asyncio.gather(*(socket.close() for socket in self._sockets))


def talk(target: Target, sessions: int) -> None:
    """One message in each session, sixteen at a time."""
    base = target.url.removesuffix("/v1/tools/invoke")
    numbers = iter(range(sessions))
    failures: list[BaseException] = []

    def work() -> None:
        for number in numbers:
            body = json.dumps({"message": "hello", "wait_seconds": 60}).encode()
            url = f"{base}/v1/sessions/agent:main:bench{number}/messages"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, body, target.headers), timeout=90) as answer:
                    assert b"hello" in answer.read()
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def lag_under_load(target: Target, seconds: int) -> float:
    """p99 of how late /healthz is answered, in milliseconds, while 64 callers call."""
    host, _, port = target.url.removeprefix("http://").partition("/")[0].partition(":")
    taken: list[float] = []
    over = threading.Event()

    def watch() -> None:
        connection = http.client.HTTPConnection(host, int(port))
        while not over.is_set():
            began = time.perf_counter()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            taken.append((time.perf_counter() - began) * 1000)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    measure(target, 64, seconds, 0)
    over.set()
    thread.join()
    taken.sort()
    return taken[len(taken) * 99 // 100]


# -- the record -------------------------------------------------------------------------------------------


def with_records(counts: list[int], seconds: int) -> list[dict]:
    """A gateway for each length of the record."""
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name, ExitStack() as stack:
        rows, targets = [], []
        for count in sorted(counts):
            folder = Path(name) / str(count)
            (folder / "home").mkdir(parents=True)
            asyncio.run(fill(folder / "home" / "farhand.db", count))
            target, process, _ = stack.enter_context(gateway(folder))
            rows.append({"calls": count, "start_cpu_s": cpu_seconds(process)})
            targets.append(target)
        for row, target, cost in zip(rows, targets, prices(targets, seconds), strict=True):
            row["cpu_us"] = cost
            row["list_ms"] = median(listing(target) for _ in range(20))
        return rows


async def fill(path: Path, count: int) -> None:
    database = SqliteStore.open(path)
    now = time.time_ns() // 1_000_000

    def write(some: int) -> None:
        def operation(store: object) -> None:
            for _ in range(some):
                record = CallRecord(
                    id=new_call_id(), tool="bench.echo", args=b'{"text":"hello"}', credential="owner", route="node",
                    node_id="bench", capability="bench", state=CallState.OK, created_at=now, deadline_at=now,
                    ended_at=now, duration_ms=1.0, result=b'{"text":"hello"}',
                )  # fmt: skip
                calls.begin(store, record)

        database.query(operation)

    for first in range(0, count, 5000):
        write(min(5000, count - first))
    await database.close()


def listing(target: Target) -> float:
    url = target.url.replace("/v1/tools/invoke", "/v1/calls?limit=50")
    began = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, headers=target.headers), timeout=60) as answer:
        answer.read()
    return (time.perf_counter() - began) * 1000


def as_text(report: dict) -> str:
    nodes = report["nodes"]
    lines = [f"{'nodes':>8}{'CPU µs/call':>14}{'KB/node':>10}"]
    lines += [f"{row['nodes']:>8}{row['cpu_us']:>14.0f}{row['kb_per_node']:>10.0f}" for row in nodes["rows"]]
    last = nodes["rows"][-1]
    lines += [
        _verdict("price of a call, dearest to cheapest", spread(nodes["rows"], "cpu_us"), FLAT),
        _verdict("KB for a node", last["kb_per_node"], NODE_KILOBYTES),
        _verdict(
            f"lag of the loop under 64 callers, p99 ms, {last['nodes']} nodes and {nodes['sessions']} sessions at rest",
            nodes["lag_p99_ms"],
            LAG_MS,
        ),
        f"gateway resident with all of them: {nodes['rss_mb']:.0f} MB",
        "",
        f"{'calls in the record':>20}{'CPU µs/call':>14}{'list of 50, ms':>16}{'CPU at start, s':>17}",
    ]
    rows = report["calls"]
    lines += [
        f"{row['calls']:>20,}{row['cpu_us']:>14.0f}{row['list_ms']:>16.1f}{row['start_cpu_s']:>17.2f}" for row in rows
    ]
    lines += [
        _verdict("price of a call, dearest to cheapest", spread(rows, "cpu_us"), FLAT),
        f"list of 50, slowest to quickest: {spread(rows, 'list_ms'):.2f}; "
        f"CPU at start, most to least: {spread(rows, 'start_cpu_s'):.2f}",
    ]
    return "\n".join(lines)


def spread(rows: list[dict], figure: str) -> float:
    """How many times the least the most is: 1 is flat."""
    values = [row[figure] for row in rows]
    return max(values) / min(values)


def _verdict(what: str, value: float, most: float) -> str:
    return f"{what}: {value:.2f}, wanted <= {most:g}: {'met' if value <= most else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
