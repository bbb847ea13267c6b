"""Three gateways that share a store lose each other, their database, their bus and their nodes, under traffic.

The checker: no call ran twice; one that ended `ok` ran once; one whose answer says that it did not run did not run;
each call has one end; nothing is open afterwards; the journal has no gap and every seal matches.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest

from farhand.store.history.verify import verify_journal
from farhand.store.postgres.store import PostgresStore
from tests.support.fleet_servers import fleet_environment, running_nats, running_postgres
from tests.support.harness import GatewayProcess, NodeProcess, Proxy, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
FAULTS = int(os.environ.get("FARHAND_FLEET_FAULTS") or (500 if LONG else 0))
SEED = int(os.environ.get("FARHAND_FLEET_SEED") or 21)
CALLERS = 64 if LONG else 6
NODES = 4 if LONG else 2


class Traffic:
    """Callers that make one call after the other on random gateways, each with an effect of its own."""

    def __init__(self, fleet: list[GatewayProcess], effects: Path, *, balanced: bool = False) -> None:
        """`balanced`: only on gateways that say they are ready; what is refused as not run is tried once more."""
        self._fleet = fleet
        self._balanced = balanced
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
            assert not thread.is_alive(), "a caller got no answer"

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
            what = self._tried(gateway, body, {"Idempotency-Key": f"key-{name}"} if self._balanced else {})
            while self._balanced and what != "ok" and not self._stop.is_set():
                # With the key, a call is made once however often it is asked for.
                time.sleep(0.1)
                what = self._tried(chance.choice(self._fleet), body, {"Idempotency-Key": f"key-{name}"})
            with self._lock:
                self.told[name] = what

    def _tried(self, gateway: GatewayProcess, body: dict[str, object], headers: dict[str, str]) -> str:
        """Make a call, and return what its caller knows then."""
        try:
            if self._balanced and gateway.request("GET", "/readyz", token=None, timeout=5).status != 200:
                return "not asked"
            answer = gateway.request("POST", "/v1/tools/invoke", body, timeout=60, headers=headers)
            said = answer.json()
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
            return "unknown"
        except ValueError:
            return "unknown"
        if answer.status != 200:
            return "did not run" if "did not run" in str(said) or "not available" in str(said) else "unknown"
        message = json.dumps(said.get("error", ""))
        return "ok" if said["ok"] else "did not run" if "did not run" in message else "unknown"


def check(traffic: Traffic, effects: Path, fleet: list[GatewayProcess], url: str, faults: int) -> None:
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
            found = connection.execute(
                "SELECT id, state, node_id, replica, to_timestamp(created_at / 1000), to_timestamp(deadline_at / 1000) "
                "FROM calls WHERE ended_at IS NULL LIMIT 5"
            ).fetchall()
            connection.rollback()
            open_calls[:] = map(str, found)
            return not found

        open_calls: list[str] = []
        try:
            wait_until(nothing_open, 100, "the end of every call")
        except AssertionError:
            raise AssertionError(f"still open: {open_calls}") from None
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
    print(f"calls of a fleet that ended ok and ran once, {faults} faults: {len(succeeded)} tried, {once} held")
    print(f"side effects that were single: {sum(happened.values())} tried, {single} held")
    print(f"{len(traffic.told)} calls: {Counter(traffic.told.values())}; in the store: {states}")


def more(traffic: Traffic, count: int) -> None:
    """Wait until some more calls have succeeded."""
    wanted = traffic.succeeded + count
    wait_until(lambda: traffic.succeeded >= wanted, 180, f"{count} more calls")


class Siege:
    """A fleet with a relay on each of its links, and what can happen to it."""

    def __init__(self, folder: Path, bucket: tuple[str, str], stack: contextlib.ExitStack) -> None:
        self.chance = random.Random(SEED)
        self.done: Counter[str] = Counter()
        self.effects = folder / "effects"
        self.effects.mkdir()
        self.postgres = stack.enter_context(running_postgres())
        self.nats = stack.enter_context(running_nats())
        self.url = self.postgres.new_database()
        self.to_postgres, self.to_nats, self.to_gateway = [], [], []
        self.fleet: list[GatewayProcess] = []
        for number in range(3):
            self.to_postgres.append(stack.enter_context(Proxy(self.postgres.port)))
            self.to_nats.append(stack.enter_context(Proxy(self.nats.port)))
            env = fleet_environment(self.url, self.nats, bucket, folder.name)
            env["FARHAND_STORE_URL"] = self.url.replace(f":{self.postgres.port}/", f":{self.to_postgres[-1].port}/")
            env["FARHAND_BUS_URL"] = f"nats://127.0.0.1:{self.to_nats[-1].port}"
            gateway = GatewayProcess(folder / f"gateway{number}", env=env)
            gateway._command[2] = "tests.support.paused_gateway"
            self.fleet.append(gateway)
            self.to_gateway.append(stack.enter_context(Proxy(gateway.port)))
        self.nodes = []
        for number in range(NODES):
            urls = [f"http://127.0.0.1:{self.to_gateway[(number + other) % 3].port}" for other in range(3)]
            others = [word for url in urls[1:] for word in ("--gateway", url)]
            name = f"hands{number}"
            node = NodeProcess(self.fleet[number % 3], folder / name, name, *others, url=urls[0])
            self.nodes.append(node)
        for gateway in self.fleet:
            stack.callback(self._stopped, gateway)
            gateway.start()
        for node in self.nodes:
            stack.callback(node.__exit__)
            node.start()
        for gateway in self.fleet:
            for node in self.nodes:
                gateway.wait_for_node(node.node_id)

    @staticmethod
    def _stopped(gateway: GatewayProcess) -> None:
        if gateway.process is not None and gateway.process.poll() is None:
            gateway.process.send_signal(signal.SIGCONT)
            gateway.stop()

    # -- faults -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        gateway = self.chance.choice(self.fleet)
        gateway.kill()
        time.sleep(self.chance.uniform(0, 2))
        gateway.start()

    def freeze(self, seconds: float | None = None) -> None:
        process = self.chance.choice(self.fleet).process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds or self.chance.choice((0.5, 1, 2, 4, 8, 13, 30)))
        process.send_signal(signal.SIGCONT)

    def restart_postgres(self) -> None:
        self.postgres.stop("immediate")
        time.sleep(self.chance.uniform(0, 1))
        self.postgres.start()

    def restart_nats(self) -> None:
        self.nats.stop()
        time.sleep(self.chance.uniform(0, 1))
        self.nats.start()

    def restart_gateway(self) -> None:
        """As for an upgrade."""
        gateway = self.chance.choice(self.fleet)
        gateway.stop()
        gateway.start()

    def cut(self, relays: list[Proxy], seconds: float | None = None) -> None:
        """One way, both ways, or with a reset and refused from then on."""
        relay = self.chance.choice(relays)
        how = self.chance.choice(((0,), (1,), (0, 1), None))
        if how is None:
            relay.cut(refuse=True)
        else:
            relay.freeze(*how)
        time.sleep(seconds or self.chance.choice((0.2, 1, 3, 6, 12)))
        relay.admit()
        relay.thaw()

    def pause(self, point: str) -> None:
        path = self.chance.choice(self.fleet).home / f"pause-{point}"
        path.with_suffix(".new").write_text(str(self.chance.choice((0.3, 1, 3, 8))))
        path.with_suffix(".new").rename(path)
        with contextlib.suppress(AssertionError):  # it may be stopped before anybody comes there
            wait_until(lambda: not path.exists(), 15, "the pause")
        path.unlink(missing_ok=True)

    def one_of_each(self) -> list[Callable[[], None]]:
        return [
            self.kill,
            partial(self.freeze, 13),  # longer than a silent gateway is waited for: others take over
            self.restart_postgres,
            self.restart_nats,
            self.restart_gateway,
            *(partial(self.cut, relays, 2) for relays in (self.to_postgres, self.to_nats, self.to_gateway)),
            *(partial(self.pause, point) for point in ("commit", "send", "answer")),
        ]

    def some(self, count: int) -> Iterator[Callable[[], None]]:
        kinds: list[Callable[[], None]] = [
            self.kill,
            self.freeze,
            self.restart_postgres,
            self.restart_nats,
            self.restart_gateway,
            *(partial(self.cut, relays) for relays in (self.to_postgres, self.to_nats)),
            *(partial(self.cut, self.to_gateway) for _ in range(3)),  # nodes move
            *(partial(self.pause, point) for point in ("commit", "send", "answer")),
        ]
        for _ in range(count):
            yield self.chance.choice(kinds)


@pytest.mark.siege
@pytest.mark.timeout(7200 if LONG else 900)
def test_no_call_runs_twice_or_is_lost_whatever_the_fleet_loses(tmp_path: Path, bucket: tuple[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        siege = Siege(tmp_path, bucket, stack)
        faults = 0
        end = time.monotonic() + float(os.environ.get("FARHAND_FLEET_SECONDS") or 1e9)
        with Traffic(siege.fleet, siege.effects) as traffic:
            more(traffic, 20)
            for fault in siege.some(FAULTS) if FAULTS else siege.one_of_each():
                fault()
                faults += 1
                more(traffic, 10)
                if time.monotonic() > end:
                    break
        check(traffic, siege.effects, siege.fleet, siege.url, faults)


@pytest.mark.timeout(600)
def test_a_rolling_restart_under_traffic_loses_and_repeats_nothing(tmp_path: Path, bucket: tuple[str, str]) -> None:
    """Callers go to a gateway that is ready, as a load balancer would send them."""
    with contextlib.ExitStack() as stack:
        siege = Siege(tmp_path, bucket, stack)
        with Traffic(siege.fleet, siege.effects, balanced=True) as traffic:
            more(traffic, 10)
            for gateway in siege.fleet:
                gateway.stop()
                gateway.start()
                more(traffic, 10)
        check(traffic, siege.effects, siege.fleet, siege.url, 0)
        # The last call of each caller may have been interrupted by the end of the test.
        said = Counter(traffic.told.values())
        assert said["unknown"] == 0 and said.total() - said["ok"] <= CALLERS, said
