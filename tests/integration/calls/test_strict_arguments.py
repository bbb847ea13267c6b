"""Every tool refuses argument names it does not have, and takes one spelling of each parameter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from farhand.machine.files.files import Files
from farhand.machine.jobs.jobs import Jobs
from farhand.node.limits import ToolLimits
from farhand.node.tools import node_tools
from farhand.protocol.errors import InvalidArgs
from farhand.sdk.context import CancelToken, ToolContext
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import NodeShellTools
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, PluginProcess

STRANGER = "qqzzqq"
# Tools whose author registered them without a schema, so their arguments are not checked.
OPEN = {"typed.raw"}

PLUGIN = """
import asyncio, os, signal
from typing import Annotated
from farhand.sdk import NodeClient, NodeInfo, ToolRegistry

registry = ToolRegistry()

@registry.tool("typed.greet", read_only=True)
async def greet(ctx, name: str, loud: bool = False):
    return {"greeting": name}

async def raw(ctx, args):
    return args

registry.register("typed.raw", raw)
client = NodeClient(os.environ["URL"], os.environ["TOKEN"], node_info=NodeInfo("typed", "typed", "test", "1"))
asyncio.run(client.run(registry))
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("strict")
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(folder / "home"))
        stack.enter_context(NodeProcess(gateway, folder / "laptop", "laptop"))
        env = {"URL": gateway.ws_url, "TOKEN": "shared-node-token"}
        stack.enter_context(PluginProcess(PLUGIN, folder / "plugin", env))
        gateway.wait_for_node("typed")
        yield gateway


def sample(schema: dict[str, Any]) -> Any:
    """A value that fits a parameter's schema."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type") or next((one["type"] for one in schema.get("anyOf", ()) if "type" in one), "string")
    return {"string": "1", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}[kind]


def valid(parameters: dict[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties", {})
    return {name: sample(properties[name]) for name in parameters.get("required", ())}


def typo(name: str) -> str:
    """One letter of a real name doubled."""
    return name[:-1] + name[-1] * 2


def refusals(parameters: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str | None]]:
    """Arguments with one wrong name, that name, and the one it should have been."""
    arguments = valid(parameters)
    names = list(parameters.get("properties", {}))
    yield {**arguments, STRANGER: 1}, STRANGER, names[0] if names else None
    for name in names:
        value = arguments.get(name, sample(parameters["properties"][name]))
        rest = {other: given for other, given in arguments.items() if other != name}
        yield {**rest, typo(name): value}, typo(name), name
        yield {**arguments, name.swapcase(): value}, name.swapcase(), name


def listed(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    return {tool["name"]: tool["parameters"] for tool in gateway.get("/v1/tools")["tools"]}


def refuses(answer: Any, wrong: str, right: str | None) -> None:
    assert answer["ok"] is False, answer
    error = answer["error"]
    assert error["kind"] == "invalid_args" and repr(wrong) in error["message"], error
    assert right is None or right in error["message"], error


def test_every_tool_refuses_names_it_does_not_have(gateway: GatewayProcess) -> None:
    tools = listed(gateway)
    some = {"laptop__Edit", "gsv__WriteFile", "gsv__Cron", "gsv__Transfer", "cron", "exec", "message", "typed.greet"}
    assert some <= set(tools)
    for tool, parameters in tools.items():
        if tool not in OPEN:
            for arguments, wrong, right in refusals(parameters):
                refuses(gateway.invoke(tool, arguments), wrong, right)


def mcp(gateway: GatewayProcess, method: str, params: Any, session: str | None = None) -> Any:
    headers = {"Accept": "application/json, text/event-stream", **({"Mcp-Session-Id": session} if session else {})}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return gateway.request("POST", "/mcp", message, headers=headers)


def test_every_schema_is_closed(gateway: GatewayProcess) -> None:
    for tool, parameters in listed(gateway).items():
        assert tool in OPEN or parameters.get("additionalProperties") is False, tool
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    session = mcp(gateway, "initialize", client).headers["mcp-session-id"]
    tools = mcp(gateway, "tools/list", {}, session).json()["result"]["tools"]
    assert len(tools) > 20
    for tool in tools:
        assert tool["name"] in OPEN or tool["inputSchema"].get("additionalProperties") is False, tool["name"]


def process(gateway: GatewayProcess, tool: Any) -> Any:
    body = {"input": [], "session_id": "s", "user_id": "u", "channel": "console", "biz_params": {"tool": tool}}
    return gateway.request("POST", "/agent/process", body)


def test_the_direct_tools_refuse_names_they_do_not_have(gateway: GatewayProcess) -> None:
    for name, given in (
        ("read_file", {"path": "a"}),
        ("create_file", {"path": "a", "content": ""}),
        ("update_file", {"path": "a", "content": "", "mode": "append"}),
        ("shell", {"command": "true", "cwd": ".", "timeout_seconds": 5}),
    ):
        arguments: dict[str, Any] = dict(given)
        wrongs = [({**arguments, STRANGER: 1}, STRANGER, "path" if "path" in given else "command")]
        for right in given:
            rest = {other: value for other, value in arguments.items() if other != right}
            wrongs.append(({**rest, typo(right): arguments[right]}, typo(right), right))
        for sent, wrong, right in wrongs:
            answer = process(gateway, {"name": name, "input": sent})
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (400, "invalid_tool_input"), error
            assert repr(wrong) in error["message"] and right in error["message"], error
    for tool in (
        {"name": "read_file", "inputs": {"path": "a"}},
        {"name": "read_file", "input": {"path": "a", "items": [{"path": "b"}]}},
        {"name": "read_file", "input": {"items": [{"path": "b"}]}, "items": [{"path": "a"}]},
    ):
        assert process(gateway, tool).status == 400, tool


def test_two_spellings_of_one_parameter_are_refused(gateway: GatewayProcess) -> None:
    for tool, arguments in (
        ("write", {"path": "same.txt", "file_path": "same.txt", "content": ""}),
        ("edit", {"path": "a", "old_text": "x", "old_string": "x", "new_text": "y"}),
        ("exec", {"command": "true", "workdir": ".", "working_dir": None}),
        ("process", {"action": "status", "process_id": "1", "pid": "1"}),
        ("message", {"to": "a", "target": "a", "content": "x"}),
        ("memory_search", {"query": "x", "limit": 1, "max_results": 1}),
        ("cron", {"action": "list", "schedule": "", "expression": ""}),
    ):
        answer = gateway.invoke(tool, arguments)
        assert answer["ok"] is False and answer["error"]["kind"] == "invalid_args", (tool, answer)
        assert "ambiguous" in answer["error"]["message"], (tool, answer)


def test_dialects_of_other_tools_are_refused(gateway: GatewayProcess) -> None:
    """The spellings by which an approval could show one edit or folder while another was used."""
    texts = {"oldString": "x", "newString": "y"}
    for tool, arguments, wrong in (
        ("laptop__Edit", {"path": "a", **texts, "old_text": "p", "new_text": "q"}, "old_text"),
        ("laptop__Bash", {"command": "pwd", "workdir": ".", "cwd": "/"}, "cwd"),
        ("laptop__Write", {"path": "a", "content": "x", "file_path": "b"}, "file_path"),
        ("exec", {"command": "pwd", "cwd": "/"}, "cwd"),
        ("edit", {"path": "a", "old_text": "x", "new_text": "y", "oldString": "p", "replaceAll": True}, "oldString"),
        ("gsv__EditFile", {"path": "a", **texts, "replace_all": True}, "replace_all"),
        ("gsv__Cron", {"action": "list", "name": "x"}, "name"),
        ("gsv__Cron", {"action": "add", "job": {"name": "x"}, "schedule": {}}, "schedule"),
    ):
        refuses(gateway.invoke(tool, arguments), wrong, None)


def test_a_record_and_a_node_see_each_name_once(gateway: GatewayProcess) -> None:
    body = b'{"tool":"laptop__bash","args":{"command":"echo first","command":"echo last"}}'
    answer = gateway.request("POST", "/v1/tools/invoke", body).json()
    assert answer["result"]["output"] == "last\n"
    record = gateway.get(f"/v1/calls/{answer['request_id']}")
    assert (record["tool"], record["args"]) == ("laptop__Bash", {"command": "echo last"})
    answer = gateway.invoke("write", {"file_path": "named.txt", "content": ""})
    assert gateway.get(f"/v1/calls/{answer['request_id']}")["args"] == {"path": "named.txt", "content": ""}


def test_tools_without_a_schema_stay_open(gateway: GatewayProcess) -> None:
    assert gateway.invoke("typed.raw", {"anything": 1})["result"] == {"anything": 1}

    async def plain() -> None:
        async with PlainNode.connect(gateway, "seed", ["seed"]) as node:
            calling = asyncio.create_task(gateway.ainvoke("seed.any", {"zzz": 1}))
            request = await node.receive("tool_request")
            assert request["args"] == {"zzz": 1}
            await node.answer(request, {})
            assert (await calling)["ok"] is True

    asyncio.run(plain())


def test_a_node_does_not_rely_on_the_gateways_check(tmp_path: Path) -> None:
    async def ask() -> None:
        async with Jobs(tmp_path / "jobs") as jobs:
            tools = node_tools((NodeFileTools(Files(tmp_path)), NodeShellTools(jobs, tmp_path)), ToolLimits())
            for name in tools.tool_names():
                tool = tools.find(name)
                assert tool is not None
                for arguments, wrong, right in refusals(tool.spec.parameters):
                    context = ToolContext("call", name, None, CancelToken())
                    with pytest.raises(InvalidArgs) as raised:
                        await tool.run(context, Raw(json.dumps(arguments).encode()))
                    assert repr(wrong) in raised.value.message and (right or "") in raised.value.message

    asyncio.run(ask())


# -- names of tools ---------------------------------------------------------------------------------------

DISABLED = """
[tools]
disabled = ["laptop__Bash", "typed.greet", " gsv__WriteFile "]

[[policy.rules]]
decision = "deny"
tool = "laptop__write"
"""


def test_names_are_decided_on_after_they_are_resolved(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(DISABLED)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(home))
        node = stack.enter_context(NodeProcess(gateway, tmp_path / "laptop", "laptop"))
        env = {"URL": gateway.ws_url, "TOKEN": "shared-node-token"}
        stack.enter_context(PluginProcess(PLUGIN, tmp_path / "plugin", env))
        gateway.wait_for_node("typed")
        assert not {"laptop__Bash", "typed.greet", "gsv__WriteFile"} & set(listed(gateway))
        mark = node.workspace / "mark"
        for name in ("laptop__Bash", "laptop__bash", "laptop__BASH", "laptop__Ba\u017fh"):
            answer = gateway.invoke(name, {"command": "touch mark"})
            assert answer["ok"] is False and answer["error"]["kind"] == "not_allowed", (name, answer)
            assert "[tools] disabled" in answer["error"]["message"]
        for name in ("laptop__Bash ", " laptop__Bash", "LAPTOP__Bash", "laptop__ Bash", "laptop__Bash\n", "Bash"):
            answer = gateway.invoke(name, {"command": "touch mark"})
            assert answer["ok"] is False and answer["error"]["kind"] in ("not_found", "not_allowed"), (name, answer)
        assert not mark.exists()
        for name in ("typed.greet", "TYPED.Greet", "typed__typed.greet", "typed__TYPED.GREET"):
            answer = gateway.invoke(name, {"name": "x"})
            assert answer["error"]["kind"] == "not_allowed", (name, answer)
        assert gateway.invoke("gsv__WriteFile", {"path": "a", "content": ""})["error"]["kind"] == "not_allowed"
        for name in ("laptop__Write", "laptop__WRITE"):
            assert "policy denies" in gateway.invoke(name, {"path": "a", "content": ""})["error"]["message"]
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
        session = mcp(gateway, "initialize", client).headers["mcp-session-id"]
        for name in ("laptop__bash", "laptop__Bash", "typed.greet", "typed_greet"):
            called = mcp(gateway, "tools/call", {"name": name, "arguments": {"command": "touch mark"}}, session)
            assert called.json().get("error") or called.json()["result"]["isError"], (name, called)
        assert not mark.exists()

        async def plain() -> None:
            async with PlainNode.connect(gateway, "seed", ["seed"]) as node:
                for name in ("seed.any ", "seed.any\t", "seed. any", "seed__seed.any "):
                    answer = await gateway.ainvoke(name, {})
                    assert answer["error"]["kind"] == "not_found", (name, answer)
                assert (await gateway.ainvoke("seed.any", {}, timeout_ms=50))["error"]["kind"] == "timeout"
                assert (await node.receive("tool_request"))["tool"] == "seed.any"

        asyncio.run(plain())
