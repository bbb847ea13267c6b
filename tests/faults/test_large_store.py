"""A very large store: the gateway starts quickly after a kill, and finds what is in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import apsw
import pytest

from tests.support.harness import GatewayProcess

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(600)]
MIB = 1024 * 1024
SIZE = 1024 * MIB if LONG else 32 * MIB
ROW = 4096
FILL = """
    WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
    INSERT INTO calls (id, tool, args, credential, route, background, state, created_at, deadline_at, ended_at, result)
    SELECT printf('old-%08d', n), 'laptop__Read', CAST('{"path":"x"}' AS BLOB), 'owner', 'node', 0, 'ok', n, n, n,
           CAST('"' || hex(randomblob(?)) || '"' AS BLOB) FROM numbers"""
STARTS = 5 if LONG else 2


def test_p11_it_starts_quickly_with_a_store_of_any_size(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start()
    gateway.stop()
    path = gateway.home / "farhand.db"
    with apsw.Connection(str(path)) as store:
        store.execute(FILL, (SIZE // ROW, ROW // 2 - 64))
    store.close()
    assert path.stat().st_size > SIZE * 0.9
    took, held = [], 0
    try:
        for _ in range(STARTS):
            began = time.perf_counter()
            gateway.start()
            took.append(time.perf_counter() - began)
            found = gateway.request("GET", f"/v1/calls/old-{SIZE // ROW:08d}")
            held += found.status == 200 and len(found.body) > ROW - 512
            gateway.kill()
    finally:
        gateway.kill()
    seconds = ", ".join(f"{one:.1f}" for one in took)
    print(f"starts after a kill on a store of {path.stat().st_size // MIB} MiB: {STARTS} tried, {held} held")
    print(f"seconds until it served: {seconds}")
    assert held == STARTS
