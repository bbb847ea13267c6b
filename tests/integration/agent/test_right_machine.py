"""An agent is never directed to another machine than the one it named, even while that one is offline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.agent.tokens import text_tokens
from tests.integration.agent.test_agent import House, open_house
from tests.support.harness import NodeProcess, PlainNode, hello_frame
from tests.support.model_server import calls, text

NOTES = [{"name": "mac.notes.search", "description": "Search notes.", "parameters": {"type": "object"}}]


@contextlib.asynccontextmanager
async def joined(house: House, hello: dict[str, Any]) -> AsyncIterator[PlainNode]:
    """A node that said this."""
    async with PlainNode.connect(house.gateway, hello["node"]["id"], hello=False) as node:
        await node.send(hello)
        await node.receive("gateway_welcome")
        yield node


class Scene:
    """Two machines: `laptop`, which is offline, and `nas`; a plug-in node `mac`, which is offline too."""

    def __init__(self, house: House, nas: NodeProcess) -> None:
        self.house = house
        self.nas = nas

    def said(self, *uses: tuple[str, Any]) -> list[str]:
        """Return the results that the model receives for these calls, made one after the other."""
        session = self.house.session(*[calls(use) for use in uses], text("done"))
        assert session.send()["state"] == "ok"
        return [one["content"] for one in session.asked()[-1].messages if one["role"] == "tool"]

    def prompt(self) -> str:
        session = self.house.session(text("ok"))
        session.send()
        return str(session.asked()[0].messages[0]["content"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("right")
    for house in open_house(folder / "home"):
        with NodeProcess(house.gateway, folder / "laptop", "laptop"):

            async def come_and_go(house: House) -> None:
                listing = hello_frame("mac", ["mac.notes"], farhand={"tools": NOTES})
                plain = hello_frame("pi", ["pi.camera"])
                for hello in (listing, plain):
                    async with joined(house, hello):
                        pass

            asyncio.run(come_and_go(house))
        with NodeProcess(house.gateway, folder / "nas", "nas") as nas:
            for gone in ("laptop", "mac", "pi"):
                house.gateway.wait_for_node(gone, online=False)
            yield Scene(house, nas)


@pytest.mark.parametrize("name", ["laptop__Bash", "laptop__bash", "laptop__Bsh"])
def test_a_call_says_that_the_machine_is_offline_since_when(scene: Scene, name: str) -> None:
    (said,) = scene.said((name, {"command": "true"}))
    assert "node 'laptop' is offline, last seen 20" in said, said
    assert "nas" not in said


@pytest.mark.parametrize("name", ["Laptop__Bash", "LAPTOP__Bash", "lap-top__Bash"])
def test_another_spelling_of_its_id_is_recognised(scene: Scene, name: str) -> None:
    (said,) = scene.said((name, {"command": "true"}))
    assert "did you mean 'laptop', which is offline, last seen 20" in said and "nas" not in said, said


def test_an_unknown_machine_leads_to_no_other(scene: Scene) -> None:
    (said,) = scene.said(("na__Bash", {"command": "true"}))
    assert "there is no node 'na'" in said and "nas__" not in said, said


@pytest.mark.parametrize("name", ["mac.notes.search", "pi.camera.shoot"])
def test_a_plug_in_s_tool_names_its_machine(scene: Scene, name: str) -> None:
    (said,) = scene.said((name, {}))
    assert f"'{name.partition('.')[0]}' (last seen 20" in said and "offline" in said, said
    answer = scene.house.gateway.invoke(name)
    assert answer["error"]["kind"] == "not_found" and "offline" in answer["error"]["message"]


@pytest.mark.parametrize(
    "query", ["laptop", "Laptop", "run a command on laptop", "laptop__Bash", "shell lap-top", "laptop, Bash"]
)
def test_a_search_shows_its_tools_as_offline_and_no_other_machine_s(scene: Scene, query: str) -> None:
    (said,) = scene.said(("tool_search", {"query": query}))
    assert "laptop is offline, last seen 20" in said and "do not use another machine" in said, said
    assert "nas__" not in said


def test_a_search_without_a_machine_marks_what_is_offline(scene: Scene) -> None:
    found, notes = scene.said(("tool_search", {"query": "Bash"}), ("tool_search", {"query": "notes"}))
    assert "nas__Bash: " in found and "- laptop__Bash (offline, last seen 20" in found, found
    assert "- mac.notes.search (offline, last seen 20" in notes, notes


def test_tools_of_offline_machines_are_not_offered_after_a_search(scene: Scene) -> None:
    session = scene.house.session(calls(("tool_search", {"query": "Bash"})), text("done"))
    session.send()
    offered = session.asked()[-1].tools
    assert "nas__Bash" in offered and "laptop__Bash" not in offered


def test_a_search_for_an_unknown_machine_finds_no_other(scene: Scene) -> None:
    (said,) = scene.said(("tool_search", {"query": "desk__Bash"}))
    assert "There is no machine 'desk'" in said and "nas__" not in said, said


def test_machines_are_listed_by_a_search(scene: Scene) -> None:
    (said,) = scene.said(("tool_search", {"query": "machines"}))
    assert "- nas: connected" in said and "- laptop: offline, last seen 20" in said, said


def test_transfers_and_logs_name_the_machine_as_offline(scene: Scene) -> None:
    there, spelled, logs = scene.said(
        ("gsv__Transfer", {"source": "laptop:a", "destination": "gsv:a"}),
        ("gsv__Transfer", {"source": "gsv:a", "destination": "Laptop:/a"}),
        ("gsv__LogsGet", {"nodeId": "laptop"}),
    )
    assert "laptop (offline, last seen 20" in there, there
    assert "did you mean 'laptop', which is offline, last seen 20" in spelled, spelled
    assert "node 'laptop' is offline, last seen 20" in logs, logs
    assert "nas" not in there + spelled + logs


def test_a_fan_out_says_so_too(scene: Scene) -> None:
    body = {"tool": "Bash", "args": {"command": "true"}, "nodes": ["laptop", "nas"]}
    rows = scene.house.gateway.request("POST", "/v1/tools/fanout", body).json()["results"]
    assert rows[0]["state"] == "offline" and "is offline, last seen 20" in rows[0]["error"]["message"], rows


def test_the_prompt_names_it_as_offline(scene: Scene) -> None:
    prompt = scene.prompt()
    offline = next(line for line in prompt.splitlines() if line.startswith("Known but offline: "))
    assert "laptop (last seen 20" in offline and "mac (last seen 20" in offline
    assert "- nas (" in prompt and "- laptop" not in prompt
    assert "nas__Bash." in prompt


def test_a_recorded_run_with_a_search_can_be_repeated(scene: Scene) -> None:
    session = scene.house.session(
        calls(("tool_search", {"query": "Bash"})), calls(("laptop__Bash", {"command": "true"})), text("done")
    )
    run = session.send()["run_id"]
    assert scene.house.gateway.get(f"/v1/runs/{run}/replay")["identical"] is True


def test_a_bare_turn_does_not_grow_with_machines(tmp_path: Path) -> None:
    tools = ("search", "create", "update", "remove", "list", "export", "import")

    def hello(number: int) -> dict[str, Any]:
        name = f"plug{number}.notes"
        specs = [{"name": f"{name}.{tool}", "description": "Work with notes."} for tool in tools]
        return hello_frame(f"plug-{number}", [name], farhand={"tools": specs})

    def cost(house: House) -> int:
        session = house.session(text("ok"))
        session.send()
        return text_tokens(session.asked()[0].body.decode())

    async def measure(house: House) -> list[int]:
        nodes, costs = contextlib.AsyncExitStack(), []
        for number in range(50):
            if number == 2:
                costs.append(await asyncio.to_thread(cost, house))
            await nodes.enter_async_context(joined(house, hello(number)))
        costs.append(await asyncio.to_thread(cost, house))
        await nodes.aclose()
        await asyncio.to_thread(house.gateway.wait_for_node, "plug-49", online=False)
        costs.append(await asyncio.to_thread(cost, house))
        return costs

    for house in open_house(tmp_path / "home"):
        two, fifty, offline = asyncio.run(measure(house))
        assert fifty <= two, (two, fifty)
        assert offline <= two, (two, offline)
