"""Every benchmark, one after the other, and what they said in one file.

    .venv/bin/python -m benchmarks.everything [NAME …] [--into FILE]

The file begins with the date, the machine and the versions of all that was measured; then come the tables as each
benchmark prints them. A benchmark that fails is told and does not stop the others.
"""

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.processes import REPOSITORY, stop_on_signals
from benchmarks.targets import PEERS

NAMES = (
    "relay", "footprint", "jobs", "search", "durable", "turn", "direct", "transfer", "growth", "memory", "freeze",
    "prompt",
)  # fmt: skip
RESULTS = REPOSITORY / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.everything", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(NAMES)}")
    parser.add_argument("--into", type=Path, help="the file (benchmarks/results/DATE.txt)")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    stop_on_signals()
    now = datetime.now(UTC)
    path = arguments.into or RESULTS / f"{now:%Y-%m-%dT%H%M}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with path.open("w", encoding="utf-8") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"{now:%Y-%m-%d %H:%M} UTC")
        for line in versions():
            say(line)
        for name in arguments.names or NAMES:
            say(f"\n== {name}")
            began = time.monotonic()
            status = run(name, say)
            if status:
                failed.append(name)
            say(f"({time.monotonic() - began:.0f} s{f', FAILED with status {status}' if status else ''})")
    print(f"\nwritten to {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run(name: str, say: Callable[[str], None]) -> int:
    command = [sys.executable, "-u", "-m", f"benchmarks.{name}"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
        return process.wait()


# -- what was measured ------------------------------------------------------------------------------------


def versions() -> Iterator[str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    found = {
        "machine": f"{processor()}, {cores} cores, {memory:.0f} GB, {platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f} before the first benchmark",
        "farhand": f"{metadata.version('farhand')}, commit {said('git', 'rev-parse', '--short', 'HEAD')}",
        "python": f"{platform.python_version()}, its SQLite {sqlite3.sqlite_version}",
        **{package: installed(package) for package in ("mcp", "starlette", "uvicorn", "apsw", "picows")},
        **{package: installed_peer(package) for package in ("@modelcontextprotocol/sdk", "openclaw")},
        "node": said("node", "--version"),
        "ssh": said("ssh", "-V"),
        "wrk": said("wrk", "-v"),
        "docker": said("docker", "info", "--format", "{{.ServerVersion}}"),
    }
    for name, version in found.items():
        yield f"{name:<27}{version}"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def installed_peer(package: str) -> str:
    try:
        described = (PEERS / "node_modules" / package / "package.json").read_text()
    except OSError:
        return "not installed"
    return str(json.loads(described)["version"])


def said(*command: str) -> str:
    """The first line a program says of itself."""
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else "says nothing"


if __name__ == "__main__":
    sys.exit(main())
