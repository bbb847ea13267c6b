"""Schedules through the tools and over HTTP, with a scripted model: one test for each promise."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, error, text

opened = contextlib.contextmanager(open_house)
FINAL = {"ok", "error", "timeout", "missed", "skipped", "unknown"}


class Cron:
    """`gsv__Cron` of a gateway."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.gateway = house.gateway

    def __call__(self, action: str, **arguments: Any) -> Any:
        """The result of an action that succeeds."""
        answer = self.gateway.invoke("gsv__Cron", {"action": action, **arguments})
        assert answer["ok"] is True and answer["route"]["kind"] == "native", answer
        return answer["result"]

    def fails(self, kind: str, **arguments: Any) -> str:
        answer = self.gateway.invoke("gsv__Cron", arguments)
        assert answer["ok"] is False and answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])

    def add(self, schedule: Any, spec: Any = None, **fields: Any) -> Any:
        job = {"name": f"job {uuid.uuid4().hex[:8]}", "schedule": schedule, "spec": spec or event("hello"), **fields}
        added = self("add", job=job)
        assert added["ok"] is True
        return added["job"]

    def runs(self, job_id: str) -> list[Any]:
        return list(self("runs", jobId=job_id)["runs"])

    def run(self, job_id: str, count: int = 1) -> Any:
        """Return the newest run of a job once it has this many runs."""
        found = wait_until(lambda: len(runs := self.runs(job_id)) >= count and runs, 20, f"{count} runs")
        return found[0]


def event(words: str) -> dict[str, Any]:
    return {"mode": "systemEvent", "text": words}


def task(words: str, **fields: Any) -> dict[str, Any]:
    return {"mode": "task", "message": words, **fields}


YEARLY = {"kind": "cron", "expr": "0 0 1 1 *"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    zone = {"FARHAND_SCHEDULE_TIMEZONE": "Europe/Berlin"}
    yield from open_house(tmp_path_factory.mktemp("cron") / "home", **zone)


@pytest.fixture
def cron(house: House) -> Iterator[Cron]:
    """Without any jobs, before and after."""
    book = Cron(house)
    yield book
    for job in book("list", includeDisabled=True)["jobs"]:
        book("remove", id=job["id"])


def words() -> str:
    return f"w-{uuid.uuid4().hex[:10]}"


# -- schedules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "milliseconds"),
    [
        ({"kind": "at", "in": "in 2 hours"}, 7_200_000),
        ({"kind": "at", "at": "in 2 hours"}, 7_200_000),
        ({"kind": "at", "inMinutes": 5}, 300_000),
        ({"kind": "at", "inSeconds": 90}, 90_000),
        ({"kind": "at", "delayMs": 90_000}, 90_000),
        ({"kind": "at", "when": "in 1 day"}, 86_400_000),
        ({"kind": "every", "everyMinutes": 30}, 1_800_000),
        ({"kind": "every", "everyHours": 2}, 7_200_000),
        ({"kind": "every", "everyDays": 1}, 86_400_000),
    ],
)
def test_the_first_slot_of_a_relative_schedule(cron: Cron, schedule: Any, milliseconds: int) -> None:
    job = cron.add(schedule)
    assert job["state"]["nextRunAtMs"] - job["createdAtMs"] == milliseconds
    assert job["nextRunHuman"] and job["scheduleHuman"]


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ({"kind": "at", "at": "2099-07-01T09:00"}, 4086572400000),  # in Berlin, where the user is
        ({"kind": "at", "at": "2099-07-01T09:00:00Z"}, 4086579600000),
        ({"kind": "at", "at": "2099-07-01T09:00", "tz": "America/New_York"}, 4086594000000),
        ({"kind": "at", "at": "4086579600"}, 4086579600000),
        ({"kind": "at", "at": 4086579600000}, 4086579600000),
        ({"kind": "at", "at": 4086579600}, 4086579600000),
        ({"kind": "at", "atMs": 4086579600000}, 4086579600000),
        ({"kind": "every", "everyDays": 1, "anchor": "2099-07-01T09:00"}, 4086572400000),
        ({"kind": "every", "everyHours": 1, "anchorMs": 4086579600000}, 4086579600000),
    ],
)
def test_a_moment_is_read_in_the_users_zone_unless_it_names_another(cron: Cron, schedule: Any, at: int) -> None:
    assert cron.add(schedule)["state"]["nextRunAtMs"] == at


def test_tomorrow_is_tomorrow_where_the_user_is(cron: Cron) -> None:
    job = cron.add({"kind": "at", "at": "tomorrow 9am"})
    assert job["nextRunHuman"].partition(" — ")[2] in ("9:00 AM CET", "9:00 AM CEST")


def test_an_anchor_in_the_past_gives_the_grid(cron: Cron) -> None:
    job = cron.add({"kind": "every", "everyMinutes": 7, "anchor": "2020-01-01T00:00:00Z"})
    assert (job["state"]["nextRunAtMs"] - 1577836800000) % 420_000 == 0
    assert 0 < job["state"]["nextRunAtMs"] - job["createdAtMs"] <= 420_000


def test_a_cron_expression_has_names_and_a_zone_of_its_own(cron: Cron) -> None:
    own = cron.add({"kind": "cron", "expr": "0 9 * jan-dec MON-FRI", "tz": "America/New_York"})
    assert own["schedule"]["tz"] == "America/New_York" and " — 9:00 AM E" in own["nextRunHuman"]
    users = cron.add({"kind": "cron", "expr": "0 9 * * *"})
    assert " — 9:00 AM CE" in users["nextRunHuman"]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("soon", "Unable to parse datetime"),
        ([], "schedule must be an object"),
        ({}, "schedule.kind is required"),
        ({"kind": "weekly"}, "Unsupported schedule.kind: weekly"),
        ({"kind": "at"}, "schedule.at requires"),
        ({"kind": "at", "at": "next full moon"}, 'Unable to parse datetime "next full moon"'),
        ({"kind": "at", "in": "two ticks"}, "schedule.in must use a relative duration"),
        ({"kind": "at", "at": "2020-01-01"}, "in the past"),
        ({"kind": "at", "at": "today"}, "in the past"),
        ({"kind": "at", "atMs": 1000}, "in the past"),
        ({"kind": "at", "at": "2027-03-28 02:30"}, "Unable to resolve local datetime"),
        ({"kind": "at", "at": True}, "schedule.at must be a text"),
        ({"kind": "at", "inMinutes": -1}, "schedule.inMinutes must be between"),
        ({"kind": "at", "at": "tomorrow", "tz": "Mars/Olympus"}, "unknown time zone"),
        ({"kind": "every"}, "schedule.every requires"),
        ({"kind": "every", "everyMinutes": 0}, "at least"),
        ({"kind": "every", "everyMinutes": "5"}, "must be a number"),
        ({"kind": "every", "everyMinutes": 5, "everyHours": 1}, "not both"),
        ({"kind": "every", "everyMinutes": 5, "anchor": "whenever"}, "Unable to parse datetime"),
        ({"kind": "cron"}, "schedule.expr is required"),
        ({"kind": "cron", "expr": "* * * *"}, "exactly 5 fields"),
        ({"kind": "cron", "expr": "61 * * * *"}, "minute"),
        ({"kind": "cron", "expr": "0 0 30 2 *"}, "day-of-month"),
        ({"kind": "cron", "expr": "0 0 * * *", "tz": "Nowhere"}, "unknown time zone"),
        ({"kind": "cron", "expression": "0 0 * * *"}, "no field 'expression'"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_reason(cron: Cron, schedule: Any, said: str) -> None:
    message = cron.fails("invalid_args", action="add", job={"name": "x", "schedule": schedule, "spec": event("x")})
    assert said in message, message
    assert cron("status")["count"] == 0


def test_a_one_shot_of_the_last_minute_fires_at_once(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("done"))
    job = cron.add({"kind": "at", "atMs": int(time.time() * 1000) - 30_000}, task(word))
    assert cron.run(job["id"])["status"] == "ok"


# -- the book ---------------------------------------------------------------------------------------------


def test_a_job_is_added_listed_changed_and_removed(cron: Cron) -> None:
    job = cron.add(YEARLY, description="  why ", agentId="Helper One")
    assert (job["agentId"], job["enabled"], job["description"], job["missed"]) == ("helper-one", True, "why", "once")
    assert job["spec"] == {"mode": "systemEvent", "text": "hello"}
    listed = cron("list")
    assert [one["id"] for one in listed["jobs"]] == [job["id"]] and listed["count"] == 1
    assert listed["timezone"] == "Europe/Berlin" and listed["currentTime"]
    changed = cron("update", id=job["id"], patch={"name": "new", "schedule": {"kind": "every", "everyHours": 1}})
    assert changed["ok"] is True and changed["job"]["name"] == "new"
    assert changed["job"]["schedule"]["everyMs"] == 3_600_000 and changed["job"]["spec"]["text"] == "hello"
    assert changed["job"]["state"]["nextRunAtMs"] < job["state"]["nextRunAtMs"]
    removed = cron("remove", id=job["id"])
    assert removed["ok"] is True and removed["removed"] is True
    assert cron("list", includeDisabled=True) | {"currentTime": "", "currentTimeMs": 0} == {
        "jobs": [],
        "count": 0,
        "offset": 0,
        "limit": 200,
        "timezone": "Europe/Berlin",
        "currentTime": "",
        "currentTimeMs": 0,
    }


def test_fields_may_stand_beside_the_action(cron: Cron) -> None:
    added = cron("add", name="inline", schedule=YEARLY, spec=event("x"), agentId="main")
    assert added["job"]["name"] == "inline"


def test_disabled_jobs_are_listed_on_request_and_have_no_next_run(cron: Cron) -> None:
    job = cron.add(YEARLY, enabled=False)
    assert "nextRunAtMs" not in job["state"]
    assert cron("list")["count"] == 0 and cron("list", includeDisabled=True)["count"] == 1
    on = cron("update", id=job["id"], patch={"enabled": True})["job"]
    assert on["state"]["nextRunAtMs"] > on["updatedAtMs"]
    off = cron("update", id=job["id"], patch={"enabled": False})["job"]
    assert off["enabled"] is False and "nextRunAtMs" not in off["state"]


def test_filters_and_pages_of_the_list(cron: Cron) -> None:
    ids = [
        cron.add({"kind": "at", "inHours": hours}, agentId=agent)["id"]
        for hours, agent in ((3, "main"), (1, "helper"), (2, "main"))
    ]
    assert [job["id"] for job in cron("list")["jobs"]] == [ids[1], ids[2], ids[0]]
    assert [job["id"] for job in cron("list", agentId="main")["jobs"]] == [ids[2], ids[0]]
    page = cron("list", limit=1, offset=1)
    assert [job["id"] for job in page["jobs"]] == [ids[2]] and page["count"] == 3
    assert len(cron("list", limit=100_000)["jobs"]) == 3 and len(cron("list", limit=0)["jobs"]) == 1
    assert cron("status", agentId="helper")["count"] == 1
    status = cron("status")
    assert status["count"] == 3 and status["nextRunAtMs"] and status["enabled"] is True
    assert (status["dueCount"], status["runningCount"], status["maxJobs"]) == (0, 0, 200)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "action is required"),
        ({"action": "dance"}, "Unknown cron action: dance"),
        ({"action": 5}, "action"),
        ({"action": "add"}, "cron add requires name, schedule, and spec"),
        ({"action": "add", "job": []}, "job"),
        ({"action": "add", "job": {"name": " ", "schedule": YEARLY, "spec": event("x")}}, "name is required"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": event(" ")}}, "non-empty text"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": task("")}}, "non-empty message"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": {"mode": "poem"}}}, "spec mode: poem"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": {}}}, "spec.mode is required"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": task("x", deliver="yes")}}, "spec.deliver"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": task("x", thinking="hard")}}, "thinking"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": task("x", timeoutSeconds=-1)}}, "timeout"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": event("x"), "color": 1}}, "'color'"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": event("x"), "missed": "x"}}, "missed"),
        ({"action": "add", "job": {"name": "x", "schedule": YEARLY, "spec": event("x"), "missed": "window"}}, "window"),
        ({"action": "update"}, "cron update requires id"),
        ({"action": "update", "id": "x"}, "cron update requires patch object"),
        ({"action": "remove"}, "cron remove requires id"),
        ({"action": "run", "mode": "force"}, "requires id"),
        ({"action": "run", "mode": "soon"}, "mode"),
        ({"action": "list", "limit": "many"}, "limit"),
        ({"action": "list", "includeDisabled": "yes"}, "includeDisabled"),
    ],
)
def test_an_impossible_change_is_reported(cron: Cron, arguments: Any, said: str) -> None:
    assert said in cron.fails("invalid_args", **arguments)


def test_a_job_that_is_not_there_is_not_found(cron: Cron) -> None:
    for arguments in (
        {"action": "update", "id": "nope", "patch": {"name": "x"}},
        {"action": "remove", "id": "nope"},
        {"action": "run", "id": "nope", "mode": "force"},
        {"action": "run", "id": "nope"},
        {"action": "runs", "jobId": "nope"},
    ):
        assert "Unknown cron job id: nope" in cron.fails("not_found", **arguments)


def test_a_spec_is_changed_in_part_or_as_a_whole(cron: Cron) -> None:
    job = cron.add(YEARLY, task("look", timeoutSeconds=5, deliver=False))
    kept = cron("update", id=job["id"], patch={"spec": {"mode": "task", "message": "see"}})["job"]["spec"]
    assert kept == {"mode": "task", "message": "see", "timeoutSeconds": 5, "deliver": False}
    other = cron("update", id=job["id"], patch={"spec": event("go")})["job"]["spec"]
    assert other == event("go")
    assert "non-empty message" in cron.fails(
        "invalid_args", action="update", id=job["id"], patch={"spec": {"mode": "task"}}
    )


def test_there_are_no_more_jobs_than_the_settings_allow(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", env={"FARHAND_SCHEDULE_MAX_JOBS": "1"}) as gateway:
        job = {"name": "x", "schedule": YEARLY, "spec": event("x")}
        assert gateway.invoke("gsv__Cron", {"action": "add", "job": job})["ok"]
        refused = gateway.invoke("gsv__Cron", {"action": "add", "job": job})
        assert refused["error"] == {"kind": "failed", "message": "Cron job limit reached (1)"}


# -- runs -------------------------------------------------------------------------------------------------


def test_a_system_event_goes_into_the_main_session(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("Noted."))
    job = cron.add({"kind": "at", "inMs": 300}, event(f"remember {word}"))
    run = cron.run(job["id"])
    assert (run["status"], run["summary"], run["trigger"], run["attempts"]) == ("ok", "Noted.", "schedule", 1)
    assert run["sessionKey"] == "agent:main:main" and run["durationMs"] >= 0 and run["slotAtMs"] <= run["ts"]
    history = house.gateway.get("/v1/sessions/main/history?limit=1000")["messages"]
    said = [message["content"] for message in history if word in str(message["content"])]
    assert len(said) == 1 and said[0].startswith("[cron · ")
    assert cron("list", includeDisabled=True)["jobs"][0]["enabled"] is False  # a one-shot is over


def test_a_task_begins_with_a_clean_session_each_time(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("one"), text("two"))
    job = cron.add(YEARLY, task(f"count {word}"))
    for reply in ("one", "two"):
        done = cron("run", id=job["id"], mode="force")
        assert done["ok"] is True and done["ran"] == 1
        assert (done["results"][0]["status"], done["results"][0]["summary"]) == ("ok", reply)
        assert done["results"][0]["jobId"] == job["id"] and done["results"][0]["nextRunAtMs"]
    first, second = house.asked(word)
    for request in (first, second):
        assert [message["role"] for message in request.messages if message["role"] != "system"] == ["user"]
    main = json.dumps(house.gateway.get("/v1/sessions/main/history?limit=1000")["messages"])
    assert word not in main
    listed = house.gateway.get("/v1/sessions?limit=100")["sessions"]
    assert f"agent:main:cron:{job['id']}" in [session["key"] for session in listed]


def test_a_tasks_model_and_thinking_are_its_own(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("ok"))
    job = cron.add(YEARLY, task(word, model="openai/other-model", thinking="high"))
    assert cron("run", id=job["id"], mode="force")["results"][0]["status"] == "ok"
    (request,) = house.asked(word)
    assert request.json["model"] == "other-model"
    assert "high" in json.dumps({k: v for k, v in request.json.items() if k not in ("messages", "tools")})


def test_a_run_is_ok_only_when_the_agents_turn_was(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, error(400, "the model is on strike"))
    job = cron.add(YEARLY, task(word))
    (result,) = cron("run", id=job["id"], mode="force")["results"]
    assert result["status"] == "error" and "on strike" in result["error"]
    state = cron("list")["jobs"][0]["state"]
    assert state["lastStatus"] == "error" and "on strike" in state["lastError"] and state["lastRunAtMs"]


def test_a_reply_that_was_to_be_delivered_and_was_not_is_an_error_unless_it_need_not(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, *[text("the reply")] * 3)
    spec = task(word, deliver=True, channel="nowhere", to="nobody")
    strict = cron.add(YEARLY, spec)
    (result,) = cron("run", id=strict["id"], mode="force")["results"]
    assert result["status"] == "error" and "not delivered" in result["error"]
    lenient = cron.add(YEARLY, {**spec, "bestEffortDeliver": True})
    (result,) = cron("run", id=lenient["id"], mode="force")["results"]
    assert result["status"] == "ok" and "not delivered" in result["summary"]
    silent = cron.add(YEARLY, {**spec, "deliver": False})
    (result,) = cron("run", id=silent["id"], mode="force")["results"]
    assert (result["status"], result["summary"]) == ("ok", "the reply")


def test_a_run_that_takes_too_long_is_stopped_with_what_it_started(
    house: House, cron: Cron, tmp_path_factory: pytest.TempPathFactory
) -> None:
    word = words()
    mark = tmp_path_factory.mktemp("late") / "mark"
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("slow"), "slow") as node:
        house.script(word, calls(("slow__Bash", {"command": f"echo $$ > {mark}; sleep 300"})))
        job = cron.add(YEARLY, task(word, timeoutSeconds=2))
        (result,) = cron("run", id=job["id"], mode="force")["results"]
        assert result["status"] == "timeout" and "2 s" in result["error"], result
        pid = int(wait_until(lambda: mark.exists() and mark.read_text(), what="the command's pid"))
        assert not Path(f"/proc/{pid}").exists()
        assert node.pid


def test_a_failed_run_is_tried_again_in_its_slot(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, error(400, "first"), error(400, "second"), text("third time lucky"))
    job = cron.add({"kind": "at", "inMs": 200}, task(word), retries=2, retryDelaySeconds=0.05)
    run = cron.run(job["id"])
    assert (run["status"], run["attempts"], run["summary"]) == ("ok", 3, "third time lucky")
    assert len(cron.runs(job["id"])) == 1


def test_the_first_failure_is_in_the_journal(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, error(400, "no"), error(400, "no"))
    job = cron.add(YEARLY, task(word))
    for _ in range(2):
        cron("run", id=job["id"], mode="force")
    answer = house.gateway.request("GET", "/v1/events?last_event_id=0&follow=0").body.decode()
    kinds = [
        json.loads(line[5:])["kind"]
        for line in answer.splitlines()
        if line.startswith("data:") and json.loads(line[5:])["subject"] == job["id"]
    ]
    assert kinds.count("cron.failing") == 1 and kinds.count("cron.ended") == 2 and kinds[0] == "cron.added"


def test_only_what_is_due_runs_when_that_is_asked_for(cron: Cron) -> None:
    job = cron.add(YEARLY)
    assert cron("run") == {"ok": True, "ran": 0, "results": []}
    assert cron("run", id=job["id"], mode="due") == {"ok": True, "ran": 0, "results": []}


def test_a_job_does_not_run_beside_itself(house: House, cron: Cron) -> None:
    word = words()
    gate = threading.Event()
    house.script(word, text("slow", gate=gate))
    job = cron.add(YEARLY, task(word))
    (begun,) = cron("run", id=job["id"], mode="force", waitSeconds=0)["results"]
    assert begun["status"] == "running"
    again = cron("run", id=job["id"], mode="force")
    assert again["ran"] == 0 and again["results"][0]["status"] == "skipped"
    assert cron("status")["runningCount"] == 1
    assert cron("list")["jobs"][0]["state"]["runningAtMs"]
    assert cron.runs(job["id"]) == []
    gate.set()
    assert cron.run(job["id"])["status"] == "ok"


def test_an_agent_may_force_a_message_to_itself(house: House, cron: Cron) -> None:
    """It runs after, or in, the turn that asks for it: waiting for it there would never end."""
    word, inner = words(), words()
    job = cron.add(YEARLY, event(f"do {inner}"))
    house.script(word, calls(("gsv__Cron", {"action": "run", "id": job["id"], "mode": "force"})), text("asked"))
    house.script(inner, text("did"))
    answer = house.gateway.request(
        "POST", "/v1/sessions/main/messages", {"message": f"please {word}", "wait_seconds": 25}, timeout=40
    ).json()
    assert answer["reply"] in ("asked", "did"), answer
    assert cron.run(job["id"])["status"] == "ok"


def test_removing_a_job_stops_its_run(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("never", gate=threading.Event()))
    job = cron.add(YEARLY, task(word))
    cron("run", id=job["id"], mode="force", waitSeconds=0)
    wait_until(lambda: house.asked(word), what="the model to be asked")
    cron("remove", id=job["id"])
    wait_until(house.asked(word)[0].left.is_set, what="the end of the run")
    wait_until(lambda: cron("status")["runningCount"] == 0, what="no run under way")


def test_a_one_shot_may_leave_after_its_run(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, text("bye"), error(400, "no"))
    gone = cron.add({"kind": "at", "inMs": 200}, task(word), deleteAfterRun=True)
    assert cron.run(gone["id"])["status"] == "ok"  # the history stays
    assert gone["id"] not in [job["id"] for job in cron("list", includeDisabled=True)["jobs"]]
    kept = cron.add({"kind": "at", "inMs": 200}, task(word), deleteAfterRun=True)
    assert cron.run(kept["id"])["status"] == "error"
    assert [job["enabled"] for job in cron("list", includeDisabled=True)["jobs"]] == [False]


def test_runs_come_newest_first_in_pages(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, *[text(str(n)) for n in range(5)])
    job = cron.add(YEARLY, task(word))
    for _ in range(5):
        cron("run", id=job["id"], mode="force")
    found = cron("runs", jobId=job["id"])
    assert [run["summary"] for run in found["runs"]] == ["4", "3", "2", "1", "0"] and found["count"] == 5
    assert {run["status"] for run in found["runs"]} <= FINAL
    page = cron("runs", jobId=job["id"], limit=2, offset=1)
    assert [run["summary"] for run in page["runs"]] == ["3", "2"] and page["count"] == 5
    assert cron("runs", limit=1)["runs"][0]["id"] == found["runs"][0]["id"]
    assert all(run["slotHuman"] and run["tsHuman"] for run in found["runs"])


def test_an_interval_keeps_its_grid(house: House, cron: Cron) -> None:
    word = words()
    house.script(word, *[text("tick")] * 50)
    job = cron.add({"kind": "every", "everyMs": 400}, task(word))
    cron.run(job["id"], 4)
    slots = [run["slotAtMs"] for run in cron.runs(job["id"])]
    assert len(slots) == len(set(slots))
    assert all((slot - job["createdAtMs"]) % 400 == 0 for slot in slots)


def test_a_job_waits_for_its_node(house: House, cron: Cron, tmp_path: Path) -> None:
    word = words()
    house.script(word, text("there"), text("there"))
    by_id = cron.add({"kind": "at", "inMs": 100}, task(word), node="faraway")
    by_tag = cron.add({"kind": "at", "inMs": 100}, task(word), tag="no-such-tag")
    wait_until(lambda: cron("status")["dueCount"] == 0, what="both slots recorded")
    assert cron.runs(by_id["id"]) == [] == cron.runs(by_tag["id"])
    with NodeProcess(house.gateway, tmp_path, "faraway"):
        assert cron.run(by_id["id"])["status"] == "ok"
        assert "'faraway'" in house.asked(word)[0].messages[-1]["content"]
    assert cron.runs(by_tag["id"]) == []


# -- the other doors --------------------------------------------------------------------------------------


def test_the_agents_own_tool_is_a_face_of_the_same_jobs(house: House, cron: Cron) -> None:
    def call(**arguments: Any) -> str:
        answer = house.gateway.invoke("cron", arguments)
        assert answer["ok"] and answer["route"]["kind"] == "local" and set(answer["result"]) == {"content"}, answer
        return str(answer["result"]["content"])

    assert call(action="list") == "[]"
    added = json.loads(call(action="add", schedule="0 9 * * MON", prompt="check the mail"))
    assert list(added) == ["id"]
    (job,) = cron("list")["jobs"]
    assert job["id"] == added["id"] and job["schedule"]["expr"] == "0 9 * * MON"
    assert job["spec"] == event("check the mail") and job["name"] == "check the mail"
    other = cron.add({"kind": "every", "everyMinutes": 5}, task("look"))
    listed = {one["id"]: one for one in json.loads(call(action="list"))}
    assert listed[added["id"]]["expression"] == "0 9 * * MON" and listed[added["id"]]["prompt"] == "check the mail"
    assert listed[added["id"]]["next_run"] and listed[other["id"]]["prompt"] == "look"
    assert call(action="remove", id=added["id"]) == f"removed cron job {added['id']}"
    assert [one["id"] for one in cron("list")["jobs"]] == [other["id"]]
    assert json.loads(call(action="add", expression="every 30 minutes", prompt="x"))["id"]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({}, "invalid_args", "action is required"),
        ({"action": "dance"}, "invalid_args", "invalid action"),
        ({"action": "add", "prompt": "x"}, "invalid_args", "schedule is required"),
        ({"action": "add", "schedule": "* * * * *"}, "invalid_args", "prompt is required"),
        ({"action": "add", "schedule": "99 * * * *", "prompt": "x"}, "invalid_args", "minute"),
        ({"action": "add", "schedule": "now and then", "prompt": "x"}, "invalid_args", "Unable to parse"),
        ({"action": "remove"}, "invalid_args", "id is required"),
        ({"action": "remove", "id": "nope"}, "not_found", "nope"),
    ],
)
def test_the_agents_own_tool_says_what_is_wrong(house: House, arguments: Any, kind: str, said: str) -> None:
    answer = house.gateway.invoke("cron", arguments)
    assert answer["error"]["kind"] == kind and said in answer["error"]["message"]


def test_jobs_over_http(house: House, cron: Cron) -> None:
    def ask(method: str, path: str = "", body: Any = None, status: int = 200, **options: Any) -> Any:
        answer = house.gateway.request(method, f"/v1/cron{path}", body, **options)
        assert answer.status == status, answer
        return answer.json()

    word = words()
    house.script(word, text("by http"), text("again"))
    job = ask("POST", "", {"name": "h", "schedule": YEARLY, "spec": task(word)}, 201)["job"]
    assert ask("GET")["jobs"][0]["id"] == job["id"] and ask("GET", "?limit=1&offset=1")["jobs"] == []
    assert ask("GET", f"/{job['id']}")["job"]["name"] == "h"
    assert ask("PATCH", f"/{job['id']}", {"name": "i", "enabled": False})["job"]["name"] == "i"
    assert ask("GET")["count"] == 0 and ask("GET", "?includeDisabled=true")["count"] == 1
    assert ask("POST", f"/{job['id']}/run")["results"][0]["summary"] == "by http"
    assert ask("POST", "/run", {"mode": "force", "id": job["id"]})["results"][0]["summary"] == "again"
    assert [run["summary"] for run in ask("GET", f"/{job['id']}/runs?limit=1")["runs"]] == ["again"]
    assert ask("GET", f"/runs?jobId={job['id']}")["count"] == 2
    assert ask("GET", "/status")["count"] == 1
    assert len(ask("GET", f"/{job['id']}/preview?count=3")["slots"]) == 3
    assert ask("POST", "", {"action": "list", "includeDisabled": True})["count"] == 1
    assert ask("DELETE", f"/{job['id']}")["removed"] is True
    unknown = (("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/run"), ("GET", "/x/runs"), ("GET", "/x/preview"))
    for method, path in unknown:
        assert ask(method, path, None, 404)["error"]["code"] == "not_found"
    assert ask("PATCH", "/x", {"name": "y"}, 404)["error"]["code"] == "not_found"
    assert ask("POST", "", {"name": "only"}, 400)["error"]["code"] == "invalid_args"
    assert ask("POST", "", b"[", 400)["error"]["code"] == "invalid_request"
    assert ask("GET", "?limit=x", None, 400)["error"]["code"] == "invalid_request"
    assert ask("GET", "", None, 401, token=None)["error"]


def test_who_may_only_look_may_change_nothing(house: House, cron: Cron) -> None:
    made = house.gateway.request("POST", "/v1/tokens", {"label": "r", "scopes": ["read", "tools.read"]}).json()
    token = made["token"]
    job = cron.add(YEARLY)
    assert house.gateway.request("GET", "/v1/cron", token=token).status == 200
    for method, path in (
        ("POST", ""),
        ("PATCH", f"/{job['id']}"),
        ("DELETE", f"/{job['id']}"),
        ("POST", f"/{job['id']}/run"),
    ):
        assert house.gateway.request(method, f"/v1/cron{path}", {}, token=token).status == 403
    body = {"tool": "gsv__Cron", "args": {"action": "remove", "id": job["id"]}}
    denied = house.gateway.request("POST", "/v1/tools/invoke", body, token=token).json()
    assert denied["error"]["kind"] == "not_allowed"
    assert cron("status")["count"] == 1


def test_an_idempotency_key_adds_one_job(house: House, cron: Cron) -> None:
    body = {"name": "k", "schedule": YEARLY, "spec": event("x")}
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first, again = (house.gateway.request("POST", "/v1/cron", body, headers=key) for _ in range(2))
    assert first.json() == again.json() and cron("status")["count"] == 1
    assert house.gateway.request("POST", "/v1/cron", {**body, "name": "l"}, headers=key).status == 409


def test_a_preview_shows_the_slots_of_a_change_of_clocks(house: House) -> None:
    def preview(schedule: Any, **more: Any) -> list[str]:
        answer = house.gateway.request("POST", "/v1/cron/preview", {"schedule": schedule, **more})
        assert answer.status == 200, answer
        return [slot["human"] for slot in answer.json()["slots"]]

    slots = preview({"kind": "cron", "expr": "30 2 * 3 *", "tz": "Europe/Berlin"}, count=31)
    assert len(slots) == 31 and sum("3:00 AM CEST" in slot for slot in slots) == 1
    assert len(preview("every 90 minutes")) == 5
    assert len(preview("in 2 hours")) == 1
    assert " — 9:00 AM E" in preview("0 9 * * *", count=1, tz="America/New_York")[0]
    bad = house.gateway.request("POST", "/v1/cron/preview", {"schedule": "whenever"})
    assert bad.status == 400 and "Unable to parse" in bad.json()["error"]["message"]
    assert house.gateway.request("POST", "/v1/cron/preview", {}).status == 400


# -- across restarts --------------------------------------------------------------------------------------


def test_slots_missed_while_down_run_once_at_start_and_are_recorded_as_late(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as house:
        cron = Cron(house)
        word = words()
        house.script(word, *[text("late")] * 9)
        often = cron.add({"kind": "every", "everySeconds": 3}, task(word))
        once = cron.add({"kind": "at", "inMs": 1500}, task(word))
        never = cron.add({"kind": "every", "everySeconds": 1}, task(word), enabled=False)
        house.gateway.kill()
        wait_until(lambda: time.time() * 1000 > often["createdAtMs"] + 7000, what="some slots to pass")
        house.gateway.start()
        cron("update", id=often["id"], patch={"schedule": YEARLY})  # no further slots
        run = cron.run(once["id"])
        assert (run["status"], run["late"], run["slotAtMs"]) == ("ok", True, once["schedule"]["atMs"])
        wait_until(lambda: any(run["status"] == "ok" for run in cron.runs(often["id"])), 20, "the late run")
        runs = [(run["slotAtMs"] - often["createdAtMs"], run["status"], run["late"]) for run in cron.runs(often["id"])]
        *missed, last = sorted(runs)
        assert missed[0] == (3000, "missed", True) and {run[1:] for run in missed} == {("missed", True)}
        assert last[0] >= 6000 and last[1:] == ("ok", True)
        assert cron.runs(never["id"]) == []


def test_missed_slots_are_recorded_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as house:
        cron = Cron(house)
        word = words()
        house.script(word, *[text("x")] * 99)
        job = cron.add({"kind": "every", "everyMs": 1000}, task(word))
        house.gateway.stop()
        wait_until(lambda: time.time() * 1000 > job["createdAtMs"] + 5500, what="five slots to pass")
        house.gateway.start()
        wait_until(lambda: any(run["status"] == "ok" for run in cron.runs(job["id"])), 20, "a run")
        runs = [run for run in cron.runs(job["id"]) if run["slotAtMs"] <= job["createdAtMs"] + 5000]
        statuses = {run["slotAtMs"] - job["createdAtMs"]: run["status"] for run in runs}
        assert set(statuses) == {1000, 2000, 3000, 4000, 5000}
        assert list(statuses.values()).count("ok") <= 1 and set(statuses.values()) <= {"ok", "missed"}


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_run_continues_after_a_restart_and_its_end_is_known(tmp_path: Path, how: str) -> None:
    with opened(tmp_path / "home") as house:
        cron = Cron(house)
        word = words()
        house.script(word, text("never said", gate=threading.Event()), text("after all"))
        job = cron.add({"kind": "at", "inMs": 100}, task(word))
        wait_until(lambda: house.asked(word), what="the model to be asked")
        house.gateway.kill() if how == "kill" else house.gateway.stop()
        house.gateway.start()
        run = cron.run(job["id"])
        assert (run["status"], run["summary"]) == ("ok", "after all")
        assert len(cron.runs(job["id"])) == 1


def test_jobs_outlive_their_gateway_and_a_disabled_scheduler_runs_nothing(tmp_path: Path) -> None:
    env = {"FARHAND_SCHEDULE_ENABLED": "false"}
    with opened(tmp_path / "home", **env) as house:
        cron = Cron(house)
        word = words()
        house.script(word, text("forced"))
        job = cron.add({"kind": "at", "inMs": 50}, task(word))
        house.gateway.kill()
        house.gateway.start()
        assert cron("status")["enabled"] is False
        wait_until(lambda: cron("status")["dueCount"] == 1, what="the job to be due")
        assert cron.runs(job["id"]) == []
        assert cron("run", id=job["id"], mode="force")["results"][0]["summary"] == "forced"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"FARHAND_SCHEDULE_TIMEZONE": "Mars/Olympus"}, "[schedule] timezone"),
        ({"FARHAND_SCHEDULE_MAX_JOBS": "0"}, "max_jobs"),
        ({"FARHAND_HEARTBEAT_EVERY": "often"}, "[heartbeat]"),
        ({"FARHAND_HEARTBEAT_ACTIVE_START": "25:00"}, "[heartbeat]"),
    ],
)
def test_settings_that_cannot_be_used_are_named_at_start(tmp_path: Path, env: dict[str, str], said: str) -> None:
    gateway = GatewayProcess(tmp_path / "home", env=dict(env))
    with pytest.raises(AssertionError):
        gateway.start()
    assert said in gateway.log.read_text()


def test_settings_hold_as_soon_as_the_file_has_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = home / "farhand.toml"

    def write(settings: str) -> None:
        beside = home / "new.toml"
        beside.write_text(settings)
        beside.rename(file)

    write('[schedule]\ntimezone = "Europe/Berlin"\n[heartbeat]\nevery = "0"\n')
    with opened(home) as house:
        cron = Cron(house)
        job = cron.add({"kind": "cron", "expr": "0 9 1 1 *"})
        assert "CET" in job["nextRunHuman"] and cron("status")["timezone"] == "Europe/Berlin"
        write('[schedule]\ntimezone = "Asia/Tokyo"\nmax_jobs = 1\n[heartbeat]\nevery = "1h"\n')
        assert cron("status")["timezone"] == "Asia/Tokyo" and cron("status")["maxJobs"] == 1
        assert "limit reached (1)" in cron.fails("failed", action="add", name="n", schedule=YEARLY, spec=event("x"))

        def moved() -> bool:
            shown = cron("list")["jobs"][0]
            return bool(job["state"]["nextRunAtMs"] - shown["state"]["nextRunAtMs"] == 8 * 3_600_000)

        wait_until(moved, 20, "the job to be due in the other zone")
        beats = lambda: house.gateway.request("GET", "/v1/cron/heartbeat:main").status  # noqa: E731
        wait_until(lambda: beats() == 200, 20, "a heartbeat")
        write('[schedule]\ntimezone = "Mars/Olympus"\n[heartbeat]\nevery = "0"\n')
        assert cron("status")["timezone"] == "Asia/Tokyo" and beats() == 200
        assert "the settings stay as they were: [schedule] timezone" in house.gateway.log.read_text()
        write('[schedule]\ntimezone = "Asia/Tokyo"\n[heartbeat]\nevery = "0"\n')
        wait_until(lambda: beats() == 404, 20, "no heartbeat")


# -- heartbeats -------------------------------------------------------------------------------------------


def test_a_heartbeat_reads_its_file_each_time_and_says_only_what_is_worth_saying(tmp_path: Path) -> None:
    env = {
        "FARHAND_HEARTBEAT_EVERY": "1s",
        "FARHAND_HEARTBEAT_ACTIVE_START": "00:00",
        "FARHAND_HEARTBEAT_ACTIVE_END": "24:00",
    }
    with opened(tmp_path / "home", **env) as house:
        cron = Cron(house)
        beats = "heartbeat:main"
        skipped = wait_until(lambda: cron.runs(beats), what="a heartbeat")[0]
        assert (skipped["status"], skipped["error"]) == ("skipped", "no_heartbeat_file")
        assert cron("list", includeDisabled=True)["count"] == 0 and cron("runs")["count"] == 0
        file = house.gateway.home / "agents" / "main" / "HEARTBEAT.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# \n<!-- nothing yet -->\n- \n")
        wait_until(lambda: cron.runs(beats)[0].get("error") == "empty_heartbeat_file", what="an empty file")
        word = words()
        house.script(word, text("HEARTBEAT_OK"), text("Fire! HEARTBEAT_OK"), *[text("HEARTBEAT_OK")] * 200)
        file.write_text(f"- look after {word}\n")

        def said() -> list[str]:
            return [run["summary"] for run in cron.runs(beats) if run["status"] == "ok"]

        found = wait_until(lambda: len(said()) > 2 and said(), 30, "three heartbeats")
        assert found[-2:] == ["Fire!", "nothing needs attention"]
        requests = house.asked(word)
        assert all(len([m for m in request.messages if m["role"] == "user"]) == 1 for request in requests)
        assert "not_allowed" in json.dumps(house.gateway.invoke("gsv__Cron", {"action": "remove", "id": beats}))


def test_no_heartbeat_outside_of_its_hours(tmp_path: Path) -> None:
    hour = time.gmtime().tm_hour
    env = {
        "TZ": "UTC",
        "FARHAND_HEARTBEAT_EVERY": "1s",
        "FARHAND_HEARTBEAT_ACTIVE_START": f"{(hour + 3) % 24:02}:00",
        "FARHAND_HEARTBEAT_ACTIVE_END": f"{(hour + 5) % 24:02}:00",
    }
    with opened(tmp_path / "home", **env) as house:
        cron = Cron(house)
        run = wait_until(lambda: cron.runs("heartbeat:main"), what="a heartbeat")[0]
        assert (run["status"], run["error"]) == ("skipped", "outside_active_hours")
        forced = cron("run", id="heartbeat:main", mode="force")["results"][0]
        assert forced["error"] == "no_heartbeat_file"
