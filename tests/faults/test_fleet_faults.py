"""Three gateways that share a store lose one of themselves, their database or their bus, under traffic.

The checker: no call ran twice; one that ended `ok` ran once; one whose answer says that it did not run did not run;
each call has one end; nothing is open afterwards; the journal has no gap and every seal matches.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from farhand.store.history.verify import verify_journal
from farhand.store.postgres.store import PostgresStore
from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment, running_nats, running_postgres
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

ROUNDS = 10 if os.environ.get("FARHAND_SIEGE") == "long" else 1
CALLERS = 6
NODES = 2


class Traffic:
    """Callers that make one call after the other on random gateways, each with an effect of its own."""

    def __init__(self, fleet: list[GatewayProcess], effects: Path) -> None:
        self._fleet = fleet
        self._effects = effects
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # By the name of the effect: what the caller was told.
        self.told: dict[str, str] = {}
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    @property
    def succeeded(self) -> int:
        with self._lock:
            return sum(what == "ok" for what in self.told.values())

    def _call(self, number: int) -> None:
        chance = random.Random(number)
        count = 0
        while not self._stop.is_set():
            count += 1
            name = f"{number}-{count}"
            gateway, node = chance.choice(self._fleet), f"hands{chance.randrange(NODES)}"
            body = {
                "tool": f"{node}__Bash",
                "args": {"command": f"echo {name} >> {self._effects / node}"},
                "timeout_ms": 30_000,
            }
            try:
                answer = gateway.request("POST", "/v1/tools/invoke", body, timeout=60)
                said = answer.json()
                if answer.status != 200:
                    what = "did not run" if "did not run" in str(said) or "not available" in str(said) else "unknown"
                else:
                    message = json.dumps(said.get("error", ""))
                    what = "ok" if said["ok"] else "did not run" if "did not run" in message else "unknown"
            except OSError:
                what = "unknown"
                time.sleep(0.05)
            except ValueError:
                what = "unknown"
            with self._lock:
                self.told[name] = what


def check(traffic: Traffic, effects: Path, fleet: list[GatewayProcess], url: str) -> None:
    happened = Counter(line for path in effects.iterdir() for line in path.read_text().split())
    twice = {name: count for name, count in happened.items() if count > 1}
    assert not twice
    lost = [name for name, what in traffic.told.items() if what == "ok" and happened[name] != 1]
    assert not lost
    ran = [name for name, what in traffic.told.items() if what == "did not run" and happened[name]]
    assert not ran
    # What a caller was not told ended, ends: at the latest with its deadline.
    with psycopg.connect(url) as connection:

        def nothing_open() -> bool:
            row = connection.execute("SELECT count(*) FROM calls WHERE ended_at IS NULL").fetchone()
            connection.rollback()
            return row is not None and row[0] == 0

        wait_until(nothing_open, 100, "the end of every call")
        ends = connection.execute(
            "SELECT subject, count(*) FROM events WHERE kind = 'call.ended' GROUP BY 1 HAVING count(*) > 1"
        ).fetchall()
        assert ends == []
        (first, last, count) = connection.execute("SELECT min(id), max(id), count(*) FROM events").fetchone()  # type: ignore[misc]
        assert count == last - first + 1
        states = dict(connection.execute("SELECT state, count(*) FROM calls GROUP BY 1").fetchall())  # type: ignore[arg-type]
    store = PostgresStore.open(url, (fleet[0].home / "journal.key").read_bytes())
    try:
        report = store.query(lambda tx: verify_journal(tx, store.sealer, None))
    finally:
        store.shut()
    assert report.faults == [], report.faults[:3]
    succeeded = [name for name, what in traffic.told.items() if what == "ok"]
    once = sum(happened[name] == 1 for name in succeeded)
    single = sum(count == 1 for count in happened.values())
    print(
        f"calls of a fleet that ended ok and ran once, {ROUNDS} rounds of faults: {len(succeeded)} tried, {once} held"
    )
    print(f"side effects that were single: {sum(happened.values())} tried, {single} held")
    print(f"{len(traffic.told)} calls: {Counter(traffic.told.values())}; in the store: {states}")


def more(traffic: Traffic, count: int) -> None:
    """Wait until some more calls have succeeded."""
    wanted = traffic.succeeded + count
    wait_until(lambda: traffic.succeeded >= wanted, 90, f"{count} more calls")


@pytest.mark.siege
@pytest.mark.timeout(600 if ROUNDS == 1 else 3600)
def test_no_call_runs_twice_or_is_lost_whatever_the_fleet_loses(tmp_path: Path, bucket: tuple[str, str]) -> None:
    effects = tmp_path / "effects"
    effects.mkdir()
    with running_postgres() as postgres, running_nats() as nats:
        url = postgres.new_database()
        env = fleet_environment(url, nats, bucket, tmp_path.name)
        fleet = [GatewayProcess(tmp_path / f"gateway{n}", env=env) for n in range(3)]
        nodes = [
            NodeProcess(
                fleet[n],
                tmp_path / f"hands{n}",
                f"hands{n}",
                *(word for other in (*fleet[n + 1 :], *fleet[:n]) for word in ("--gateway", other.url)),
            )
            for n in range(NODES)
        ]
        try:
            for gateway in fleet:
                gateway.start()
            for node in nodes:
                node.start()
            for gateway in fleet:
                for node in nodes:
                    gateway.wait_for_node(node.node_id)
            with Traffic(fleet, effects) as traffic:
                for _ in range(ROUNDS):
                    _faults(traffic, fleet, postgres, nats)
            check(traffic, effects, fleet, url)
        finally:
            for node in nodes:
                node.__exit__()
            for gateway in fleet:
                if gateway.process is not None and gateway.process.poll() is None:
                    gateway.stop()


def _faults(traffic: Traffic, fleet: list[GatewayProcess], postgres: PostgresServer, nats: NatsServer) -> None:
    more(traffic, 20)
    fleet[0].kill()  # it holds a node, and calls of its own
    more(traffic, 10)
    fleet[0].start()
    more(traffic, 10)
    frozen = fleet[1].process
    assert frozen is not None
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(13)  # longer than a silent gateway is waited for: others take over
    frozen.send_signal(signal.SIGCONT)
    more(traffic, 20)
    postgres.stop()
    time.sleep(0.5)
    postgres.start()
    more(traffic, 20)
    nats.stop()
    time.sleep(0.5)
    nats.start()
    more(traffic, 20)
    fleet[2].stop()  # as for an upgrade
    more(traffic, 10)
    fleet[2].start()
    more(traffic, 10)
