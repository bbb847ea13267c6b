"""What a durable job costs beside a bare spawn of the same login shell, measured turn by turn in one run.

    python -m benchmarks.jobs [--rounds 200] [--idle 200] [--profile] [--json]

`--profile` uses the user's own shell profile; without it an empty home is used, so that the profile's own cost does
not hide the difference. Memory is the proportional set size (`Pss`): each shared page is counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from farhand.machine.jobs import jobs as jobs_module
from farhand.machine.jobs.jobs import Jobs, login_shell
from farhand.tools.node_shell import NodeShellTools

SOURCE = str(Path(jobs_module.__file__).parents[3])
TITLES = {
    "bare": "bare spawn of the login shell",
    "thread": "the same from a thread",
    "Bash": "Bash `true` (kept, durable)",
    "shim": "a fresh shim per command instead",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        environment = dict(os.environ) if options.profile else {**os.environ, "HOME": home}
        report = asyncio.run(measure(Path(home), environment, options.rounds, options.idle))
    print(json.dumps(report, indent=2) if options.json else as_text(report))


async def measure(home: Path, environment: dict[str, str], rounds: int, idle: int) -> dict[str, Any]:
    started = time.perf_counter()
    async with Jobs(home / "jobs", environment=environment, linger=0.2) as jobs:
        cold = (time.perf_counter() - started) * 1e3
        tools = NodeShellTools(jobs, home)
        return {
            "keeper_start_ms": cold,
            "spawns": await spawns(tools, environment, rounds),
            "output": await flood(tools, environment),
            "idle": await idling(jobs, tools, idle),
        }


def as_text(report: dict[str, Any]) -> str:
    spawns, output, idle = report["spawns"], report["output"], report["idle"]
    base = spawns["bare"]["p50_ms"]
    lines = [f"{'cold start of the keeper':36} {report['keeper_start_ms']:9.2f} ms, once"]
    for name, title in TITLES.items():
        p50, p95 = spawns[name]["p50_ms"], spawns[name]["p95_ms"]
        lines.append(f"{title:36} {p50:9.2f} ms p50 {p95:9.2f} ms p95   +{p50 - base:6.2f} ms   x{p50 / base:5.2f}")
    lines += [
        f"1 GB of output: {output['kept_mb_s']:.0f} MB/s kept on disk, "
        f"{output['bare_mb_s']:.0f} MB/s through a bare pipe",
        f"{idle['jobs']} idle background jobs: started in {idle['start_s']:.2f} s, {idle['total_mb']:.0f} MB in total: "
        f"keeper and {idle['workers']} workers {idle['keeper_mb']:.0f} MB "
        f"({idle['keeper_mb'] / idle['jobs']:.1f} MB a job), commands {idle['command_mb']:.0f} MB; "
        f"this program +{idle['program_mb']:.0f} MB",
        f"all of them ended in {idle['end_s']:.2f} s",
    ]
    return "\n".join(lines)


async def spawns(tools: NodeShellTools, environment: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    shell = [*login_shell(environment), "true"]

    async def bare() -> None:
        await asyncio.to_thread(subprocess.run, shell, env=environment, stdin=subprocess.DEVNULL, capture_output=True)

    def blocking() -> None:
        subprocess.run(shell, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)

    async def bare_blocking() -> None:
        blocking()

    async def job() -> None:
        answer = await tools.Bash(command="true")
        assert answer["status"] == "completed"

    async def shim() -> None:
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            "import sys; sys.path.append(sys.argv[1]); import farhand.machine.jobs.keeper",
        ]
        subprocess.run([*argv, SOURCE], check=True)
        blocking()

    times = await turns({"bare": bare_blocking, "thread": bare, "Bash": job, "shim": shim}, rounds)
    return {
        name: {"p50_ms": statistics.median(values), "p95_ms": statistics.quantiles(values, n=20)[-1]}
        for name, values in times.items()
    }


async def turns(contestants: dict[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 5):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            await contestant()
            if round_number >= 5:
                times[name].append((time.perf_counter() - started) * 1e3)
    return times


async def flood(tools: NodeShellTools, environment: dict[str, str]) -> dict[str, float]:
    size = 1_000_000_000
    started = time.perf_counter()
    subprocess.run(
        [*login_shell(environment), f"head -c {size} /dev/zero | cat >/dev/null"], env=environment, check=True
    )
    bare = time.perf_counter() - started
    started = time.perf_counter()
    answer = await tools.Bash(command=f"head -c {size} /dev/zero")
    assert answer["truncated"]
    kept = time.perf_counter() - started
    return {"kept_mb_s": size / kept / 1e6, "bare_mb_s": size / bare / 1e6}


async def idling(jobs: Jobs, tools: NodeShellTools, count: int) -> dict[str, float]:
    before = own_memory()
    started = time.perf_counter()
    await asyncio.gather(*(tools.Bash(command="sleep 100000", background=True) for _ in range(count)))
    took = time.perf_counter() - started
    await asyncio.sleep(2.0)
    keepers, commands = [], []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(jobs.folder).encode() in words:
            keepers.append(pid)
        elif words == b"sleep\x00100000\x00":
            commands.append(pid)
    keeper, command = sum(map(memory, keepers)), sum(map(memory, commands))
    program = own_memory() - before
    started = time.perf_counter()
    await asyncio.gather(*(jobs.end(job, grace=0) for job in jobs.listing() if job.running))
    return {
        "jobs": count,
        "start_s": took,
        "workers": len(keepers) - 1,
        "keeper_mb": keeper / 1024,
        "command_mb": command / 1024,
        "total_mb": (keeper + command) / 1024,
        "program_mb": program / 1024,
        "end_s": time.perf_counter() - started,
    }


def memory(pid: str) -> int:
    """Pss in KB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def own_memory() -> int:
    return memory("self")


if __name__ == "__main__":
    main()
