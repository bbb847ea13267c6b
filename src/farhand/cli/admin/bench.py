"""`bench`: measure Farhand on this machine in about 15 seconds."""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import psutil

from farhand import __version__
from farhand.cli.client import TOKEN_FILE, Client
from farhand.cli.json_output import json_option
from farhand.cli.output import Column, on_terminal, remark, show_json, show_table
from farhand.protocol.errors import FarhandError

START_SECONDS: Final = 30.0
CALLERS: Final = (1, 16)
COMMANDS: Final = 20
SYNCS: Final = 100
COPIED_BYTES: Final = 64 << 20
READY: Final = "farhand ready on "
TEXT: Final = "forty-two\n"


class BenchError(FarhandError):
    """The gateway or a node did not start, or a call failed."""


@dataclass(frozen=True)
class Figure:
    """One line of the report; times in milliseconds."""

    what: str
    p50_ms: float | None = None
    p99_ms: float | None = None
    rate: float | None = None
    unit: str = ""


def _milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} ms" if value < 1000 else f"{value / 1000:.2f} s"


COLUMNS = [
    Column("", lambda figure: figure.what),
    Column("P50", lambda figure: _milliseconds(figure.p50_ms), right=True),
    Column("P99", lambda figure: _milliseconds(figure.p99_ms), right=True),
    Column("RATE", lambda one: "" if one.rate is None else f"{one.rate:,.0f} {one.unit}", right=True),
]


@click.command()
@click.option("--seconds", type=click.FloatRange(0.2, 60), default=1.5, help="Duration of each measurement.  [1.5]")
@json_option()
def bench(seconds: float, as_json: bool) -> int:
    """Measure calls, commands and a copy on this machine.

    Starts a gateway and a node in a temporary folder, measures them and stops them; your own installation is not
    touched. This program makes the calls and uses part of the machine itself. See docs/reference/performance.md for
    comparisons with other systems.

    \b
    Examples:
      farhand bench
      farhand bench --seconds 5 --json
    """
    if math.isnan(seconds):  # FloatRange accepts it
        raise click.UsageError("--seconds takes 0.2 to 60, not nan.")
    machine = _describe_machine()
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir=_disk_folder()) as name, _farhand(Path(name)) as run:
        figures = list(_measure(run, seconds, quiet=as_json or not on_terminal()))
    if as_json:
        show_json({"version": __version__, **machine, "figures": [asdict(figure) for figure in figures]})
        return 0
    print(f"Farhand {__version__}, {machine['system']}, Python {machine['python']}, {machine['cores']} cores\n")
    show_table(COLUMNS, figures)
    if machine["load"] > machine["cores"] / 2:
        remark(f"The machine was busy (load {machine['load']:.1f}); an idle one gives better figures.")
    return 0


def _describe_machine() -> dict[str, Any]:
    """Describe what the figures are measured on; the load is that before the measurement."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "load": os.getloadavg()[0],
    }


# -- measurements -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A gateway with this machine as a node."""

    url: str
    token: str
    node: str
    folder: Path
    process_id: int
    ready_seconds: float


@contextmanager
def _farhand(folder: Path) -> Iterator[Running]:
    home, workspace = folder / "home", folder / "workspace"
    workspace.mkdir()
    (workspace / "small.txt").write_text(TEXT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FARHAND_", "SA_"))}
    command = [sys.executable, "-m", "farhand", "up", "--port", "0", "--home", str(home), "--workspace", str(workspace)]
    log = folder / "farhand.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        url = _ready(process, log)
        seconds = time.perf_counter() - began
        token = (home / TOKEN_FILE).read_text().strip()
        yield Running(url, token, _node(home, log), folder, process.pid, seconds)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
        time.sleep(0.005)
    raise BenchError(f"the gateway did not start: {log.read_text(errors='replace')[-500:]}")


def _node(home: Path, log: Path) -> str:
    """Wait for the local node and return its id."""
    client = Client(str(home))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for node in client.get("/v1/nodes").value["nodes"]:
            if node["online"]:
                return str(node["node_id"])
        time.sleep(0.02)
    raise BenchError(f"the node did not connect: {log.read_text(errors='replace')[-500:]}")


def _measure(run: Running, seconds: float, *, quiet: bool) -> Iterator[Figure]:
    def announce(what: str) -> None:
        if not quiet:
            remark(f"measuring {what} …")

    yield Figure("start to ready", p50_ms=run.ready_seconds * 1000)
    memory = psutil.Process(run.process_id).memory_info().rss / (1 << 20)
    yield Figure("memory of the gateway with one node", rate=memory, unit="MB")
    announce("the disk")
    yield _times("one sync of the disk", _syncs(run.folder))
    read = {"tool": f"{run.node}__Read", "args": {"path": "small.txt"}}
    write = {"tool": f"{run.node}__Write", "args": {"path": "written.txt", "content": TEXT}}
    for what, call in (("Read, a read-only call", read), ("Write, a call with effects", write)):
        for callers in CALLERS:
            announce(f"{what}, {callers} at once")
            taken = asyncio.run(_call_for(run, call, callers, seconds))
            title = f"{what}, {callers} caller{'s' if callers > 1 else ''}"
            yield _times(title, taken, rate=len(taken) / seconds, unit="calls/s")
    announce("commands")
    shell = os.environ.get("SHELL") or "/bin/sh"
    yield _times(f"`true` in a bare {Path(shell).name}", [_spawn(shell) for _ in range(COMMANDS)])
    bash = {"tool": f"{run.node}__Bash", "args": {"command": "true"}}
    yield _times("`true` by Bash, durable", asyncio.run(_call_for(run, bash, 1, seconds, most=COMMANDS)))
    announce("a copy")
    source = run.folder / "workspace" / "large.bin"
    source.write_bytes(os.urandom(1 << 20) * (COPIED_BYTES >> 20))
    copy = {"source": f"{run.node}:{source}", "destination": "gsv:bench/large.bin"}
    [took] = asyncio.run(_call_for(run, {"tool": "gsv__Transfer", "args": copy}, 1, 60.0, most=1))
    yield Figure("copy of 64 MiB into the workspace", rate=COPIED_BYTES / (1 << 20) / took, unit="MiB/s")


def _times(what: str, taken: list[float], rate: float | None = None, unit: str = "") -> Figure:
    taken = sorted(taken)
    middle, late = taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 99 // 100)]
    return Figure(what, p50_ms=middle * 1000, p99_ms=late * 1000, rate=rate, unit=unit)


def _syncs(folder: Path) -> list[float]:
    taken = []
    file = os.open(folder / "sync", os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(SYNCS):
            os.pwrite(file, b"x" * 4096, 0)
            began = time.perf_counter()
            os.fsync(file)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(file)
    return taken


def _spawn(shell: str) -> float:
    began = time.perf_counter()
    subprocess.run([shell, "-lc", "true"], check=False, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - began


def _disk_folder() -> str | None:
    """Return a folder on disk: the default for temporary files may be in memory, and the disk is measured too."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else None  # noqa: S108


# -- the calls --------------------------------------------------------------------------------------------


async def _call_for(
    run: Running, call: dict[str, Any], callers: int, seconds: float, most: int | None = None
) -> list[float]:
    """Return the duration of each call that `callers` make in parallel, for `seconds` or `most` calls."""
    host, _, port = run.url.removeprefix("http://").rpartition(":")
    body = json.dumps(call).encode()
    head = (
        f"POST /v1/tools/invoke HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {run.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while time.perf_counter() < end and (most is None or len(taken) < most):
                began = time.perf_counter()
                writer.write(head + body)
                answer = await _answer(reader)
                taken.append(time.perf_counter() - began)
                if not answer.get("ok"):
                    raise BenchError(f"{call['tool']} failed: {answer.get('error')}")
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(callers)))
    return taken


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    return answer
