"""The tools of a plain node are listed on every interface."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import PlainNode
from tests.support.model_server import calls, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("plain") / "home")


def names_over_http(house: House) -> dict[str, Any]:
    return {one["name"]: one for one in house.gateway.get("/v1/tools")["tools"]}


def names_over_mcp(house: House) -> dict[str, Any]:
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
    begin = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    begun = house.gateway.request("POST", "/mcp", begin, headers=headers)
    session = {name.lower(): value for name, value in begun.headers.items()}.get("mcp-session-id")
    answer = house.gateway.request(
        "POST", "/mcp", asked, headers={**headers, **({"Mcp-Session-Id": session} if session else {})}
    )
    body = answer.body.decode()
    data = next((line[5:] for line in body.splitlines() if line.startswith("data:")), body)
    return {one["name"]: one for one in json.loads(data)["result"]["tools"]}


def names_on_the_command_line(house: House) -> str:
    env = {**os.environ, "FARHAND_HOME": str(house.gateway.home)}
    return run_process([*FARHAND, "tools"], env=env, check=True).stdout


def test_capabilities_and_names_that_worked_are_listed(house: House) -> None:
    async def run() -> None:
        async with PlainNode.connect(house.gateway, "hello", ["hello.ping", "hello.fs"]) as node:
            listed = await asyncio.to_thread(names_over_http, house)
            assert {"hello.ping", "hello.fs"} <= listed.keys() and listed["hello.ping"]["host"] == "hello"
            assert listed["hello.ping"]["parameters"]["type"] == "object"
            assert {"hello.ping", "hello.fs"} <= {
                name.replace("_", ".") for name in await asyncio.to_thread(names_over_mcp, house)
            }
            assert "hello.ping" in await asyncio.to_thread(names_on_the_command_line, house)

            for tool, ok in (("hello.fs.read_text", True), ("hello.fs.none", False)):
                asked = asyncio.ensure_future(house.gateway.ainvoke(tool, {"path": "x"}))
                request = await node.receive("tool_request")
                if ok:
                    await node.answer(request, {"content": "x"})
                else:
                    failure = {"kind": "not_found", "message": "no such tool"}
                    await node.send(
                        {
                            "type": "tool_response",
                            "request_id": request["request_id"],
                            "ok": False,
                            "error": failure,
                        }
                    )
                assert (await asked)["ok"] is ok
            listed = await asyncio.to_thread(names_over_http, house)
            assert "hello.fs.read_text" in listed and "hello.fs.none" not in listed

    asyncio.run(run())
    assert not {name for name in names_over_http(house) if name.startswith("hello.")}


def test_names_learned_have_a_bound(house: House) -> None:
    async def run() -> None:
        async with PlainNode.connect(house.gateway, "many", ["many"]) as node:
            for number in range(80):
                asked = asyncio.ensure_future(house.gateway.ainvoke(f"many.tool{number}"))
                await node.answer(await node.receive("tool_request"), None)
                await asked
            listed = await asyncio.to_thread(names_over_http, house)
            assert 10 < len([name for name in listed if name.startswith("many.")]) <= 64

    asyncio.run(run())


def test_the_prompt_names_no_tool_that_does_not_exist(house: House) -> None:
    async def run() -> None:
        async with PlainNode.connect(house.gateway, "lone", ["lone.camera"]) as node:
            session = house.session(calls(("lone.camera", {"zoom": 2})), text("done"))
            sending = asyncio.ensure_future(asyncio.to_thread(session.send))
            request = await node.receive("tool_request", 20)
            await node.answer(request, "a picture")
            assert (await sending)["state"] == "ok" and request["args"] == {"zoom": 2}
            prompt = str(session.asked()[0].messages[0]["content"])
            assert "- lone: lone.camera.*" in prompt and "__Bash" not in prompt

    asyncio.run(run())
