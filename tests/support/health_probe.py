"""Asks gateways for `/healthz`, one after another, until its standard input closes; then prints how long each took.

    python -m tests.support.health_probe PORT...

Prints one JSON list of seconds for each port. A request that fails or takes longer than 60 s counts as 60 s.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

PATIENCE = 60.0


def ask(port: int) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/healthz")
        good = connection.getresponse().status == 200
    except OSError:
        good = False
    finally:
        connection.close()
    return time.perf_counter() - began if good else PATIENCE


def main() -> None:
    ports = [int(text) for text in sys.argv[1:]]
    took: list[list[float]] = [[] for _ in ports]
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        for port, times in zip(ports, took, strict=True):
            times.append(ask(port))
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
