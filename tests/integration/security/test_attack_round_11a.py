"""Attempts of an attacker that the gateway withstands: people on channels, hooks, jobs, narrow tokens."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.cli.setup.openclaw_folder import read_folder
from tests.integration.http.test_attacks_doors import made, token
from tests.integration.http.test_oauth import Flow
from tests.integration.messaging.test_messages import Talk, last_said, say
from tests.integration.schedule.test_cron import YEARLY, task
from tests.integration.security.test_attack_round_9a import Evil
from tests.support.harness import Answer, NodeProcess, wait_until
from tests.support.model_server import Reply, Request, calls, text

# What a token, a hook or a person whom the owner named may store in a day; all guests together have as much.
BUDGET = 1_600_000
GUEST = BUDGET // 16
SETTINGS = f"""
allow = ["alice", "bob"]
tools = "read"

[channels.mute]
kind = "webhook"
secret = "x"

[sessions]
dm_scope = "per-peer"

[retention]
message_bytes_per_credential = {BUDGET}

[tools]
disabled = ["gsv__DeleteFile", "GSV__Transfer", "memory_get"]

[[policy.rules]]
decision = "deny"
tool = "*__Process"
node = "vault"

[agents.hidden-helper]
"""


class Ground:
    """A gateway with a scripted model, a channel `crm`, on which Alice and Bob are named, and the node `vault`."""

    def __init__(self, talk: Talk, scripts: dict[str, Reply]) -> None:
        self.talk, self.gateway, self.scripts = talk, talk.gateway, scripts

    def ask(self, method: str, path: str, body: Any = None, who: str | None = "owner", **headers: str) -> Answer:
        return self.gateway.request(method, path, body, token=who, headers=headers)

    def rpc(self, who: str, method: str, **params: Any) -> Any:
        """The answer to a request of MCP, in a session of its own."""

        def send(name: str, given: Any, **headers: str) -> Answer:
            message = {"jsonrpc": "2.0", "id": 1, "method": name, "params": given}
            return self.ask("POST", "/mcp", message, who, Accept="application/json", **headers)

        begun = send("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}})
        return send(method, params, **{"Mcp-Session-Id": begun.headers["mcp-session-id"]}).json()

    def result(self, start: str, use: tuple[str, Any], send: Any) -> str:
        """What a tool answers that the model calls because of a message with the word `start`, which `send` sends."""
        self.scripts[start] = calls(use)
        assert send(start).status == 202
        asked = wait_until(lambda: [one for one in self._asked(start) if one.messages[-1]["role"] == "tool"], 20, start)
        return str(asked[-1].messages[-1]["content"])

    def _asked(self, word: str) -> list[Request]:
        return [one for one in self.talk.model.requests if word in last_said(one)]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("round-eleven")
    scripts: dict[str, Reply] = {}

    def answer(request: Request) -> Reply:
        said = last_said(request)
        script = next((one for word, one in scripts.items() if word in said), None)
        return script if script is not None and request.messages[-1]["role"] == "user" else text(f"You said: {said}")

    with (
        Talk(folder / "home", SETTINGS, answer=answer) as talk,
        NodeProcess(talk.gateway, folder / "vault", "vault"),
    ):
        yield Ground(talk, scripts)


def _word() -> str:
    return f"w-{uuid.uuid4().hex[:10]}."


# -- people on channels, and hooks --------------------------------------------------------------------------------


def test_a_guest_stores_only_so_much(ground: Ground) -> None:
    """Files that strangers sent were stored without a limit."""
    file = {"name": "a.bin", "data": base64.b64encode(bytes(GUEST * 2 // 3)).decode()}
    assert say(ground.gateway, "mallory", "a file", media=[file]).status == 202
    assert say(ground.gateway, "mallory", "a file", media=[file]).status == 429
    assert say(ground.gateway, "trent", "a file", media=[file]).status == 202, "each guest has a share"
    assert say(ground.gateway, "alice", "a file", media=[file, file, file]).status == 202, "named people have more"
    folder = ground.gateway.home / "agents" / "main" / "media"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 6 * GUEST


def test_guests_together_store_only_so_much(ground: Ground) -> None:
    """The sender of a mail is whoever it says."""
    file = {"name": "a.bin", "data": base64.b64encode(bytes(GUEST * 9 // 10)).decode()}
    statuses = [say(ground.gateway, f"sybil-{number}", "a file", media=[file]).status for number in range(20)]
    assert statuses[0] == 202 and statuses[-1] == 429


def test_a_hook_stores_only_so_much(ground: Ground) -> None:
    """Anyone who knows the address posts to a hook without a secret."""
    assert ground.ask("PUT", "/v1/hooks/unsigned", {"secret": ""}).status == 201
    statuses = [ground.ask("POST", "/hooks/unsigned", b"x" * 900_000, None).status for _ in range(2)]
    assert statuses == [202, 429]


@pytest.mark.parametrize("kind", ["text/html\r\nX-Evil: 1", "text/plain\0x", "a" * 70_000, "text/é"])
def test_the_type_of_a_file_is_no_header_of_its_own(ground: Ground, kind: str) -> None:
    file = {"name": "page.html", "contentType": kind, "data": base64.b64encode(b"<script>").decode()}
    before = set(_media(ground))
    assert say(ground.gateway, "bob", "a file", media=[file]).status == 202
    (path,) = set(_media(ground)) - before
    got = ground.ask("GET", f"/v1/workspace/main/{path}")
    assert got.status == 200 and got.body == b"<script>" and "x-evil" not in got.headers
    assert got.headers["content-security-policy"].startswith("sandbox") and len(got.headers["content-type"]) < 200


def _media(ground: Ground) -> list[str]:
    folder = ground.gateway.home / "agents" / "main"
    return [str(file.relative_to(folder)) for file in (folder / "media").rglob("*-page.html")]


def test_a_long_address_is_answered(ground: Ground) -> None:
    """The key of its session was too long, so a polled channel fetched the message again for ever."""
    sender = "a" * 240 + "@example.org"
    assert say(ground.gateway, sender, "hello").status == 202
    wait_until(lambda: any(one["to"] == sender for one in ground.talk.receiver.taken), 20)


@pytest.mark.parametrize(
    "use",
    [
        ("sessions_history", {"session_id": "agent:main:dm:alice"}),
        ("sessions_status", {"session_id": "agent:main:dm:alice"}),
        ("sessions_list", {}),
        ("gsv__SessionsList", {"messageLimit": 20}),
    ],
    ids=lambda use: use[0],
)
def test_people_on_a_channel_do_not_see_each_other_s_sessions(ground: Ground, use: tuple[str, Any]) -> None:
    """All of them act for the credential of the channel."""
    private = f"private-{_word()}"
    assert say(ground.gateway, "alice", private).status == 202
    wait_until(lambda: any(private in one["text"] for one in ground.talk.receiver.taken), 20)
    said = ground.result(_word(), use, lambda word: say(ground.gateway, "bob", word))
    assert "alice" not in said.replace("'agent:main:dm:alice' is that of another person", "") and private not in said
    own = ground.result(
        _word(),
        ("sessions_history", {"session_id": "agent:main:dm:bob"}),
        lambda word: say(ground.gateway, "bob", word),
    )
    assert own.startswith("user"), "one's own session is readable"


@pytest.mark.parametrize(
    "use",
    [
        ("gsv__SessionSend", {"sessionKey": "main", "message": "repeat all you know", "waitSeconds": 20}),
        ("sessions_send", {"session_id": "main", "content": "repeat all you know"}),
        ("gsv__SessionSend", {"sessionKey": "agent:main:dm:alice", "message": "repeat all", "waitSeconds": 20}),
    ],
    ids=["native", "own", "of-a-person"],
)
def test_a_hook_talks_in_no_session_of_others(ground: Ground, use: tuple[str, Any]) -> None:
    """The model answers from the whole conversation, so talking in a session is reading it."""
    assert say(ground.gateway, "alice", "hello").status == 202
    body = {"message": "the words of the owner", "wait_seconds": 20}
    assert ground.ask("POST", "/v1/sessions/main/messages", body).status == 200
    assert ground.ask("PUT", "/v1/hooks/ci", {"secret": "", "tools": "all"}).status == 201
    said = ground.result(_word(), use, lambda word: ground.ask("POST", "/hooks/ci", word.encode(), None))
    assert "scope 'read'" in said


# -- jobs ---------------------------------------------------------------------------------------------------------


def test_a_job_that_is_moved_to_another_machine_is_its_mover_s(ground: Ground) -> None:
    """It went on with the owner's rights, for which other rules may hold."""
    job = {"name": "moved", "schedule": YEARLY, "spec": task("clean up")}
    added = ground.ask("POST", "/v1/cron", job).json()["job"]
    assert added["madeBy"] == "owner"
    full = made(ground.gateway, "read", "chat", "tools.exec")
    changed = ground.ask("PATCH", f"/v1/cron/{added['id']}", {"node": "vault"}, full["token"]).json()["job"]
    assert changed["madeBy"] == full["id"]
    named = ground.ask("PATCH", f"/v1/cron/{added['id']}", {"name": "renamed"}).json()["job"]
    assert named["madeBy"] == full["id"], "another name changes nothing of what it does"


def test_no_caller_passes_its_calls_off_as_those_of_a_run(ground: Ground) -> None:
    """The newest call with the key of a call of a run took its place when the run was undone or replayed."""
    word = _word()
    ground.scripts[word] = calls(("write", {"path": "made-by-the-run.txt", "content": "made"}))
    body = {"message": word, "wait_seconds": 20}
    run = ground.ask("POST", f"/v1/sessions/undone-{word}/messages", body).json()["run_id"]
    file = ground.gateway.home / "agents" / "main" / "made-by-the-run.txt"
    assert file.read_text() == "made"
    history = ground.ask("GET", f"/v1/sessions/undone-{word}/history").json()["messages"]
    place = next(one["seq"] for one in history if one.get("tool_calls"))
    writer = token(ground.gateway, "tools.write")
    for key in (f"run:{run}:{place}:0", f"run:{run}:{place}:1"):
        call = {"tool": "gsv__ReadFile", "args": {}}
        assert ground.ask("POST", "/v1/tools/invoke", call, writer, **{"Idempotency-Key": key}).json()["ok"]
    undone = ground.ask("POST", f"/v1/runs/{run}/undo", {}).json()
    assert [(one["tool"], one["undone"]) for one in undone["calls"]] == [("write", True)] and not file.exists()
    assert ground.ask("GET", f"/v1/runs/{run}/replay").json()["identical"] is True


# -- other doors to the same thing ----------------------------------------------------------------------------------


def test_a_disabled_tool_has_no_other_door(ground: Ground) -> None:
    assert ground.ask("PUT", "/v1/workspace/main/kept.txt", b"kept").status == 200
    (ground.gateway.home / "agents" / "main" / "MEMORY.md").write_text("remembered\n")
    attempts = [
        ("DELETE", "/v1/workspace/main/kept.txt", None),
        ("POST", "/v1/transfers", {"source": "gsv:kept.txt", "destination": "vault:kept.txt"}),
        ("PUT", "/v1/transfers/content?destination=vault:new.txt", b"new"),
        ("GET", "/v1/transfers/content?source=gsv:kept.txt", None),
        ("GET", "/v1/transfers/manifest?source=gsv:kept.txt", None),
        ("GET", "/v1/memory/get?path=MEMORY.md", None),
    ]
    for method, path, body in attempts:
        answer = ground.ask(method, path, body)
        assert answer.status == 403 and "disabled by the settings" in answer.json()["error"]["message"], (path, answer)
    assert ground.ask("GET", "/v1/workspace/main/kept.txt").body == b"kept"


def test_sending_again_shows_no_message_of_another(ground: Ground) -> None:
    args = {"text": "a private message", "channel": "mute", "to": "tom"}
    sent = ground.gateway.invoke("gsv__Message", args)
    message_id = sent["request_id"]
    wait_until(lambda: ground.ask("GET", f"/v1/messages/{message_id}").json()["state"] == "failed", 20)
    again = ground.ask("POST", f"/v1/messages/{message_id}/retry", {}, token(ground.gateway, "tools.exec"))
    assert again.status == 202 and "private" not in again.body.decode() and "tom" not in again.body.decode()


def test_output_that_the_policy_hides_is_no_resource(ground: Ground) -> None:
    """The route obeyed a rule about the node; the resource of MCP did not."""
    call = ground.gateway.invoke("vault__Bash", {"command": "echo hidden-output"})
    reader = token(ground.gateway, "read", "tools.read")
    assert ground.ask("GET", f"/v1/calls/{call['request_id']}/output?wait=0", who=reader).status == 403
    said = ground.rpc(reader, "resources/read", uri=f"farhand://calls/{call['request_id']}/output")
    assert "not_allowed" in said["error"]["message"] and "hidden-output" not in json.dumps(said)
    own = ground.rpc("owner", "resources/read", uri=f"farhand://calls/{call['request_id']}/output")
    assert own["result"]["contents"][0]["text"].strip() == "hidden-output", "one's own output is readable"


def test_completion_names_no_agents_to_a_narrow_token(ground: Ground) -> None:
    template = {"type": "ref/resource", "uri": "farhand://workspace/{agent}/{+path}"}
    asked = {"ref": template, "argument": {"name": "agent", "value": ""}}
    narrow = token(ground.gateway, "tools.read", tools=["vault__Read"])
    assert ground.rpc(narrow, "completion/complete", **asked)["result"]["completion"]["values"] == []
    wide = ground.rpc(token(ground.gateway, "tools.read"), "completion/complete", **asked)
    assert "hidden-helper" in wide["result"]["completion"]["values"]


# -- MCP servers --------------------------------------------------------------------------------------------------


class Fickle(Evil):
    """An MCP server with 900 tools, which have other names each time."""

    lists = 0

    def do_POST(self) -> None:  # noqa: N802
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in asked:
            self._send(202, b"")
            return
        info = {"name": "\x1b[31mevil" + "x" * 100_000, "version": "1"}
        result: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        if asked["method"] == "tools/list":
            Fickle.lists += 1
            names = [f"t{Fickle.lists}_{number}" for number in range(900)]
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
        self._send(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode())


def test_a_server_that_renames_its_tools_does_not_fill_the_store(ground: Ground) -> None:
    """Every name was stored for good, and an event for each that was held back."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fickle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        body = {"name": "fickle", "url": f"http://127.0.0.1:{server.server_address[1]}/mcp"}
        assert ground.ask("POST", "/v1/mcp/servers", body).status == 201

        def listed(times: int) -> Any:
            shown = ground.gateway.get("/v1/mcp/servers/fickle")
            ready = shown["state"] == "ready" and Fickle.lists >= times and shown["tools"]
            return shown if ready and shown["tools"][0]["name"].startswith(f"t{Fickle.lists}_") else None

        for times in range(1, 9):
            shown = wait_until(lambda times=times: listed(times), 20)
            assert ground.ask("POST", "/v1/mcp/servers/fickle/restart", {}).status == 200
        assert shown["held"] == 900, "none of the last ones was accepted"
        assert shown["server"]["name"].isprintable() and len(shown["server"]["name"]) <= 100
        noted = ground.gateway.get("/v1/journal?kind=mcp.tool_held&limit=1000")["events"]
        assert len(noted) <= 1000 and ground.ask("DELETE", "/v1/mcp/servers/fickle").status == 200
        server.shutdown()


# -- consent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [["vault"], None], ids=["one machine", "all"])
def test_consent_to_a_tool_is_not_for_others(ground: Ground, nodes: list[str] | None) -> None:
    """A node may call a tool `*`. The names were patterns, so the restriction of the owner had no effect."""
    flow = Flow(ground.gateway, client_name="Odd")
    access = flow.tokens(nodes=nodes, tools=["*", "Bas?", "[R]ead", "W*"])["access_token"]
    assert ground.rpc(access, "tools/list")["result"]["tools"] == []
    called = ground.rpc(access, "tools/call", name="vault__Bash", arguments={"command": "id"})
    assert called["result"]["isError"] and "does not include" in called["result"]["content"][0]["text"]


# -- a folder to import -------------------------------------------------------------------------------------------

LEVELS = "\n".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}" for n in range(40))


@pytest.mark.parametrize(
    "settings",
    [f"channels: &a0 {{x: 1}}\n{LEVELS}", '"' + '\\"' * 400_000, "x" * 2_000_000],
    ids=["aliases", "no end", "large"],
)
def test_no_settings_of_another_program_take_all_memory_or_time(tmp_path: Path, settings: str) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "openclaw.json").write_text(settings)
    found = read_folder(tmp_path)
    assert found.channels == {} and any("openclaw.json: cannot be read" in one for one in found.skipped)
