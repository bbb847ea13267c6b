"""What the first visit of the console costs, in Debian's Chromium.

    .venv/bin/python -m benchmarks.page [--rounds N] [--json]

Each round signs in with a new browser profile, so nothing is cached. Counted are the bytes that the browser receives
(compressed, as sent) and the time from the navigation until the page shows that it is live.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.processes import BenchmarkError
from tests.support.browser import ARGUMENTS, CHROMIUM
from tests.support.harness import GatewayProcess


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.page", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how many visits (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    report = run(arguments.rounds)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"first visit: {report['kilobytes']:.0f} KB received, live after {report['seconds']:.2f} s", end=" ")
        print(f"(median of {arguments.rounds})")
    return 0


def run(rounds: int) -> dict[str, Any]:
    if not CHROMIUM.exists():
        raise BenchmarkError(f"{CHROMIUM} is missing; install the Debian package chromium")
    visits = []
    with (
        tempfile.TemporaryDirectory(prefix="farhand-bench-") as name,
        GatewayProcess(Path(name) / "home") as gateway,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        for _ in range(rounds):
            visits.append(visit(browser, gateway))
        browser.close()
    return {
        "visits": visits,
        "kilobytes": median(each["kilobytes"] for each in visits),
        "seconds": median(each["seconds"] for each in visits),
    }


def visit(browser: Any, gateway: GatewayProcess) -> dict[str, float]:
    context = browser.new_context()
    page = context.new_page()
    received = 0

    def loaded(event: dict[str, Any]) -> None:
        nonlocal received
        received += int(event["encodedDataLength"])

    network = context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.loadingFinished", loaded)
    address = gateway.url + gateway.request("POST", "/v1/signin", {}).json()["path"]
    began = time.perf_counter()
    page.goto(address)
    page.get_by_text("Live", exact=True).first.wait_for(timeout=60_000)
    seconds = time.perf_counter() - began
    context.close()
    return {"kilobytes": received / 1000, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
