"""Stopping a run: at once, whatever it waits for, and with everything it started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import House, assert_valid, open_house
from tests.support.harness import NodeProcess, Plugin, Proxy, marked, wait_until
from tests.support.model_server import Reply, calls, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("stops") / "home")


STUBBORN = "trap '' TERM INT HUP; sh -c \"trap '' TERM; exec sleep {0}\" & setsid sleep {0} & wait"


def test_processes_that_will_not_listen_are_gone_when_the_stop_is_answered(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "deaf"):
        session = house.session(
            calls(
                ("exec", {"command": STUBBORN.format("5234561"), "background": True}),
                ("deaf__Bash", {"command": STUBBORN.format("5234562"), "background": True}),
            ),
            calls(
                ("exec", {"command": STUBBORN.format("5234563")}),
                ("deaf__Bash", {"command": STUBBORN.format("5234564")}),
            ),
        )
        run_id = session.send(wait=0)["run_id"]
        marks = [f"sleep\0{number}\0" for number in range(5234561, 5234565)]
        wait_until(lambda: all(len(marked(mark)) == 2 for mark in marks), what="eight sleepers")
        assert session.stop()["stopped"] == [run_id]
        assert [marked(mark) for mark in marks] == [[]] * 4
        assert_valid(session.history())


def test_a_suspended_machine_does_not_block_others_and_ends_its_commands_when_it_resumes(
    house: House, tmp_path: Path
) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "still") as node:
        session = house.session(
            calls(("still__Bash", {"command": "exec sleep 6234567", "background": True})),
            calls(("still__Bash", {"command": "exec sleep 6234568"})),
        )
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: marked("sleep\0006234568\0"))
        os.kill(node.pid, signal.SIGSTOP)
        try:
            assert session.stop()["stopped"] == [run_id]
            assert session.outcome(run_id)["state"] == "stopped"
            assert_valid(session.history())
        finally:
            os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: not marked("sleep\0006234567\0") and not marked("sleep\0006234568\0"))


def test_a_machine_that_was_away_ends_its_part_when_it_is_back(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "away") as node:
        session = house.session(
            calls(("away__Bash", {"command": "exec sleep 7234567", "background": True})),
            text("never", gate=threading.Event()),
        )
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: len(session.asked()) == 2)
        node.kill()
        house.gateway.wait_for_node("away", online=False)
        assert session.stop()["stopped"] == [run_id]
        assert marked("sleep\0007234567\0") != []
        node.start()
        wait_until(lambda: not marked("sleep\0007234567\0"), 30)


def test_a_command_that_was_waited_for_is_ended_when_its_machine_is_back(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "waiting") as node:
        session = house.session(calls(("waiting__Bash", {"command": "exec sleep 7334567"})), text("never"))
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: marked("sleep\0007334567\0"))
        node.kill()
        house.gateway.wait_for_node("waiting", online=False)
        assert session.stop()["stopped"] == [run_id]
        assert marked("sleep\0007334567\0") != []
        node.start()
        wait_until(lambda: not marked("sleep\0007334567\0"), 30)


def test_a_machine_ends_its_commands_although_the_gateway_was_restarted_before_it_is_back(
    house: House, tmp_path: Path
) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "both") as node:
        session = house.session(
            calls(("both__Bash", {"command": "exec sleep 7434567", "background": True})),
            text("never", gate=threading.Event()),
        )
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: len(session.asked()) == 2)
        kept = node.ok("Bash", {"command": "exec sleep 7534567", "background": True})["sessionId"]
        node.kill()
        house.gateway.wait_for_node("both", online=False)
        assert session.stop()["stopped"] == [run_id]
        house.gateway.kill()
        house.gateway.start()
        assert marked("sleep\0007434567\0") != []
        node.start()
        wait_until(lambda: not marked("sleep\0007434567\0"), 30)
        assert node.ok("Process", {"action": "poll", "sessionId": kept})["running"] is True, "not of that run"


def test_a_link_that_carries_nothing_any_more_does_not_block_others(house: House, tmp_path: Path) -> None:
    with Proxy(house.gateway.port) as proxy, NodeProcess(house.gateway, tmp_path, "cable", url=proxy.url):
        session = house.session(calls(("cable__Bash", {"command": "exec sleep 8234567"})), text("again"))
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: marked("sleep\0008234567\0"))
        proxy.freeze()
        assert session.stop()["stopped"] == [run_id]
        assert session.send()["reply"] == "again", "the session goes on meanwhile"
        proxy.cut()
        proxy.thaw()
        wait_until(lambda: not marked("sleep\0008234567\0"), 30)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(lambda: Reply(delay=600), id="no answer at all"),
        pytest.param(lambda: text("never", gate=threading.Event()), id="a head and nothing more"),
        pytest.param(lambda: text("never whole", gate=threading.Event(), before_gate=3), id="half a reply"),
        pytest.param(lambda: Reply(status=503, headers={"retry-after": "60"}, body=b"{}"), id="a wait to ask again"),
    ],
)
def test_a_model_that_hangs_is_left(house: House, reply: object) -> None:
    session = house.session(reply())  # type: ignore[operator]
    run_id = session.send(wait=0)["run_id"]
    wait_until(session.asked)
    assert session.stop()["stopped"] == [run_id]
    assert session.outcome(run_id)["state"] == "stopped"


def test_a_tool_that_ignores_its_end_does_not_block_others(house: House, tmp_path: Path) -> None:
    with Plugin(house.gateway, tmp_path, "mule") as mule:
        session = house.session(calls(("mule.hold", {"until": "x", "stubborn": True})), text("next"))
        run_id = session.send(wait=0)["run_id"]
        (call_id,) = mule.started(1)
        assert session.stop()["stopped"] == [run_id]
        assert "has not confirmed" in session.history()[-1]["content"]
        wait_until(lambda: "cancel" in mule.steps(call_id))
        assert session.send()["reply"] == "next"
        mule.release("x")


def test_a_run_that_was_taken_up_after_a_kill_is_stopped_as_any(house: House, tmp_path: Path) -> None:
    with Plugin(house.gateway, tmp_path, "ox") as ox:
        session = house.session(calls(("ox.hold", {"until": "x", "stubborn": True})), text("next"))
        run_id = session.send(wait=0)["run_id"]
        ox.started(1)
        house.gateway.kill()
        house.gateway.start()
        wait_until(lambda: session.show()["state"] == "running")
        assert session.stop()["stopped"] == [run_id]
        assert_valid(session.history())
        assert session.send()["reply"] == "next"
        ox.release("x")


def test_a_sub_agent_whose_model_hangs_ends_with_its_parent(house: House) -> None:
    session = house.session(calls(("sessions_spawn", {"prompt": "the-hanging-child"})))
    house.script("the-hanging-child", Reply(delay=600))
    run_id = session.send(wait=0)["run_id"]
    wait_until(lambda: house.asked("the-hanging-child"))
    assert session.stop()["stopped"] == [run_id]
    key = next(one["key"] for one in house.gateway.get("/v1/sessions")["sessions"] if one["kind"] == "child")
    wait_until(lambda: house.gateway.get(f"/v1/sessions/{key}")["state"] == "idle")
    assert_valid(session.history())
