"""Budgets: a limit applies on every route, in parallel and after a kill; a used-up one is `denied` with the reason."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, Session, open_house
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, text


@pytest.fixture(scope="module")
def hands(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        (node.workspace / "note.txt").write_text("hi\n")
        yield node


def made(gateway: GatewayProcess, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = Command(gateway.home)("token", "create", *options, "--json").json()
    return found


def call(gateway: GatewayProcess, token: str, tool: str, args: Any = None, **options: Any) -> Any:
    body = {"tool": tool, "args": args or {}, **options}
    answer = gateway.request("POST", "/v1/tools/invoke", body, token=token)
    assert answer.status == 200, answer
    return answer.json()


def shown(gateway: GatewayProcess, subject: str, token: str = "owner") -> dict[str, Any]:
    answer = gateway.request("GET", f"/v1/budgets?subject={subject}", token=token)
    assert answer.status == 200, answer
    return {one["unit"]: one for one in answer.json()["budgets"]}


TRUE = {"command": "true"}


def test_parallel_calls_cannot_exceed_a_number_of_calls(hands: NodeProcess) -> None:
    gateway = hands.gateway
    token = made(gateway, "--budget", "calls=5/day")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        tools = ["hands__Bash", "hands__Read"] * 8  # one is recorded before it is sent, the other with its end
        args = [TRUE, {"path": "note.txt"}] * 8
        answers = list(pool.map(lambda one: call(gateway, token["token"], *one), zip(tools, args, strict=True)))
    denied = [answer for answer in answers if answer["state"] == "denied"]
    assert len(answers) - len(denied) == 5 and all(one["state"] in ("ok", "denied") for one in answers)
    midnight = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)
    for answer in denied:
        assert answer["error"]["kind"] == "not_allowed"
        message = answer["error"]["message"]
        assert "5 of 5 calls per day" in message and f"token {token['id']}" in message and "did not run" in message
        assert f"renews at {midnight}T00:00:00Z" in message
        assert f"`farhand budget set token:{token['id']} calls=…`" in message
    use = shown(gateway, f"token:{token['id']}")["calls"]
    assert (use["used"], use["limit"], use["reserved"], use["left"]) == (5, 5, 0, 0)
    record = gateway.get("/v1/calls?state=denied&limit=1")["calls"][0]
    assert "5 of 5 calls" in record["error"]["message"]


def test_a_narrow_token_sees_its_own_budget_only_and_cannot_raise_it(hands: NodeProcess) -> None:
    gateway = hands.gateway
    token, other = made(gateway, "--tool", "hands__*", "--budget", "calls=3/total"), made(gateway)
    assert shown(gateway, f"token:{token['id']}", token["token"])["calls"]["renews_at"] is None
    answer = gateway.request("GET", "/v1/budgets", token=token["token"]).json()
    assert {one["subject"] for one in answer["budgets"]} == {f"token:{token['id']}"} and answer["defaults"] == []
    for subject in ("all", "agent:main", f"token:{other['id']}"):
        assert gateway.request("GET", f"/v1/budgets?subject={subject}", token=token["token"]).status == 403
    raised = {"subject": f"token:{token['id']}", "limits": [{"unit": "calls", "amount": 1000}]}
    assert gateway.request("PUT", "/v1/budgets", raised, token=token["token"]).status == 403
    admin = made(gateway, "--scope", "admin", "--budget", "calls=1000/day")
    for limits in ([], [{"unit": "calls", "amount": 10**9}]):
        body = {"subject": f"token:{admin['id']}", "limits": limits}
        assert gateway.request("PUT", "/v1/budgets", body, token=admin["token"]).status == 403


def test_a_token_gains_nothing_by_making_others(hands: NodeProcess) -> None:
    gateway = hands.gateway
    admin = made(gateway, "--scope", "admin", "--budget", "calls=2/day")
    child = gateway.request("POST", "/v1/tokens", {"label": "child"}, token=admin["token"]).json()
    assert call(gateway, child["token"], "hands__Bash", TRUE)["ok"] is True
    assert call(gateway, admin["token"], "hands__Bash", TRUE)["ok"] is True
    assert call(gateway, child["token"], "hands__Bash", TRUE)["state"] == "denied"
    body = {"subject": f"token:{admin['id']}", "limits": []}
    assert gateway.request("PUT", "/v1/budgets", body, token=admin["token"]).status == 403


def test_bytes_and_wall_time_are_counted_and_end(hands: NodeProcess) -> None:
    gateway = hands.gateway
    token = made(gateway, "--budget", "bytes=20000/day", "--budget", "wall_seconds=30/day")
    assert call(gateway, token["token"], "hands__Bash", {"command": "head -c 19000 /dev/zero | tr '\\0' x"})["ok"]
    use = shown(gateway, f"token:{token['id']}")
    assert use["bytes"]["used"] > 19_000 and use["bytes"]["reserved"] == 0
    assert 0 < use["wall_seconds"]["used"] < 30
    large = call(gateway, token["token"], "hands__Bash", {"command": f"true {'x' * 5000}"})
    assert large["state"] == "denied" and "bytes per day" in large["error"]["message"]
    timed = made(gateway, "--budget", "wall_seconds=1.5/day")
    slow = call(gateway, timed["token"], "hands__Bash", {"command": "sleep 600"})
    assert slow["state"] == "timeout" and "1.5 s, which is all that its budget left" in slow["error"]["message"]
    late = call(gateway, timed["token"], "hands__Bash", TRUE)
    assert late["state"] == "denied" and "seconds of wall time" in late["error"]["message"]


def test_machines_are_counted_once(hands: NodeProcess, tmp_path: Path) -> None:
    gateway = hands.gateway
    token = made(gateway, "--budget", "machines=1/day")
    with NodeProcess(gateway, tmp_path, "feet"):
        assert call(gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
        assert call(gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
        denied = call(gateway, token["token"], "feet__Bash", TRUE)
        assert denied["state"] == "denied" and "1 of 1 machines" in denied["error"]["message"]
        copied = call(
            gateway, token["token"], "gsv__Transfer", {"source": "hands:note.txt", "destination": "feet:note.txt"}
        )
        assert copied["state"] == "denied", copied
        fanned = gateway.request(
            "POST", "/v1/tools/fanout", {"tool": "Bash", "args": TRUE, "nodes": ["hands", "feet"]}, token=token["token"]
        )
        assert fanned.status == 200 and b"1 of 1 machines" in fanned.body, fanned


def test_the_command_line_sets_shows_and_clears(hands: NodeProcess) -> None:
    farhand = Command(hands.gateway.home)
    token = made(hands.gateway)
    assert "calls" in farhand("budget", "set", f"token:{token['id']}", "calls=1/day", "money=0.5").out
    listed = farhand("budget")
    assert f"token:{token['id']}" in listed.out and "0.5" in listed.out
    assert call(hands.gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
    assert call(hands.gateway, token["token"], "hands__Bash", TRUE)["state"] == "denied"
    farhand("budget", "clear", f"token:{token['id']}")
    assert call(hands.gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
    for wrong, said in (
        (("set", "tokn:x", "calls=1"), "token"),
        (("set", "token:zzzz", "calls=1"), "farhand token list"),
        (("set", "all", "cals=1"), "did you mean 'calls'"),
        (("set", "all", "calls=1/week"), "day or total"),
        (("set", "all", "calls=-1"), "not a limit"),
    ):
        failed = farhand("budget", *wrong)
        assert failed.status != 0 and said in failed.err, (wrong, failed)
    for amount in (-1, 1.5, 10**30, "x", None, True):
        body = {"subject": "all", "limits": [{"unit": "calls", "amount": amount}]}
        assert hands.gateway.request("PUT", "/v1/budgets", body).status == 400, amount


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("budgets") / "home")


def test_the_money_of_an_agent_ends_before_the_model_is_asked(house: House) -> None:
    gateway = house.gateway
    farhand = Command(gateway.home)
    farhand("budget", "set", "agent:main", "tokens=1000000/day")
    session = house.session(calls(("exec", TRUE)), text("done"))
    assert session.send()["reply"] == "done"
    used = shown(gateway, "agent:main")["tokens"]["used"]
    assert used > 0
    asked = len(house.model.requests)
    farhand("budget", "set", "agent:main", f"tokens={int(used)}/day")
    answer = house.session(text("never said")).send()
    assert len(house.model.requests) == asked
    assert "the model was not asked" in str(answer) and "tokens per day" in str(answer)
    farhand("budget", "clear", "agent:main")


def test_counters_survive_a_kill_without_double_counting(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        token = made(gateway, "--budget", "calls=3/day", "--budget", "wall_seconds=1000/day")
        assert call(gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
        os.mkfifo(node.workspace / "gate")
        waits = {"command": "read x < gate; echo $x"}
        running = call(gateway, token["token"], "hands__Bash", waits, background=True)["request_id"]
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("hands")
        use = shown(gateway, f"token:{token['id']}")
        assert use["calls"]["used"] == 2 and use["wall_seconds"]["reserved"] > 0
        gateway.request("DELETE", f"/v1/calls/{running}")
        wait_until(lambda: gateway.get(f"/v1/calls/{running}")["state"] != "running", what="the end")
        use = shown(gateway, f"token:{token['id']}")
        assert use["calls"]["used"] == 2 and use["wall_seconds"]["reserved"] == 0
        assert call(gateway, token["token"], "hands__Bash", TRUE)["ok"] is True
        assert call(gateway, token["token"], "hands__Bash", TRUE)["state"] == "denied"


def test_transfers_and_the_output_of_commands_count_as_bytes(hands: NodeProcess) -> None:
    gateway = hands.gateway
    (hands.workspace / "large.bin").write_bytes(b"x" * 300_000)
    token = made(gateway, "--budget", "bytes=400000/day", "--budget", "calls=20/day")
    copy = "/v1/transfers/content?source=hands:large.bin"
    first = gateway.request("GET", copy, token=token["token"])
    assert first.status == 200 and len(first.body) == 300_000
    wait_until(lambda: shown(gateway, f"token:{token['id']}")["bytes"]["reserved"] == 0, what="the end")
    use = shown(gateway, f"token:{token['id']}")
    assert use["bytes"]["used"] == 300_000 and use["calls"]["used"] == 1
    second = gateway.request("GET", copy, token=token["token"])
    assert second.status == 403 and b"bytes per day" in second.body, second
    started = call(gateway, token["token"], "hands__Bash", {"command": "head -c 90000 /dev/zero | tr '\\0' y"})
    output = f"/v1/calls/{started['request_id']}/output?wait=0"
    denied = gateway.request("GET", output, token=token["token"])
    assert denied.status == 403 and b"used up" in denied.body, denied


# -- each unit, for each subject -----------------------------------------------------------------------------------

NOUNS = {
    "money": "US dollars",
    "tokens": "tokens",
    "calls": "calls",
    "bytes": "bytes",
    "machines": "machines",
    "wall_seconds": "seconds of wall time",
}


class Workshop:
    """An agent with a model that has a price, two machines, and a token that talks to the agent."""

    def __init__(self, house: House, folder: Path) -> None:
        self.house, self.gateway, self.folder = house, house.gateway, folder
        self.token = made(house.gateway, "--scope", "chat", "--scope", "tools.exec")

    def work(self, session: Session, machine: str) -> tuple[Any, bool]:
        """Let the agent write a file on a machine; return what it answered, and whether the file is there."""
        file = self.folder / f"{session.key}-{machine}"
        self.house.script(session.key, calls((f"{machine}__Bash", {"command": f"touch {file}"})), text("done"))
        return session.send(token=self.token["token"]), file.exists()

    def set(self, subject: str, **limits: float) -> None:
        """Replace the limits of a subject; none clears them."""
        body = {"subject": subject, "limits": [{"unit": unit, "amount": limits[unit]} for unit in limits]}
        assert self.gateway.request("PUT", "/v1/budgets", body).status == 200


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "home").mkdir()
    (folder / "home" / "farhand.toml").write_text("[models.scripted]\ninput_cost = 1000\noutput_cost = 5000\n")
    houses = open_house(folder / "home", FARHAND_MODEL="scripted")
    house = next(houses)
    try:
        with (
            NodeProcess(house.gateway, folder / "hands", "hands"),
            NodeProcess(house.gateway, folder / "feet", "feet"),
        ):
            yield Workshop(house, folder)
    finally:
        houses.close()


@pytest.mark.parametrize("unit", NOUNS)
@pytest.mark.parametrize("kind", ["token", "session", "agent", "all"])
def test_each_unit_ends_for_each_subject_before_it_is_used(workshop: Workshop, kind: str, unit: str) -> None:
    session = workshop.house.session()
    subjects = {"token": f"token:{workshop.token['id']}", "session": f"session:{session.key}", "agent": "agent:main"}
    subject = subjects.get(kind, "all")
    workshop.set(subject, **{unit: 1_000_000})
    try:
        answer, is_there = workshop.work(session, "hands")
        assert answer["reply"] == "done" and is_there, answer
        used = shown(workshop.gateway, subject)[unit]["used"]
        assert used > 0
        workshop.set(subject, **{unit: used})
        asked = len(workshop.house.model.requests)
        answer, is_there = workshop.work(session, "feet")
        assert not is_there
        said = f"{subject.replace(':', ' ', 1)} is used up" if kind != "all" else "everything together is used up"
        seen = json.dumps([answer, session.history()])
        assert said in seen and f"{NOUNS[unit]} per day" in seen, seen
        if unit in ("money", "tokens"):
            assert len(workshop.house.model.requests) == asked and "the model was not asked" in seen
        else:
            denied = workshop.gateway.get("/v1/calls?state=denied&limit=1")["calls"][0]
            assert denied["tool"] == "feet__Bash" and said in denied["error"]["message"], denied
    finally:
        workshop.set(subject)
    answer, is_there = workshop.work(session, "feet")
    assert is_there, answer
