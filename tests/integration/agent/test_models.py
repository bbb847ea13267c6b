"""Which models a caller may choose: those of the settings, on every route, and never a file of the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.cli.conftest import Command
from tests.support.model_server import text

PATHS = ["/dev/zero", "/etc/passwd", "/no/such/file", "/tmp"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("models") / "home")


@pytest.fixture(scope="module")
def talker(house: House) -> str:
    """A token that may chat and nothing else."""
    return str(Command(house.gateway.home)("token", "create", "--scope", "chat", "--json").json()["token"])


@pytest.mark.parametrize("path", PATHS)
def test_no_caller_names_a_recording(house: House, talker: str, path: str) -> None:
    """S4: `replay:/dev/zero` took the memory, and the texts said which files exist."""
    gateway, name = house.gateway, f"replay:{path}"
    session = house.session()
    refusal = f"There is no model '{name}' here. Choose one of: scripted, other-model"
    body = {"message": "hi", "wait_seconds": 20}
    where = f"/v1/sessions/{session.key}/messages"
    answer = gateway.request("POST", where, {**body, "model": name}, token=talker)
    assert answer.status == 400 and refusal in answer.json()["error"]["message"], answer
    assert refusal in gateway.request("POST", where, {**body, "message": f"/model {name}"}, token=talker).body.decode()
    completions = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
    assert gateway.request("POST", "/v1/chat/completions", completions, token=talker).status == 404
    job = {"name": f"job {path}", "schedule": {"kind": "every", "everyMs": 86_400_000}}
    job["spec"] = {"mode": "task", "message": "hi", "model": name}
    added = gateway.invoke("gsv__Cron", {"action": "add", "job": job})
    assert added["ok"], added
    ran = gateway.invoke("gsv__Cron", {"action": "run", "id": added["result"]["job"]["id"], "mode": "force"})
    assert refusal in str(ran["result"]), ran


def test_a_configured_model_may_be_chosen(house: House, talker: str) -> None:
    session = house.session(text("one"), text("two"))
    for name in ("other-model", "openai/other-model"):
        assert session.send(model=name, token=talker)["state"] == "ok"
    assert [request.json["model"] for request in session.asked()] == ["other-model", "other-model"]
