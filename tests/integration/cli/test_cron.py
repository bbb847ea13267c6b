"""`farhand cron`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess


@pytest.fixture(autouse=True)
def no_jobs(shared_gateway: GatewayProcess) -> Iterator[None]:
    yield
    for job in shared_gateway.get("/v1/cron?includeDisabled=1")["jobs"]:
        shared_gateway.request("DELETE", f"/v1/cron/{job['id']}")


def test_a_job_is_added_shown_changed_and_removed(command: Command) -> None:
    added = command("cron", "add", "standup", "0 9 * * MON-FRI", "Remind me.", "--tz", "Europe/Berlin")
    assert added.status == 0 and "09:00 on Monday through Friday (Europe/Berlin)" in added.out, added
    (job,) = command("cron", "list", "--json").json()["jobs"]
    assert job["spec"] == {"mode": "systemEvent", "text": "Remind me."} and job["schedule"]["tz"] == "Europe/Berlin"
    listed = command("cron").out
    assert job["id"] in listed and "standup" in listed and ":00:00" in listed
    for name in (job["id"], job["id"][:8], "standup"):
        assert "Remind me." in command("cron", "show", name).out
    command("cron", "add", "standup", "0 9 * * *", "Another.")
    assert command("cron", "remove", "standup", "--json").json()["error"]["code"] == "ambiguous"
    (other,) = [one["id"] for one in command("cron", "list", "--json").json()["jobs"] if one["id"] != job["id"]]
    assert command("cron", "remove", other).status == 0
    assert command("cron", "show", job["id"], "--json").json()["job"]["id"] == job["id"]
    changed = command("cron", "update", job["id"], "--name", "later", "--schedule", "every 2 hours", "--text", "Hey.")
    assert "every 2 hours" in changed.out and "later" in changed.out and "Hey." in changed.out
    off = command("cron", "update", job["id"], "--disable", "--json").json()["job"]
    assert off["enabled"] is False and off["spec"]["text"] == "Hey."
    assert "no jobs; create one" in command("cron", "list").err and job["id"] in command("cron", "list", "--all").out
    patched = command("cron", "update", job["id"], "--patch", '{"missed": "skip"}', "--json").json()["job"]
    assert patched["missed"] == "skip"
    assert command("cron", "remove", job["id"]).out == f"removed: {job['id']}\n"
    gone = command("cron", "show", job["id"], "--json")
    assert gone.status == 1 and gone.json()["error"]["code"] == "not_found"


def test_a_job_that_would_fail_now_is_added_with_a_warning(command: Command) -> None:
    unknown = command("cron", "add", "disk", "every day at 7", "--call", "gsv__ReadFil", "path=a")
    assert unknown.status == 0 and "the call would fail now: " in unknown.err and "gsv__ReadFil" in unknown.err
    misspelled = command("cron", "add", "disk", "every day at 7", "--call", "gsv__ReadFile", "pth=a")
    assert misspelled.status == 0 and "did you mean 'path'?" in misspelled.err
    elsewhere = command("cron", "add", "photos", "every day at 7", "Copy them.", "--node", "naas")
    assert elsewhere.status == 0 and "there is no node 'naas' yet" in elsewhere.err
    right = command("cron", "add", "disk", "every day at 7", "--call", "gsv__ReadFile", "path=a")
    assert right.status == 0 and "warning" not in right.err


def test_a_task_takes_the_options_of_one(command: Command) -> None:
    options = ["--task", "--timeout", "60", "--model", "openai/x", "--no-deliver", "--retries", "2", "--tag", "big"]
    window = ["--missed", "window", "--window", "600", "--delete-after-run", "--agent", "helper", "--description", "d"]
    job = command("cron", "add", "report", "in 2 hours", "Write it.", *options, *window, "--json").json()["job"]
    assert job["spec"] == {
        "mode": "task",
        "message": "Write it.",
        "model": "openai/x",
        "timeoutSeconds": 60,
        "deliver": False,
    }
    assert (job["missed"], job["windowSeconds"], job["retries"], job["tag"]) == ("window", 600, 2, "big")
    assert (job["deleteAfterRun"], job["agentId"], job["description"]) == (True, "helper", "d")
    refused = command("cron", "add", "x", "in 2 hours", "x", "--model", "y")
    assert refused.status == 2 and "--task" in refused.err


def test_a_run_by_hand_says_how_it_went(command: Command) -> None:
    job = command("cron", "add", "x", "in 2 hours", "x", "--json").json()["job"]
    done = command("cron", "run", job["id"])
    assert done.status == 1 and done.out.startswith("error  x\nNo model is set up"), done
    answer = command("cron", "run", job["id"], "--json")
    assert answer.status == 1 and answer.json()["results"][0]["status"] == "error"
    assert command("cron", "run", "--due").err == "nothing is due\n"
    assert command("cron", "run").status == 2
    runs = command("cron", "runs", job["id"]).out
    assert runs.count("error") == 2 and "No model is set up" in runs
    assert command("cron", "runs", "--json", "--limit", "1").json()["count"] == 2


def test_a_preview_adds_nothing(command: Command) -> None:
    shown = command("cron", "preview", "0 9 * * *", "--tz", "America/New_York", "--count", "3").out.splitlines()
    assert len(shown) == 4 and all(" — 9:00 AM E" in line for line in shown[1:])
    assert len(command("cron", "preview", "every 90 minutes", "--json").json()["slots"]) == 5
    bad = command("cron", "preview", "whenever", "--json")
    assert bad.status == 1 and bad.json()["error"]["code"] == "invalid_args"
    assert command("cron", "list", "--json").json()["count"] == 0
    job = command("cron", "add", "x", "0 0 1 1 *", "x", "--json").json()["job"]
    assert len(command("cron", "preview", job["id"], "--count", "2", "--json").json()["slots"]) == 2


def test_the_status_tells_what_is_next(command: Command) -> None:
    command("cron", "add", "x", "in 2 hours", "x")
    shown = command("cron", "status").out
    assert "1 of 200" in shown and "scheduler" in shown
    assert command("cron", "status", "--json").json()["count"] == 1
