"""Every route with every kind of narrow credential: no answer tells of what is beyond its rights, and nothing changes.

The routes, their parameters and their bodies come from the OpenAPI document, so a new route is tried as well. All that
the credentials must not reach has the mark in its name or content; every parameter names such a thing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.integration.http.test_attacks_doors import made, token
from tests.integration.http.test_oauth import Flow
from tests.integration.messaging.test_messages import SECRET, last_said
from tests.integration.schedule.test_cron import YEARLY, task
from tests.support.harness import ROOT, Answer, GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, Reply, Request, calls, text

MARK = "zzbeyond"
SETTINGS = f"""
[channels.{MARK}]
kind = "webhook"
secret = "{SECRET}"
policy = "pairing"

[agents.{MARK}]

[[policy.rules]]
name = "{MARK} is asked about"
decision = "ask"
tool = "*__Bash"
args = {{ command = "*{MARK}-asked*" }}
"""
SERVER = ROOT / "tests" / "support" / "plain_mcp_server.py"
# Each is refused by every route that needs a credential; an access token of OAuth is one for /mcp alone.
INVALID = ("none", "node", "revoked", "child of a revoked one", "oauth")
VALID = ("one tool", "one node", "writes on one node", "chat")
# They answer until their client leaves.
ENDLESS = {"GET /v1/events", "GET /mcp"}


class Place:
    """A gateway with something of each kind that only the owner may reach."""

    def __init__(self, gateway: GatewayProcess, model: ModelServer) -> None:
        self.gateway, self.model = gateway, model
        self.document: Any = gateway.get("/v1/openapi.json")
        self.values = self._fill()
        self.secrets = self._credentials()

    def owner(self, method: str, path: str, body: Any = None, *statuses: int) -> Any:
        answer = self.gateway.request(method, path, body)
        assert answer.status in (statuses or (200, 201, 202)), (path, answer)
        return answer.json()

    def _fill(self) -> dict[str, str]:
        """Make the things, and return the values of parameters that name them."""
        gateway = self.gateway
        self.owner("PUT", f"/v1/workspace/main/{MARK}.txt", f"content {MARK}".encode())
        (gateway.home / "agents" / "main" / "MEMORY.md").write_text(f"remembered: {MARK}\n")
        self.owner("PUT", f"/v1/secrets/{MARK}", {"value": "a value that is long enough"})
        self.owner("PUT", f"/v1/hooks/{MARK}-hook", {"secret": SECRET})
        self.owner("PUT", f"/v1/skills/{MARK}/SKILL.md", f"---\nname: {MARK}\ndescription: {MARK}\n---\n".encode())
        job = self.owner("POST", "/v1/cron", {"name": MARK, "schedule": YEARLY, "spec": task(MARK)})["job"]
        server = {"name": f"{MARK}-server", "command": [sys.executable, str(SERVER)]}
        self.owner("POST", "/v1/mcp/servers", server)
        said = self.owner("POST", f"/v1/sessions/{MARK}/messages", {"message": f"about {MARK}", "wait_seconds": 30})
        process = {"session_id": MARK, "user_id": MARK, "input": [{"role": "user", "content": MARK}]}
        assert gateway.request("POST", "/agent/process", process).status == 200
        chat = gateway.get(f"/chats?session_id={MARK}")[0]["id"]
        response = self.owner("POST", "/v1/responses", {"model": "farhand", "input": MARK})["id"]
        call = gateway.invoke(f"{MARK}__Bash", {"command": f"echo {MARK}"})["request_id"]
        tried = gateway.invoke(f"{MARK}__Bash", {"command": f"echo {MARK} > a", "trial": True})["request_id"]
        gateway.invoke(f"{MARK}__Bash", {"command": f"echo {MARK}-asked"}, background=True)
        asked = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 20, "the approval")[0]["id"]
        terminal = self.owner("POST", "/v1/terminals", {"node": MARK, "command": "cat"})["terminal_id"]
        ends = {"source": f"gsv:{MARK}.txt", "destination": f"{MARK}:copied-{MARK}.txt"}
        transfer = self.owner("POST", "/v1/transfers", ends)
        message = gateway.invoke("gsv__Message", {"text": MARK, "channel": "console", "to": MARK})["request_id"]
        known = made(gateway, "read", name=MARK)
        budget = {"subject": f"token:{known['id']}", "calls_per_day": 5}
        gateway.request("PUT", "/v1/budgets", budget)
        session = gateway.sign_in()
        console = gateway.request("GET", "/v1/console/sessions", token=None, headers=session).json()["sessions"][0]
        client = Flow(gateway, client_name=MARK)
        client.tokens(nodes=[MARK])
        return {
            **dict.fromkeys(("node_id", "node", "host", "agent", "name", "key", "who", "session"), MARK),
            "hook_id": f"{MARK}-hook",
            **dict.fromkeys(("path", "file"), f"{MARK}.txt"),
            **dict.fromkeys(("agentId", "subject", "channel", "session_id", "user_id", "to", "q", "tag"), MARK),
            "call_id": call,
            "job_id": job["id"],
            "jobId": job["id"],
            "run_id": said["run_id"],
            "trial_id": tried,
            "terminal_id": terminal,
            "transfer_id": transfer.get("transfer_id") or transfer["id"],
            "token_id": known["id"],
            "approval_id": asked,
            "standing_id": "1",
            "message_id": message,
            "chat_id": chat,
            "id": response,
            "session_id": console["id"],
            "code": "AAAA-AAAA",
            "source": f"{MARK}:{MARK}.txt",
            "destination": f"{MARK}:planted-{MARK}.txt",
            "client_id": client.id,
            "tool": f"{MARK}__Bash",
            "wait": "0",
            "follow": "0",
        }

    def _credentials(self) -> dict[str, str | None]:
        gateway = self.gateway
        parent = made(gateway, "admin")
        child = gateway.request("POST", "/v1/tokens", {"scopes": ["admin"]}, token=parent["token"]).json()
        revoked = made(gateway, "admin")
        for one in (parent, revoked):
            assert gateway.request("DELETE", f"/v1/tokens/{one['id']}").status == 200
        return {
            "none": None,
            "node": token(gateway, "tools.exec", node_id="some-node"),
            "revoked": revoked["token"],
            "child of a revoked one": child["token"],
            "oauth": Flow(gateway).tokens(nodes=["near"])["access_token"],
            "one tool": token(gateway, "tools.read", tools=["near__Read"]),
            "one node": token(gateway, "tools.read", nodes=["near"]),
            "writes on one node": token(gateway, "tools.exec", nodes=["near"]),
            "chat": token(gateway, "chat"),
        }

    def requests(self) -> Iterator[tuple[str, str, Any, bool]]:
        """Each operation, its path with a query, its body, and whether it needs no credential."""
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                name = f"{method.upper()} {path}"
                if name in ENDLESS or path == "/v1/nodes/ws" or path.endswith("/ws"):
                    continue
                filled = re.sub(r"\{(\w+)\}", lambda found: quote(self._value(found[1]), safe=""), path)
                queries = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
                query = urlencode({one: self.values[one] for one in queries if one in self.values})
                yield name, f"{filled}?{query}", self._body(operation), operation.get("security") == []

    def _value(self, name: str) -> str:
        assert name in self.values, f"add the id of something of the owner's as {name!r}"
        return self.values[name]

    def _body(self, operation: Any) -> Any:
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return None if operation["operationId"].startswith(("get", "delete")) else {}
        schema = content.get("application/json", {}).get("schema")
        return b"planted" if schema is None else self._example("", schema)

    def _example(self, name: str, schema: Any, depth: int = 0) -> Any:
        """A small value that fits a schema, and names the owner's things wherever it can."""
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        for union in ("anyOf", "oneOf"):
            if union in schema:
                kinds = [one for one in schema[union] if one.get("type") != "null"]
                return self._example(name, kinds[0], depth)
        if "enum" in schema or "const" in schema:
            return schema.get("const") or schema["enum"][0]
        match schema.get("type"):
            case "object":
                fields = schema.get("properties", {})
                wanted = {*schema.get("required", []), *(fields.keys() & self.values.keys())}
                return {one: self._example(one, fields[one], depth + 1) for one in sorted(wanted) if depth < 4}
            case "array":
                return [self._example(name.removesuffix("s"), schema.get("items", {}), depth + 1)]
            case "integer" | "number":
                return schema.get("minimum", 1)
            case "boolean":
                return False
            case "string":
                return self.values.get(name, MARK)
        return {} if name == "args" else MARK

    def state(self) -> Any:
        """What the owner sees of the things, without times and what the gateway itself counts."""
        lists = ("cron", "hooks", "secrets", "tokens", "mcp/servers", "approvals", "transfers", "oauth/clients")
        lists += ("policy", "budgets", "channels/pairings", "skills", "console/sessions", "terminals", "freeze")
        seen: dict[str, Any] = {name: self.gateway.get(f"/v1/{name}") for name in lists}
        seen["session"] = self.gateway.get(f"/v1/sessions/{MARK}/history")
        seen["chat"] = self.gateway.get(f"/chats/{self.values['chat_id']}")
        seen["nodes"] = [(one["node_id"], one["online"]) for one in self.gateway.get("/v1/nodes")["nodes"]]
        seen["files"] = sorted(str(one) for one in (self.gateway.home / "agents").rglob("*") if MARK in one.name)
        seen["near"] = sorted(one.name for one in self.far.rglob("*"))
        changing = r'"(last_\w+|uses)": [^,}]*|\b\d{13}\b'
        return re.sub(changing, "", json.dumps(seen, sort_keys=True))

    far: Path


def _answer(request: Request) -> Reply:
    """The run in the owner's session writes a file on the far node."""
    first = request.messages[-1]["role"] == "user" and f"about {MARK}" in last_said(request)
    return calls((f"{MARK}__Write", {"path": f"{MARK}-run.txt", "content": MARK})) if first else text("done")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("matrix")
    home = folder / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(SETTINGS)
    with (
        ModelServer(answer=_answer) as model,
        GatewayProcess(home, env=model.environment) as gateway,
        NodeProcess(gateway, folder / "near", "near"),
        NodeProcess(gateway, folder / "far", MARK) as far,
    ):
        Place.far = far.workspace
        yield Place(gateway, model)


def _told(answer: Answer, path: str, body: Any) -> str:
    """What an answer says, without what the request said itself."""
    said = answer.body.decode(errors="replace") + json.dumps(answer.headers)
    asked = path + (body.decode() if isinstance(body, bytes) else json.dumps(body))
    for word in sorted(set(re.findall(r"[\w.:+-]+", asked)), key=len, reverse=True):
        if MARK in word:
            said = said.replace(word, "")
    return said


@pytest.mark.parametrize("name", INVALID)
def test_no_route_takes_an_invalid_credential(place: Place, name: str) -> None:
    before, tried = place.state(), 0
    for operation, path, body, public in place.requests():
        if name == "oauth" and operation.endswith(" /mcp"):
            continue
        method = operation.partition(" ")[0]
        answer = place.gateway.request(method, path, body, token=place.secrets[name])
        assert public or answer.status == 401, (operation, answer)
        assert MARK not in _told(answer, path, body), (operation, answer)
        tried += 1
    assert tried > 120 and place.state() == before


@pytest.mark.parametrize("name", VALID)
def test_no_route_leads_beyond_the_rights_of_a_credential(place: Place, name: str) -> None:
    before = place.state()
    for operation, path, body, _ in place.requests():
        method = operation.partition(" ")[0]
        answer = place.gateway.request(method, path, body, token=place.secrets[name])
        assert answer.status < 500, (operation, body, answer)
        if name == "chat" and operation.startswith("GET /v1/models"):
            continue  # whoever may talk to agents may know them
        assert MARK not in _told(answer, path, body), (operation, body, answer)
    assert place.state() == before


@pytest.mark.parametrize("name", ["oauth", "one tool", "one node", "writes on one node"])
def test_no_request_of_mcp_leads_beyond_the_rights_of_a_credential(place: Place, name: str) -> None:
    secret = place.secrets[name]

    def send(method: str, params: Any, **headers: str) -> Answer:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers["Accept"] = "application/json, text/event-stream"
        return place.gateway.request("POST", "/mcp", message, token=secret, headers=headers)

    begun = send("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}})
    assert begun.status == 200 and MARK not in _told(begun, "", None), begun
    session = {"Mcp-Session-Id": begun.headers["mcp-session-id"]}
    template = {"type": "ref/resource", "uri": "farhand://workspace/{agent}/{+path}"}
    requests: list[tuple[str, Any]] = [
        *((f"{kind}/list", {}) for kind in ("tools", "resources", "resources/templates", "prompts", "tasks")),
        ("resources/read", {"uri": f"farhand://workspace/main/{MARK}.txt"}),
        ("resources/read", {"uri": f"farhand://calls/{place.values['call_id']}/output"}),
        ("prompts/get", {"name": MARK}),
        ("tasks/get", {"taskId": place.values["call_id"]}),
        ("tools/call", {"name": f"{MARK}__Bash", "arguments": {"command": "true"}}),
        ("tools/call", {"name": f"{MARK}-server__read", "arguments": {"path": "/etc/hostname"}}),
        ("completion/complete", {"ref": template, "argument": {"name": "agent", "value": ""}}),
    ]
    before = place.state()
    for method, params in requests:
        answer = send(method, params, **session)
        assert answer.status == 200 and MARK not in _told(answer, "", params), (method, answer)
    assert place.state() == before
