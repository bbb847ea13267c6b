"""Three gateways that share a store lose each other, their database, their bus and their nodes, under traffic.

The checker (`tests/support/fleet_siege.py`): no call ran twice; one that ended `ok` ran once; one that is said not to
have run did not; each call has one end; a slot of the schedule runs at most once; a message to a person is delivered
at most once and in order; nothing is open afterwards; the journal has no gap and every seal matches. The same run with
one guard taken out shows that the checker would notice.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.fleet_siege import Checker, Siege, Traffic

LONG = os.environ.get("FARHAND_SIEGE") == "long"
FAULTS = int(os.environ.get("FARHAND_FLEET_FAULTS") or (500 if LONG else 0))
SEED = int(os.environ.get("FARHAND_FLEET_SEED") or 21)
CALLERS = 64 if LONG else 6
NODES = 3 if LONG else 1
AT_ONCE = 4 if LONG else 3

Fault = tuple[str, Callable[[random.Random], None]]


def chosen(siege: Siege, count: int) -> list[Fault]:
    """Return faults by chance: nodes move more often than anything else happens."""
    chance = random.Random(SEED)
    kinds = siege.kinds()
    weights = [3 if name == "nodes cut off" else 1 for name in kinds]
    return chance.choices(list(kinds.items()), weights, k=count)


def one_of_each(siege: Siege) -> list[Fault]:
    short: dict[str, Callable[[random.Random], None]] = {
        "a gateway frozen": partial(siege.freeze, seconds=13),  # others take over
        "PostgreSQL cut off": partial(siege.cut, relays=siege.to_postgres, seconds=2),
        "NATS cut off": partial(siege.cut, relays=siege.to_nats, seconds=2),
        "nodes cut off": partial(siege.cut, relays=siege.to_gateway, seconds=2),
    }
    faults = list({**siege.kinds(), **short}.items())
    random.Random(SEED).shuffle(faults)
    return faults


@pytest.mark.siege
@pytest.mark.timeout(7200 if LONG else 900)
def test_a_fleet_runs_nothing_twice_and_loses_nothing(tmp_path: Path, bucket: tuple[str, str]) -> None:
    end = time.monotonic() + float(os.environ.get("FARHAND_FLEET_SECONDS") or 1e9)
    with contextlib.ExitStack() as stack:
        siege = Siege(tmp_path, bucket, stack, nodes=NODES, seed=SEED)
        began = time.monotonic()
        schedulers, senders = (3, 4) if LONG else (1, 2)
        traffic = Traffic(siege, callers=CALLERS, schedulers=schedulers, senders=senders, rest=0.5 if LONG else 0.1)
        with traffic:
            assert traffic.more(20)
            faults = chosen(siege, FAULTS) if FAULTS else one_of_each(siege)
            done = siege.suffer(faults, AT_ONCE, traffic.go_on, lambda: time.monotonic() > end)
        took = time.monotonic() - began
        checker = Checker(siege, traffic)
        print(f"{done} faults of a fleet in {took:.0f} s: {dict(siege.done)}")
        print("\n".join([*checker.counts, *checker.violations]))
        assert checker.violations == []


@pytest.mark.timeout(600)
def test_a_rolling_restart_under_traffic_loses_and_repeats_nothing(tmp_path: Path, bucket: tuple[str, str]) -> None:
    """Callers go to a gateway that is ready, as a load balancer would send them."""
    with contextlib.ExitStack() as stack:
        siege = Siege(tmp_path, bucket, stack, nodes=NODES, seed=SEED)
        with Traffic(siege, callers=CALLERS, balanced=True) as traffic:
            assert traffic.more(10)
            for gateway in siege.fleet:
                gateway.stop()
                gateway.start()
                assert traffic.more(10)
        checker = Checker(siege, traffic)
        assert checker.violations == []
        # The last call of each caller may have been interrupted by the end of the test.
        said = Counter(traffic.reported.values())
        assert said.total() - said["ok"] <= CALLERS, said


# By guard: the faults in which it matters, and what the checker says without it.
MUTANTS: dict[str, tuple[Callable[[Siege], list[Callable[[random.Random], None]]], str]] = {
    "generation": (lambda siege: [siege.move], "a frame for a connection that its node had left before"),
    "tombstone": (
        lambda siege: [siege.kill_node, partial(siege.ask, what="pause-start", seconds=3)],
        "a call that ended, and runs or waits",
    ),
    "ledger": (lambda siege: [siege.kill_node], "ran more than once"),
    "first end": (lambda siege: [partial(siege.ask, what="repeat-end")], "a call with two ends"),
    "epoch": (
        lambda siege: [partial(siege.freeze, seconds=13)],
        "a gateway wrote after others had taken over its work",
    ),
}
MOST_FAULTS = 60


@pytest.mark.siege
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guard", MUTANTS if LONG else ["first end"])
def test_the_run_notices_a_guard_that_is_gone(tmp_path: Path, bucket: tuple[str, str], guard: str) -> None:
    """The same run, with faults in which the guard matters more often, and without the guard."""
    kinds, expected = MUTANTS[guard]
    with contextlib.ExitStack() as stack:
        siege = Siege(tmp_path, bucket, stack, nodes=2, seed=SEED, mutant=guard)
        faults: list[Fault] = [(f"fault {n}", kind) for n, kind in enumerate(kinds(siege))] * MOST_FAULTS
        done = 0
        checker: Checker | None = None
        traffic = Traffic(siege, callers=12, waiting=0.4, slow=2.0 if guard == "ledger" else 0.2)
        with traffic:
            assert traffic.more(20)
            while done < MOST_FAULTS and not (checker and any(expected in one for one in checker.violations)):
                done = siege.suffer(faults[done : done + 4], 2, lambda: traffic.more(3, 10))
                checker = Checker(siege, traffic, quiet=0)
        assert checker is not None
        print(f"without the guard {guard!r}, after {done} faults: {checker.violations}")
        assert any(expected in one for one in checker.violations), (checker.violations, checker.counts)
        print(f"mutants that the run noticed ({guard}): 1 tried, 1 held")
