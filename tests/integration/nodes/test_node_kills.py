"""Commands outlive the node program, the gateway and the link: same ids, output without gap or repeat, exits kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farhand.node.names import default_node_id
from tests.support.harness import GatewayProcess, NodeProcess, Proxy, marked, wait_until

pytestmark = pytest.mark.usefixtures("own_interpreters")


@pytest.fixture
def node(shared_gateway: GatewayProcess, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node of the test's own, to be killed."""
    with NodeProcess(shared_gateway, tmp_path, f"mortal-{uuid.uuid4().hex[:6]}") as process:
        yield process


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def begin(node: NodeProcess, command: str, **args: Any) -> str:
    return str(node.ok("Bash", {"command": command, "background": True, **args})["sessionId"])


def act(node: NodeProcess, action: str, session: str, **args: Any) -> Any:
    return node.ok("Process", {"action": action, "sessionId": session, **args})


def over(node: NodeProcess, session: str) -> Any:
    def ended() -> Any:
        answer = act(node, "poll", session)
        return None if answer["running"] else answer

    return wait_until(ended, 30, f"the end of session {session}")


def says(node: NodeProcess, session: str, text: str) -> None:
    wait_until(lambda: text in act(node, "log", session, limit=10**6)["log"], 30, f"{text!r} in the log")


def counting(last: int) -> str:
    """A command that says the numbers up to `last`, for about 20 ms each, and exits with 5."""
    return f"for i in $(seq {last}); do echo number $i; sleep 0.02; done; exit 5"


def counted(last: int) -> list[str]:
    return [f"number {i}" for i in range(1, last + 1)]


def stepping(folder: Path) -> str:
    """A command that notes its start once, waits for the file `go`, and says that it went."""
    return f"echo ran >> {folder}/ran; echo begun; until test -e {folder}/go; do sleep 0.02; done; echo went; exit 3"


def ran(folder: Path) -> int:
    path = folder / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


# -- the node program ----------------------------------------------------------------------------------------------


def test_a_session_continues_when_the_node_program_is_killed(node: NodeProcess) -> None:
    session = begin(node, counting(150))
    says(node, session, "number 5")
    for _ in range(2):
        node.restart()
        assert [found["sessionId"] for found in node.ok("Process", {"action": "list"})["sessions"]] == [session]
    answer = over(node, session)
    assert (answer["sessionId"], answer["exitCode"], answer["status"]) == (session, 5, "failed")
    assert act(node, "log", session, limit=1000)["log"].split("\n") == counted(150)


def test_a_session_that_ends_while_no_node_runs_keeps_its_exit_and_output(node: NodeProcess) -> None:
    session = begin(node, stepping(node.workspace))
    says(node, session, "begun")
    pid = node.ok("Process", {"action": "list"})["sessions"][0]["pid"]
    node.kill()
    (node.workspace / "go").touch()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 15, "its end")
    node.start()
    answer = act(node, "poll", session)
    assert (answer["running"], answer["exitCode"], answer["tail"]) == (False, 3, "begun\nwent\n")
    [listed] = node.ok("Process", {"action": "list"})["sessions"]
    assert listed["pid"] == pid and listed["endedAt"] - listed["startedAt"] == listed["runtimeMs"]
    assert ran(node.workspace) == 1


def test_input_still_arrives_after_the_node_program_was_killed(node: NodeProcess) -> None:
    session = begin(node, "while read line; do echo heard $line; done")
    act(node, "submit", session, data="before")
    says(node, session, "heard before")
    node.restart()
    assert act(node, "write", session, data="af")["bytesWritten"] == 2
    act(node, "submit", session, data="ter")
    says(node, session, "heard after")
    assert act(node, "log", session)["log"] == "heard before\nheard after"


def test_kill_still_ends_the_whole_tree_after_the_node_program_was_killed(node: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    session = begin(node, f"export MARK={mark}; setsid sleep 1000 & (setsid sleep 1000 &); echo up; sleep 1000")
    says(node, session, "up")
    node.restart()
    assert len(act(node, "kill", session)["ended"]) >= 3
    assert over(node, session)["signal"] == "SIGKILL"
    wait_until(lambda: not marked(mark), 15, "the end of the tree")


def test_a_timeout_holds_while_no_node_runs(node: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    session = begin(node, f"MARK={mark} setsid sleep 1000 & echo up; sleep 1000", timeout=1500)
    says(node, session, "up")
    node.kill()
    wait_until(lambda: not marked(mark), 15, "the end of the tree")
    node.start()
    assert act(node, "poll", session)["timedOut"] is True


def test_a_synchronous_command_in_flight_returns_its_result_and_ran_once(
    node: NodeProcess, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(node.ok, "Bash", {"command": stepping(node.workspace)})
    wait_until(lambda: ran(node.workspace), 15, "its start")
    node.restart()
    (node.workspace / "go").touch()
    result = waiting.result(60)
    assert (result["output"], result["exitCode"], result["status"]) == ("begun\nwent\n", 3, "failed")
    assert ran(node.workspace) == 1


def test_a_synchronous_command_survives_an_orderly_restart_of_the_node_program(
    node: NodeProcess, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(node.ok, "Bash", {"command": stepping(node.workspace)})
    wait_until(lambda: ran(node.workspace), 15, "its start")
    assert node.stop(signal.SIGTERM) == 0
    node.start()
    (node.workspace / "go").touch()
    result = waiting.result(30)
    assert (result["output"], result["exitCode"], result["status"]) == ("begun\nwent\n", 3, "failed")
    assert ran(node.workspace) == 1


def test_commands_that_wait_for_their_turn_survive_an_orderly_restart_of_the_node_program(node: NodeProcess) -> None:
    """As many as run at once, and some behind them."""
    folders = [node.workspace / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    calls = [node.begin("Bash", {"command": stepping(folder)}) for folder in folders]
    wait_until(lambda: sum(map(ran, folders)) == 16, 60, "the start of those that run at once")
    assert node.stop(signal.SIGTERM) == 0
    node.start()
    for folder in folders:
        (folder / "go").touch()
    assert [node.end_of(call, 60)["result"]["output"] for call in calls] == ["begun\nwent\n"] * 20
    assert [ran(folder) for folder in folders] == [1] * 20


def test_a_synchronous_command_that_ended_while_no_node_ran_returns_its_result(
    node: NodeProcess, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(node.ok, "Bash", {"command": stepping(node.workspace)})
    wait_until(lambda: ran(node.workspace), 15, "its start")
    node.kill()
    (node.workspace / "go").touch()
    wait_until(lambda: not marked(str(node.workspace / "ran")), 15, "its end")
    node.start()
    assert waiting.result(60)["output"] == "begun\nwent\n"
    assert ran(node.workspace) == 1


def test_many_synchronous_commands_in_flight_each_run_once(node: NodeProcess, threads: ThreadPoolExecutor) -> None:
    folders = [node.workspace / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    waiting = [threads.submit(node.ok, "Bash", {"command": stepping(folder)}) for folder in folders]
    wait_until(lambda: all(map(ran, folders)), 15, "the start of all")
    node.restart()
    for folder in folders:
        (folder / "go").touch()
    assert [future.result(60)["output"] for future in waiting] == ["begun\nwent\n"] * 6
    assert [ran(folder) for folder in folders] == [1] * 6


def test_a_call_can_be_cancelled_after_the_node_program_was_killed(node: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    call = node.begin("Bash", {"command": f"export MARK={mark}; setsid sleep 1000 & sleep 1000; true"})
    wait_until(lambda: len(marked(mark)) >= 3, 15, "the tree")
    node.restart()
    record = node.gateway.request("DELETE", f"/v1/calls/{call}").json()
    assert record["state"] == "cancelled" and "ended 3 processes" in record["error"]["message"], record
    wait_until(lambda: not marked(mark), 15, "the end of the tree")


# -- what was ended while the node program was dead ----------------------------------------------------------------


class Tree:
    """A command with a child that left its session."""

    def __init__(self) -> None:
        self.mark = f"mark-{uuid.uuid4()}"
        self.command = f"export MARK={self.mark}; setsid sleep 1000 & sleep 1000; true"

    def grown(self) -> None:
        wait_until(lambda: len(marked(self.mark)) >= 3, 15, "the tree")

    def gone(self) -> None:
        wait_until(lambda: not marked(self.mark), 30, "the end of the tree")

    @property
    def alive(self) -> bool:
        return bool(marked(self.mark))


@pytest.mark.parametrize("more", [{}, {"yieldMs": 120_000}], ids=["foreground", "yielding"])
def test_a_call_cancelled_while_the_node_program_was_dead_is_ended_when_it_is_back(
    node: NodeProcess, more: dict[str, Any]
) -> None:
    tree, other = Tree(), Tree()
    kept = begin(node, other.command)
    call = node.begin("Bash", {"command": tree.command, **more})
    tree.grown()
    other.grown()
    node.kill()
    record = node.gateway.request("DELETE", f"/v1/calls/{call}").json()
    assert record["state"] == "cancelled" and tree.alive
    node.start()
    tree.gone()
    assert other.alive and act(node, "poll", kept)["running"] is True, "a command that was not ended goes on"
    act(node, "kill", kept)


def test_a_call_that_ran_out_of_time_while_the_node_program_was_dead_is_ended_when_it_is_back(
    node: NodeProcess,
) -> None:
    tree = Tree()
    call = node.begin("Bash", {"command": tree.command, "timeout": 600_000}, timeout_ms=3000)
    tree.grown()
    node.kill()
    assert node.end_of(call)["state"] == "unknown" and tree.alive
    node.start()
    tree.gone()


def test_a_call_whose_caller_hung_up_while_the_node_program_was_dead_is_ended_when_it_is_back(
    node: NodeProcess,
) -> None:
    tree = Tree()
    gateway = node.gateway
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    body = json.dumps({"tool": f"{node.node_id}__Bash", "args": {"command": tree.command}})
    headers = {"Authorization": f"Bearer {gateway.token}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/tools/invoke", body, headers)
    tree.grown()
    node.kill()
    connection.close()
    calls = f"/v1/calls?tool={node.node_id}__Bash"
    wait_until(lambda: gateway.get(calls)["calls"][0]["state"] == "cancelled", 15, "the end of the call")
    assert tree.alive
    node.start()
    tree.gone()


def test_a_node_that_is_killed_again_while_it_ends_a_command_gets_the_order_again(node: NodeProcess) -> None:
    tree = Tree()
    call = node.begin("Bash", {"command": tree.command})
    tree.grown()
    node.kill()
    node.gateway.request("DELETE", f"/v1/calls/{call}")
    node.start(wait=False)
    node.kill()
    node.start()
    tree.gone()


def test_live_output_continues_when_the_node_program_is_killed(node: NodeProcess) -> None:
    call = node.begin("Bash", {"command": counting(150)})
    gateway, seen, begun = node.gateway, bytearray(), threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", f"/v1/calls/{call}/output", headers={"Authorization": f"Bearer {gateway.token}"})
            response = connection.getresponse()
            while data := response.read1():
                seen.extend(data)
                if b"number 5\n" in seen:
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    node.restart()
    assert node.end_of(call)["result"]["exitCode"] == 5
    reader.join(60)
    assert not reader.is_alive() and seen.decode().splitlines() == counted(150)


def test_a_file_call_lost_with_the_node_program_does_not_pretend(node: NodeProcess) -> None:
    """A call that is no command cannot be taken up: it ends, and a later one works."""
    node.kill()
    assert "offline" in node.fails("Read", {"path": "x"}, "failed")
    node.start()
    node.ok("Write", {"path": "x", "content": "y"})


# -- the gateway ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(gateway: GatewayProcess, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node whose gateway is the test's own, to be killed too."""
    with NodeProcess(gateway, tmp_path / "node", "pair") as process:
        yield process


def gateway_again(node: NodeProcess) -> None:
    node.gateway.kill()
    node.gateway.start()
    node.gateway.wait_for_node(node.node_id, seconds=40)


def test_a_session_continues_when_the_gateway_is_killed(pair: NodeProcess) -> None:
    session = begin(pair, counting(150))
    says(pair, session, "number 5")
    gateway_again(pair)
    answer = over(pair, session)
    assert (answer["sessionId"], answer["exitCode"]) == (session, 5)
    assert act(pair, "log", session, limit=1000)["log"].split("\n") == counted(150)


def test_a_call_in_flight_ends_with_its_result_when_the_gateway_is_killed(pair: NodeProcess) -> None:
    call = pair.begin("Bash", {"command": stepping(pair.workspace)})
    wait_until(lambda: ran(pair.workspace), 15, "its start")
    gateway_again(pair)
    (pair.workspace / "go").touch()
    record = pair.end_of(call)
    assert record["state"] == "ok" and record["result"]["output"] == "begun\nwent\n", record
    assert ran(pair.workspace) == 1


def test_a_call_that_was_cancelled_stays_cancelled_when_the_gateway_is_restarted_too(pair: NodeProcess) -> None:
    tree = Tree()
    call = pair.begin("Bash", {"command": tree.command})
    tree.grown()
    pair.kill()
    assert pair.gateway.request("DELETE", f"/v1/calls/{call}").json()["state"] == "cancelled"
    pair.gateway.kill()
    pair.gateway.start()
    assert tree.alive
    pair.start()
    tree.gone()


def test_a_command_that_ended_while_no_gateway_ran_is_reported_afterwards(pair: NodeProcess) -> None:
    call = pair.begin("Bash", {"command": stepping(pair.workspace)})
    wait_until(lambda: ran(pair.workspace), 15, "its start")
    pair.gateway.kill()
    (pair.workspace / "go").touch()
    wait_until(lambda: not marked(str(pair.workspace / "ran")), 15, "its end")
    pair.gateway.start()
    assert pair.end_of(call)["result"]["exitCode"] == 3
    assert ran(pair.workspace) == 1


def test_killing_node_and_gateway_at_once_loses_nothing(pair: NodeProcess) -> None:
    session = begin(pair, "while read line; do echo heard $line; done")
    call = pair.begin("Bash", {"command": stepping(pair.workspace)})
    wait_until(lambda: ran(pair.workspace), 15, "its start")
    pair.kill()
    pair.gateway.kill()
    pair.gateway.start()
    pair.start()
    (pair.workspace / "go").touch()
    assert pair.end_of(call)["result"]["output"] == "begun\nwent\n"
    act(pair, "submit", session, data="it")
    says(pair, session, "heard it")
    assert ran(pair.workspace) == 1


# -- the link ------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(shared_gateway: GatewayProcess, tmp_path: Path) -> Iterator[tuple[NodeProcess, Proxy]]:
    """A node that reaches its gateway through a proxy."""
    with Proxy(shared_gateway.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with NodeProcess(shared_gateway, tmp_path, f"far-{uuid.uuid4().hex[:6]}", url=url) as process:
            yield process, proxy


def joined_at(node: NodeProcess) -> int:
    nodes = node.gateway.get("/v1/nodes")["nodes"]
    return int(next(entry["connected_at"] for entry in nodes if entry["node_id"] == node.node_id))


def test_a_command_continues_while_the_link_is_down(
    far: tuple[NodeProcess, Proxy], threads: ThreadPoolExecutor
) -> None:
    node, proxy = far
    session = begin(node, counting(100))
    waiting = threads.submit(node.ok, "Bash", {"command": stepping(node.workspace)})
    wait_until(lambda: ran(node.workspace), 15, "its start")
    proxy.cut(refuse=True)
    node.gateway.wait_for_node(node.node_id, online=False)
    (node.workspace / "go").touch()
    wait_until(lambda: not marked(str(node.workspace / "ran")), 15, "its end")
    proxy.admit()
    node.gateway.wait_for_node(node.node_id, seconds=40)
    assert waiting.result(60)["output"] == "begun\nwent\n"
    assert ran(node.workspace) == 1
    assert over(node, session)["exitCode"] == 5
    assert act(node, "log", session, limit=1000)["log"].split("\n") == counted(100)


def test_a_link_cut_again_and_again_repeats_nothing(
    far: tuple[NodeProcess, Proxy], threads: ThreadPoolExecutor
) -> None:
    node, proxy = far
    waiting = threads.submit(node.ok, "Bash", {"command": stepping(node.workspace)}, timeout=60)
    wait_until(lambda: ran(node.workspace), 15, "its start")
    for _ in range(3):
        before = joined_at(node)
        proxy.cut()
        wait_until(lambda before=before: joined_at(node) != before, 40, "the next link")
    (node.workspace / "go").touch()
    assert waiting.result(60)["exitCode"] == 3
    assert ran(node.workspace) == 1


def test_a_stopped_gateway_finds_the_result_when_it_continues(pair: NodeProcess, threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(pair.ok, "Bash", {"command": stepping(pair.workspace)})
    wait_until(lambda: ran(pair.workspace), 15, "its start")
    assert pair.gateway.process is not None
    os.kill(pair.gateway.process.pid, signal.SIGSTOP)
    try:
        (pair.workspace / "go").touch()
        wait_until(lambda: not marked(str(pair.workspace / "ran")), 15, "its end")
    finally:
        os.kill(pair.gateway.process.pid, signal.SIGCONT)
    assert waiting.result(60)["output"] == "begun\nwent\n"
    assert ran(pair.workspace) == 1


# -- `farhand up` --------------------------------------------------------------------------------------------------


def test_the_node_of_up_is_started_again_and_finds_its_sessions(tmp_path: Path) -> None:
    mark = f"mark-{uuid.uuid4()}"
    arguments = ("--workspace", str(tmp_path / "work"))
    with GatewayProcess(tmp_path / "home", *arguments, command="up", env={"UP_MARK": mark}) as gateway:
        try:
            [entry] = wait_until(
                lambda: [node for node in gateway.get("/v1/nodes")["nodes"] if node["online"]], 30, "the node"
            )
            name = entry["node_id"]
            shell = gateway.invoke(f"{name}__Bash", {"command": "pwd; echo up; sleep 1000", "background": True})
            session = shell["result"]["sessionId"]
            assert gateway.process is not None
            children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
            [child] = [pid for pid in children if b"\0node\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(int(child), signal.SIGKILL)
            wait_until(
                lambda: [
                    node for node in gateway.get("/v1/nodes")["nodes"] if node["connected_at"] > entry["connected_at"]
                ],
                30,
                "its next life",
            )

            def polled() -> Any:
                poll = gateway.invoke(f"{name}__Process", {"action": "poll", "sessionId": session})["result"]
                assert poll["running"] is True
                return poll["tail"] == f"{tmp_path}/work\nup\n"

            wait_until(polled, 20, "what the command printed")
        finally:
            gateway.stop()
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_up_that_stops_as_a_whole_ends_what_is_waited_for(tmp_path: Path) -> None:
    tree = Tree()
    arguments = ("--workspace", str(tmp_path / "work"))
    with GatewayProcess(tmp_path / "home", *arguments, command="up") as gateway:
        gateway.wait_for_node(default_node_id(), seconds=30)
        gateway.invoke(f"{default_node_id()}__Bash", {"command": tree.command}, background=True)
        tree.grown()
        assert gateway.stop() == 0
        tree.gone()


def test_ctrl_c_while_the_node_of_up_starts_does_not_cause_a_crash(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", command="up")
    gateway.start()
    assert gateway.process is not None
    children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children")
    wait_until(lambda: children.read_text().strip() != "", 10, "the node to begin")
    os.killpg(gateway.process.pid, signal.SIGINT)  # what a terminal does: to all that run in its foreground
    assert gateway.process.wait(60) == 0
    gateway.stop()
    said = gateway.log.read_text()
    assert "Traceback" not in said and "starting it again" not in said
