"""How long a machine is out of reach when the gateway is killed.

    .venv/bin/python -m benchmarks.recovery [--rounds N] [--json]

Each round kills the gateway (SIGKILL) and starts it again at once, as a service manager does, and measures the time
from the kill until a command on the same node has been answered. A background command that was started before the
first kill has to be running after the last one.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import BenchmarkError
from tests.support.harness import GatewayProcess, NodeProcess


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often the gateway is killed (10)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    report = run(arguments.rounds)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"kill of the gateway to the first answer, {arguments.rounds} rounds: ", end="")
        print(f"p50 {report['p50_s']:.2f} s, slowest {report['worst_s']:.2f} s; the background command was running")
    return 0


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        gateway = stack.enter_context(GatewayProcess(folder / "home"))
        node = stack.enter_context(NodeProcess(gateway, folder / "node", "bench"))
        job = node.ok("Bash", {"command": "sleep 600", "background": True})["sessionId"]
        seconds = [one_round(gateway) for _ in range(rounds)]
        state = node.ok("Process", {"action": "poll", "sessionId": job})["status"]
        if state != "running":
            raise BenchmarkError(f"the background command did not survive: its status is {state!r}")
        node.ok("Process", {"action": "kill", "sessionId": job})
    return {"rounds": seconds, "p50_s": median(seconds), "worst_s": max(seconds)}


def one_round(gateway: GatewayProcess) -> float:
    began = time.perf_counter()
    gateway.kill()
    gateway.start()
    while not gateway.invoke("bench__Bash", {"command": "true"})["ok"]:
        time.sleep(0.01)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
