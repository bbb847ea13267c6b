"""How many tokens a bare "hello" to the agent takes with 2, 10 and 50 machines.

    .venv/bin/python -m benchmarks.context [--machines N…] [--json]

The nodes are real, ten to a process. The request that the model receives is counted as Farhand itself counts: system
prompt, tools and message.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.freeze import NODES_PER_PROCESS
from benchmarks.processes import plain_environment, running, stop_on_signals
from farhand.agent.tokens import text_tokens
from tests.support.harness import SHARED_TOKEN, GatewayProcess, wait_until
from tests.support.model_server import ModelServer, text


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.context", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 10, 50], help="how many (2 10 50)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    stop_on_signals()
    tokens = run(sorted(arguments.machines))
    if arguments.json:
        print(json.dumps({"tokens": tokens}))
    else:
        for machines, count in tokens.items():
            print(f"{machines:>4} machines: {count:,} tokens")
    return 0


def run(sizes: list[int]) -> dict[int, int]:
    """Return the tokens of one request by number of machines."""
    tokens: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="farhand-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        model = stack.enter_context(ModelServer(answer=lambda _: text("Hello.")))
        gateway = stack.enter_context(GatewayProcess(folder / "home", env=dict(model.environment)))
        environment = {**plain_environment(), "SA_NODE_TOKEN": SHARED_TOKEN, "HOME": name}
        joined = 0
        for size in sizes:
            while joined < size:
                count = min(NODES_PER_PROCESS, size - joined)
                command = [sys.executable, "-m", "benchmarks.freeze", "--nodes", str(count)]
                command += ["--serve", gateway.ws_url, str(joined), name]
                stack.enter_context(running(command, folder / f"nodes-{joined}.log", None, environment))
                joined += count
            wait_until(lambda wanted=size: online(gateway) == wanted, 120, f"{size} nodes online")
            model.requests.clear()
            gateway.request("POST", f"/v1/sessions/hello-{size}/messages", {"message": "hello", "wait_seconds": 60})
            tokens[size] = text_tokens(model.requests[0].body.decode())
    return tokens


def online(gateway: GatewayProcess) -> int:
    return sum(node["online"] for node in gateway.get("/v1/nodes")["nodes"])


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
