"""Where the replies of scheduled work go, with a webhook channel as the service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.messaging.test_messages import Talk, last_said, say
from tests.support.harness import wait_until
from tests.support.model_server import Reply, error, text

YEARLY = {"kind": "cron", "expr": "0 0 1 1 *"}
ALARM = "the cellar is flooded"


def answer(request: Any) -> Reply:
    said = last_said(request)
    if "please fail" in said:
        return error(400, "no more of it")
    if "[heartbeat" in said:
        return text(f"HEARTBEAT_OK {ALARM}")
    return text("done: " + said.partition("] ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    more = 'allow = ["lena"]\n[heartbeat]\nevery = "1h"\nactive_start = "00:00"\nactive_end = "24:00"\n'
    with Talk(tmp_path_factory.mktemp("talk") / "home", more, answer=answer) as one:
        yield one


def force(talk: Talk, spec: dict[str, Any]) -> Any:
    job = {"name": "a job", "schedule": YEARLY, "spec": spec}
    added = talk.gateway.request("POST", "/v1/cron", job).json()["job"]
    (result,) = talk.gateway.request("POST", f"/v1/cron/{added['id']}/run").json()["results"]
    return result


def task(message: str, **fields: Any) -> dict[str, Any]:
    return {"mode": "task", "message": message, **fields}


def taken(talk: Talk, words: str) -> list[tuple[str, str]]:
    """(to, text) of what the service took that has these words in it."""
    return [(one["to"], one["text"]) for one in talk.receiver.taken if words in one["text"]]


def arrives(talk: Talk, words: str) -> tuple[str, str]:
    found = wait_until(lambda: taken(talk, words), 15, f"a message with {words!r}")
    assert len(found) == 1
    return tuple(found[0])  # type: ignore[return-value]


def test_before_the_first_message_there_is_nowhere_to_deliver(talk: Talk) -> None:
    assert force(talk, task("alpha"))["status"] == "ok"
    demanded = force(talk, task("beta", deliver=True))
    assert demanded["status"] == "error" and "no one has written" in demanded["error"]
    assert taken(talk, "alpha") == [] == taken(talk, "beta")


def test_a_task_delivers_to_the_channel_and_peer_it_names(talk: Talk) -> None:
    result = force(talk, task("gamma", channel="crm", to="tom"))
    assert result["status"] == "ok" and "tom" in result["summary"]
    assert arrives(talk, "done: gamma") == ("tom", "done: gamma")


def test_a_channel_that_is_not_there_is_an_error_of_the_run(talk: Talk) -> None:
    result = force(talk, task("delta", channel="pager", to="tom"))
    assert result["status"] == "error" and "pager" in result["error"]
    lenient = force(talk, task("delta", channel="pager", to="tom", bestEffortDeliver=True))
    assert lenient["status"] == "ok" and "pager" in lenient["summary"]


def test_replies_go_to_the_person_who_last_wrote_to_the_agent(talk: Talk) -> None:
    say(talk.gateway, "lena", "hello there")
    wait_until(lambda: [one for one in talk.receiver.taken if one["to"] == "lena"], 15, "an answer to lena")
    assert force(talk, {"mode": "systemEvent", "text": "epsilon"})["status"] == "ok"
    assert arrives(talk, "done: epsilon")[0] == "lena"
    assert force(talk, task("zeta"))["status"] == "ok"
    assert arrives(talk, "done: zeta")[0] == "lena"
    assert force(talk, task("eta", deliver=False))["status"] == "ok"
    assert taken(talk, "eta") == [one for one in taken(talk, "eta") if "zeta" in one[1]]


def test_the_first_failure_of_a_job_is_reported(talk: Talk) -> None:
    say(talk.gateway, "lena", "hello again")
    wait_until(lambda: len([one for one in talk.receiver.taken if one["to"] == "lena"]) > 1, 15, "an answer to lena")
    assert force(talk, task("please fail"))["status"] == "error"
    to, said = arrives(talk, "no more of it")
    assert to == "lena" and "“a job” failed" in said
    assert force(talk, task("theta", channel="pager", to="tom"))["status"] == "error"
    wait_until(lambda: [one for one in taken(talk, "pager") if one[0] == "lena"], 15, "the failure, reported elsewhere")


def test_a_heartbeat_reply_is_delivered_even_if_short(talk: Talk) -> None:
    say(talk.gateway, "lena", "are you there")
    wait_until(lambda: taken(talk, "are you there"), 15, "an answer to lena")
    file = talk.gateway.home / "agents" / "main" / "HEARTBEAT.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("- look after the cellar\n")
    body = {"mode": "force", "id": "heartbeat:main"}
    (result,) = talk.gateway.request("POST", "/v1/cron/run", body).json()["results"]
    assert result["status"] == "ok", result
    assert arrives(talk, ALARM) == ("lena", ALARM)
