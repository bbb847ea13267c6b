"""Every benchmark, one after the other, into one JSON file.

    .venv/bin/python -m benchmarks.everything [NAME …] [--into FILE]

The file has the date, the versions of everything that was measured, and the report of each benchmark. A benchmark that
fails is named and does not stop the others. `benchmarks.summary` turns the file into the page of the documentation.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.processes import REPOSITORY, stop_on_signals
from benchmarks.summary import as_markdown, summary
from benchmarks.targets import PEERS

NAMES = (
    "first_call", "prompt", "jobs", "search", "transfer", "turn", "context", "recovery", "freeze", "page", "footprint",
    "relay", "fleet", "durable", "direct", "growth", "memory",
)  # fmt: skip
RESULTS = REPOSITORY / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.everything", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(NAMES)}")
    parser.add_argument("--into", type=Path, help="the file (benchmarks/results/DATE.json)")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    stop_on_signals()
    now = datetime.now(UTC)
    path = arguments.into or RESULTS / f"{now:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"date": f"{now:%Y-%m-%d}", "versions": versions(), "reports": {}}
    failed = []
    for name in arguments.names or NAMES:
        began = time.monotonic()
        print(f"{name} ... ", end="", flush=True)
        report = run(name)
        if report is None:
            failed.append(name)
        else:
            results["reports"][name] = report
            path.write_text(json.dumps(results, indent=2))
        print(f"{'done' if report is not None else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{as_markdown(list(summary(results['reports'])))}\n\nwritten to {path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str) -> Any:
    """Return what a benchmark reports, or None if it failed; it prints its own errors."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {"error": f"ended with status {done.returncode} and no report"}
    if isinstance(report, dict) and "error" in report:
        print(f"{name}: {report['error']}", file=sys.stderr)
        return None
    return report


# -- what was measured ------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "machine": f"{processor()}, {cores} cores, {memory:.0f} GB, {platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f} before the first benchmark",
        "farhand": f"{metadata.version('farhand')}, commit {first_line('git', 'rev-parse', '--short', 'HEAD')}",
        "python": platform.python_version(),
        **{package: installed(package) for package in ("mcp", "starlette", "uvicorn", "apsw", "picows")},
        **{package: installed_peer(package) for package in ("@modelcontextprotocol/sdk", "openclaw")},
        "node": first_line("node", "--version"),
        "ssh": first_line("ssh", "-V"),
        "wrk": first_line("wrk", "-v"),
    }


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


def first_line(*command: str) -> str:
    """Return the first line that a command prints."""
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
