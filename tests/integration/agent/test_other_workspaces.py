"""Files of OpenClaw workspaces: their content is in the agent's prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.model_server import text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("claw") / "home")


@pytest.mark.parametrize("name", ["TOOLS.md", "BOOTSTRAP.md", "BOOT.md"])
def test_the_file_is_in_the_prompt_of_the_main_session(house: House, name: str) -> None:
    """I7: these three were not read."""
    folder = house.gateway.home / "agents" / "main"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"the words of {name}\n")
    house.script(f"tell of {name}", text("done"))
    body = {"message": f"tell of {name}", "wait_seconds": 30}
    answer = house.gateway.request("POST", "/v1/sessions/main/messages", body)
    assert answer.status == 200, answer
    assert f"the words of {name}" in str(house.asked(f"tell of {name}")[-1].messages[0]["content"])
