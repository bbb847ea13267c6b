"""Resources, prompts, completion, logging and progress, with the official client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.integration.http.test_mcp import connected, run
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, NodeProcess, end_marked

MODES = ["legacy", "2026-07-28"]


@pytest.fixture(scope="module")
def fixtures(shared_gateway: GatewayProcess) -> Iterator[None]:
    """The plug-in node of the conformance suite."""
    mark = "TEST_NODE=conformance"
    environment = {**os.environ, "SA_GATEWAY_WS_URL": shared_gateway.ws_url, "SA_NODE_TOKEN": SHARED_TOKEN}
    environment |= {"SA_NODE_ID": "conformance", "TEST_NODE": "conformance"}
    command = [sys.executable, "-m", "tests.support.conformance_node"]
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        shared_gateway.wait_for_node("conformance")
        yield
    finally:
        process.kill()
        process.wait()
        end_marked(mark)


@pytest.mark.parametrize("mode", MODES)
def test_workspace_files_are_resources(shared_gateway: GatewayProcess, mode: str) -> None:
    folder = shared_gateway.home / "agents" / "main"
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    (folder / "plan.md").write_text("# Plan\n")
    (folder / "notes" / "ä b.txt").write_text("inside\n")

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            listed = {one.name: one for one in (await client.list_resources()).resources}
            assert listed["plan.md"].uri == "farhand://workspace/main/plan.md"
            templates = (await client.list_resource_templates()).resource_templates
            assert {one.name for one in templates} == {"workspace-file", "call", "call-output"}
            (found,) = (await client.read_resource("farhand://workspace/main/plan.md")).contents
            assert isinstance(found, types.TextResourceContents) and found.text == "# Plan\n"
            (found,) = (await client.read_resource("farhand://workspace/main/notes/%C3%A4%20b.txt")).contents
            assert isinstance(found, types.TextResourceContents) and found.text == "inside\n"
            for wrong in (
                "farhand://workspace/main/../../token",
                "farhand://workspace/main/%2e%2e/%2e%2e/token",
                "farhand://workspace/..%2f..%2f/token",
                "farhand://workspace/main/missing.md",
                "farhand://calls/nothing",
                "file:///etc/passwd",
                "farhand://",
            ):
                with pytest.raises(MCPError):
                    await client.read_resource(wrong)
            ref = types.ResourceTemplateReference(type="ref/resource", uri="farhand://workspace/{agent}/{+path}")
            done = await client.complete(ref, {"name": "path", "value": "pl"})
            assert done.completion.values == ["plan.md"]
            done = await client.complete(ref, {"name": "agent", "value": "m"})
            assert done.completion.values == ["main"]

    run(act())
    assert any(call["tool"] == "gsv__ReadFile" for call in shared_gateway.get("/v1/calls")["calls"])


@pytest.mark.parametrize("mode", MODES)
def test_calls_and_their_output_are_resources(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    call = shared_gateway.invoke("hands__Bash", {"command": "echo printed"})["request_id"]
    narrow = shared_gateway.request("POST", "/v1/tokens", {"tools": ["hands__Read"]}).json()["token"]

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            (found,) = (await client.read_resource(f"farhand://calls/{call}")).contents
            assert isinstance(found, types.TextResourceContents)
            assert json.loads(found.text)["tool"] == "hands__Bash"
            (found,) = (await client.read_resource(f"farhand://calls/{call}/output")).contents
            assert isinstance(found, types.TextResourceContents) and found.text == "printed\n"
            ref = types.ResourceTemplateReference(type="ref/resource", uri="farhand://calls/{id}")
            assert call in (await client.complete(ref, {"name": "id", "value": call[:8]})).completion.values
        async with connected(shared_gateway, mode, narrow) as client:
            for uri in (f"farhand://calls/{call}", f"farhand://calls/{call}/output"):
                with pytest.raises(MCPError):
                    await client.read_resource(uri)
            assert (await client.list_resources()).resources == []
            assert (await client.list_prompts()).prompts == []
            with pytest.raises(MCPError):
                await client.read_resource("farhand://workspace/main/plan.md")

    run(act())


@pytest.mark.parametrize("mode", MODES)
def test_skills_are_prompts(shared_gateway: GatewayProcess, mode: str, tmp_path: Path) -> None:
    skill = b"---\nname: tidy\ndescription: Tidy up.\n---\nPut things away.\n"
    assert shared_gateway.request("PUT", "/v1/skills/tidy/SKILL.md", skill).status in (200, 201)

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            prompts = {one.name: one for one in (await client.list_prompts()).prompts}
            assert prompts["tidy"].description == "Tidy up."
            found = await client.get_prompt("tidy", {"task": "the kitchen"})
            content = found.messages[0].content
            assert isinstance(content, types.TextContent)
            assert "Put things away." in content.text and content.text.endswith("Task: the kitchen")
            with pytest.raises(MCPError):
                await client.get_prompt("missing")

    run(act())


@pytest.mark.parametrize("mode", MODES)
def test_logs_progress_and_blocks_of_plug_ins_reach_the_client(
    shared_gateway: GatewayProcess, fixtures: None, mode: str
) -> None:
    logged: list[Any] = []
    steps: list[tuple[float, float | None]] = []

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        logged.append(params.data)

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, total))

    async def act() -> None:
        options: dict[str, Any] = {"log_level": "info"} if mode != "legacy" else {}
        async with connected(shared_gateway, mode, logging_callback=on_log, **options) as client:
            if mode == "legacy":
                await client.set_logging_level("info")
            await client.call_tool("test_tool_with_logging", {})
            await client.call_tool("test_tool_with_progress", {}, progress_callback=on_progress)
            result = await client.call_tool("test_multiple_content_types", {})
            assert [block.type for block in result.content] == ["text", "image", "resource"]
            result = await client.call_tool("test_audio_content", {})
            assert [block.type for block in result.content] == ["audio"]
            await asyncio.sleep(0)

    run(act())
    assert logged == ["Tool execution started", "Tool processing data", "Tool execution completed"]
    assert (100, 100) in steps and sorted(steps) == steps
