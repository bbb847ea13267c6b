"""Results of tens of megabytes: a client that requests many of them at once does not block others."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.http.test_stalls import Watched, percentile, token_of
from tests.support.harness import GatewayProcess, NodeProcess

MEGABYTES = 40
AT_ONCE = 24


@pytest.mark.timeout(900)
def test_large_results_do_not_stall_the_gateway(tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "home") as gateway,
        GatewayProcess(tmp_path / "idle") as control,
        NodeProcess(gateway, tmp_path / "node", "hands") as node,
    ):
        line = b"a line of text, as it is in any file that is longer than it should be\n"
        (node.workspace / "large").write_bytes(line * (MEGABYTES * 1_000_000 // len(line)))
        reader = token_of(gateway, "tools.read")
        body = {"tool": "hands__Read", "args": {"path": "large"}, "timeout_ms": 600_000}

        def read(_: int) -> int:
            return gateway.request("POST", "/v1/tools/invoke", body, token=reader, timeout=600).status

        with Watched(gateway, control) as watched, ThreadPoolExecutor(AT_ONCE) as threads:
            statuses = Counter(threads.map(read, range(AT_ONCE)))
    report = {
        "probes": len(watched.attacked),
        "p50": percentile(watched.attacked, 0.5),
        "p99": percentile(watched.attacked, 0.99),
        "worst": max(watched.attacked),
        "idle p99": percentile(watched.idle, 0.99),
        "idle worst": max(watched.idle),
        "statuses": dict(statuses),
    }
    print(report)
    assert statuses == {200: AT_ONCE}, report
    assert report["p99"] < max(0.25, 20 * report["idle p99"]), report
