"""How many calls a second Farhand's store has on disk, beside bare SQLite with group commit.

    .venv/bin/python -m benchmarks.durable [--seconds N] [--rounds N] [--json]

64 callers make one call after another: its start is on disk before its end is stored, both with their rows in the
sealed journal. Bare SQLite does the least for the same promise: one row for each of the 64 and one commit with
synchronous=FULL, again and again. Both run in this process, without sockets, in turns.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import apsw
import uvloop

from farhand.gateway.calls.open_call import ended, new_call_id
from farhand.gateway.calls.recorder import CallEnd, Recorder, store_ends
from farhand.protocol.calls import ToolResult
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.calls import CallRecord, CallState

CALLERS = 64
GOAL = 0.5
ARGS = b'{"text":"The quick brown fox jumps over the lazy dog and comes back again"}'


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.durable", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measured run (2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    ours, bare = [], []
    with tempfile.TemporaryDirectory(prefix="farhand-bench-", dir="/var/tmp") as name:
        for number in range(arguments.rounds):
            ours.append(uvloop.run(farhand(Path(name) / f"farhand-{number}", arguments.seconds)))
            bare.append(sqlite(Path(name) / f"bare-{number}.db", arguments.seconds))
    ratio = median(one / other for one, other in zip(ours, bare, strict=True))
    report = {"farhand": median(ours), "sqlite": median(bare), "ratio": ratio, "met": ratio >= GOAL}
    if arguments.json:
        print(json.dumps(report))
    else:
        verdict = "met" if report["met"] else "MISSED"
        print(f"durable calls/s: Farhand's store {report['farhand']:,.0f}, bare SQLite {report['sqlite']:,.0f}")
        print(f"ratio {ratio:.2f}, wanted >= {GOAL}: {verdict}")
    return 0


async def farhand(home: Path, seconds: float) -> float:
    home.mkdir()
    store = SqliteStore.open(home / "farhand.db")
    recorder = Recorder(store, lambda _: None)
    done = 0
    began = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            record = CallRecord(
                id=new_call_id(), tool="bench.echo", args=ARGS, credential="owner", route="node", node_id="bench",
                capability="bench", node_boot="b", created_at=time.time_ns() // 1_000_000, deadline_at=1,
            )  # fmt: skip
            await recorder.begin(record)
            last = ended(record, CallState.OK, ToolResult(ok=True, result=ARGS), record.created_at, 1.0)
            await store.write(partial(store_ends, ends=[CallEnd(last, "running")]), durable=False)
            done += 1

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    rate = done / (time.perf_counter() - began)
    await store.close()
    return rate


def sqlite(path: Path, seconds: float) -> float:
    store = apsw.Connection(str(path))
    store.pragma("journal_mode", "wal")
    store.pragma("synchronous", "full")
    store.execute("CREATE TABLE calls (id TEXT PRIMARY KEY, tool TEXT, args BLOB, created_at INTEGER)")
    done = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        store.execute("BEGIN IMMEDIATE")
        for _ in range(CALLERS):
            row = (new_call_id(), "bench.echo", ARGS, time.time_ns() // 1_000_000)
            store.execute("INSERT INTO calls VALUES (?, ?, ?, ?)", row)
        store.execute("COMMIT")
        done += CALLERS
    rate = done / (time.perf_counter() - began)
    store.close()
    return rate


if __name__ == "__main__":
    sys.exit(main())
