"""What one gateway of a fleet began, another one shows, continues, answers and ends."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from farhand.gateway.messaging.hooks import signature
from tests.integration.fleet.conftest import Fleet
from tests.integration.mcp.test_tasks import LEGACY, Client
from tests.support.channel_servers import TelegramServer
from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, Reply, Request, calls, text
from tests.support.terminal import TerminalViewer

SETTINGS = """
[policy]
[[policy.rules]]
name = "writes are asked about"
decision = "ask"
tool = ["Write"]

[channels.telegram]
token = "{token}"
url = "{url}"
policy = "pairing"
"""


class Scripted:
    """A model that answers by the last message: the function in `replies` whose key it contains."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}

    def answer(self, request: Request) -> Reply:
        said = " ".join(str(one.get("content")) for one in request.messages if one["role"] == "user")
        for key, replies in reversed(self.replies.items()):
            if key in said and replies:
                return replies.pop(0)
        return text("nothing to say")


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def telegram() -> Iterator[TelegramServer]:
    with TelegramServer() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
    postgres: PostgresServer,
    nats: NatsServer,
    bucket: tuple[str, str],
    scripted: Scripted,
    telegram: TelegramServer,
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("anywhere")
    with ModelServer(answer=scripted.answer) as model:
        env = fleet_environment(postgres.new_database(), nats, bucket, folder.name) | model.environment
        env["FARHAND_GATEWAY_PUBLIC_URL"] = "https://fleet.example"
        env["FARHAND_GATEWAY_HOSTS"] = "fleet.example"
        for name in ("one", "two"):
            (folder / name).mkdir(mode=0o700)
            settings = SETTINGS.format(token=telegram.TOKEN, url=telegram.url)
            (folder / name / "farhand.toml").write_text(settings)
        with GatewayProcess(folder / "one", env=env) as one, GatewayProcess(folder / "two", env=env) as two:
            yield [one, two]


# -- calls ------------------------------------------------------------------------------------------------


def asked(gateway: GatewayProcess, call_id: str) -> Any:
    def found() -> Any:
        answer = gateway.request("GET", f"/v1/approvals/{call_id}")
        return answer.json() if answer.status == 200 else None

    return wait_until(found, 30, "the approval")


def ended(gateway: GatewayProcess, call_id: str) -> Any:
    def over() -> Any:
        found = gateway.get(f"/v1/calls/{call_id}")
        return found if found["state"] not in ("waiting", "running") else None

    return wait_until(over, 60, "the end of the call")


@pytest.mark.parametrize(("decision", "state"), [("approve", "ok"), ("deny", "denied")])
def test_a_call_that_waits_on_one_is_answered_on_the_other(
    fleet: Fleet, hands_of_one: NodeProcess, decision: str, state: str
) -> None:
    one, two = fleet
    name = f"{decision}.txt"
    call_id = one.invoke("hands__Write", {"path": name, "content": "x"}, background=True)["request_id"]
    approval = asked(two, call_id)
    assert approval["id"] in [each["id"] for each in two.get("/v1/approvals?state=pending")["approvals"]]
    shown = two.get(f"/v1/calls/{call_id}")
    assert (shown["state"], shown["waits_for"], shown["approval_id"]) == ("waiting", "approval", approval["id"])
    body = {"decision": decision, "hash": approval["hash"]}
    assert two.request("POST", f"/v1/approvals/{approval['id']}", {**body, "hash": "0" * 64}).status == 409
    answer = two.request("POST", f"/v1/approvals/{approval['id']}", body)
    assert answer.status == 200, answer
    again = one.request("POST", f"/v1/approvals/{approval['id']}", body)
    assert again.status == 409 and b"answered before" in again.body
    assert ended(one, call_id)["state"] == state
    assert (hands_of_one.workspace / name).exists() is (decision == "approve")


def test_a_credential_cannot_approve_its_own_call_on_another_gateway(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    made = one.request("POST", "/v1/tokens", {"label": "x", "scopes": ["tools.exec", "approve", "read"]}).json()
    secret = made["token"]
    wanted = {"tool": "hands__Write", "args": {"path": "own", "content": "x"}, "background": True}
    call_id = one.request("POST", "/v1/tools/invoke", wanted, token=secret).json()["request_id"]
    approval = asked(two, call_id)
    body = {"decision": "approve", "hash": approval["hash"]}
    answer = two.request("POST", f"/v1/approvals/{approval['id']}", body, token=secret)
    assert answer.status == 403, answer
    cancelled = two.request("DELETE", f"/v1/calls/{call_id}").json()
    assert (cancelled["state"], cancelled["already_over"]) == ("cancelled", False)
    assert two.request("DELETE", f"/v1/calls/{call_id}").json()["already_over"] is True


def test_a_call_is_cancelled_on_the_other(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    call_id = one.invoke("hands__Bash", {"command": "sleep 300"}, background=True)["request_id"]
    answer = two.request("DELETE", f"/v1/calls/{call_id}").json()
    assert (answer["state"], answer["already_over"]) == ("cancelled", False)


def test_a_fan_out_reaches_nodes_of_both(fleet: Fleet, hands_of_one: NodeProcess, tmp_path: Path) -> None:
    one, two = fleet
    with NodeProcess(two, tmp_path / "feet", "feet"):
        one.wait_for_node("feet")
        body = {"tool": "Bash", "args": {"command": "echo here"}, "nodes": ["hands", "feet"]}
        for gateway in fleet:
            answer = gateway.request("POST", "/v1/tools/fanout", body).json()
            assert answer["ok"] and answer["counts"] == {"ok": 2}, answer


def test_a_terminal_is_used_on_both(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    command = "PS1='$ ' exec bash --norc --noprofile -i"
    terminal_id = one.request("POST", "/v1/terminals", {"node": "hands", "command": command}).json()["terminal_id"]
    with TerminalViewer(one, terminal_id, 0) as first, TerminalViewer(two, terminal_id, 0) as second:
        second.type("echo $((40+2))\r")
        first.sees("42")
        second.sees("42")
        assert terminal_id in [each["terminal_id"] for each in two.get("/v1/terminals")["terminals"]]
    assert two.request("DELETE", f"/v1/terminals/{terminal_id}").status == 200


# -- sessions ---------------------------------------------------------------------------------------------


def say(gateway: GatewayProcess, key: str, message: str, wait: float = 0) -> Any:
    answer = gateway.request("POST", f"/v1/sessions/{key}/messages", {"message": message, "wait_seconds": wait})
    assert answer.status == 200, answer
    return answer.json()


def followed(gateway: GatewayProcess, run_id: str) -> list[tuple[str, Any]]:
    """The events of a run until its end."""
    answer = gateway.request("GET", f"/v1/runs/{run_id}/events", timeout=120)
    assert answer.status == 200, answer
    found = []
    for block in answer.body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_a_run_is_watched_on_the_other(fleet: Fleet, scripted: Scripted) -> None:
    one, two = fleet
    gate = threading.Event()
    long = "a long answer " * 50_000  # larger than a message of the bus
    scripted.replies["watch me"] = [text("begun " + long, pieces=2, gate=gate, before_gate=2)]
    run_id = say(one, "watched", "watch me")["run_id"]
    wait_until(lambda: two.get("/v1/sessions/watched")["state"] == "running", 30, "the run on the other")
    assert two.get(f"/v1/runs/{run_id}")["state"] == "running"
    threading.Timer(0.5, gate.set).start()
    seen = [followed(gateway, run_id) for gateway in (two, one)]
    for events in seen:
        assert events[-1][0] == "ended" and events[-1][1]["state"] == "ok"
        assert events[-1][1]["reply"].startswith("begun a long answer")
    assert [kind for kind, _ in seen[0]] == [kind for kind, _ in seen[1]]


def test_a_message_to_a_session_that_the_other_works_on_is_answered(fleet: Fleet, scripted: Scripted) -> None:
    one, two = fleet
    gate = threading.Event()
    scripted.replies["first message"] = [text("first answer", gate=gate)]
    run_id = say(one, "shared", "first message")["run_id"]
    wait_until(lambda: two.get("/v1/sessions/shared")["run_id"] == run_id, 30, "the run")
    scripted.replies["second message"] = [text("second answer")]
    second = say(two, "shared", "second message")
    assert second["state"] == "running"
    gate.set()
    assert followed(two, second["run_id"])[-1][1]["state"] == "ok"
    assert followed(two, run_id)[-1][1]["reply"] == "first answer"
    said = [entry["content"] for entry in one.get("/v1/sessions/shared/history")["messages"]]
    assert said.count("second message") == 1
    status = say(two, "shared", "/status", wait=30)
    assert "idle" in status["reply"], status


def test_a_run_is_stopped_on_the_other(fleet: Fleet, hands_of_one: NodeProcess, scripted: Scripted) -> None:
    one = fleet[0]
    for number, gateway in enumerate(fleet):
        scripted.replies[f"sleep {number}"] = [calls(("hands__Bash", {"command": "sleep 300"}))]
        run_id = say(gateway, f"stopped{number}", f"sleep {number}")["run_id"]
        wait_until(lambda: one.get(f"/v1/sessions/stopped{number}")["state"] == "running", 30, "the run")  # noqa: B023
        other = fleet[1 - number]
        answer = other.request("POST", f"/v1/sessions/stopped{number}/stop", {})
        assert answer.status == 200 and answer.json()["stopped"] == [run_id], answer
        assert other.get(f"/v1/runs/{run_id}")["state"] == "stopped"


def test_a_hook_made_on_one_is_posted_to_on_the_other(fleet: Fleet, scripted: Scripted) -> None:
    one, two = fleet
    assert one.request("PUT", "/v1/hooks/deploy", {"secret": "hook-secret"}).status in (200, 201)
    wait_until(lambda: "deploy" in str(two.get("/v1/hooks")), 30, "the hook")
    scripted.replies["posted to two"] = [text("taken")]
    body = b"posted to two"
    headers = {"X-Webhook-Signature": signature("hook-secret", body)}
    assert two.request("POST", "/hooks/deploy", body, token=None, headers=headers).status == 202
    sessions = wait_until(
        lambda: [each for each in one.get("/v1/sessions")["sessions"] if "hook:deploy" in each["session_key"]],
        30,
        "the session of the hook",
    )
    key = sessions[0]["session_key"]
    wait_until(lambda: "taken" in str(one.get(f"/v1/sessions/{key}/history")), 30, "the answer")
    assert one.request("DELETE", "/v1/hooks/deploy").status in (200, 204)
    wait_until(lambda: two.request("POST", "/hooks/deploy", b"x", token=None).status == 404, 30, "the end of the hook")


def test_a_polled_channel_is_listened_to_by_one_gateway(
    fleet: Fleet, scripted: Scripted, telegram: TelegramServer
) -> None:
    two = fleet[1]
    telegram.write(7, "let me in")
    pairing = wait_until(lambda: two.get("/v1/channels/pairings")["pairings"], 60, "the request")[0]
    assert two.request("POST", f"/v1/channels/pairings/{pairing['code']}/approve", {}).status == 200
    wait_until(lambda: any("You can talk" in said.text for said in telegram.said), 60, "the answer to the request")
    scripted.replies["good morning"] = [text("and a good day")]
    telegram.write(7, "good morning")
    wait_until(lambda: any("and a good day" in said.text for said in telegram.said), 60, "the answer")
    assert [said.text for said in telegram.said].count("and a good day") == 1


# -- access -----------------------------------------------------------------------------------------------


def test_a_token_of_one_is_known_to_the_other_at_once(fleet: Fleet) -> None:
    one, two = fleet
    for _ in range(5):
        made = one.request("POST", "/v1/tokens", {"label": "x", "scopes": ["read"]}).json()
        assert two.request("GET", "/v1/nodes", token=made["token"]).status == 200
    assert two.request("GET", "/v1/nodes", token="fhc_" + "0" * 40).status == 401


def test_a_sign_in_link_works_once_and_its_session_on_both(fleet: Fleet) -> None:
    one, two = fleet
    path = one.request("POST", "/v1/signin", {}).json()["path"]
    answer = two.request("GET", path, token=None)
    assert answer.status == 303, answer
    assert one.request("GET", path, token=None).status == 401
    page = answer.headers["location"].partition("#page=")[2]
    headers = {"Cookie": answer.headers["set-cookie"].partition(";")[0], "X-Farhand-Page": page}
    for gateway in (one, two):
        assert gateway.request("GET", "/v1/nodes", token=None, headers=headers).status == 200
    assert one.request("POST", "/v1/signout", {}, token=None, headers=headers).status == 200
    wait_until(lambda: two.request("GET", "/v1/nodes", token=None, headers=headers).status == 401, 30, "the end")


def test_a_pairing_code_of_one_is_used_on_the_other_once(fleet: Fleet) -> None:
    one, two = fleet
    code = one.request("POST", "/v1/pairings", {}).json()["code"]
    body = {"code": code, "node_id": "newcomer"}
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda gateway=gateway: statuses.append(  # type: ignore[misc]
                gateway.request("POST", "/v1/pair", body, token=None).status
            )
        )
        for gateway in (two, one, two, one)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses)[0] == 201 and sorted(statuses).count(201) == 1, statuses


def test_a_secret_set_on_one_is_used_on_the_other(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    assert one.request("PUT", "/v1/secrets/FLEET_KEY", {"value": "s3cr3t-of-the-fleet"}).status == 200
    command = {"command": "printf %s '{{secret:FLEET_KEY}}' | wc -c"}

    def used() -> bool:
        answer = two.invoke("hands__Bash", command)
        return bool(answer["ok"]) and "19" in str(answer["result"])

    wait_until(used, 30, "the secret on the other gateway")


def test_an_oauth_client_goes_from_one_to_the_other(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    headers = {"Host": "fleet.example"}
    callback = "http://127.0.0.1:9/callback"
    client = one.request(
        "POST", "/oauth/register", {"client_name": "c", "redirect_uris": [callback]}, token=None, headers=headers
    ).json()["client_id"]
    verifier = "v" * 64
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    resource = "https://fleet.example/mcp"
    query = urlencode(
        {
            "response_type": "code",
            "client_id": client,
            "redirect_uri": callback,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
            "resource": resource,
        }
    )
    consent = two.request(
        "POST", "/v1/oauth/consent", {"request": query, "allow": True, "nodes": ["hands"]}, headers=headers
    )
    assert consent.status == 200, consent
    code = parse_qs(urlsplit(consent.json()["redirect"]).query)["code"][0]
    form = urlencode(
        {
            "grant_type": "authorization_code",
            "client_id": client,
            "code": code,
            "redirect_uri": callback,
            "code_verifier": verifier,
            "resource": resource,
        }
    ).encode()
    kind = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    tokens = one.request("POST", "/oauth/token", form, token=None, headers=kind).json()
    for gateway in (two, one):
        listing = Client(gateway, LEGACY, token=tokens["access_token"]).result("tools/list")
        assert listing["tools"]
    assert two.request("POST", "/oauth/token", form, token=None, headers=kind).status == 400, "a code is used once"
    wait_until(
        lambda: one.request("POST", "/mcp", {}, token=tokens["access_token"]).status == 401, 30, "the revocation"
    )


# -- MCP --------------------------------------------------------------------------------------------------


def test_an_mcp_session_is_used_on_both(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    client = Client(one, LEGACY, elicitation={})
    client.gateway = two
    assert client.result("tools/list")["tools"]
    task = client.result("tools/call", name="hands__Bash", arguments={"command": "echo from a task"}, task={})["task"]
    client.gateway = one
    assert "from a task" in str(client.result("tasks/result", taskId=task["taskId"]))
    answers: list[Any] = []

    def call() -> None:
        body = {
            "jsonrpc": "2.0",
            "id": 4711,
            "method": "tools/call",
            "params": {"name": "hands__Bash", "arguments": {"command": "sleep 301"}},
        }
        answers.append(one.request("POST", "/mcp", body, headers=client.headers, timeout=120))

    thread = threading.Thread(target=call)
    thread.start()
    running = "/v1/calls?state=running&tool=hands__Bash"
    call_id = wait_until(
        lambda: next((each["id"] for each in two.get(running)["calls"] if "301" in str(each["args"])), None),
        30,
        "the call",
    )
    body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 4711}}
    assert two.request("POST", "/mcp", body, headers=client.headers).status == 202
    thread.join(60)
    assert answers and ended(two, call_id)["state"] == "cancelled"
    assert two.request("DELETE", "/mcp", headers=client.headers).status == 200
    wait_until(lambda: one.request("GET", "/mcp", headers=client.headers).status == 404, 30, "the end of the session")


def test_an_mcp_client_cannot_answer_the_approvals_of_others(fleet: Fleet, hands_of_one: NodeProcess) -> None:
    one, two = fleet
    call_id = one.invoke("hands__Write", {"path": "forged", "content": "x"}, background=True)["request_id"]
    approval = asked(two, call_id)
    made = one.request("POST", "/v1/tokens", {"label": "x", "scopes": ["tools.exec"]}).json()
    client = Client(two, LEGACY, token=made["token"], elicitation={})
    result = {"action": "accept", "content": {"decision": "approve"}}
    forged = {"jsonrpc": "2.0", "id": f"farhand-approval:{approval['id']}", "result": result}
    assert two.request("POST", "/mcp", forged, headers=client.headers, token=made["token"]).status == 202
    assert one.get(f"/v1/approvals/{approval['id']}")["state"] == "pending"
    assert one.request("DELETE", f"/v1/calls/{call_id}").status == 200


def test_an_mcp_server_added_on_one_is_used_on_the_other(fleet: Fleet, tmp_path: Path) -> None:
    one, two = fleet
    command = [sys.executable, "-m", "tests.support.mcp_server", str(tmp_path)]
    root = str(Path(__file__).parents[3])
    added = one.request("POST", "/v1/mcp/servers", {"name": "greeter", "command": command, "env": {"PYTHONPATH": root}})
    assert added.status in (200, 201), added

    def greeted() -> bool:
        answer = two.invoke("greeter__greet", {"name": "fleet"})
        return bool(answer["ok"]) and "Hello fleet" in str(answer["result"])

    wait_until(greeted, 60, "the server on the other gateway")
    assert two.request("DELETE", "/v1/mcp/servers/greeter").status in (200, 204)
    wait_until(lambda: "greeter" not in str(one.get("/v1/mcp/servers")), 30, "the end of the server")


def test_commands_read_the_shared_store(fleet: Fleet, scripted: Scripted) -> None:
    one, two = fleet
    scripted.replies["replay me"] = [text("again and again")]
    run_id = say(one, "replayed", "replay me", wait=60)["run_id"]

    def farhand(*words: str) -> Any:
        done = run_process([*FARHAND, *words, "--json"], env=two.environment)
        return json.loads(done.stdout or "{}") | {"status": done.returncode, "said": done.stderr}

    replayed = farhand("replay", run_id)
    assert replayed["identical"] and replayed["status"] == 0, replayed
    checks = {check["name"]: check for check in farhand("doctor")["checks"]}
    for name in ("store", "journal", "history", "fleet"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "PostgreSQL" in checks["store"]["message"] and PostgresServer.PASSWORD not in str(checks)
    metrics = [gateway.request("GET", "/metrics").body.decode() for gateway in fleet]
    ids = {each["id"] for each in one.get("/v1/fleet")["replicas"]}
    found = [set(re.findall(r'^farhand_calls_open{replica="([^"]+)"}', text, re.M)) for text in metrics]
    assert found[0] | found[1] == ids and all(len(each) == 1 for each in found)


def test_settings_that_differ_are_shown(fleet: Fleet) -> None:
    one, two = fleet
    assert len({each["settings"] for each in one.get("/v1/fleet")["replicas"]}) == 1
    path = two.home / "farhand.toml"
    before = path.read_text()
    path.write_text(before + '\n[[policy.rules]]\nname = "more"\ndecision = "deny"\ntool = ["Nothing"]\n')
    try:
        wait_until(
            lambda: len({each["settings"] for each in one.get("/v1/fleet")["replicas"]}) == 2, 30, "the difference"
        )
    finally:
        path.write_text(before)


def test_a_client_that_hangs_up_ends_nothing_on_the_other(fleet: Fleet, scripted: Scripted) -> None:
    one, two = fleet
    gate = threading.Event()
    scripted.replies["left alone"] = [text("still answered", gate=gate)]
    run_id = say(one, "left", "left alone")["run_id"]
    connection = http.client.HTTPConnection("127.0.0.1", int(two.url.rpartition(":")[2]), timeout=30)
    connection.request("GET", f"/v1/runs/{run_id}/events", headers={"Authorization": f"Bearer {two.token}"})
    assert connection.getresponse().status == 200
    connection.close()
    gate.set()
    assert followed(two, run_id)[-1][1]["reply"] == "still answered"
