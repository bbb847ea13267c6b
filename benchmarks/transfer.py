"""How fast a file goes from node to gateway to node, beside bare sockets and `scp`, in one interleaved run.

    .venv/bin/python -m benchmarks.transfer [--mib N] [--rounds N] [--folder DIR] [--json]

All three read one file and write another on the same disk, and bring it to the disk before they are done (scp does
not). Each round runs each of them once. During Farhand's, small calls go through the same gateway to the sending
node, and are compared with the same calls before it.
"""

import argparse
import getpass
import hashlib
import http.client
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from benchmarks.processes import (
    BenchmarkError,
    cpu_seconds,
    free_port,
    memory_megabytes,
    plain_environment,
    running,
    stop_on_signals,
)

MIB = 1024 * 1024
IDLE_CALLS = 400
# Between two small calls, idle or not: after a longer pause a call finds colder caches.
PAUSE_SECONDS = 0.005


class Farhand:
    """A gateway and two nodes."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.port, home = free_port(), folder / "home"
        environment = {**plain_environment(), "FARHAND_HOME": str(home), "SA_NODE_TOKEN": secrets.token_hex(16)}
        farhand = [sys.executable, "-m", "farhand"]
        gateway = [*farhand, "gateway", "--port", str(self.port)]
        self.gateway = stack.enter_context(running(gateway, folder / "gateway.log", "farhand ready on ", environment))
        self.nodes = []
        for name in ("left", "right"):
            (folder / name).mkdir()
            command = [*farhand, "node", "--gateway", f"http://127.0.0.1:{self.port}", "--id", name]
            command += ["--home", str(folder / f"{name}-home"), "--workspace", str(folder / name)]
            self.nodes.append(stack.enter_context(running(command, folder / f"{name}.log", None, environment)))
        token = (home / "token").read_text().strip()
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 20
        while sum(node["online"] for node in self.ask("GET", "/v1/nodes")["nodes"]) < 2:
            if time.monotonic() > deadline:
                raise BenchmarkError("the nodes did not join")
            time.sleep(0.05)

    def ask(self, method: str, path: str, body: object = None) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, json.dumps(body) if body else None, self.headers)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    @property
    def processes(self) -> tuple[int, ...]:
        return (self.gateway.pid, *(node.pid for node in self.nodes))


class SmallCalls(threading.Thread):
    """One small read-only call after the other; `latencies` in milliseconds."""

    def __init__(self, farhand: Farhand, path: Path) -> None:
        super().__init__(daemon=True)
        self.latencies: list[float] = []
        self.stop = threading.Event()
        self._body = json.dumps({"tool": "left__Read", "args": {"path": str(path)}})
        self._headers = farhand.headers
        self._connection = http.client.HTTPConnection("127.0.0.1", farhand.port, timeout=60)

    def one(self) -> None:
        began = time.perf_counter()
        self._connection.request("POST", "/v1/tools/invoke", self._body, self._headers)
        answer = json.loads(self._connection.getresponse().read())
        if not answer["ok"]:
            raise BenchmarkError(str(answer))
        self.latencies.append((time.perf_counter() - began) * 1000)

    def run(self) -> None:
        while not self.stop.is_set():
            self.one()
            time.sleep(PAUSE_SECONDS)


def measure_farhand(farhand: Farhand, source: Path, target: Path) -> dict:
    small = source.with_name("small")
    small.write_text("a small file\n")
    idle = SmallCalls(farhand, small)
    for _ in range(IDLE_CALLS):
        idle.one()
        time.sleep(PAUSE_SECONDS)
    busy = SmallCalls(farhand, small)
    cpu = [cpu_seconds(pid) for pid in farhand.processes]
    most = 0.0
    body = {"source": f"left:{source}", "destination": f"right:{target}", "background": True}
    busy.start()
    began = time.perf_counter()
    transfer = farhand.ask("POST", "/v1/transfers", body)
    while (record := farhand.ask("GET", f"/v1/transfers/{transfer['id']}"))["state"] == "running":
        most = max(most, memory_megabytes(farhand.gateway.pid)["rss"])
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    busy.stop.set()
    busy.join()
    if record["state"] != "ok":
        raise BenchmarkError(str(record))
    spent = [after - before for after, before in zip(map(cpu_seconds, farhand.processes), cpu, strict=True)]
    return {
        "seconds": seconds,
        "cpu_ms_per_mib": [each * 1000 / (source.stat().st_size / MIB) for each in spent],
        "gateway_rss_mb": most,
        "idle_p50_ms": median(idle.latencies),
        "idle_p99_ms": percentile(idle.latencies),
        "busy_p50_ms": median(busy.latencies),
        "busy_p99_ms": percentile(busy.latencies),
        "busy_calls": len(busy.latencies),
    }


def percentile(values: list[float]) -> float:
    return quantiles(values, n=100)[98] if len(values) > 1 else values[0]


def measure_raw(folder: Path, source: Path, target: Path) -> dict:
    with ExitStack() as stack:
        raw = [sys.executable, "-m", "benchmarks.raw_relay"]
        receiver = folder / "raw-receive.log"
        stack.enter_context(running([*raw, "receive", str(target)], receiver, "ready on "))
        relay = folder / "raw-relay.log"
        stack.enter_context(running([*raw, "relay", receiver.read_text().split()[-1]], relay, "ready on "))
        began = time.perf_counter()
        subprocess.run([*raw, "send", str(source), relay.read_text().split()[-1]], check=True)
        return {"seconds": time.perf_counter() - began}


def measure_scp(folder: Path, port: int, source: Path, target: Path) -> dict:
    command = ["scp", "-q", "-P", str(port), "-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no"]
    command += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    began = time.perf_counter()
    subprocess.run([*command, str(source), f"{getpass.getuser()}@127.0.0.1:{target}"], check=True)
    return {"seconds": time.perf_counter() - began}


def start_sshd(stack: ExitStack, folder: Path) -> int | None:
    """A server of our own with keys of its own; None where there is none to start."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None or shutil.which("scp") is None:
        return None
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    options = [f"HostKey={folder / 'host'}", f"AuthorizedKeysFile={folder / 'authorized'}", "StrictModes=no"]
    options += ["ListenAddress=127.0.0.1", "UsePAM=no", "PermitRootLogin=yes", "PidFile=none"]
    command = [sshd, "-D", "-e", "-p", str(port), *(f"-o{option}" for option in options)]
    stack.enter_context(running(command, folder / "sshd.log", "Server listening"))
    return port


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def run(arguments: argparse.Namespace) -> dict:
    samples: dict[str, list[dict]] = {"farhand": [], "raw": [], "scp": []}
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir=arguments.folder) as name, ExitStack() as stack:
        folder = Path(name)
        source, target = folder / "source", folder / "target"
        with source.open("wb") as file:
            for _ in range(arguments.mib):
                file.write(os.urandom(MIB))
        expected = digest(source)
        farhand = Farhand(stack, folder)
        port = start_sshd(stack, folder)
        for number in range(arguments.rounds):
            order = ["farhand", "raw", "scp"]
            for each in order[number % 3 :] + order[: number % 3]:
                if each == "scp" and port is None:
                    continue
                target.unlink(missing_ok=True)
                os.sync()
                if each == "farhand":
                    sample = measure_farhand(farhand, source, target)
                elif each == "raw":
                    sample = measure_raw(folder, source, target)
                else:
                    sample = measure_scp(folder, port or 0, source, target)
                if digest(target) != expected:
                    raise BenchmarkError(f"{each} made another file of it")
                samples[each].append({**sample, "mib_per_second": arguments.mib / sample["seconds"]})
    return {"mib": arguments.mib, "load": os.getloadavg()[0], "samples": samples, "goals": goals(samples)}


def goals(samples: dict[str, list[dict]]) -> list[dict]:
    def rate(name: str) -> float:
        return median(sample["mib_per_second"] for sample in samples[name])

    ours = samples["farhand"]
    found = [
        ("rate, times that of bare sockets", rate("farhand") / rate("raw"), 0.6, True),
        ("gateway resident, MB", max(sample["gateway_rss_mb"] for sample in ours), 150.0, False),
        (
            "p99 of small calls, times the idle one",
            median(sample["busy_p99_ms"] / sample["idle_p99_ms"] for sample in ours),
            2.0,
            False,
        ),
    ]
    if samples["scp"]:
        found.append(("rate, times that of scp", rate("farhand") / rate("scp"), 1.0, True))
    return [
        {"goal": text, "value": value, "limit": limit, "met": value >= limit if at_least else value <= limit}
        for text, value, limit, at_least in found
    ]


def as_text(report: dict) -> str:
    lines = [f"{report['mib']} MiB, load {report['load']:.1f} (figures of a busy machine say little)", ""]
    for name, samples in report["samples"].items():
        if samples:
            rates = ", ".join(f"{sample['mib_per_second']:.0f}" for sample in samples)
            lines.append(f"{name:<10}{median(s['mib_per_second'] for s in samples):>8.0f} MiB/s   ({rates})")
    for sample in report["samples"]["farhand"]:
        cpu = " + ".join(f"{each:.2f}" for each in sample["cpu_ms_per_mib"])
        lines.append(
            f"  CPU ms/MiB gateway + sender + receiver: {cpu}; gateway {sample['gateway_rss_mb']:.0f} MB; small calls "
            f"p50 {sample['idle_p50_ms']:.2f} -> {sample['busy_p50_ms']:.2f} ms, "
            f"p99 {sample['idle_p99_ms']:.2f} -> {sample['busy_p99_ms']:.2f} ms ({sample['busy_calls']} calls)"
        )
    lines.append("")
    for goal in report["goals"]:
        lines.append(
            f"{goal['goal']:<42}{goal['value']:>8.2f}  limit {goal['limit']:<6} {'met' if goal['met'] else 'MISSED'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the file (1024)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--folder", default="/var/tmp", help="where the files lie (/var/tmp, a disk)")
    parser.add_argument("--json", action="store_true", help="one JSON document with every sample")
    arguments = parser.parse_args()
    stop_on_signals()
    try:
        report = run(arguments)
    except BenchmarkError as error:
        print(json.dumps({"error": str(error)}) if arguments.json else f"failed: {error}")
        return 1
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
