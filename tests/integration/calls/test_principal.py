"""Who acts, and on whose behalf: an agent never does more than the credential it works for, nor for longer."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, Session, open_house
from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, wait_until
from tests.support.model_server import calls, text

ASK = """
[[policy.rules]]
name = "marked commands are asked about"
decision = "ask"
args = { command = "*ask-me*" }
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("principal") / "home"
    write_policy(home, ASK)
    yield from open_house(home)


def token(gateway: GatewayProcess, *scopes: str, **more: Any) -> tuple[str, str]:
    """A new token: its id, and its secret."""
    made = gateway.request("POST", "/v1/tokens", {"scopes": list(scopes), **more})
    assert made.status == 201, made
    return made.json()["id"], made.json()["token"]


def revoke(gateway: GatewayProcess, token_id: str) -> None:
    assert gateway.request("DELETE", f"/v1/tokens/{token_id}").status == 200


def command(word: str) -> tuple[str, dict[str, str]]:
    return "exec", {"command": f"echo {word}"}


def waiting_call(house: House, session: Session, run_id: str) -> Any:
    """The approval that a run's only call waits for."""

    def found() -> Any:
        listed = house.gateway.get(f"/v1/calls?state=waiting&session_key=agent:main:{session.key}")["calls"]
        return listed[0] if listed else None

    def by_session() -> Any:
        every = house.gateway.get("/v1/calls?state=waiting")["calls"]
        return next((one for one in every if session.key in json.dumps(one["args"])), None)

    return wait_until(lambda: found() or by_session(), 20, f"the call of run {run_id}")


def start(house: House, secret: str, said: str = "go", **script: Any) -> tuple[Session, str, Any]:
    """A run on behalf of a token whose only call waits to be approved: its session, its id, and the call."""
    session = house.session()
    house.script(session.key, calls(command(f"ask-me {session.key}")), text("done"), **script)
    run_id = session.send(said, wait=0, token=secret)["run_id"]
    return session, run_id, waiting_call(house, session, run_id)


# -- approvals and the record ---------------------------------------------------------------------------------


def test_a_token_cannot_approve_what_its_agent_does_and_both_are_recorded(house: House) -> None:
    gateway = house.gateway
    name, secret = token(gateway, "chat", "tools.exec", "approve", "read")
    session, run_id, call = start(house, secret)
    assert (call["credential"], call["on_behalf_of"]) == ("agent:main", name)
    approval = asked(gateway, call["id"])
    assert (approval["credential"], approval["on_behalf_of"]) == ("agent:main", name)
    for decision in ("approve", "deny"):
        assert answer(gateway, approval, decision, token=secret).status == 403
    _, other = token(gateway, "approve")
    assert answer(gateway, approval, token=other).status == 200
    assert session.outcome(run_id)["state"] == "ok"
    shown = Command(gateway.home)("calls", "show", call["id"], "--json").json()
    assert (shown["credential"], shown["on_behalf_of"]) == ("agent:main", name)
    lines = Command(gateway.home)("log", "--session", session.key, "--json").out
    assert f'"on_behalf_of":"{name}"' in lines.replace(" ", ""), lines


def test_the_owner_approves_what_is_done_on_the_owners_behalf(house: House) -> None:
    session, run_id, call = start(house, "owner")
    assert call["on_behalf_of"] == "owner"
    assert answer(house.gateway, asked(house.gateway, call["id"])).status == 200
    assert session.outcome(run_id)["reply"] == "done"


# -- ends of credentials --------------------------------------------------------------------------------------


def test_revoking_a_token_stops_its_runs_and_refuses_its_waiting_calls(house: House) -> None:
    gateway = house.gateway
    name, secret = token(gateway, "chat", "tools.exec")
    session, run_id, call = start(house, secret)
    queued = session.send("and then", wait=0, token=secret)["run_id"]
    direct = {"tool": "exec", "args": {"command": "echo ask-me directly"}, "background": True}
    own = gateway.request("POST", "/v1/tools/invoke", direct, token=secret).json()
    _, kept_run, kept = start(house, "owner")
    revoke(gateway, name)
    for one in (run_id, queued):
        ended = session.outcome(one)
        assert ended["state"] == "stopped" and name in ended["error"]["message"], ended
    assert gateway.get(f"/v1/calls/{call['id']}")["state"] in ("denied", "cancelled")
    refused = gateway.get(f"/v1/calls/{own['request_id']}")
    assert refused["state"] == "denied" and f"the token {name} was revoked" in refused["error"]["message"], refused
    assert gateway.get(f"/v1/calls/{kept['id']}")["state"] == "waiting", "another's goes on"
    assert gateway.get(f"/v1/runs/{kept_run}")["state"] == "running"
    gateway.request("POST", f"/v1/calls/{kept['id']}/cancel", {})


def test_a_token_that_expires_stops_its_run(house: House) -> None:
    name, secret = token(house.gateway, "chat", "tools.exec", expires_seconds=3)
    session, run_id, call = start(house, secret)
    ended = session.outcome(run_id)
    assert ended["state"] == "stopped" and f"the token {name} expired" in ended["error"]["message"], ended
    assert house.gateway.get(f"/v1/calls/{call['id']}")["state"] in ("denied", "cancelled")


def test_work_of_a_token_that_expired_while_the_gateway_was_down_is_not_resumed(house: House) -> None:
    """A token that expires meanwhile: its run, its waiting call, and its job."""
    gateway = house.gateway
    name, secret = token(gateway, "chat", "tools.exec", "read", expires_seconds=4)
    session, run_id, call = start(house, secret)
    job = add_job(gateway, secret, "every 30 days")
    gateway.kill()
    wait_until(lambda: expired(gateway, name), 20, "the end of the token")
    gateway.start()
    ended = session.outcome(run_id)
    assert ended["state"] == "stopped" and name in ended["error"]["message"], ended
    refused = wait_until(lambda: over(gateway, call["id"]), 20, "the end of the call")
    assert refused["state"] in ("denied", "cancelled")
    assert name in gateway.get(f"/v1/cron/{job}")["job"]["pausedReason"]


def expired(gateway: GatewayProcess, name: str) -> bool:
    with sqlite3.connect(f"file:{gateway.home}/farhand.db?mode=ro", uri=True) as store:
        rows = store.execute("SELECT expires_at FROM tokens WHERE id = ?", (name,)).fetchall()
    return bool(rows) and rows[0][0] < time.time() * 1000


def over(gateway: GatewayProcess, call_id: str) -> Any:
    found = gateway.get(f"/v1/calls/{call_id}")
    return found if found["state"] not in ("waiting", "running") else None


# -- jobs and hooks -------------------------------------------------------------------------------------------


def add_job(gateway: GatewayProcess, secret: str, schedule: str, said: str = "hello") -> str:
    job = {"name": f"job-{uuid.uuid4().hex[:8]}", "schedule": schedule, "spec": {"mode": "task", "message": said}}
    answer = gateway.request("POST", "/v1/cron", job, token=secret)
    assert answer.status == 201, answer
    return str(answer.json()["job"]["id"])


def run_job(gateway: GatewayProcess, job: str, secret: str = "owner") -> Any:
    return gateway.request("POST", f"/v1/cron/{job}/run", {"waitSeconds": 30}, token=secret, timeout=60)


def test_a_job_runs_on_behalf_of_its_maker_and_is_paused_with_it(house: House) -> None:
    gateway = house.gateway
    name, secret = token(gateway, "tools.exec", "read")
    word = f"job-{uuid.uuid4().hex[:8]}"
    house.script(word, calls(command(word)), text("job done"), text("taken over"))
    job = add_job(gateway, secret, "every 30 days", word)
    assert gateway.get(f"/v1/cron/{job}")["job"]["madeBy"] == name
    ran = run_job(gateway, job, secret).json()["results"][0]
    assert ran["status"] == "ok", ran
    made = next(one for one in gateway.get("/v1/calls")["calls"] if word in json.dumps(one["args"]))
    assert (made["credential"], made["on_behalf_of"]) == ("agent:main", name)

    revoke(gateway, name)
    shown = gateway.get(f"/v1/cron/{job}")["job"]
    assert shown["pausedReason"] == f"the token {name} was revoked" and "nextRunAtMs" not in shown["state"]
    listed = Command(gateway.home)("cron", "list")
    assert "paused" in listed.out and f"the token {name} was revoked" in listed.out + listed.err
    native = gateway.invoke("gsv__Cron", {"action": "list"})["result"]["jobs"]
    assert next(one for one in native if one["id"] == job)["pausedReason"] == shown["pausedReason"]
    refused = run_job(gateway, job)
    assert refused.status == 403 and "paused" in refused.json()["error"]["message"]

    assert gateway.request("PATCH", f"/v1/cron/{job}", {"name": "renamed"}).status == 200
    assert "pausedReason" in gateway.get(f"/v1/cron/{job}")["job"], "a change of its name takes nothing over"
    assert gateway.request("PATCH", f"/v1/cron/{job}", {"enabled": True}).status == 200
    shown = gateway.get(f"/v1/cron/{job}")["job"]
    assert shown["madeBy"] == "owner" and "pausedReason" not in shown
    assert run_job(gateway, job).json()["results"][0]["status"] == "ok"


def test_a_weaker_token_does_not_change_or_start_another_ones_job(house: House) -> None:
    gateway = house.gateway
    job = add_job(gateway, "owner", "every 30 days")
    _, secret = token(gateway, "tools.exec")
    patch = {"spec": {"mode": "task", "message": "act as the owner"}}
    assert gateway.request("PATCH", f"/v1/cron/{job}", patch, token=secret).status == 403
    assert gateway.request("DELETE", f"/v1/cron/{job}", token=secret).status == 403
    assert run_job(gateway, job, secret).status == 403
    name, equal = token(gateway, "read", "chat", "tools.exec")
    assert gateway.request("PATCH", f"/v1/cron/{job}", patch, token=equal).status == 200
    assert gateway.get(f"/v1/cron/{job}")["job"]["madeBy"] == name, "what it says is that token's from now on"


def test_a_hook_ends_with_the_token_that_made_it(house: House) -> None:
    gateway = house.gateway
    name, secret = token(gateway, "admin")
    hook = f"hook-{uuid.uuid4().hex[:8]}"
    house.script(f"[webhook:{hook}]", calls(command(f"ask-me {hook}")), text("done"))
    made = gateway.request("PUT", f"/v1/hooks/{hook}", {"secret": "", "tools": "all"}, token=secret)
    assert made.status == 201 and made.json()["made_by"] == name, made
    assert gateway.request("POST", f"/hooks/{hook}", b"hello", token=None).status == 202

    def call() -> Any:
        every = gateway.get("/v1/calls?state=waiting")["calls"]
        return next((one for one in every if hook in json.dumps(one["args"])), None)

    waiting = wait_until(call, 20, "the call of the hook's run")
    assert waiting["on_behalf_of"] == f"hook:{hook}"
    assert answer(gateway, asked(gateway, waiting["id"]), token=secret).status == 403, "it is on its maker's behalf"
    revoke(gateway, name)
    ended = wait_until(lambda: over(gateway, waiting["id"]), 20, "the end of the call")
    assert ended["state"] in ("denied", "cancelled")
    assert gateway.request("POST", f"/hooks/{hook}", b"again", token=None).status == 403
    listed = {one["id"]: one for one in gateway.get("/v1/hooks")["hooks"]}
    assert listed[hook]["ended_reason"] == f"the token {name} was revoked"


def test_a_run_of_a_hook_has_no_more_rights_than_the_hook_has_now(house: House) -> None:
    """Neither a call that waited, nor one that the run makes later."""
    gateway, hook = house.gateway, f"hook-{uuid.uuid4().hex[:8]}"
    uses = [calls(command(f"{ask} {hook}")) for ask in ("ask-me", "echo later", "ask-me again")]
    house.script(f"[webhook:{hook}]", *uses, text("done"))
    assert gateway.request("PUT", f"/v1/hooks/{hook}", {"secret": "", "tools": "all"}).status == 201
    assert gateway.request("POST", f"/hooks/{hook}", b"hello", token=None).status == 202

    def made() -> Any:
        every = gateway.get("/v1/calls?limit=50")["calls"]
        return [one for one in every if hook in json.dumps(one["args"])]

    (waiting,) = wait_until(made, 20, "the call of the hook's run")
    assert gateway.request("PUT", f"/v1/hooks/{hook}", {"secret": "", "tools": "read"}).status == 201
    assert answer(gateway, asked(gateway, waiting["id"])).status == 200
    found = wait_until(lambda: made() if len(made()) == len(uses) else None, 20, "all calls")
    states = [wait_until(partial(over, gateway, one["id"]), 20, "its end")["state"] for one in found]
    assert states == ["denied"] * len(uses), found


# -- narrow tokens --------------------------------------------------------------------------------------------


def narrow(gateway: GatewayProcess, *tools: str) -> tuple[str, str]:
    return token(gateway, "tools.read", "tools.write", "tools.exec", tools=list(tools))


def test_a_narrow_token_does_not_widen_itself_through_a_session(house: House) -> None:
    gateway = house.gateway
    name, secret = narrow(gateway, "gsv__SessionSend", "sessions_send", "sessions_spawn")
    word = f"widen-{uuid.uuid4().hex[:8]}"
    sub = f"below-{uuid.uuid4().hex[:8]}"
    house.script(
        word,
        calls(command(word), ("gsv__ReadFile", {"path": "/"}), ("sessions_spawn", {"prompt": sub})),
        text("end of the run"),
    )
    house.script(sub, calls(("read", {"file_path": "SOUL.md"})), text("nothing read"))
    args = {"sessionKey": f"narrow-{word}", "message": word, "waitSeconds": 60}
    sent = gateway.request(
        "POST", "/v1/tools/invoke", {"tool": "gsv__SessionSend", "args": args}, token=secret, timeout=90
    ).json()
    assert sent["ok"] is True and sent["result"]["reply"] == "end of the run", sent
    made = {one["tool"]: one for one in gateway.get("/v1/calls?limit=50")["calls"] if one["on_behalf_of"] == name}
    assert all(one["state"] != "ok" for tool, one in made.items() if tool not in ("gsv__SessionSend", "sessions_spawn"))
    results = [one["content"] for one in house.asked(word)[-1].messages if one["role"] == "tool"]
    assert len(results) == 3 and sum("not found" in one or "not allowed" in one for one in results) == 2, results
    offered = {tool["function"]["name"] for tool in house.asked(word)[0].json["tools"]}
    assert "exec" not in offered and "sessions_send" in offered, offered


def test_a_narrow_token_does_not_widen_itself_through_the_schedule(house: House) -> None:
    gateway = house.gateway
    name, secret = narrow(gateway, "gsv__Cron", "cron")
    word = f"later-{uuid.uuid4().hex[:8]}"
    house.script(word, calls(command(word)), text("end of the job"))
    job = {"name": "widen", "schedule": {"kind": "every", "everyHours": 5}, "spec": {"mode": "task", "message": word}}
    body = {"tool": "gsv__Cron", "args": {"action": "add", "job": job}}
    added = gateway.request("POST", "/v1/tools/invoke", body, token=secret).json()
    assert added["ok"] is True, added
    body = {"tool": "gsv__Cron", "args": {"action": "run", "mode": "force", "id": added["result"]["job"]["id"]}}
    ran = gateway.request("POST", "/v1/tools/invoke", body, token=secret, timeout=90).json()
    assert ran["ok"] is True and ran["result"]["results"][0]["status"] == "ok", ran
    results = [one["content"] for one in house.asked(word)[-1].messages if one["role"] == "tool"]
    assert len(results) == 1 and "not found" in results[0], results
    made = [one for one in gateway.get("/v1/calls")["calls"] if one["on_behalf_of"] == name]
    assert all(one["state"] != "ok" for one in made), made


# -- rules ----------------------------------------------------------------------------------------------------


def test_rules_for_a_token_hold_when_its_agent_acts(house: House) -> None:
    gateway = house.gateway
    name, secret = token(gateway, "chat", "tools.exec")
    _, other = token(gateway, "chat", "tools.exec")
    rules = f"""
[[policy.rules]]
name = "not that one"
decision = "deny"
credential = "{name}"
tool = "exec"

[[policy.rules]]
name = "the agent for that one"
decision = "deny"
credential = "agent:*"
on_behalf_of = "{name}"
tool = "ls"
"""
    write_policy(gateway.home, rules + ASK)
    explained = {"tool": "exec", "credential": "agent:main", "on_behalf_of": name}

    def deciding() -> Any:
        found = gateway.request("POST", "/v1/policy/explain", explained).json()
        return found if found["rule"] == "not that one" else None

    found = wait_until(deciding, 20, "the new policy")
    assert (found["credential"], found["on_behalf_of"]) == ("agent:main", name)
    for who, states in ((secret, {"exec": "denied", "ls": "denied"}), (other, {"exec": "ok", "ls": "ok"})):
        session = house.session()
        house.script(session.key, calls(command(session.key), ("ls", {"path": "."})), text("done"))
        assert session.send("go", token=who)["reply"] == "done"
        made = gateway.get("/v1/calls?limit=2")["calls"]
        assert {one["tool"]: one["state"] for one in made} == states, made
    shown = Command(gateway.home)("policy", "explain", made[0]["id"])
    assert "on behalf of" in shown.out, shown.out
    replayed = gateway.request("POST", "/v1/policy/replay", {"since": 0}).json()["stopped"]
    assert any(one["on_behalf_of"] == name and one["credential"] == "agent:main" for one in replayed)
    write_policy(gateway.home, ASK)


# -- sessions of others ---------------------------------------------------------------------------------------


def test_without_read_a_credential_sees_its_own_sessions_alone(house: House) -> None:
    gateway = house.gateway
    _, reader = token(gateway, "tools.read")
    _, seer = token(gateway, "tools.read", "read")
    _, guest = token(gateway, "tools.read", "chat")
    secret, mine = house.session(text("the secret is 4711")), house.session(text("hello guest"), text("and owner"))
    secret.send("tell it")
    mine.send("hi", token=guest)

    def seen(who: str, key: str) -> tuple[bool, bool, bool, bool]:
        def call(tool: str, args: dict[str, Any]) -> Any:
            return gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args}, token=who).json()

        listed = json.dumps(call("sessions_list", {"limit": 1000})["result"])
        native = json.dumps(call("gsv__SessionsList", {"limit": 100, "messageLimit": 5})["result"])
        history = call("sessions_history", {"session_id": key})
        status = call("sessions_status", {"session_id": key})
        return key in listed, key in native, history["ok"], status["ok"]

    every, none = (True,) * 4, (False,) * 4
    assert seen(reader, secret.key) == seen(reader, mine.key) == none
    assert seen(seer, secret.key) == seen(seer, mine.key) == seen("owner", secret.key) == every
    assert seen(guest, mine.key) == every and seen(guest, secret.key) == none
    fork = gateway.request("POST", f"/v1/sessions/{secret.key}/fork", {}, token=guest)
    assert fork.status == 403, fork
    run = mine.send("now the owner speaks")["run_id"]
    assert gateway.request("GET", f"/v1/runs/{run}/events", token=guest).status == 403
    assert seen(guest, mine.key) == none, "another's words are in it now"


def test_without_read_a_credential_does_not_talk_in_the_session_of_another(house: House) -> None:
    gateway = house.gateway
    _, guest = token(gateway, "tools.exec", "chat")
    secret = house.session(text("the secret is 4713"), text("it is 4713"), text("you may"))
    secret.send("tell it")
    path, body = f"/v1/sessions/{secret.key}/messages", {"message": "repeat the secret", "wait_seconds": 5}
    refused = gateway.request("POST", path, body, token=guest)
    assert refused.status == 403 and "'read'" in refused.json()["error"]["message"], refused
    call = {"tool": "gsv__SessionSend", "args": {"sessionKey": secret.key, "message": "repeat", "waitSeconds": 5}}
    sent = gateway.request("POST", "/v1/tools/invoke", call, token=guest).json()
    assert sent["error"]["kind"] == "not_allowed" and "'read'" in sent["error"]["message"], sent
    _, reader = token(gateway, "chat", "read")
    assert gateway.request("POST", path, body, token=reader).status == 200


def test_an_agent_reads_other_sessions_only_for_those_who_may(house: House) -> None:
    gateway = house.gateway
    secret = house.session(text("the secret is 4712"))
    secret.send("tell it")
    for scopes, works in ((("chat", "tools.read"), False), (("chat", "tools.read", "read"), True)):
        _, who = token(gateway, *scopes)
        session = house.session(calls(("sessions_history", {"session_id": secret.key})), text("done"))
        session.send("look", token=who)
        reported = next(one["content"] for one in session.history() if one["role"] == "tool")
        assert ("4712" in reported) is works, reported
