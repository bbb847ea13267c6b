"""Two gateways that share a store: either serves everything, wherever a node is connected."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import time
import uuid
from pathlib import Path

import websockets

from tests.integration.fleet.conftest import Fleet
from tests.integration.nodes.test_attacks_nodes import hello
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, wait_until


def test_both_show_all_nodes(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    for gateway in fleet:
        (node,) = [node for node in gateway.get("/v1/nodes")["nodes"] if node["node_id"] == "hands"]
        assert node["online"]


def test_a_call_reaches_a_node_of_the_other_gateway(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    for gateway in (one, two):
        answer = gateway.invoke("hands__Bash", {"command": "echo from $((40 + 2))"})
        assert answer["ok"] and "from 42" in str(answer["result"]), answer
    failed = two.invoke("hands__Read", {"path": "/nowhere"})
    assert not failed["ok"] and failed["error"]["kind"] == "not_found"


def test_a_result_larger_than_a_message_of_the_bus_arrives(
    fleet: Fleet, hands_of_one: NodeProcess, tmp_path: Path
) -> None:
    text = "x" * 100 + "\n"
    (tmp_path / "large").write_text(text * 30_000)
    answer = fleet[1].invoke("hands__Bash", {"command": f"cat {tmp_path / 'large'} | head -c 1500000"})
    assert answer["ok"], answer
    sent = "y" * 1_500_000
    written = fleet[1].invoke("hands__Write", {"path": str(tmp_path / "sent"), "content": sent})
    assert written["ok"], written
    assert (tmp_path / "sent").read_text() == sent


def test_many_calls_at_once(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: fleet[n % 2].invoke("hands__Bash", {"command": f"echo n{n}"}), range(60)))
    assert all(answer["ok"] and f"n{n}" in str(answer["result"]) for n, answer in enumerate(answers))


def test_the_output_of_a_running_command_is_live_and_it_can_be_cancelled(
    fleet: Fleet, hands_of_one: NodeProcess
) -> None:
    one, two = fleet
    begun = two.invoke("hands__Bash", {"command": "echo begun; sleep 300"}, background=True)
    call_id = begun["request_id"]

    def output(gateway: object) -> bool:
        answer = gateway.request("GET", f"/v1/calls/{call_id}/output?wait=false")  # type: ignore[attr-defined]
        return answer.status == 200 and b"begun" in answer.body

    for gateway in (two, one):
        wait_until(lambda: output(gateway), 30, "the output")  # noqa: B023
    cancelled = one.request("DELETE", f"/v1/calls/{call_id}")
    assert cancelled.status == 200, cancelled
    assert two.get(f"/v1/calls/{call_id}")["state"] == "cancelled"


def test_a_token_revoked_on_one_is_out_on_the_other(fleet: Fleet) -> None:
    one, two = fleet
    made = one.request("POST", "/v1/tokens", {"label": "x", "scopes": ["read"]}).json()
    secret = made["token"] if "token" in made else made["secret"]
    wait_until(lambda: two.request("GET", "/v1/nodes", token=secret).status == 200, 10, "the token on the other")
    identity = made.get("id") or made.get("token_id")
    assert one.request("DELETE", f"/v1/tokens/{identity}").status in (200, 204)
    began = time.monotonic()
    wait_until(lambda: two.request("GET", "/v1/nodes", token=secret).status == 401, 10, "the revocation")
    assert time.monotonic() - began < 20


def test_an_idempotency_key_counts_on_both(fleet: Fleet, hands_of_one: NodeProcess, tmp_path: Path) -> None:
    headers = {"Idempotency-Key": f"key-{tmp_path.name}"}
    command = {"command": f"echo once >> {tmp_path / 'count'}; echo done"}
    first = fleet[0].invoke("hands__Bash", command, headers=headers)
    again = fleet[1].invoke("hands__Bash", command, headers=headers)
    assert first["request_id"] == again["request_id"] and again["ok"]
    assert (tmp_path / "count").read_text() == "once\n"


def test_a_freeze_holds_on_both(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    assert two.request("POST", "/v1/freeze", {"reason": "test"}).status == 200
    wait_until(lambda: one.get("/v1/health")["frozen"], 10, "the freeze on the other")
    refused = one.invoke("hands__Bash", {"command": "id"})
    assert not refused["ok"]
    assert one.request("POST", "/v1/thaw", {}).status == 200
    wait_until(lambda: not two.get("/v1/health")["frozen"], 10, "the thaw on the other")
    assert two.invoke("hands__Bash", {"command": "echo on"})["ok"]


def test_events_of_one_are_seen_on_the_other_from_any_position(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    head = fleet[1].get("/v1/audit/head")["id"]
    fleet[0].invoke("hands__Bash", {"command": "echo seen"})
    end = fleet[0].get("/v1/audit/head")["id"]
    assert end > head
    seen = [event_ids(gateway, head, end) for gateway in fleet]
    assert seen[0] == seen[1] == list(range(head + 1, end + 1))


def event_ids(gateway: GatewayProcess, last: int, until: int) -> list[int]:
    """The ids of the events after one, as a stream with `Last-Event-ID` delivers them."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request(
        "GET", "/v1/events", headers={"Authorization": f"Bearer {gateway.token}", "Last-Event-ID": str(last)}
    )
    response = connection.getresponse()
    assert response.status == 200
    found: list[int] = []
    while not found or found[-1] < until:
        line = response.readline().decode()
        assert line, "the stream ended"
        if line.startswith("id:"):
            found.append(int(line[3:]))
    connection.close()
    return [number for number in found if number <= until]


def test_the_gateways_list_each_other(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    answers = [gateway.get("/v1/fleet") for gateway in fleet]
    assert [answer["count"] for answer in answers] == [2, 2]
    own = [[one["id"] for one in answer["replicas"] if one["self"]] for answer in answers]
    assert own[0] != own[1] and all(len(ids) == 1 for ids in own)
    nodes = {one["id"]: one["nodes"] for one in answers[0]["replicas"]}
    assert nodes[own[0][0]] == 1 and nodes[own[1][0]] == 0
    assert len({one["settings"] for one in answers[0]["replicas"]}) == 1


def test_the_command_lists_the_gateways(fleet: Fleet) -> None:
    done = run_process([*FARHAND, "fleet"], env=fleet[0].environment, check=True)
    assert "GATEWAY" in done.stdout and " *" in done.stdout and len(done.stdout.splitlines()) >= 3


def test_the_shared_journal_can_be_verified_from_every_home(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    for gateway in fleet:
        done = run_process([*FARHAND, "audit", "verify"], env=gateway.environment)
        assert done.returncode == 0 and "nothing was changed" in done.stdout, done.stdout + done.stderr


def test_answers_to_calls_that_were_never_made_do_not_block_others(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet

    async def flood() -> None:
        url = f"{one.ws_url}?token={SHARED_TOKEN}&node_id=evil"
        async with websockets.connect(url, ping_interval=None, compression=None, close_timeout=1) as socket:
            await socket.send(json.dumps(hello("evil")))
            await socket.recv()
            with contextlib.suppress(websockets.ConnectionClosed):
                for _ in range(10_000):
                    answer = {"type": "tool_response", "request_id": str(uuid.uuid4()), "ok": True, "result": 1}
                    await socket.send(json.dumps(answer))
                await asyncio.wait_for(socket.wait_closed(), 60)

    asyncio.run(flood())
    assert "connect again" in one.log.read_text()
    for gateway in fleet:
        assert gateway.invoke("hands__Bash", {"command": "echo well"})["ok"]
    assert "took over" not in two.log.read_text()


def test_a_new_token_is_known_behind_a_proxy_that_is_locked_out(fleet: Fleet) -> None:
    """Its first request to the gateway that did not make it was refused like a wrong token."""
    one, two = fleet
    proxied = {"X-Forwarded-For": "203.0.113.7"}
    wrong = [two.request("GET", "/v1/health", token="wrong", headers=proxied).status for _ in range(12)]
    assert wrong[0] == 401 and wrong[-1] == 429
    for _ in range(5):
        made = one.request("POST", "/v1/tokens", {"scopes": ["read"]}).json()["token"]
        assert two.request("GET", "/v1/health", token=made, headers=proxied).status == 200
