"""Attempts to bypass the policy, approvals and identities; each must fail."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.integration.calls.test_principal import over, revoke, token
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, text

RULES = """
[[policy.rules]]
name = "production is closed"
decision = "deny"
node = ["prod", "tag:closed"]

[[policy.rules]]
name = "hooks run nothing"
decision = "deny"
origin = "hook:*"
tool = "exec"

[[policy.rules]]
name = "marked commands are asked about"
decision = "ask"
args = { command = "*ask-me*" }
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("attacks") / "home"
    write_policy(home, RULES)
    yield from open_house(home)


@pytest.fixture(scope="module")
def hands(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node


@pytest.fixture(scope="module")
def prod(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("prod"), "prod") as node:
        yield node


def invoke(gateway: GatewayProcess, secret: str, tool: str, args: Any, **more: Any) -> Any:
    return gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more}, token=secret).json()


# -- credentials that end while something runs ----------------------------------------------------------------


@pytest.mark.parametrize(("tool", "how"), [("hands__Bash", "revoked"), ("exec", "expired")])
def test_a_running_call_ends_with_its_token(house: House, hands: NodeProcess, tool: str, how: str) -> None:
    gateway = house.gateway
    lasts = {"expires_seconds": 2} if how == "expired" else {}
    name, secret = token(gateway, "tools.exec", **lasts)
    begun = hands.workspace / f"begun-{uuid.uuid4().hex[:8]}"
    args = {"command": f"touch {begun}; sleep 600"}
    made = invoke(gateway, secret, tool, args, background=True)
    wait_until(begun.exists, 20, "the command")
    if how == "revoked":
        revoke(gateway, name)
    ended = wait_until(lambda: over(gateway, made["request_id"]), 20, "the end of the call")
    assert ended["state"] == "cancelled" and f"the token {name}" in ended["error"]["message"], ended


def test_a_running_call_whose_token_ends_while_the_gateway_is_down(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        name, secret = token(gateway, "tools.exec", expires_seconds=3)
        begun = node.workspace / "begun"
        made = invoke(gateway, secret, "hands__Bash", {"command": f"touch {begun}; sleep 600"}, background=True)
        wait_until(begun.exists, 20, "the command")
        gateway.kill()
        gateway.start()
        ended = wait_until(lambda: over(gateway, made["request_id"]), 30, "the end of the call")
        assert ended["state"] == "cancelled" and f"the token {name} expired" in ended["error"]["message"], ended


def test_a_transfer_ends_with_its_token(house: House, hands: NodeProcess) -> None:
    gateway = house.gateway
    with (hands.workspace / "large").open("wb") as file:
        file.truncate(64 << 30)  # sparse: it takes long to read and no room
    name, secret = token(gateway, "tools.write", "read")
    body = {"source": f"hands:{file.name}", "destination": "gsv:copy", "background": True}
    begun = gateway.request("POST", "/v1/transfers", body, token=secret)
    assert begun.status == 202, begun
    revoke(gateway, name)

    def ended() -> Any:
        found = gateway.get(f"/v1/transfers/{begun.json()['id']}")
        return found if found["state"] != "running" else None

    found = wait_until(ended, 20, "the end of the transfer")
    assert found["state"] == "cancelled" and name in found["error"]["message"], found


# -- rules ----------------------------------------------------------------------------------------------------


def test_a_closed_node_is_not_reached_by_naming_it_in_arguments(
    house: House, hands: NodeProcess, prod: NodeProcess
) -> None:
    gateway = house.gateway
    (prod.workspace / "secret").write_text("4711")
    (hands.workspace / "evil").write_text("evil")
    inside = f"prod:{prod.workspace}"
    tries = [
        ("prod__Read", {"path": "secret"}),
        ("gsv__Transfer", {"source": f"{inside}/secret", "destination": "gsv:copy"}),
        ("gsv__Transfer", {"source": "prod:secret", "destination": "gsv:copy"}),
        ("gsv__Transfer", {"source": f"hands:{hands.workspace}/evil", "destination": f"{inside}/evil"}),
        ("gsv__Transfer", {"source": f"{inside}/secret", "destination": f"{inside}/copy"}),
        ("gsv__LogsGet", {"nodeId": "prod"}),
    ]
    for tool, args in tries:
        made = gateway.invoke(tool, args)
        assert made["ok"] is False and "production is closed" in made["error"]["message"], (tool, args, made)
    session = house.session(calls(*tries), text("done"))
    assert session.send("go")["reply"] == "done"
    reported = [one["content"] for one in session.history() if one["role"] == "tool"]
    assert len(reported) == len(tries) and all("production is closed" in one for one in reported), reported
    fan = gateway.request("POST", "/v1/fanout", {"tool": "Read", "args": {"path": "secret"}, "nodes": ["prod"]})
    assert "4711" not in fan.body.decode()
    assert not (prod.workspace / "evil").exists() and not (gateway.home / "agents/main/copy").exists()


def test_work_that_is_handed_on_keeps_its_origins(house: House) -> None:
    gateway = house.gateway
    hook, word = f"hook-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex[:8]
    job = {
        "name": word,
        "schedule": {"kind": "every", "everyHours": 5},
        "spec": {"mode": "task", "message": f"j{word}"},
    }
    house.script(
        f"[webhook:{hook}]",
        calls(
            ("exec", {"command": f"echo {word} itself"}),
            ("gsv__SessionSend", {"sessionKey": f"s{word}", "message": f"s{word}", "waitSeconds": 30}),
            ("gsv__Cron", {"action": "add", "job": job}),
        ),
        text("done"),
    )
    house.script(
        f"s{word}", calls(("gsv__SessionSend", {"sessionKey": f"t{word}", "message": f"t{word}"})), text("done")
    )
    house.script(f"t{word}", calls(("exec", {"command": f"echo {word} by session"})), text("done"))
    house.script(f"j{word}", calls(("exec", {"command": f"echo {word} by job"})), text("done"))
    assert gateway.request("PUT", f"/v1/hooks/{hook}", {"secret": "", "tools": "all"}).status == 201
    assert gateway.request("POST", f"/hooks/{hook}", b"hello", token=None).status == 202

    def added() -> Any:
        return next((one["id"] for one in gateway.get("/v1/cron")["jobs"] if one["name"] == word), None)

    job_id = wait_until(added, 30, "the job")
    ran = gateway.request("POST", f"/v1/cron/{job_id}/run", {"waitSeconds": 30}, timeout=60).json()
    assert ran["results"][0]["status"] == "ok", ran

    def commands() -> list[Any]:
        made = gateway.get("/v1/calls?limit=200&bodies=1")["calls"]
        return [one for one in made if one["tool"] == "exec" and word in json.dumps(one["args"])]

    made = wait_until(lambda: len(found := commands()) == 3 and found, 30, "the three commands")
    assert {one["state"] for one in made} == {"denied"}, made


def test_a_message_from_elsewhere_does_not_join_a_run(house: House) -> None:
    """What a run may do depends on its origin, so a message of another origin waits for a run of its own."""
    gateway = house.gateway
    session, word = house.session(), uuid.uuid4().hex[:8]
    house.script(session.key, calls(("exec", {"command": f"echo ask-me {session.key}"})), text("first"), text("second"))
    first = session.send("go", wait=0)["run_id"]

    def waiting() -> Any:
        every = gateway.get("/v1/calls?state=waiting&bodies=1")["calls"]
        return next((one for one in every if session.key in json.dumps(one["args"])), None)

    call = wait_until(waiting, 20, "the call")
    args = {"sessionKey": session.key, "message": f"from elsewhere {word}", "waitSeconds": 0}
    sent = gateway.invoke("gsv__SessionSend", args)["result"]
    assert answer(gateway, asked(gateway, call["id"])).status == 200
    assert session.outcome(first)["reply"] == "first"
    assert session.outcome(sent["runId"])["reply"] == "second"


# -- steering files -------------------------------------------------------------------------------------------

MOVE = "*** Begin Patch\n*** Update File: {source}\n*** Move to: {target}\n@@\n-mine\n+evil\n*** End Patch\n"


def test_no_move_link_or_spelling_writes_a_steering_file(house: House) -> None:
    gateway = house.gateway
    folder = gateway.home / "agents" / "main"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.txt").write_text("mine\n")
    (folder / "SOUL.md").write_text("the owner's\n")
    (folder / "skills").mkdir(exist_ok=True)
    (folder / "away").mkdir(exist_ok=True)
    (folder / "away" / "to-skills").symlink_to(folder / "skills")
    (folder / "away" / "up").symlink_to(folder)
    (gateway.home / "alias").symlink_to(folder)

    def tree() -> dict[str, bytes]:
        """What steers: files at the top of a workspace, and skills."""
        found = [*folder.glob("[!a-z]*"), *folder.glob("skills/**/*"), *gateway.home.glob("skill*/**/*")]
        return {str(path): path.read_bytes() for path in found if path.is_file()}

    before = tree()
    spellings = (
        "away/to-skills/x/SKILL.md",
        "away/up/SOUL.md",
        "away/../SOUL.md",
        "./skills/../SOUL.md",
        "//SOUL.md",
        "SOUL.md.",
        "SOUL.md ",
        "ＳＯＵＬ.md",
        "ſoul.md",
        f"{folder}/SOUL.md",
        f"{gateway.home}/alias/SOUL.md",
        f"/proc/self/root{folder}/SOUL.md",
        "agents/main/SOUL.md/../../../SOUL.md",
    )
    secret = token(gateway, "tools.read", "tools.write", "tools.exec")[1]
    for path in spellings:
        for tool, args in (
            ("write", {"file_path": path, "content": "evil"}),
            ("gsv__WriteFile", {"path": path, "content": "evil"}),
            ("create_file", {"path": path, "content": "evil"}),
            ("apply_patch", {"patch": MOVE.format(source="plain.txt", target=path)}),
        ):
            made = invoke(gateway, secret, tool, args)
            assert tree() == before, (tool, path, made)
        put = gateway.request("PUT", f"/v1/workspace/main/{quote(path)}", b"evil", token=secret)
        assert tree() == before, (path, put)


# -- identities -----------------------------------------------------------------------------------------------


def test_a_credential_cannot_approve_through_a_token_that_it_created(house: House) -> None:
    gateway = house.gateway

    def made(by: str, *scopes: str) -> str:
        answered = gateway.request("POST", "/v1/tokens", {"scopes": scopes}, token=by)
        assert answered.status == 201, answered
        return str(answered.json()["token"])

    first = token(gateway, "admin")[1]
    second, third = made(first, "approve"), made(first, "admin", "tools.exec")
    fourth, stranger = made(third, "approve"), token(gateway, "approve")[1]
    for caller in (first, third):
        waiting = invoke(gateway, caller, "exec", {"command": "echo ask-me"}, background=True)
        approval = asked(gateway, waiting["request_id"])
        for who in (first, second, third, fourth):
            assert answer(gateway, approval, token=who).status == 403
        assert answer(gateway, approval, token=stranger).status == 200


def test_a_token_without_read_sees_its_own_jobs_alone(house: House) -> None:
    gateway = house.gateway
    word = uuid.uuid4().hex[:8]
    house.script(f"owner-{word}", text(f"secret-{word}"))
    spec = {"mode": "task", "message": f"owner-{word}"}
    job = {"name": f"owner-{word}", "schedule": {"kind": "every", "everyHours": 5}, "spec": spec}
    added = gateway.invoke("gsv__Cron", {"action": "add", "job": job})["result"]["job"]["id"]
    gateway.request("POST", f"/v1/cron/{added}/run", {"waitSeconds": 30}, timeout=60)
    assert f"secret-{word}" in json.dumps(gateway.invoke("gsv__Cron", {"action": "runs"}))
    secret = token(gateway, "tools.exec", tools=["gsv__Cron", "cron"])[1]
    own = invoke(
        gateway,
        secret,
        "gsv__Cron",
        {"action": "add", "job": {**job, "name": f"own-{word}", "spec": {**spec, "message": "x"}}},
    )
    for tool, args in (
        ("gsv__Cron", {"action": "list", "limit": 500}),
        ("gsv__Cron", {"action": "runs", "limit": 500}),
        ("gsv__Cron", {"action": "runs", "jobId": added}),
        ("gsv__Cron", {"action": "run"}),
        ("cron", {"action": "list"}),
    ):
        reported = json.dumps(invoke(gateway, secret, tool, args))
        assert f"owner-{word}" not in reported and f"secret-{word}" not in reported, (args, reported)
        assert (own["result"]["job"]["id"] in reported) is (args["action"] == "list"), (args, reported)


def test_commands_of_a_closed_node_are_not_shown(house: House, hands: NodeProcess, prod: NodeProcess) -> None:
    gateway = house.gateway
    running = {
        name: gateway.invoke(tool, {"command": "sleep 600", "background": True})
        for name, tool in (("hands", "hands__Bash"), ("gsv", "exec"))
    }
    assert all(one["ok"] for one in running.values()), running
    # By the policy.
    for path in (
        "/v1/jobs?node_id=prod",
        "/v1/nodes/prod/metrics",
        "/v1/nodes/prod/logs",
        "/v1/nodes/prod/jobs/x/output",
    ):
        refused = gateway.request("GET", path)
        assert refused.status == 403 and "production is closed" in refused.body.decode(), (path, refused)
    # By the credential.
    body = {"scopes": ["read"], "nodes": ["hands"]}
    of_hands = gateway.request("POST", "/v1/tokens", body).json()["token"]
    of_a_tool = gateway.request("POST", "/v1/tokens", {"scopes": ["read"], "tools": ["hands__Read"]}).json()["token"]
    for secret, seen in ((None, {"hands", "gsv"}), (of_hands, {"hands"}), (of_a_tool, set())):
        given = {} if secret is None else {"token": secret}
        jobs = gateway.request("GET", "/v1/jobs", **given).json()["jobs"]
        assert {job["node_id"] for job in jobs if job["running"]} == seen, (seen, jobs)
        for node in ("hands", "gsv"):
            status = gateway.request("GET", f"/v1/jobs?node_id={node}", **given).status
            assert status == (200 if node in seen else 403), (node, seen)
        metrics = gateway.request("GET", "/v1/nodes/hands/metrics", **given).status
        assert metrics == (200 if "hands" in seen else 403)
        output = gateway.request("GET", f"/v1/calls/{running['gsv']['request_id']}/output?wait=0", **given).status
        assert output == (200 if "gsv" in seen else 403)
        assert gateway.request("GET", "/v1/terminals", **given).status == 200
    for job in gateway.get("/v1/jobs")["jobs"]:
        tool, named = ("process", "session_id") if job["node_id"] == "gsv" else ("hands__Process", "sessionId")
        gateway.invoke(tool, {"action": "kill", named: job["job_id"]})
