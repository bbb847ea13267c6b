"""Budgets of a fleet: a limit holds for both gateways together, whichever of them is asked, and however fast."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_budgets import TRUE, call, shown
from tests.integration.cli.conftest import Command
from tests.integration.fleet.conftest import Fleet
from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, Reply, Request, text

# Dollars for a million tokens of the model.
PRICE = 10.0


class Model:
    """A model whose answers are held back while `held` is not set."""

    def __init__(self) -> None:
        self.held = threading.Event()

    def answer(self, _: Request) -> Reply:
        return text("done", usage=(100, 10), gate=self.held)


@pytest.fixture(scope="module")
def scripted() -> Model:
    return Model()


@pytest.fixture(scope="module")
def model(scripted: Model) -> Iterator[ModelServer]:
    with ModelServer(answer=scripted.answer) as server:
        yield server


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
    postgres: PostgresServer,
    nats: NatsServer,
    bucket: tuple[str, str],
    model: ModelServer,
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("budgets")
    env = fleet_environment(postgres.new_database(), nats, bucket, folder.name) | model.environment
    for name in ("one", "two"):
        (folder / name).mkdir(mode=0o700)
        costs = f"[models.scripted]\ninput_cost = {PRICE}\noutput_cost = {PRICE}\n"
        (folder / name / "farhand.toml").write_text(costs)
    with GatewayProcess(folder / "one", env=env) as one, GatewayProcess(folder / "two", env=env) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def feet_of_two(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(fleet[1], tmp_path_factory.mktemp("feet"), "feet") as node:
        fleet[0].wait_for_node("feet")
        yield node


def made(fleet: Fleet, *budget: str) -> dict[str, Any]:
    """A token with a budget, made on the first gateway."""
    words = [word for limit in budget for word in ("--budget", limit)]
    found: dict[str, Any] = Command(fleet[0].home)("token", "create", *words, "--json").json()
    return found


def all_at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    ready = threading.Barrier(count)

    def one(number: int) -> Any:
        ready.wait(60)
        return act(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def both_show(fleet: Fleet, subject: str, unit: str) -> dict[str, Any]:
    """What both gateways show of a budget: the same."""
    one, two = (shown(gateway, subject)[unit] for gateway in fleet)
    assert one == two
    return one


def states(answers: list[Any]) -> dict[str, int]:
    found = [answer["state"] for answer in answers]
    return {state: found.count(state) for state in set(found)}


@pytest.mark.parametrize("tool", ["Bash", "Read"])
def test_calls_on_both_cannot_exceed_a_number_of_calls(fleet: Fleet, hands_of_one: NodeProcess, tool: str) -> None:
    """`Bash` is recorded before it is sent, `Read` with its end."""
    (hands_of_one.workspace / "note.txt").write_text("hi\n")
    args = TRUE if tool == "Bash" else {"path": "note.txt"}
    token = made(fleet, "calls=7/day")
    answers = all_at_once(24, lambda n: call(fleet[n % 2], token["token"], f"hands__{tool}", args))
    assert states(answers) == {"ok": 7, "denied": 17}
    assert all("7 of 7 calls per day" in one["error"]["message"] for one in answers if one["state"] == "denied")
    use = both_show(fleet, f"token:{token['id']}", "calls")
    assert (use["used"], use["reserved"], use["left"]) == (7, 0, 0)


def test_machines_on_both_are_counted_together(
    fleet: Fleet, hands_of_one: NodeProcess, feet_of_two: NodeProcess
) -> None:
    token = made(fleet, "machines=1/day")
    answers = all_at_once(
        16, lambda n: call(fleet[n % 2], token["token"], f"{('hands', 'feet')[n // 2 % 2]}__Bash", TRUE)
    )
    ran = {answer["route"]["node_id"] for answer in answers if answer["ok"]}
    assert len(ran) == 1 and states(answers) == {"ok": 8, "denied": 8}
    assert both_show(fleet, f"token:{token['id']}", "machines")["used"] == 1


@pytest.fixture
def gate(hands_of_one: NodeProcess, tmp_path: Path) -> Iterator[Path]:
    """A pipe on which commands wait that read from it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield path
    with open(path, "r+b", buffering=0) as opened:
        opened.write(b"\n" * 100)


def end_all(fleet: Fleet, answers: list[Any]) -> None:
    for answer in answers:
        if answer["state"] == "running":
            assert fleet[1].request("DELETE", f"/v1/calls/{answer['request_id']}").status == 200


def test_bytes_that_calls_on_both_reserve_do_not_exceed_the_limit(
    fleet: Fleet, hands_of_one: NodeProcess, gate: Path
) -> None:
    """A call reserves 64 KiB for its result, or what is left."""
    token = made(fleet, "bytes=100000/day")
    waits = {"command": f"read x < {gate}"}
    answers = all_at_once(12, lambda n: call(fleet[n % 2], token["token"], "hands__Bash", waits, background=True))
    assert states(answers) == {"running": 2, "denied": 10}
    use = both_show(fleet, f"token:{token['id']}", "bytes")
    assert (use["used"], use["left"]) == (100_000, 0)
    end_all(fleet, answers)
    use = both_show(fleet, f"token:{token['id']}", "bytes")
    assert use["reserved"] == 0 and use["used"] < 10_000


def test_the_time_of_calls_on_both_does_not_exceed_the_limit(
    fleet: Fleet, hands_of_one: NodeProcess, gate: Path
) -> None:
    token = made(fleet, "wall_seconds=1000/day")
    waits = {"command": f"read x < {gate}"}
    answers = all_at_once(
        12,
        lambda n: call(fleet[n % 2], token["token"], "hands__Bash", waits, background=True, timeout_ms=400_000),
    )
    # Two of 400 seconds, and perhaps a third one that was given the rest.
    assert set(states(answers)) == {"running", "denied"} and states(answers)["running"] in (2, 3)
    assert both_show(fleet, f"token:{token['id']}", "wall_seconds")["used"] in (800, 1000)
    end_all(fleet, answers)
    use = both_show(fleet, f"token:{token['id']}", "wall_seconds")
    assert use["reserved"] == 0 and use["used"] < 400


@pytest.mark.parametrize(("unit", "amount"), [("tokens", 20_000), ("money", 20_000 * PRICE / 1_000_000)])
def test_what_models_are_asked_on_both_does_not_exceed_the_limit(
    fleet: Fleet, model: ModelServer, scripted: Model, unit: str, amount: float
) -> None:
    """A request reserves its prompt and its reply before the model is asked; the answers are held back meanwhile."""
    farhand = Command(fleet[0].home)
    farhand("budget", "set", "agent:main", f"{unit}={amount}/day")
    wait_until(lambda: unit in shown(fleet[1], "agent:main"), what="the budget on the other gateway")
    scripted.held.clear()
    asked = len(model.requests)
    try:
        begun = all_at_once(
            8,
            lambda n: (
                fleet[n % 2]
                .request("POST", f"/v1/sessions/{unit}-{n}/messages", {"message": "hello", "wait_seconds": 0})
                .json()
            ),
        )

        def refused() -> int:
            runs = [fleet[0].get(f"/v1/runs/{run['run_id']}") for run in begun]
            return sum("the model was not asked" in str(run) for run in runs)

        def decided() -> bool:
            return refused() + len(model.requests) - asked >= 8

        wait_until(decided, 60, "every run to be asked or refused")
        use = both_show(fleet, "agent:main", unit)
        assert use["used"] <= amount and len(model.requests) - asked < 8
    finally:
        scripted.held.set()
    wait_until(lambda: not shown(fleet[0], "agent:main")[unit]["reserved"], 60, "the end of the runs")
    count = len(model.requests) - asked
    per_request = 110 if unit == "tokens" else 110 * PRICE / 1_000_000
    assert 1 <= count < 8 and both_show(fleet, "agent:main", unit)["used"] == pytest.approx(count * per_request)
    farhand("budget", "clear", "agent:main")
    wait_until(lambda: unit not in shown(fleet[1], "agent:main"), what="the other gateway to know")


def test_reservations_of_a_lost_gateway_are_settled_by_another(
    tmp_path: Path, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str]
) -> None:
    env = fleet_environment(postgres.new_database(), nats, bucket, tmp_path.name)
    with (
        GatewayProcess(tmp_path / "one", env=env) as one,
        GatewayProcess(tmp_path / "two", env=env) as two,
        NodeProcess(two, tmp_path / "hands", "hands") as node,
    ):
        one.wait_for_node("hands")
        token = made([one, two], "calls=3/day", "wall_seconds=1000/day")
        assert call(one, token["token"], "hands__Bash", TRUE)["ok"] is True
        os.mkfifo(node.workspace / "gate")
        waits = {"command": "read x < gate; echo $x"}
        running = call(one, token["token"], "hands__Bash", waits, background=True)["request_id"]
        one.kill()
        use = shown(two, f"token:{token['id']}")
        assert use["calls"]["used"] == 2 and use["wall_seconds"]["reserved"] > 0
        with (node.workspace / "gate").open("w") as gate:
            gate.write("done\n")
        wait_until(lambda: two.get(f"/v1/calls/{running}")["state"] == "ok", 60, "the end of the call")
        use = shown(two, f"token:{token['id']}")
        assert use["calls"]["used"] == 2 and use["wall_seconds"]["reserved"] == 0
        assert call(two, token["token"], "hands__Bash", TRUE)["ok"] is True
        assert call(two, token["token"], "hands__Bash", TRUE)["state"] == "denied"
        one.start()
        one.wait_for_node("hands")
        assert call(one, token["token"], "hands__Bash", TRUE)["state"] == "denied"
