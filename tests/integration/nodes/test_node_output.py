"""What a command prints while it runs, the jobs of all nodes, and cancelling: over HTTP, with a real node."""

from __future__ import annotations

import http.client
import json
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, marked, wait_until

JOB = {
    "node_id",
    "job_id",
    "call_id",
    "command",
    "workdir",
    "pid",
    "running",
    "background",
    "started_at",
    "ended_at",
    "exit_code",
    "signal",
    "lost",
    "output_bytes",
    "size",
}


class Steps:
    """A command that prints a line whenever it is let go on."""

    def __init__(self, node: NodeProcess) -> None:
        self.folder = node.workspace / f"steps-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        self._steps = 0

    def command(self, steps: int, end: str = "") -> str:
        wait = f"until test -e {self.folder}/$i; do sleep 0.02; done"
        return f"for i in $(seq {steps}); do {wait}; echo step $i ☃; done; {end}"

    def go(self) -> None:
        self._steps += 1
        (self.folder / str(self._steps)).touch()


@pytest.fixture
def steps(hands: NodeProcess) -> Steps:
    return Steps(hands)


@contextmanager
def streaming(gateway: GatewayProcess, path: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {gateway.token}"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


def job_of(gateway: GatewayProcess, call_id: str) -> Any:
    def found() -> Any:
        return next((job for job in gateway.get("/v1/jobs")["jobs"] if job["call_id"] == call_id), None)

    return wait_until(found, 15, f"the job of call {call_id}")


# -- the output of a call ------------------------------------------------------------------------------------------


def test_output_streams_while_the_command_runs(
    shared_gateway: GatewayProcess, hands: NodeProcess, steps: Steps
) -> None:
    call = hands.begin("Bash", {"command": steps.command(3)})
    with streaming(shared_gateway, f"/v1/calls/{call}/output") as response:
        assert response.headers["X-Offset"] == "0"
        for number in (1, 2, 3):
            steps.go()
            assert response.readline().decode() == f"step {number} ☃\n"  # the next is not let go before this came
        assert response.read() == b""
    assert hands.end_of(call)["result"]["output"] == "step 1 ☃\nstep 2 ☃\nstep 3 ☃\n"


def test_output_is_plain_bytes(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = hands.begin("Bash", {"command": r"printf 'a\377\000\342'"})
    answer = shared_gateway.request("GET", f"/v1/calls/{call}/output")
    assert answer.status == 200 and answer.body == b"a\xff\x00\xe2"
    assert answer.headers["content-type"] == "application/octet-stream"


def test_output_resumes_at_a_byte(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = hands.begin("Bash", {"command": "printf 0123456789"})
    hands.end_of(call)
    for offset in (0, 1, 9, 10):
        answer = shared_gateway.request("GET", f"/v1/calls/{call}/output?offset={offset}")
        assert answer.body == b"0123456789"[offset:] and answer.headers["x-offset"] == str(offset)


def test_a_reader_that_reconnects_misses_and_repeats_nothing(
    shared_gateway: GatewayProcess, hands: NodeProcess, steps: Steps
) -> None:
    call = hands.begin("Bash", {"command": steps.command(4)})
    seen = b""
    for _ in range(4):
        with streaming(shared_gateway, f"/v1/calls/{call}/output?offset={len(seen)}") as response:
            steps.go()
            seen += response.readline()
    assert seen.decode() == "".join(f"step {number} ☃\n" for number in (1, 2, 3, 4))
    hands.end_of(call)


def test_without_waiting_the_answer_is_what_is_there(
    shared_gateway: GatewayProcess, hands: NodeProcess, steps: Steps
) -> None:
    call = hands.begin("Bash", {"command": steps.command(2)})
    with streaming(shared_gateway, f"/v1/calls/{call}/output") as response:
        steps.go()
        response.readline()
        answer = shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0")
        assert answer.body.decode() == "step 1 ☃\n"
        assert (answer.headers["x-next-offset"], answer.headers["x-over"]) == ("11", "false")
        empty = shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0&offset=11")
        assert (empty.body, empty.headers["x-next-offset"], empty.headers["x-over"]) == (b"", "11", "false")
        steps.go()
        response.read()
    hands.end_of(call)
    rest = shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0&offset=11")
    assert rest.body.decode() == "step 2 ☃\n"
    assert (rest.headers["x-next-offset"], rest.headers["x-over"]) == ("22", "true")


def test_the_whole_stream_can_be_read_when_the_result_kept_only_its_tail(
    shared_gateway: GatewayProcess, hands: NodeProcess
) -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    (hands.workspace / "long.txt").write_text(text)
    call = hands.begin("Bash", {"command": "cat long.txt"})
    assert hands.end_of(call)["result"]["truncated"] is True
    assert shared_gateway.request("GET", f"/v1/calls/{call}/output").body == text.encode()
    at = text.index("line 77777\n")
    assert shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0&offset={at}").body == text[at:].encode()


def test_output_of_a_command_still_to_print_waits_for_it(
    shared_gateway: GatewayProcess, hands: NodeProcess, steps: Steps
) -> None:
    call = hands.begin("Bash", {"command": steps.command(1, "exit 3")})
    answer = shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0")
    assert answer.status in (200, 404)  # the command may not have started yet
    steps.go()
    assert shared_gateway.request("GET", f"/v1/calls/{call}/output").body.decode() == "step 1 ☃\n"


@pytest.mark.parametrize("call", ["nonsense", "00000000-0000-7000-8000-000000000000"])
def test_output_of_an_unknown_call_is_not_found(shared_gateway: GatewayProcess, hands: NodeProcess, call: str) -> None:
    answer = shared_gateway.request("GET", f"/v1/calls/{call}/output")
    assert answer.status == 404 and answer.json()["error"]["code"] == "not_found"


def test_output_of_a_call_without_a_command_is_not_found(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = shared_gateway.invoke("hands__Glob", {"pattern": "*"})["request_id"]
    assert shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0").status == 404


@pytest.mark.parametrize("offset", ["-1", "x", "1.5"])
def test_an_invalid_offset_is_refused(shared_gateway: GatewayProcess, hands: NodeProcess, offset: str) -> None:
    call = shared_gateway.invoke("hands__Bash", {"command": "echo x"})["request_id"]
    assert shared_gateway.request("GET", f"/v1/calls/{call}/output?offset={offset}").status == 400


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_jobs_of_all_nodes_are_listed_newest_first(
    shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path: Path
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "second") as other:
        finished = hands.ok("Bash", {"command": "echo four; exit 4"})["sessionId"]
        running = other.ok("Bash", {"command": "sleep 1000", "background": True})
        answer = shared_gateway.get("/v1/jobs")
        jobs = {job["job_id"]: job for job in answer["jobs"]}
        assert answer["count"] == len(answer["jobs"]) and answer["unanswered"] == []
        assert [job["job_id"] for job in answer["jobs"][:2]] == [running["sessionId"], finished]
        assert all(set(job) == JOB for job in answer["jobs"])
        done, alive = jobs[finished], jobs[running["sessionId"]]
        assert (done["node_id"], done["command"], done["exit_code"]) == ("hands", "echo four; exit 4", 4)
        assert (done["running"], done["background"], done["output_bytes"]) == (False, False, 5)
        assert (alive["node_id"], alive["running"], alive["background"]) == ("second", True, True)
        assert (alive["pid"], alive["ended_at"], alive["exit_code"]) == (running["pid"], None, None)
        assert done["size"] is None and alive["size"] is None, "only a terminal has a size"
        assert {job["node_id"] for job in shared_gateway.get("/v1/jobs?node_id=second")["jobs"]} == {"second"}


def test_the_output_of_a_job_streams_and_resumes(
    shared_gateway: GatewayProcess, hands: NodeProcess, steps: Steps
) -> None:
    job = hands.ok("Bash", {"command": steps.command(2), "background": True})["sessionId"]
    with streaming(shared_gateway, f"/v1/nodes/hands/jobs/{job}/output") as response:
        for number in (1, 2):
            steps.go()
            assert response.readline().decode() == f"step {number} ☃\n"
        assert response.read() == b""
    answer = shared_gateway.request("GET", f"/v1/nodes/hands/jobs/{job}/output?offset=11&wait=0")
    assert answer.body.decode() == "step 2 ☃\n"
    assert (answer.headers["x-next-offset"], answer.headers["x-over"]) == ("22", "true")


@pytest.mark.parametrize("path", ["hands/jobs/nonsense", "hands/jobs/..%2F..%2Fx", "nobody/jobs/x"])
def test_the_output_of_an_unknown_job_is_not_found(
    shared_gateway: GatewayProcess, hands: NodeProcess, path: str
) -> None:
    assert shared_gateway.request("GET", f"/v1/nodes/{path}/output").status == 404


# -- cancelling ----------------------------------------------------------------------------------------------------


class Tree:
    """A command with detached descendants, all of which carry a mark."""

    def __init__(self) -> None:
        self.mark = f"mark-{uuid.uuid4()}"
        self.command = f"export MARK={self.mark}; setsid sleep 1000 & (setsid sleep 1000 &) ; sleep 1000; true"

    def grown(self) -> None:
        wait_until(lambda: len(marked(self.mark)) >= 4, 15, "the whole tree")

    def gone(self) -> None:
        wait_until(lambda: not marked(self.mark), 15, "the end of the tree")


def tells_what_was_ended(message: str) -> bool:
    found = re.search(r"ended (\d+) processes \(([^)]*)\)", message)
    return found is not None and int(found[1]) >= 4 and found[2].count("sleep ") == 3


def test_cancelling_a_call_ends_the_tree_and_says_what_was_ended(
    shared_gateway: GatewayProcess, hands: NodeProcess
) -> None:
    tree = Tree()
    call = hands.begin("Bash", {"command": tree.command})
    tree.grown()
    answer = shared_gateway.request("DELETE", f"/v1/calls/{call}")
    assert answer.status == 200
    record = answer.json()
    assert (record["state"], record["error"]["kind"]) == ("cancelled", "cancelled")
    assert tells_what_was_ended(record["error"]["message"]), record
    tree.gone()
    assert job_of(shared_gateway, call)["signal"] == "SIGTERM"


def test_hanging_up_ends_the_tree_and_says_what_was_ended(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    tree = Tree()
    body = json.dumps({"tool": "hands__Bash", "args": {"command": tree.command}}).encode()
    with socket.create_connection(("127.0.0.1", shared_gateway.port)) as line:
        head = f"POST /v1/tools/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {shared_gateway.token}\r\n"
        line.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        tree.grown()
        [running] = shared_gateway.get("/v1/calls?state=running&tool=hands__Bash")["calls"]
    record = hands.end_of(running["id"])
    assert (record["state"], record["error"]["kind"]) == ("cancelled", "cancelled")
    assert "disconnected" in record["error"]["message"] and tells_what_was_ended(record["error"]["message"]), record
    tree.gone()


def test_the_timeout_of_a_call_ends_the_tree_and_says_what_was_ended(
    shared_gateway: GatewayProcess, hands: NodeProcess
) -> None:
    tree = Tree()
    call = hands.begin("Bash", {"command": tree.command}, timeout_ms=3000)
    tree.grown()
    record = hands.end_of(call)
    assert (record["state"], record["error"]["kind"]) == ("timeout", "timeout")
    assert tells_what_was_ended(record["error"]["message"]), record
    tree.gone()


def test_a_tree_deaf_to_sigterm_is_ended_too(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    command = f"trap '' TERM INT HUP; : {mark}; while :; do sleep 0.1; done"
    call = hands.begin("Bash", {"command": command})
    wait_until(lambda: marked(mark), 15, "its start")
    assert shared_gateway.request("DELETE", f"/v1/calls/{call}").json()["state"] == "cancelled"
    wait_until(lambda: not marked(mark), 15, "its end")


def test_cancelling_a_call_leaves_the_other_commands_alone(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    kept = hands.ok("Bash", {"command": "sleep 1000", "background": True})["sessionId"]
    call = hands.begin("Bash", {"command": "sleep 1000"})
    job_of(shared_gateway, call)
    shared_gateway.request("DELETE", f"/v1/calls/{call}")
    assert hands.ok("Process", {"action": "poll", "sessionId": kept})["running"] is True


def test_a_backgrounded_command_outlives_its_call(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    """Its call ended when it said `running`; there is nothing left to cancel."""
    answer = shared_gateway.invoke("hands__Bash", {"command": "sleep 1000", "background": True})
    record = shared_gateway.request("DELETE", f"/v1/calls/{answer['request_id']}").json()
    assert record["state"] == "ok"
    session = answer["result"]["sessionId"]
    assert hands.ok("Process", {"action": "poll", "sessionId": session})["running"] is True


def test_a_yielding_command_is_ended_when_its_call_is_cancelled(
    shared_gateway: GatewayProcess, hands: NodeProcess
) -> None:
    tree = Tree()
    call = hands.begin("Bash", {"command": tree.command, "yieldMs": 120_000})
    tree.grown()
    record = shared_gateway.request("DELETE", f"/v1/calls/{call}").json()
    assert record["state"] == "cancelled" and tells_what_was_ended(record["error"]["message"]), record
    tree.gone()


def test_the_output_of_a_cancelled_call_is_kept(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = hands.begin("Bash", {"command": "echo printed before; sleep 1000"})
    with streaming(shared_gateway, f"/v1/calls/{call}/output") as response:
        assert response.readline() == b"printed before\n"
        shared_gateway.request("DELETE", f"/v1/calls/{call}")
        assert response.read() == b""
    answer = shared_gateway.request("GET", f"/v1/calls/{call}/output?wait=0")
    assert (answer.body, answer.headers["x-over"]) == (b"printed before\n", "true")


def test_a_restart_of_the_node_ends_no_command_that_is_waited_for(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    tree = Tree()
    with NodeProcess(shared_gateway, tmp_path, "leaving") as node:
        kept = node.ok("Bash", {"command": "sleep 1000", "background": True})
        call = node.begin("Bash", {"command": tree.command})
        tree.grown()
        assert node.stop() == 0
        assert shared_gateway.get(f"/v1/calls/{call}")["state"] == "running"
        assert Path(f"/proc/{kept['pid']}").exists()
        tree.grown()
        node.start()
        record = shared_gateway.request("DELETE", f"/v1/calls/{call}").json()
        assert record["state"] == "cancelled", record
        tree.gone()
        assert Path(f"/proc/{kept['pid']}").exists()


def test_output_without_an_end_is_answered_in_parts(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    started = hands.ok("Bash", {"command": "yes 0123456789abcde", "background": True})
    path = f"/v1/nodes/{hands.node_id}/jobs/{started['sessionId']}/output"

    def size() -> int:
        jobs = shared_gateway.get(f"/v1/jobs?node_id={hands.node_id}")["jobs"]
        return int(next(job["output_bytes"] for job in jobs if job["job_id"] == started["sessionId"]))

    try:
        wait_until(lambda: size() > 20 * 1024 * 1024, 60, "much output")
        for headers in ({}, {"Range": "bytes=0-99999999999"}):
            answer = shared_gateway.request("GET", f"{path}?wait=0", headers=headers)
            assert answer.status in (200, 206) and len(answer.body) <= 9 * 1024 * 1024, (
                answer.status,
                len(answer.body),
            )
            assert answer.headers["x-over"] == "false"
            # What is overwritten meanwhile is left out.
            assert int(answer.headers["x-next-offset"]) >= int(answer.headers["x-offset"]) + len(answer.body)
    finally:
        hands.ok("Process", {"action": "kill", "sessionId": started["sessionId"]})
