"""The load: wrk, the same for every target, and what it saw."""

import json
import os
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import BenchmarkError, cpu_seconds

SCRIPT = Path(__file__).with_name("load.lua")
WARM_UP_SECONDS = 1


@dataclass(frozen=True)
class Target:
    """One POST and the text its answer must hold; `processes` are the ids of those who serve it."""

    name: str
    title: str
    url: str
    body: str
    headers: dict[str, str]
    expect: str
    processes: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What one run of the load saw: times in microseconds, CPU per call for each serving process.

    `load_cpu` and `other_cpu` are the cores kept busy by wrk and by all that is foreign to the measurement.
    """

    target: str
    callers: int
    round: int
    calls_per_second: float
    p50: float
    p99: float
    calls: int
    not_2xx: int
    broken: int
    cpu_per_call: tuple[float, ...]
    load_cpu: float
    other_cpu: float


def check_once(target: Target) -> None:
    """Send the call once and read its answer; a wrong one raises `BenchmarkError`."""
    request = urllib.request.Request(target.url, target.body.encode(), target.headers, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            status, body = answer.status, answer.read().decode()
    except OSError as error:
        detail = error.read().decode(errors="replace") if hasattr(error, "read") else ""
        raise BenchmarkError(f"{target.name}: {error} {detail}") from error
    if status != 200 or target.expect not in body:
        raise BenchmarkError(f"{target.name}: wrong answer, status {status}: {body[:500]}")


def measure(target: Target, callers: int, seconds: int, round_number: int) -> Sample:
    """One warm-up in which every answer is compared, then one measured run."""
    check_once(target)
    _wrk(target, callers, WARM_UP_SECONDS, checked=True)
    check_once(target)  # it comes after whatever the warm-up left under way
    machine_before, load_before = _machine_cpu(), _children_cpu()
    before = [cpu_seconds(process) for process in target.processes]
    seen = _wrk(target, callers, seconds, checked=False)
    used = [cpu_seconds(process) - start for process, start in zip(target.processes, before, strict=True)]
    load, machine = _children_cpu() - load_before, _machine_cpu() - machine_before
    elapsed = seen["microseconds"] / 1e6
    calls = seen["requests"]
    if not calls:
        raise BenchmarkError(f"{target.name} with {callers} callers answered nothing: {seen}")
    return Sample(
        target=target.name,
        callers=callers,
        round=round_number,
        calls_per_second=calls / elapsed,
        p50=seen["p50"],
        p99=seen["p99"],
        calls=calls,
        not_2xx=seen["not_2xx"],
        broken=seen["broken"],
        cpu_per_call=tuple(each * 1e6 / calls for each in used),
        load_cpu=load / elapsed,
        other_cpu=max(0.0, machine - load - sum(used)) / elapsed,
    )


def _wrk(target: Target, callers: int, seconds: int, *, checked: bool) -> dict[str, int]:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise BenchmarkError("wrk is missing; install the Debian package `wrk`")
    environment = dict(os.environ)
    environment["BENCH_BODY"] = target.body
    environment["BENCH_HEADERS"] = "\n".join(f"{name}: {value}" for name, value in target.headers.items())
    environment.pop("BENCH_EXPECT", None)
    if checked:
        environment["BENCH_EXPECT"] = target.expect
    command = [wrk, "-t1", f"-c{callers}", f"-d{seconds}s", "--timeout", "10s", "-s", str(SCRIPT), target.url]
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds + 30, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"wrk did not end on {target.name}") from error
    line = next((line for line in ran.stdout.splitlines() if line.startswith("BENCH ")), None)
    if ran.returncode != 0 or line is None:
        raise BenchmarkError(f"wrk failed on {target.name}: {ran.stdout}{ran.stderr}")
    seen = json.loads(line.removeprefix("BENCH "))
    if checked and (seen["wrong"] or seen["not_2xx"] or seen["broken"]):
        first = next((line for line in ran.stdout.splitlines() if line.startswith("WRONG ")), "")
        raise BenchmarkError(f"{target.name} with {callers} callers answered wrongly: {seen} {first[:600]}")
    return seen


def _machine_cpu() -> float:
    """Seconds during which any core was busy since the machine started."""
    fields = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _children_cpu() -> float:
    """CPU seconds of the ended children, which are the runs of wrk."""
    times = os.times()
    return times.children_user + times.children_system
