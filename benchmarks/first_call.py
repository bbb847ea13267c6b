"""How long it takes from a fresh clone to the first command on a machine.

    .venv/bin/python -m benchmarks.first_call [--json]

Clones the last commit into an empty folder and follows the README there: `make run`, then `farhand run NODE -- true`.
The packages come from the package index, or from pip's cache where it has them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import REPOSITORY, BenchmarkError, free_port, plain_environment, stop_on_signals

READY_SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.first_call", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    stop_on_signals()
    report = run()
    if arguments.json:
        print(json.dumps(report))
    else:
        print(
            f"`make run` ready after {report['ready_s']:.0f} s, first command answered after {report['call_s']:.0f} s"
        )
    return 0


def run() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name:
        clone = Path(name) / "farhand"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        environment = {**plain_environment(), "FARHAND_HOME": f"{name}/home"}
        environment.pop("VIRTUAL_ENV", None)
        began = time.perf_counter()
        log = Path(name) / "make.log"
        with log.open("wb") as output:
            make = subprocess.Popen(
                ["make", "run", f"ARGS=--port {free_port()}"],
                cwd=clone,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while "farhand ready on" not in log.read_text(errors="replace"):
                if make.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                    raise BenchmarkError(f"`make run` did not get ready:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.1)
            ready = time.perf_counter() - began
            command = [str(clone / ".venv" / "bin" / "farhand"), "run", os.uname().nodename.lower(), "--", "true"]
            while subprocess.run(command, env=environment, capture_output=True, check=False).returncode:
                if time.perf_counter() - began > READY_SECONDS:
                    raise BenchmarkError(f"`{' '.join(command[1:])}` did not succeed")
                time.sleep(0.1)
            return {"ready_s": ready, "call_s": time.perf_counter() - began}
        finally:
            os.killpg(make.pid, signal.SIGTERM)
            make.wait(60)


if __name__ == "__main__":
    sys.exit(main())
