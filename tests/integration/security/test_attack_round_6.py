"""Attempts of an attacker that the gateway and its nodes withstand: narrow tokens, links, secrets, lies and bombs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from farhand.machine.sandbox.egress import EgressRefused, NetworkRule, _address
from tests.integration.http.test_attacks_doors import made, token
from tests.integration.nodes.test_attacks_nodes import hello
from tests.support.harness import PATIENCE, SHARED_TOKEN, GatewayProcess, NodeProcess, wait_until
from tests.unit.sdk.wire import asynchronous

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
SECRET = "round-six-secret-value"
OUTSIDE = "kept outside of the lent folder\n"
MCP = {"Accept": "application/json"}
SETTINGS = """
[sandbox]
enabled = true

[policy]
default = "allow"

[[policy.rules]]
name = "asked"
decision = "ask"
session = "asked"
"""


class Ground:
    """A gateway with a sandbox, a node `free`, a node `lent` with one folder, and a folder beside that one."""

    def __init__(self, folder: Path, gateway: GatewayProcess, free: NodeProcess, lent: NodeProcess) -> None:
        self.gateway, self.free, self.lent = gateway, free, lent
        self.root, self.outside = folder / "root", folder / "outside"

    def call(self, tool: str, args: Any, who: str = "owner", **more: Any) -> Any:
        answer = self.gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more}, token=who)
        assert answer.status == 200, answer
        return answer.json()

    def bash(self, command: str, **more: Any) -> Any:
        return self.call("lent__Bash", {"command": command, "workdir": str(self.root), **more})


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("round-six")
    for name in ("home", "root", "outside"):
        (folder / name).mkdir()
    (folder / "home" / "farhand.toml").write_text(SETTINGS)
    env: dict[str, str | None] = {"OF_THE_NODE": "variable-of-the-node"}
    with (
        GatewayProcess(folder / "home", env={"OF_THE_GATEWAY": "variable-of-the-gateway"}) as gateway,
        NodeProcess(gateway, folder / "free", "free") as free,
        NodeProcess(gateway, folder / "lent", "lent", "--root", str(folder / "root"), env=env) as lent,
    ):
        for name, body in (("ANY", {}), ("FREE", {"nodes": ["free"], "tools": ["free__Bash"]})):
            assert gateway.request("PUT", f"/v1/secrets/{name}", {"value": SECRET + name, **body}).status == 200
        yield Ground(folder, gateway, free, lent)


# -- narrow tokens ------------------------------------------------------------------------------------------------

ELSEWHERE = [
    ("free__Bash", {"command": "true"}),
    ("node_bash", {"node": "free", "command": "true"}),
    ("node_read", {"node": "free", "path": "/etc/hostname"}),
    ("free__Trial", {"trialId": "x", "action": "keep"}),
    ("exec", {"command": "true"}),
    ("gsv__ReadFile", {"path": "/"}),
    ("gsv__Transfer", {"source": "free:/etc/hostname", "destination": "lent:x"}),
    ("gsv__LogsGet", {"nodeId": "free"}),
    ("node_list", {}),
]


def test_a_token_for_one_machine_reaches_no_other_through_mcp(ground: Ground) -> None:
    """Neither under the name of the machine, nor under the common names, nor through tools that name machines."""
    narrow = token(ground.gateway, "tools.exec", nodes=["lent"])
    session = mcp(ground.gateway, narrow, "initialize", protocolVersion="2025-06-18", capabilities={})
    headers = {"Mcp-Session-Id": session.headers["mcp-session-id"]}
    for name, arguments in ELSEWHERE:
        answer = mcp(ground.gateway, narrow, "tools/call", headers, name=name, arguments=arguments).json()
        assert answer["result"]["isError"] is True, (name, answer)
        assert answer["result"]["content"][0]["text"].startswith("not_allowed"), (name, answer)
    for uri in ("farhand://workspace/main/", "farhand://workspace/..%2f..%2f/token", f"farhand://calls/{'0' * 36}"):
        assert "error" in mcp(ground.gateway, narrow, "resources/read", headers, uri=uri).json(), uri
    own = mcp(
        ground.gateway, narrow, "tools/call", headers, name="node_glob", arguments={"node": "lent", "pattern": "*"}
    )
    assert own.json()["result"]["isError"] is False, own
    other = token(ground.gateway, "tools.exec")
    assert mcp(ground.gateway, other, "tools/list", headers).status == 404


def mcp(gateway: GatewayProcess, who: str, method: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return gateway.request("POST", "/mcp", body, token=who, headers={**MCP, **(headers or {})})


def test_a_job_makes_no_call_that_its_maker_may_not_make(ground: Ground, tmp_path: Path) -> None:
    narrow = made(ground.gateway, "tools.exec", tools=["gsv__Cron", "lent__Glob"])
    calls = [
        ("free__Bash", {"command": f"touch {tmp_path}/one"}),
        ("node_bash", {"node": "free", "command": f"touch {tmp_path}/two"}),
        ("exec", {"command": f"touch {tmp_path}/three"}),
        ("lent__Glob", {"pattern": "*"}),
    ]
    for tool, args in calls:
        job = {
            "name": tool,
            "schedule": {"kind": "at", "in": "1s"},
            "spec": {"mode": "call", "tool": tool, "args": args},
        }
        assert ground.call("gsv__Cron", {"action": "add", "job": job}, narrow["token"])["ok"] is True

    def ended() -> Any:
        found = ground.gateway.get(f"/v1/calls?credential={narrow['id']}")["calls"]
        of_jobs = {one["tool"]: one["state"] for one in found if one["tool"] != "gsv__Cron"}
        return of_jobs if len(of_jobs) == 3 and "running" not in of_jobs.values() else None

    # The common name is the tool of the machine, so two of the four calls have the same name.
    assert wait_until(ended) == {"free__Bash": "denied", "exec": "denied", "lent__Glob": "ok"}
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
@pytest.mark.parametrize("command", ["echo evil > SOUL.md", "mkdir -p skills/x && echo evil > skills/x/SKILL.md"])
def test_keeping_a_trial_does_not_steer_the_agent(ground: Ground, command: str) -> None:
    narrow = token(ground.gateway, "tools.exec", tools=["exec", "trial"])
    tried = ground.call("exec", {"command": command, "trial": True}, narrow)
    kept = ground.gateway.request("POST", f"/v1/trials/{tried['request_id']}/keep", {}, token=narrow)
    assert tried["ok"] is True and kept.status == 403 and "steers the agent" in kept.json()["error"]["message"]
    assert not any((ground.gateway.home / "agents" / "main").glob("S*"))
    assert not (ground.gateway.home / "agents" / "main" / "skills").exists()


# -- links --------------------------------------------------------------------------------------------------------


@pytest.fixture
def swapped(ground: Ground) -> Iterator[str]:
    """The id of a call that wrote a file of the lent folder, whose folder has become a link out of it since."""
    folder = ground.root / "folder"
    folder.mkdir()
    (folder / "file").write_text("old\n")
    (ground.outside / "file").write_text(OUTSIDE)
    written = ground.call("lent__Write", {"path": str(folder / "file"), "content": "new\n"})
    assert written["ok"] is True, written
    shutil.rmtree(folder)
    os.symlink(ground.outside, folder)
    yield str(written["request_id"])
    folder.unlink()
    assert (ground.outside / "file").read_text() == OUTSIDE


def test_no_tool_follows_a_link_out_of_the_lent_folder(ground: Ground, swapped: str) -> None:
    file = str(ground.root / "folder" / "file")
    for tool, args in (
        ("lent__Read", {"path": file}),
        ("lent__Write", {"path": file, "content": "evil"}),
        ("lent__Edit", {"path": file, "oldString": "kept", "newString": "evil"}),
        ("lent__Glob", {"pattern": "folder/*", "path": str(ground.root)}),
        ("lent__Grep", {"pattern": "kept", "path": str(ground.root / "folder")}),
        ("lent__Undo", {"call": swapped}),
        ("lent__Undo", {"call": swapped, "dryRun": True}),
        ("gsv__Transfer", {"source": f"lent:{file}", "destination": "gsv:stolen"}),
        ("gsv__Transfer", {"source": f"lent:{ground.root}/", "destination": "gsv:stolen/"}),
    ):
        answer = ground.call(tool, args)
        assert answer["ok"] is False and "kept outside" not in json.dumps(answer), (tool, answer)
    found = ground.call("lent__Grep", {"pattern": "kept", "path": str(ground.root)})
    assert found["result"]["count"] == 0, found


def test_no_preview_shows_what_a_link_leads_to(ground: Ground, swapped: str) -> None:
    file = str(ground.root / "folder" / "file")
    for tool, args in (
        ("lent__Undo", {"call": swapped}),
        ("lent__Write", {"path": file, "content": "evil"}),
        ("lent__Edit", {"path": file, "oldString": "kept", "newString": "evil"}),
    ):
        call_id = ground.call(tool, args, session_key="asked", background=True)["request_id"]

        def asked(wanted: str = call_id) -> Any:
            waiting = ground.gateway.get("/v1/approvals")["approvals"]
            return next((one for one in waiting if one["call_id"] == wanted), None)

        shown = wait_until(asked)
        assert "leads outside" in shown["note"] and shown["diff"] == "", (tool, shown)
        ground.gateway.request("POST", f"/v1/approvals/{shown['id']}", {"decision": "deny", "reason": "no"})


@needs_bubblewrap
def test_a_command_finds_no_way_to_uncover_the_state_of_its_node(
    ground: Ground, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The home of the node lies in the folder it lends."""
    folder = tmp_path_factory.mktemp("covered")
    root = folder / "root"
    root.mkdir()
    with NodeProcess(ground.gateway, folder / "n", "covered", "--root", str(root), state=root / ".farhand") as node:
        command = "mv .farhand x; rm -rf .farhand; umount .farhand; mv ../root ../y; cat .farhand/nodes/*/*; ls -A"
        for trial in (False, True):
            done = node.ok("Bash", {"command": command, "workdir": str(root), "trial": trial})
            assert done["output"].splitlines()[-1] == ".farhand", done
        assert "protected" in node.fails("Glob", {"pattern": ".farhand/**", "path": str(root)}, "not_allowed")
        assert (root / ".farhand" / "nodes").is_dir()


# -- secrets ------------------------------------------------------------------------------------------------------

WRONG_PLACES = [
    ("lent__Bash", {"command": "echo {{secret:FREE}}"}),
    ("node_bash", {"node": "lent", "command": "echo {{secret:FREE}}"}),
    ("free__Write", {"path": "x", "content": "{{secret:FREE}}"}),
    ("free__Read", {"path": "{{secret:FREE}}"}),
    ("free__Process", {"action": "list", "sessionId": "{{secret:FREE}}"}),
    ("exec", {"command": "echo {{secret:FREE}}"}),
    ("read", {"path": "{{secret:FREE}}"}),
]


def test_a_secret_for_one_tool_of_one_machine_is_given_to_no_other(ground: Ground) -> None:
    for tool, args in WRONG_PLACES:
        answer = ground.call(tool, args)
        assert answer["error"]["kind"] == "not_allowed", (tool, answer)
    for tool in ("free__Bash", "free__bash"):
        assert ground.call(tool, {"command": "test -n {{secret:FREE}}"})["result"]["exitCode"] == 0


ERRORS = [
    ("free__Read", {"path": "/nowhere/{{secret:ANY}}"}),
    ("free__Grep", {"pattern": "({{secret:ANY}}"}),
    ("free__Glob", {"pattern": "{{secret:ANY}}["}),
    ("free__Bash", {"command": "true", "workdir": "{{secret:ANY}}"}),
    ("free__Bash", {"command": "printenv FARHAND_SECRET_ANY; : {{secret:ANY}}"}),
    ("gsv__ReadFile", {"path": "{{secret:ANY}}"}),
    ("read", {"path": "{{secret:ANY}}"}),
]


def test_no_answer_and_no_record_has_the_value_of_a_secret(ground: Ground) -> None:
    for tool, args in ERRORS:
        assert SECRET not in json.dumps(ground.call(tool, args)), tool
    for path in ("/v1/calls?limit=50", "/v1/journal", "/v1/events?follow=0&last_event_id=0"):
        assert SECRET.encode() not in ground.gateway.request("GET", path).body, path
    assert SECRET not in ground.gateway.log.read_text()
    store = sqlite3.connect(f"file:{ground.gateway.home / 'farhand.db'}?mode=ro", uri=True)
    with contextlib.closing(store):
        for table in ("calls", "events"):
            rows = store.execute(f"SELECT * FROM {table}").fetchall()
            assert rows and not any(SECRET in str(value) for row in rows for value in row), table


@needs_bubblewrap
@pytest.mark.parametrize("tool", ["lent__Bash", "exec"])
@pytest.mark.parametrize("trial", [False, True])
def test_a_secret_brings_no_other_variables_into_the_sandbox(ground: Ground, tool: str, trial: bool) -> None:
    """Its value is passed on by inheritance, which must not pass on anything else."""
    answer = ground.call(tool, {"command": "env; : {{secret:ANY}}", "trial": trial})
    text = json.dumps(answer["result"])
    assert "FARHAND_SECRET_ANY" in text and SECRET not in text
    assert "variable-of-the" not in text and "SA_NODE_TOKEN" not in text


# -- hostile nodes ------------------------------------------------------------------------------------------------


class Liar:
    """A node with terminals that answers questions about them with whatever `said` returns."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.said: dict[str, Callable[[], Any]] = {}

    async def listen(self) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for frame in self._socket:
                message = json.loads(frame)
                if message["type"] == "tool_request":
                    name = {"type": "tool_response", "request_id": message["request_id"]}
                    await self._socket.send(json.dumps({**name, "ok": True, "result": {"pid": 1}}))
                elif message["type"] == "node_query" and message["kind"] in self.said:
                    name = {"type": "node_answer", "query_id": message["query_id"]}
                    await self._socket.send(json.dumps({**name, **self.said[message["kind"]]()}))


@contextlib.asynccontextmanager
async def lying(gateway: GatewayProcess) -> AsyncIterator[Liar]:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}}
    shell = {"name": "Bash", "capability": "shell.exec", "parameters": parameters, "unlisted": {"terminal": {}}}
    frame = hello("liar", tools=[shell])
    frame["capabilities"] = ["shell.exec"]
    url = f"{gateway.ws_url}?token={SHARED_TOKEN}&node_id=liar"
    async with websockets.connect(url, ping_interval=None, compression=None, max_size=None, close_timeout=1) as socket:
        await socket.send(json.dumps(frame))
        assert json.loads(await socket.recv())["type"] == "gateway_welcome"
        liar = Liar(socket)
        listening = asyncio.create_task(liar.listen())
        yield liar
        listening.cancel()


async def opened(gateway: GatewayProcess, node: str) -> str:
    answer = await asyncio.to_thread(gateway.request, "POST", "/v1/terminals", {"node": node})
    assert answer.status == 200, answer
    return str(answer.json()["terminal_id"])


async def seen(gateway: GatewayProcess, terminal_id: str, enough: int = 100) -> tuple[list[Any], int | None]:
    """The first frames that a viewer of a terminal gets, and the close code if the gateway closed it before."""
    url = f"ws://127.0.0.1:{gateway.port}/v1/terminals/{terminal_id}/ws"
    headers = {"Authorization": f"Bearer {gateway.token}"}
    frames: list[Any] = []
    async with websockets.connect(url, additional_headers=headers, max_size=None) as viewer, asyncio.timeout(PATIENCE):
        with contextlib.suppress(websockets.ConnectionClosed):
            while len(frames) < enough:
                frames.append(await viewer.recv())
            return frames, None
        return frames, viewer.close_code


def page(**fields: Any) -> Callable[[], Any]:
    data = base64.b64encode(b"lie").decode()
    return lambda: {"result": {"offset": 0, "next_offset": 0, "data": data, "over": False, **fields}}


LIES: list[tuple[Callable[[], Any], int | None]] = [
    (page(offset="x"), 1011),
    (page(data=7), 1011),
    (page(size=[1]), 1011),
    (lambda: {"result": []}, 1011),
    (lambda: {"result": None}, 1011),
    (lambda: {"error": {"kind": "not_allowed", "message": "x" * 100_000}}, 4403),
    (page(over=True, size=[10**18, -5], exit_code=10**18), 1000),
    (page(offset=2**63, next_offset=2**63), None),
    (page(offset=-5, next_offset=-(10**15)), None),
    (page(), None),
]


@asynchronous
async def test_false_reports_about_a_terminal_reach_only_its_viewers(ground: Ground) -> None:
    async with lying(ground.gateway) as liar:
        terminal = await opened(ground.gateway, "liar")
        for said, code in LIES:
            liar.said["output"] = said
            # Bytes that a node repeats are shown once, so a viewer may get only the first frame.
            _, closed = await seen(ground.gateway, terminal, enough=20 if code else 1)
            assert closed == code, (said(), closed)
            assert (await asyncio.to_thread(ground.gateway.request, "GET", "/healthz", token=None)).status == 200
    assert "Traceback" not in ground.gateway.log.read_text()


@asynchronous
async def test_a_node_does_not_take_the_viewers_of_another_s_terminal(ground: Ground) -> None:
    async with lying(ground.gateway) as liar:
        terminal = await opened(ground.gateway, "free")
        job = {
            "job_id": "j",
            "command": "x",
            "started_at": 2**53,
            "running": True,
            "call_id": terminal,
            "size": [80, 24],
        }
        liar.said |= {"jobs": lambda: {"result": [job]}, "output": page()}
        listed = (await asyncio.to_thread(ground.gateway.get, "/v1/terminals"))["terminals"]
        assert {one["node"] for one in listed if one["terminal_id"] == terminal} == {"free", "liar"}
        frames, closed = await seen(ground.gateway, terminal, enough=2)
        assert closed is None and b"lie" not in frames[1]
        assert json.loads(frames[0]) == {"type": "hello", "offset": 0, "cols": 80, "rows": 24}
        await asyncio.to_thread(ground.gateway.request, "DELETE", f"/v1/terminals/{terminal}")


# -- bombs --------------------------------------------------------------------------------------------------------

BOMBS = {
    "nested": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "numbers": b'{"tool":"x","args":{"a":1e999},"since":' + b"9" * 5000 + b',"expires_seconds":1e999,"timeout_ms":-1}',
    "surrogates": json.dumps(
        dict.fromkeys(("tool", "name", "message", "node", "reason", "value"), "\ud800\0")
    ).encode(),
    "types": b'{"tool":[],"args":"x","name":{},"message":1,"node":[],"input":1,"scopes":"admin","allow":"yes"}',
    "keys": b"{" + b",".join(b'"k%d":1' % number for number in range(20_000)) + b"}",
    "nothing": b"",
}
# They would change the gateway for the other tests.
LEFT_OUT = ("/v1/freeze", "/v1/signout", "/v1/console/sessions")


def test_no_body_makes_a_route_fail(ground: Ground) -> None:
    tried = 0
    for path, methods in ground.gateway.get("/v1/openapi.json")["paths"].items():
        for method in methods:
            if method == "get" or path.startswith(LEFT_OUT):
                continue
            for name, body in BOMBS.items():
                answer = ground.gateway.request(method.upper(), re.sub(r"\{[^}]*\}", "x", path), body)
                assert answer.status < 500 or answer.status in (502, 503, 504), (method, path, name, answer)
                tried += 1
    assert tried > 200 and "Traceback" not in ground.gateway.log.read_text()


VALUES: list[Any] = [None, -1, 10**30, "\0", [], {"a": {}}]
METHODS = ["tools/list", "tools/call", "resources/read", "prompts/get", "completion/complete", "logging/setLevel"]
METHODS += ["tasks/get", "tasks/list", "tasks/result", "tasks/cancel", "notifications/cancelled", "initialize", ""]
FIELDS = ["name", "arguments", "uri", "cursor", "taskId", "task", "ref", "requestId", "_meta", "protocolVersion"]


def test_no_message_makes_mcp_fail(ground: Ground) -> None:
    reader = token(ground.gateway, "tools.read")
    session = mcp(ground.gateway, reader, "initialize", protocolVersion="2025-11-25", capabilities={})
    headers = {"Mcp-Session-Id": session.headers["mcp-session-id"]}
    for method in METHODS:
        for field in FIELDS:
            for value in VALUES:
                answer = mcp(ground.gateway, reader, method, headers, **{field: value})
                assert answer.status < 500, (method, field, value, answer)


# -- the network of a sandbox -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "let_out"),
    [
        ("api.example.com:443", True),
        ("API.Example.COM.:443", True),
        ("example.com:443", False),
        ("api.example.com.evil.org:443", False),
        ("evil.org:443/.example.com", False),
        ("evil.org:443#.example.com", False),
        ("evil.org?.example.com:443", False),
        ("api.example.com:443@evil.org:443", False),
        ("notexample.com:443", False),
        ("api.example.com%00.evil.org:443", False),
        ("db:5432", True),
        ("db:5433", False),
        ("db", False),
        ("[::1]:80", False),
        ("api.example.com:99999", False),
    ],
)
def test_no_spelling_of_a_host_passes_for_an_allowed_one(target: str, let_out: bool) -> None:
    rule = NetworkRule.read("allow:*.example.com,db:5432")
    try:
        found = rule.names(*_address("CONNECT", target))
    except EgressRefused:
        found = False
    assert found is let_out
