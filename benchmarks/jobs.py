"""What a durable job costs beside a bare spawn of the same login shell, measured turn by turn in one run.

    python -m benchmarks.jobs [--rounds 200] [--idle 200] [--profile]

`--profile` uses the user's own shell profile; without it an empty home is used, so that the profile's own cost does
not hide the difference. Memory is the proportional set size (`Pss`): each shared page is counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from farhand.machine.jobs import jobs as jobs_module
from farhand.machine.jobs.jobs import Jobs, login_shell
from farhand.tools.node_shell import NodeShellTools

SOURCE = str(Path(jobs_module.__file__).parents[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        environment = dict(os.environ) if options.profile else {**os.environ, "HOME": home}
        asyncio.run(measure(Path(home), environment, options.rounds, options.idle))


async def measure(home: Path, environment: dict[str, str], rounds: int, idle: int) -> None:
    started = time.perf_counter()
    async with Jobs(home / "jobs", environment=environment, linger=0.2) as jobs:
        print(f"cold start of the keeper             {(time.perf_counter() - started) * 1e3:9.2f} ms, once")
        tools = NodeShellTools(jobs, home)
        await spawns(tools, environment, rounds)
        await flood(tools, environment)
        await idling(jobs, tools, idle)


async def spawns(tools: NodeShellTools, environment: dict[str, str], rounds: int) -> None:
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
    base = statistics.median(times["bare"])
    names = {
        "bare": "bare spawn of the login shell",
        "thread": "the same from a thread",
        "Bash": "Bash `true` (kept, durable)",
        "shim": "a fresh shim per command instead",
    }
    for key, name in names.items():
        p50, p95 = statistics.median(times[key]), statistics.quantiles(times[key], n=20)[-1]
        print(f"{name:36} {p50:9.2f} ms p50 {p95:9.2f} ms p95   +{p50 - base:6.2f} ms   x{p50 / base:5.2f}")


async def turns(contestants: dict[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 5):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            await contestant()
            if round_number >= 5:
                times[name].append((time.perf_counter() - started) * 1e3)
    return times


async def flood(tools: NodeShellTools, environment: dict[str, str]) -> None:
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
    print(
        f"1 GB of output: {size / kept / 1e6:.0f} MB/s kept on disk, {size / bare / 1e6:.0f} MB/s through a bare pipe"
    )


async def idling(jobs: Jobs, tools: NodeShellTools, count: int) -> None:
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
    total = (keeper + command) / 1024
    print(
        f"{count} idle background jobs: started in {took:.2f} s, {total:.0f} MB in total: "
        f"keeper and {len(keepers) - 1} workers {keeper / 1024:.0f} MB ({keeper / count / 1024:.1f} MB a job), "
        f"commands {command / 1024:.0f} MB; this program +{(own_memory() - before) / 1024:.0f} MB"
    )
    started = time.perf_counter()
    await asyncio.gather(*(jobs.end(job, grace=0) for job in jobs.listing() if job.running))
    print(f"all of them ended in {time.perf_counter() - started:.2f} s")


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
