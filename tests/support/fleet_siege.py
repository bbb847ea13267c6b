"""A fleet of three gateways under traffic, what can happen to it, and the check of everything it promises.

The traffic: calls of nodes (plain ones, ones that are tried again with an idempotency key, ones that wait for their
node and are cancelled), jobs of the schedule, and messages to people. `violations` returns what must not be.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from farhand.store.history.verify import verify_journal
from farhand.store.postgres.store import PostgresStore
from tests.support.channel_servers import SignalServer
from tests.support.fleet_servers import fleet_environment, running_nats, running_postgres
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, NodeProcess, PluginProcess, Proxy

SETTINGS = """
[schedule]
max_jobs = 100000
report_failures = false
max_concurrent = 50

[channels.signal]
number = "{number}"
url = "{url}"
"""

# Which connection was the node's when a call was recorded, and the order of the node's connections.
TRACE = """
CREATE TABLE siege_links (node TEXT, gen BIGINT, socket TEXT);
CREATE FUNCTION siege_link() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO siege_links VALUES (NEW.node, NEW.gen, NEW.socket); RETURN NEW; END';
CREATE TRIGGER siege_link AFTER INSERT OR UPDATE OF gen ON links FOR EACH ROW EXECUTE FUNCTION siege_link();
CREATE TABLE siege_calls (call TEXT, gen BIGINT);
CREATE FUNCTION siege_call() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO siege_calls SELECT NEW.id, gen FROM links WHERE node = NEW.node_id; RETURN NEW; END';
CREATE TRIGGER siege_begun AFTER INSERT ON calls FOR EACH ROW WHEN (NEW.state = $$running$$)
    EXECUTE FUNCTION siege_call();
CREATE TRIGGER siege_started AFTER UPDATE ON calls FOR EACH ROW
    WHEN (OLD.state = $$waiting$$ AND NEW.state = $$running$$) EXECUTE FUNCTION siege_call();
"""

NOT_RUN = "did not run"
LOST = (OSError, http.client.HTTPException, ValueError)


class ActingNode(PluginProcess):
    """`siege_node.py`, connected through the relays of the gateways."""

    def __init__(self, folder: Path, name: str, urls: list[str], effects: Path, mutant: str) -> None:
        env = {
            "NODE_ID": name,
            "GATEWAYS": " ".join(urls),
            "STATE": str(folder),
            "EFFECTS": str(effects / name),
            "SA_NODE_TOKEN": SHARED_TOKEN,
            "SIEGE_MUTANT": mutant,
        }
        self.node_id = name
        super().__init__(ROOT / "tests" / "support" / "siege_node.py", folder, env)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


class Siege:
    """A fleet with a relay on each of its links, and what can happen to it. `done` counts the faults by kind."""

    def __init__(
        self,
        folder: Path,
        bucket: tuple[str, str],
        stack: contextlib.ExitStack,
        *,
        nodes: int,
        seed: int,
        mutant: str = "",
    ) -> None:
        """`nodes`: the number of acting nodes; there is one more with a shell."""
        self.seed = seed
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._log = folder / "faults.log"
        self.effects = folder / "effects"
        self.effects.mkdir()
        self.postgres = stack.enter_context(running_postgres())
        self.nats = stack.enter_context(running_nats())
        self.signal: SignalServer = stack.enter_context(SignalServer())
        self.url = self.postgres.new_database()
        self.to_postgres, self.to_nats, self.to_gateway = [], [], []
        self.fleet: list[GatewayProcess] = []
        # A gateway has one fault of its own at a time.
        self.busy = [threading.Lock() for _ in range(3)]
        # Takes two gateways, which two at once could wait for forever.
        self._moving = threading.Lock()
        self._server_busy = {"postgres": threading.Lock(), "nats": threading.Lock()}
        settings = SETTINGS.format(number=SignalServer.NUMBER, url=self.signal.url)
        for number in range(3):
            self.to_postgres.append(stack.enter_context(Proxy(self.postgres.port)))
            self.to_nats.append(stack.enter_context(Proxy(self.nats.port)))
            env = fleet_environment(self.url, self.nats, bucket, folder.name)
            env["FARHAND_STORE_URL"] = self.url.replace(f":{self.postgres.port}/", f":{self.to_postgres[-1].port}/")
            env["FARHAND_BUS_URL"] = f"nats://127.0.0.1:{self.to_nats[-1].port}"
            env["SIEGE_MUTANT"] = mutant
            home = folder / f"gateway{number}"
            home.mkdir(mode=0o700)
            (home / "farhand.toml").write_text(settings)
            gateway = GatewayProcess(home, env=env)
            gateway._command[2] = "tests.support.siege_gateway"
            self.fleet.append(gateway)
            self.to_gateway.append(stack.enter_context(Proxy(gateway.port)))
        with psycopg.connect(self.url) as connection:
            connection.execute("CREATE TABLE siege_late_writes (replica TEXT)")
        for gateway in self.fleet:
            stack.callback(self._stopped, gateway)
            gateway.start()
        with psycopg.connect(self.url) as connection:
            connection.execute(TRACE)  # type: ignore[arg-type,unused-ignore]
        self.nodes: list[ActingNode | NodeProcess] = []
        self._node_busy = [threading.Lock() for _ in range(nodes + 1)]
        for number in range(nodes + 1):
            name = f"hands{number}"
            ports = [self.to_gateway[(number + other) % 3].port for other in range(3)]
            if number < nodes:
                sockets = [f"ws://127.0.0.1:{port}/v1/nodes/ws" for port in ports]
                acting = ActingNode(folder / name, name, sockets, self.effects, mutant)
                stack.callback(acting.stop)
                acting.start()
                self.nodes.append(acting)
            else:
                urls = [f"http://127.0.0.1:{port}" for port in ports]
                others = [word for url in urls[1:] for word in ("--gateway", url)]
                shell = NodeProcess(self.fleet[number % 3], folder / name, name, *others, url=urls[0])
                stack.callback(shell.__exit__)
                shell.start()
                self.nodes.append(shell)
        for gateway in self.fleet:
            for node in self.nodes:
                gateway.wait_for_node(node.node_id)

    @staticmethod
    def _stopped(gateway: GatewayProcess) -> None:
        if gateway.process is not None and gateway.process.poll() is None:
            gateway.process.send_signal(signal.SIGCONT)
            gateway.stop()

    def call_of(self, node: str, name: str, seconds: float) -> tuple[str, dict[str, Any]]:
        """Return the tool and the arguments of a call that leaves the line `name` behind."""
        if node == self.nodes[-1].node_id:
            command = f"echo {name} - >> {self.effects / node}"
            return f"{node}__Bash", {"command": f"{command}; sleep {seconds:.2f}" if seconds else command}
        return f"{node}.act", {"name": name, "seconds": seconds}

    # -- faults -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _gateway(self, chance: random.Random) -> Iterator[int]:
        """Choose a gateway that has no fault of its own at present."""
        while True:
            for number in chance.sample(range(3), 3):
                if self.busy[number].acquire(blocking=False):
                    try:
                        yield number
                    finally:
                        self.busy[number].release()
                    return
            time.sleep(0.05)

    def kill(self, chance: random.Random) -> None:
        with self._gateway(chance) as number:
            gateway = self.fleet[number]
            gateway.kill()
            time.sleep(chance.uniform(0, 2))
            start_again(gateway)

    def lose(self, chance: random.Random) -> None:
        """Kill a gateway for so long that others take over its work."""
        with self._gateway(chance) as number:
            self.fleet[number].kill()
            time.sleep(13)
            start_again(self.fleet[number])

    def freeze(self, chance: random.Random, seconds: float | None = None) -> None:
        with self._gateway(chance) as number:
            process = self.fleet[number].process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            # Longer than a silent gateway is waited for, others take over.
            time.sleep(seconds or chance.choice((0.5, 1, 1, 2, 2, 4, 4, 8, 8, 13, 13, 30)))
            process.send_signal(signal.SIGCONT)

    def restart_gateway(self, chance: random.Random) -> None:
        """As for an upgrade."""
        with self._gateway(chance) as number:
            self.fleet[number].stop()
            start_again(self.fleet[number])

    def restart_postgres(self, chance: random.Random) -> None:
        with self._server_busy["postgres"]:
            self.postgres.stop("immediate")
            time.sleep(chance.uniform(0, 1))
            self.postgres.start()

    def restart_nats(self, chance: random.Random) -> None:
        with self._server_busy["nats"]:
            self.nats.stop()
            time.sleep(chance.uniform(0, 1))
            self.nats.start()

    def kill_node(self, chance: random.Random) -> None:
        number = chance.randrange(len(self.nodes))
        node = self.nodes[number]
        with self._node_busy[number]:
            node.kill()
            time.sleep(chance.uniform(0, 1))
            node.start(wait=False) if isinstance(node, NodeProcess) else node.start()

    def cut(self, chance: random.Random, relays: list[Proxy], seconds: float | None = None) -> None:
        """One way, both ways, or with a reset and refused from then on."""
        with self._gateway(chance) as number:
            relay = relays[number]
            how = chance.choice(((0,), (1,), (0, 1), None))
            if how is None:
                relay.cut(refuse=True)
            else:
                relay.freeze(*how)
            time.sleep(seconds or chance.choice((0.2, 0.5, 1, 1, 3, 3, 6, 12)))
            relay.admit()
            relay.thaw()

    def move(self, chance: random.Random) -> None:
        """Nodes connect to other gateways while one gateway cannot hear of it, and has calls for them."""
        with self._moving, self._gateway(chance) as deaf, self._gateway(chance) as left:
            self.to_postgres[deaf].freeze()
            self.to_gateway[left].cut(refuse=True)
            time.sleep(chance.uniform(1, 2.5))
            self.to_gateway[left].admit()
            self.to_postgres[deaf].thaw()

    def ask(self, chance: random.Random, what: str, seconds: float | None = None) -> None:
        """Put a fault into a gateway, and wait a while until it comes there."""
        with self._gateway(chance) as number:
            path = self.fleet[number].home / what
            longest = (13,) if what in ("pause-send", "pause-answer") else ()
            beside = path.with_suffix(f".{threading.get_ident()}")
            beside.write_text(str(seconds or chance.choice((0.3, 1, 3, 8, *longest))))
            beside.rename(path)
            end = time.monotonic() + 5
            while path.exists() and time.monotonic() < end:
                time.sleep(0.02)
            path.unlink(missing_ok=True)

    def kinds(self) -> dict[str, Callable[[random.Random], None]]:
        return {
            "a gateway killed": self.kill,
            "a gateway killed for 13 s": self.lose,
            "a gateway frozen": self.freeze,
            "PostgreSQL crashed": self.restart_postgres,
            "NATS crashed": self.restart_nats,
            "a gateway restarted": self.restart_gateway,
            "a node killed": self.kill_node,
            "PostgreSQL cut off": partial(self.cut, relays=self.to_postgres),
            "NATS cut off": partial(self.cut, relays=self.to_nats),
            "nodes cut off": partial(self.cut, relays=self.to_gateway),
            "nodes moved unheard": self.move,
            "a pause before the commit": partial(self.ask, what="pause-commit"),
            "a pause before the frame": partial(self.ask, what="pause-send"),
            "a pause before the end": partial(self.ask, what="pause-answer"),
            "a pause before a waiting call starts": partial(self.ask, what="pause-start"),
            "ends written again": partial(self.ask, what="repeat-end"),
        }

    def suffer(
        self,
        faults: list[tuple[str, Callable[[random.Random], None]]],
        at_once: int,
        settled: Callable[[], object],
        enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Let all faults happen, several at once, until `enough`; return how many did. `settled` waits after each."""
        waiting = iter(faults)
        failures: list[BaseException] = []

        def lane(number: int) -> None:
            chance = random.Random(self.seed * 1000 + number)
            while not failures and not enough():
                with self._lock:
                    found = next(waiting, None)
                if found is None:
                    return
                name, fault = found
                try:
                    fault(chance)
                    with self._lock:
                        self.done[name] += 1
                        with self._log.open("a") as log:
                            log.write(f"{time.strftime('%T')} {self.done.total()} {name}\n")
                    settled()
                except BaseException as error:
                    failures.append(error)

        lanes = [threading.Thread(target=lane, args=(number,)) for number in range(at_once)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        if failures:
            raise failures[0]
        return self.done.total()


def start_again(gateway: GatewayProcess) -> None:
    """Start a gateway as a service manager does: a start that fails, since a server is away, is tried again."""
    for last in [False] * 20 + [True]:
        try:
            gateway.start()
            return
        except AssertionError:
            if last:
                raise
            time.sleep(1)


# -- traffic ------------------------------------------------------------------------------------------------


class Traffic:
    """Callers, each making one call after the other on random gateways; jobs; and messages. Use as a context manager.

    `reported` is the answer to each caller: `ok`, `did not run` or `unknown`, by the line that the call leaves.
    """

    def __init__(
        self,
        siege: Siege,
        *,
        callers: int,
        schedulers: int = 0,
        senders: int = 0,
        rest: float = 0.0,
        balanced: bool = False,
        waiting: float = 0.1,
        slow: float = 0.2,
    ) -> None:
        """`rest`: the longest time between two calls of a caller. `balanced`: only gateways that say they are ready,
        and what fails is tried again with its key. `waiting`: how many of the calls wait for their node.
        `slow`: how long a third of the calls take."""
        self._siege = siege
        self._fleet = siege.fleet
        self._balanced = balanced
        self._rest = rest
        self._waiting = waiting
        self._slow = slow
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.reported: dict[str, str] = {}
        # Ids of the calls whose end was reported to callers.
        self.ids: dict[str, str] = {}
        self.slots = 0
        self.messages = 0
        works = [self._caller] * callers + [self._scheduler] * schedulers + [self._sender] * senders
        self._threads = [threading.Thread(target=self._work, args=(work, number)) for number, work in enumerate(works)]
        self._failures: list[BaseException] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a caller got no answer"
        if self._failures:
            raise self._failures[0]

    def _work(self, work: Callable[[int, random.Random], None], number: int) -> None:
        try:
            work(number, random.Random(self._siege.seed * 1000 + number))
        except BaseException as error:
            self._failures.append(error)

    @property
    def succeeded(self) -> int:
        with self._lock:
            return sum(what == "ok" for what in self.reported.values())

    def more(self, count: int, seconds: float = 180) -> bool:
        """Wait until some more calls have succeeded; return whether they did in time."""
        wanted = self.succeeded + count
        end = time.monotonic() + seconds
        while self.succeeded < wanted and not self._failures:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def go_on(self) -> None:
        """Fail unless calls succeed again."""
        assert self.more(3), "no call succeeds any more"

    # -- calls ------------------------------------------------------------------------------------------

    def _caller(self, number: int, chance: random.Random) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            name = f"c{number}-{count}"
            node = chance.choice(self._siege.nodes).node_id
            tool, args = self._siege.call_of(node, name, chance.choice((0, 0, self._slow)))
            body = {"tool": tool, "args": args, "timeout_ms": 12_000}
            kind = chance.random()
            if self._balanced or kind < 0.2:
                what = self._with_key(chance, name, body)
            elif kind > 1 - self._waiting:
                what = self._waits(chance, name, body)
            else:
                what = self._tried(chance.choice(self._fleet), name, body, {})
            with self._lock:
                self.reported[name] = what
            if self._rest:
                self._stop.wait(chance.uniform(0, self._rest))

    def _with_key(self, chance: random.Random, name: str, body: dict[str, Any]) -> str:
        """Ask for a call until there is an answer: with the key, it is made once however often it is asked for."""
        answered = True
        while True:
            what = self._tried(chance.choice(self._fleet), name, body, {"Idempotency-Key": f"key-{name}"})
            if what == "ok" if self._balanced else name in self.ids:
                return what
            # An attempt without an answer may have begun the call, whatever a later one is told.
            answered = answered and what != "no answer"
            if self._stop.is_set():
                return what if answered else "unknown"
            time.sleep(0.1)

    def _waits(self, chance: random.Random, name: str, body: dict[str, Any]) -> str:
        """Make a call that waits if its node is away, and cancel some of those."""
        answer = self._request(
            chance.choice(self._fleet), "POST", "/v1/tools/invoke", {**body, "when_online": True, "before": "in 20 s"}
        )
        if answer is None or answer.get("state") != "waiting":
            return self._read(name, answer)
        time.sleep(chance.uniform(0, 2))
        if chance.random() < 0.3:
            return "unknown"
        ended = self._request(chance.choice(self._fleet), "DELETE", f"/v1/calls/{answer['request_id']}")
        # A gateway that could not cancel the call says nothing about whether it ran.
        return "unknown" if ended is None or "state" not in ended else self._read(name, ended)

    def _tried(self, gateway: GatewayProcess, name: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        """Make a call, and return what its caller knows then."""
        if self._balanced:
            with contextlib.suppress(*LOST):
                if gateway.request("GET", "/readyz", token=None, timeout=5).status != 200:
                    return "no answer"
        return self._read(name, self._request(gateway, "POST", "/v1/tools/invoke", body, headers))

    def _read(self, name: str, said: dict[str, Any] | None) -> str:
        """Return what an answer tells of a call."""
        if said is None:
            return "no answer"
        if said.get("state") not in ("ok", "error", "timeout", "cancelled", "denied", "unknown"):
            # An error of the gateway: there is no call.
            return NOT_RUN if NOT_RUN in str(said) or "not available" in str(said) else "no answer"
        self.ids[name] = said["request_id"]
        return "ok" if said["state"] == "ok" else NOT_RUN if NOT_RUN in str(said.get("error")) else "unknown"

    def _request(
        self, gateway: GatewayProcess, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        """Return the answer, None if there is none."""
        try:
            return gateway.request(method, path, body, timeout=60, headers=headers).json()
        except LOST:
            self._stop.wait(0.05)
            return None

    # -- jobs and messages ------------------------------------------------------------------------------

    def _scheduler(self, number: int, chance: random.Random) -> None:
        """Add jobs that run once, and one that runs every second."""
        acting = self._siege.nodes[:-1]
        count = 0
        while not self._stop.is_set():
            count += 1
            name = f"s{number}-{count}"
            node = chance.choice(acting).node_id
            tool, args = self._siege.call_of(node, name, chance.choice((0, 0.2)))
            now = time.time_ns() // 1_000_000
            schedule = {"kind": "at", "atMs": now + chance.randrange(300, 2000)}
            if count == 1:
                schedule = {"kind": "every", "everyMs": 1000}
            job = {
                "name": name,
                "schedule": schedule,
                "spec": {"mode": "call", "tool": tool, "args": args, "timeoutSeconds": 12},
                "missed": "all" if count == 1 else chance.choice(("once", "all")),
                "deleteAfterRun": count != 1,
            }
            answer = self._request(chance.choice(self._fleet), "POST", "/v1/cron", job)
            if count == 1 and not (answer and "job" in answer):
                count = 0  # once more: there has to be one
            self.slots += 1
            self._stop.wait(chance.uniform(0.2, 1))

    def _sender(self, number: int, chance: random.Random) -> None:
        """Write one message after the other to the same person."""
        count = 0
        while not self._stop.is_set():
            count += 1
            args = {"text": f"m{number}-{count}", "channel": "signal", "to": f"+1555{number:07d}"}
            body = {"tool": "gsv__Message", "args": args, "timeout_ms": 12_000}
            self._request(chance.choice(self._fleet), "POST", "/v1/tools/invoke", body)
            self.messages += 1
            self._stop.wait(chance.uniform(0, 0.5))


# -- the check ----------------------------------------------------------------------------------------------


class Checker:
    """Compares what happened with what was reported and recorded. Make it after the traffic has ended.

    `violations` are what must not be, `counts` what was checked.
    """

    def __init__(self, siege: Siege, traffic: Traffic, *, quiet: float = 100) -> None:
        """Wait up to `quiet` seconds for the end of everything that is open."""
        self._siege = siege
        self._reported, self._ids = traffic.reported, traffic.ids
        self.violations: list[str] = []
        self.counts: list[str] = []
        with psycopg.connect(siege.url, autocommit=True) as connection:
            self._connection = connection
            self._check_quiet(quiet)
            lines = [line.split() for path in siege.effects.iterdir() for line in path.read_text().splitlines()]
            # How often each line was left behind, and how often by which call (the shell does not tell).
            self._happened = Counter(name for name, _ in lines)
            self._of_call = Counter(call for _, call in lines if call != "-")
            self._check_told()
            self._check_recorded()
            self._check_ends()
            self._check_frames()
            self._check_writers()
            self._check_slots()
            self._check_messages()
            self._check_journal()

    def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement).fetchall()  # type: ignore[arg-type,unused-ignore]

    def _wrong(self, what: str, found: Collection[Any]) -> None:
        """Note a violation, if something was found."""
        if found:
            self.violations.append(f"{what} ({len(found)}): {list(found)[:5]}")

    def _count(self, what: str, tried: int, wrong: int = 0) -> None:
        self.counts.append(f"{what}: {tried} tried, {tried - wrong} held")

    def _check_quiet(self, seconds: float) -> None:
        """What is open ends, at the latest with its deadline."""
        self._connection.execute("UPDATE cron_jobs SET enabled = 0, next_at = NULL")
        open_work = """
            SELECT 'call', id, state, replica, node_id FROM calls WHERE ended_at IS NULL
            UNION ALL SELECT 'message', id, state, holder, peer FROM outbox WHERE ended_at IS NULL
            UNION ALL SELECT 'slot', name, status, holder, job FROM cron_slots WHERE status IN ('waiting', 'running')"""
        end = time.monotonic() + seconds
        while (left := self._rows(open_work)) and time.monotonic() < end:
            time.sleep(0.1)
        self._wrong("still open", left)

    def _check_told(self) -> None:
        reported, happened = self._reported, self._happened
        twice = [name for name, count in happened.items() if count > 1 and name in reported]
        self._wrong("ran more than once", twice)
        succeeded = [name for name, what in reported.items() if what == "ok"]
        not_once = [name for name in succeeded if happened[name] != 1]
        self._wrong("reported ok, and did not run once", not_once)
        ran = [name for name, what in reported.items() if what == NOT_RUN and happened[name]]
        self._wrong("reported not to have run, and ran", ran)
        self._count("calls that ended ok and ran once", len(succeeded), len(not_once))
        effects = [name for name in happened if name in reported]
        self._count("side effects that were single", len(effects), len(twice))
        self.counts.append(f"{len(reported)} calls: {dict(Counter(reported.values()))}")

    def _check_recorded(self) -> None:
        """What the record says of each call is what happened, and what was reported to its caller."""
        found = self._rows("SELECT id, tool, state, args, error_message FROM calls")
        states: dict[str, str] = {}
        not_run: set[str] = set()
        by_shell: dict[str, list[str]] = defaultdict(list)
        for call, tool, state, args, error in found:
            states[call] = state
            if state == "denied" or NOT_RUN in (error or ""):
                not_run.add(call)
            if tool.endswith("__Bash"):
                by_shell[json.loads(bytes(args))["command"].split()[1]].append(call)
        acting = [call for call, tool, *_ in found if tool.endswith(".act")]
        times = {call: self._of_call[call] for call in acting}
        self._wrong("a call that ran more than once", [call for call, count in times.items() if count > 1])
        self._wrong("a call without a record", self._of_call.keys() - states.keys())
        not_once = [call for call, count in times.items() if states[call] == "ok" and count != 1]
        ran = [call for call, count in times.items() if call in not_run and count]
        for name, calls in by_shell.items():
            if any(states[call] == "ok" for call in calls):
                not_once += [name] if self._happened[name] != 1 else []
            elif not_run.issuperset(calls):
                ran += [name] if self._happened[name] else []
        self._wrong("recorded as ok, and did not run once", not_once)
        self._wrong("recorded as not run, and ran", ran)
        other = [
            (name, call, self._reported[name], states[call])
            for name, call in self._ids.items()
            if call in states
            and (
                self._reported[name] == "ok" != states[call]
                or (self._reported[name] == NOT_RUN and states[call] == "ok")
            )
        ]
        self._wrong("reported otherwise than recorded", other)
        self.counts.append(f"calls in the store: {dict(Counter(states[call] for call in states))}")

    def _check_ends(self) -> None:
        twice = self._rows("SELECT subject FROM events WHERE kind = 'call.ended' GROUP BY 1 HAVING count(*) > 1")
        self._wrong("a call with two ends", twice)
        no_end = self._rows("SELECT id FROM calls WHERE ended_at IS NOT NULL AND state IN ('waiting', 'running')")
        self._wrong("a call that ended, and runs or waits", no_end)
        ((ended,),) = self._rows("SELECT count(*) FROM calls WHERE ended_at IS NOT NULL")
        self._count("calls with one end", ended, len(twice) + len(no_end))

    def _check_frames(self) -> None:
        """No frame leaves for a connection that its node had left when the call was recorded."""
        order = dict(self._rows("SELECT socket, gen FROM siege_links"))
        recorded = dict(self._rows("SELECT call, max(gen) FROM siege_calls GROUP BY 1"))
        late: list[str] = []
        frames = 0
        for gateway in self._siege.fleet:
            for line in (gateway.home / "frames").read_text().splitlines():
                call, socket = line.split()
                frames += 1
                if socket in order and call in recorded and order[socket] < recorded[call]:
                    late.append(call)
        self._wrong("a frame for a connection that its node had left before", late)
        self._count("frames for a connection of the node", frames, len(late))

    def _check_writers(self) -> None:
        """A gateway whose work others have taken over writes nothing until it has restarted."""
        late = self._rows("SELECT replica FROM siege_late_writes")
        self._wrong("a gateway wrote after others had taken over its work", late)
        ((taken,),) = self._rows("SELECT count(*) FROM events WHERE kind = 'replica.lost'")
        self._count("gateways whose work was taken over, and that wrote nothing more", taken, len(set(late)))

    def _check_slots(self) -> None:
        """A slot runs at most once; one that is `ok` did, one that was missed did not."""
        slot_of = {
            call: tuple(key.split(":")[1:3])
            for call, key in self._rows("SELECT id, idempotency_key FROM calls WHERE idempotency_key LIKE 'cron:%'")
        }
        times: Counter[tuple[str, ...]] = Counter()
        for call, count in self._of_call.items():
            if call in slot_of:
                times[slot_of[call]] += count
        rows = {
            (job, str(slot)): status for job, slot, status in self._rows("SELECT job, slot, status FROM cron_slots")
        }
        twice = {slot: count for slot, count in times.items() if count > 1}
        once_only = {name: n for name, n in self._happened.items() if name[0] == "s" and name[-2:] != "-1" and n > 1}
        self._wrong("a slot that ran more than once", {**twice, **once_only})
        self._wrong("a slot that ran without a record", times.keys() - rows.keys())
        self._wrong(
            "a slot that is ok and did not run", [s for s, how in rows.items() if how == "ok" and times[s] != 1]
        )
        missed = [slot for slot, how in rows.items() if how in ("missed", "skipped") and times[slot]]
        self._wrong("a slot that was missed and ran", missed)
        self._count("slots that ran at most once", len(rows), len(twice))
        self.counts.append(f"slots: {dict(Counter(rows.values()))}")

    def _check_messages(self) -> None:
        """A message is delivered at most once and in order; one that ended as unknown may come at any time."""
        unknown = {subject for (subject,) in self._rows("SELECT subject FROM events WHERE kind = 'message.unknown'")}
        messages = {
            (peer, json.loads(bytes(parts))[0]): (seq, state, name)
            for seq, name, peer, parts, state in self._rows("SELECT seq, id, peer, parts, state FROM outbox")
        }
        said = [(one.to, one.text) for one in self._siege.signal.said]
        times = Counter(said)
        twice = [one for one, count in times.items() if count > 1]
        self._wrong("a message that was delivered more than once", twice)
        self._wrong("a message without a record", times.keys() - messages.keys())
        sent = [one for one, (_, state, _) in messages.items() if state == "sent" and times[one] != 1]
        self._wrong("a message that is sent and was not delivered once", sent)
        failed = [one for one, (_, state, _) in messages.items() if state == "failed" and times[one]]
        self._wrong("a message that failed and was delivered", failed)
        last: dict[str, int] = {}
        behind: list[tuple[str, str]] = []
        for one in said:
            seq, _, name = messages.get(one, (0, "", ""))
            if seq and name not in unknown:
                if seq < last.get(one[0], 0):
                    behind.append(one)
                last[one[0]] = seq
        self._wrong("a message that was delivered after a later one", behind)
        self._count("messages delivered at most once and in order", len(messages), len(twice) + len(behind))
        self.counts.append(f"messages: {dict(Counter(state for _, state, _ in messages.values()))}")

    def _check_journal(self) -> None:
        ((first, last, count),) = self._rows("SELECT min(id), max(id), count(*) FROM events")
        if count != last - first + 1:
            self.violations.append(f"the journal has a gap: {count} events from {first} to {last}")
        store = PostgresStore.open(self._siege.url, (self._siege.fleet[0].home / "journal.key").read_bytes())
        try:
            report = store.query(lambda tx: verify_journal(tx, store.sealer, None))
        finally:
            store.shut()
        self._wrong("the journal does not verify", [str(fault) for fault in report.faults])
        self._count("events without a gap and with their seal", count, len(report.faults))
