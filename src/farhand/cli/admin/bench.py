"""`bench`: how quick Farhand is on this machine, in a quarter of a minute."""

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

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
LINUX: Final = sys.platform == "linux"
READY: Final = "farhand ready on "
TEXT: Final = "forty-two\n"


class BenchError(FarhandError):
    """What is to be measured could not be started, or answered wrongly."""


@dataclass(frozen=True)
class Figure:
    """One line of the report; times in milliseconds."""

    what: str
    p50_ms: float | None = None
    p99_ms: float | None = None
    rate: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Machine:
    """What the figures were measured on."""

    system: str = field(default_factory=lambda: f"{platform.system()} {platform.release()}")
    python: str = field(default_factory=platform.python_version)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)) if LINUX else os.cpu_count() or 1)
    # How many programs wanted to run at once, before anything was measured.
    load: float = field(default_factory=lambda: os.getloadavg()[0])


@click.command()
@click.option("--seconds", type=click.FloatRange(0.2, 60), default=1.5, help="Length of each run of calls.  [1.5]")
@json_option()
def bench(seconds: float, as_json: bool) -> int:
    """Measure calls, commands and a copy on this machine.

    A gateway and a node are started in a folder of their own, measured, and stopped; nothing of yours is touched. The
    calls are made by this one Python program, which takes its share of the machine: see
    docs/reference/performance.md for figures beside other systems.

    \b
    Examples:
      farhand bench
      farhand bench --seconds 5 --json
    """
    if math.isnan(seconds):  # which no range excludes
        raise click.UsageError("--seconds takes a number from 0.2 to 60, not nan.")
    machine = Machine()
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir=_disk_folder()) as name, _farhand(Path(name)) as run:
        figures = list(_measure(run, seconds, quiet=as_json or not on_terminal()))
    if as_json:
        show_json({"version": __version__, **asdict(machine), "figures": [asdict(figure) for figure in figures]})
        return 0
    print(f"Farhand {__version__}, {machine.system}, Python {machine.python}, {machine.cores} cores\n")
    columns = [Column(""), Column("P50", right=True), Column("P99", right=True), Column("RATE", right=True)]
    show_table(columns, [_row(figure) for figure in figures])
    if machine.load > machine.cores / 2:
        remark(f"The machine had other work to do (load {machine.load:.1f}): alone, Farhand is quicker than this.")
    return 0


def _row(figure: Figure) -> list[str]:
    def shown(milliseconds: float | None) -> str:
        if milliseconds is None:
            return ""
        return f"{milliseconds:.2f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"

    rate = "" if figure.rate is None else f"{figure.rate:,.0f} {figure.unit}"
    return [figure.what, shown(figure.p50_ms), shown(figure.p99_ms), rate]


# -- what is measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A gateway with this machine as its node."""

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
    """The id of this machine's node, once it has joined."""
    client = Client(str(home))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for node in client.get("/v1/nodes").value["nodes"]:
            if node["online"]:
                return str(node["node_id"])
        time.sleep(0.02)
    raise BenchError(f"this machine did not join: {log.read_text(errors='replace')[-500:]}")


def _measure(run: Running, seconds: float, *, quiet: bool) -> Iterator[Figure]:
    def say(what: str) -> None:
        if not quiet:
            remark(f"measuring {what} …")

    yield Figure("start to ready", p50_ms=run.ready_seconds * 1000)
    memory = _resident_megabytes(run.process_id)
    if memory is not None:
        yield Figure("memory of the gateway, one node joined", rate=memory, unit="MB")
    say("the disk")
    yield _times("one sync of the disk", _syncs(run.folder))
    read = {"tool": f"{run.node}__Read", "args": {"path": "small.txt"}}
    write = {"tool": f"{run.node}__Write", "args": {"path": "written.txt", "content": TEXT}}
    for what, call in (("Read, a read-only call", read), ("Write, a call with effects", write)):
        for callers in CALLERS:
            say(f"{what}, {callers} at once")
            taken = asyncio.run(_call_for(run, call, callers, seconds))
            title = f"{what}, {callers} caller{'s' if callers > 1 else ''}"
            yield _times(title, taken, rate=len(taken) / seconds, unit="calls/s")
    say("commands")
    shell = os.environ.get("SHELL") or "/bin/sh"
    yield _times(f"`true` in a bare {Path(shell).name}", [_spawn(shell) for _ in range(COMMANDS)])
    bash = {"tool": f"{run.node}__Bash", "args": {"command": "true"}}
    yield _times("`true` by Bash, kept and durable", asyncio.run(_call_for(run, bash, 1, seconds, most=COMMANDS)))
    say("a copy")
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


def _resident_megabytes(process_id: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    except OSError:
        return None  # no Linux
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _disk_folder() -> str | None:
    """Where a disk is: other folders for such files may lie in memory, and the disk is part of what is measured."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else None  # noqa: S108


# -- the calls --------------------------------------------------------------------------------------------


async def _call_for(
    run: Running, call: dict[str, Any], callers: int, seconds: float, most: int | None = None
) -> list[float]:
    """How long each call took that `callers` made one after the other, for `seconds` or `most` times."""
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
