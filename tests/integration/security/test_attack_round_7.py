"""Attempts of an attacker that the gateway and its nodes withstand: jobs, proxies, trials, names and budgets."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import websockets

from farhand.machine.sandbox.egress import EgressRefused, NetworkRule, _address
from farhand.machine.sandbox.trials import MOST_OF_CALLER
from tests.integration.http.test_attacks_doors import made
from tests.integration.nodes.test_attacks_nodes import hello, joined
from tests.support.harness import PATIENCE, SHARED_TOKEN, GatewayProcess, NodeProcess, wait_until
from tests.unit.sdk.wire import asynchronous

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


class Ground:
    """A gateway with a node `free`, a node `lent` with one folder, and a budget for one token."""

    def __init__(self, folder: Path, gateway: GatewayProcess, free: NodeProcess, lent: NodeProcess) -> None:
        self.gateway, self.free, self.lent = gateway, free, lent
        self.folder, self.root = folder, folder / "root"

    def call(self, tool: str, args: Any, who: str = "owner", **more: Any) -> Any:
        answer = self.gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more}, token=who)
        assert answer.status == 200, answer
        return answer.json()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("round-seven")
    (folder / "root").mkdir()
    network = ("--network", "allow:localhost,*.localhost,*.example.com")
    with (
        GatewayProcess(folder / "home") as gateway,
        NodeProcess(gateway, folder / "free", "free") as free,
        NodeProcess(gateway, folder / "lent", "lent", "--root", str(folder / "root"), *network) as lent,
    ):
        yield Ground(folder, gateway, free, lent)


# -- jobs ---------------------------------------------------------------------------------------------------------


def test_a_pinned_job_has_the_limits_of_its_maker(ground: Ground, tmp_path: Path) -> None:
    """A job that is pinned to a machine makes no call there that its maker may not make."""
    narrow = made(ground.gateway, "tools.exec", tools=["gsv__Cron", "lent__Glob"])
    calls = [
        ("free", "free__Bash", {"command": f"touch {tmp_path}/one"}),
        ("free", "Write", {"path": f"{tmp_path}/two", "content": ""}),
        ("lent", "lent__Bash", {"command": "touch three"}),
        ("free", "gsv__WriteFile", {"path": "four.md", "content": ""}),
        ("free", "gsv__Transfer", {"source": "free:/etc/hostname", "destination": "gsv:five"}),
        ("lent", "Glob", {"pattern": "*"}),
    ]
    for node, tool, args in calls:
        spec = {"mode": "call", "tool": tool, "args": args}
        job = {"name": tool, "schedule": {"kind": "at", "in": "1s"}, "node": node, "spec": spec}
        assert ground.call("gsv__Cron", {"action": "add", "job": job}, narrow["token"])["ok"] is True

    def ended() -> Any:
        found = ground.gateway.get(f"/v1/calls?credential={narrow['id']}")["calls"]
        of_jobs = {one["tool"]: one["state"] for one in found if one["tool"] != "gsv__Cron"}
        return of_jobs if len(of_jobs) == len(calls) and "running" not in of_jobs.values() else None

    states = wait_until(ended)
    assert states.pop("lent__Glob") == "ok" and set(states.values()) == {"denied"}, states
    assert list(tmp_path.iterdir()) == [] and not (ground.root / "three").exists()


# -- the network of a sandbox -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    """The port of a server on this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"reached")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


TARGETS = ["evil.org\0.example.com", "evil.org\x01.example.com", "evil.org%00.example.com"]
TARGETS += ["evil.org\xa0.example.com", "evil.org\\.example.com", "evil.org;.example.com", "[::1%lo].example.com"]
TARGETS += ["\xaaxample.com", ".example.com", "-.example.com", "a,evil.org/.example.com", "%5b::1]"]


@pytest.mark.parametrize("host", TARGETS)
def test_a_host_is_a_name_and_nothing_else(host: str) -> None:
    """The resolver stops at a NUL character, so `evil.org` would be looked up for `evil.org\\0.example.com`."""
    for method, target in (("CONNECT", f"{host}:443"), ("GET", f"http://{host}:80/")):
        with pytest.raises(EgressRefused):
            _address(method, target)
    assert NetworkRule.read("allow:*.example.com").names(*_address("CONNECT", "API.Example.com.:443"))


ATTEMPT = """
import socket, sys
for target in ("localhost", "127.0.0.1\\0.localhost", "localhost\\0.example.com"):
    for text in ("CONNECT %s:PORT HTTP/1.1||GET / HTTP/1.0||", "GET http://%s:PORT/ HTTP/1.1||"):
        with socket.create_connection(("127.0.0.1", 3128)) as proxy:
            proxy.sendall((text.replace("PORT", sys.argv[1]).replace("|", "\\r\\n") % target).encode())
            said = b"".join(iter(lambda: proxy.recv(4096), b""))
            print(int(said.endswith(b"reached")), end=" ")
"""


@needs_bubblewrap
def test_no_spelling_of_a_host_leads_out_of_a_sandbox(ground: Ground, service: int) -> None:
    (ground.root / "attempt.py").write_text(ATTEMPT)
    done = ground.call("lent__Bash", {"command": f"/usr/bin/python3 attempt.py {service}"})
    assert done["result"]["output"].split() == ["1", "1", "0", "0", "0", "0"], done


# -- names and credentials of nodes -------------------------------------------------------------------------------


@asynchronous
async def test_a_node_that_the_owner_named_is_not_taken_for_another(ground: Ground) -> None:
    """`box:C` came first, with the shared token, and would get what is sent to `box:C:/Users`."""
    gateway = ground.gateway
    box = gateway.ws_url + "?token={}&node_id=box"
    async with joined(gateway, "box:C"):
        named = await asyncio.to_thread(gateway.request, "POST", "/v1/tokens", {"node_id": "box", "scopes": ["read"]})
        async with websockets.connect(box.format(named.json()["token"]), close_timeout=1) as socket:
            await socket.send(json.dumps(hello("box")))
            assert json.loads(await socket.recv())["type"] == "gateway_welcome"
            known = (await asyncio.to_thread(gateway.get, "/v1/nodes"))["nodes"]
            assert [one["node_id"] for one in known if one["node_id"].startswith("box")] == ["box"]
            async with websockets.connect(f"{gateway.ws_url}?token={SHARED_TOKEN}", close_timeout=1) as again:
                await again.send(json.dumps(hello("box:C")))
                with pytest.raises(websockets.ConnectionClosed):
                    await asyncio.wait_for(again.recv(), PATIENCE)


def test_a_pairing_code_gives_no_id_that_continues_another(ground: Ground) -> None:
    code = ground.gateway.request("POST", "/v1/pairings", {}).json()["code"]
    for node_id in ("free:C", "lent:x", "gsv:notes", "Free"):
        answer = ground.gateway.request("POST", "/v1/pair", {"code": code, "node_id": node_id}, token=None)
        assert answer.status == 409, (node_id, answer)
    assert ground.gateway.request("POST", "/v1/pair", {"code": code, "node_id": "other"}, token=None).status == 201


def test_a_credential_for_hosts_goes_to_named_nodes_alone(ground: Ground) -> None:
    """A node gets it as soon as it joins and says that it has a proxy."""
    body = {"value": "credential-of-a-host", "hosts": ["api.example.com"]}
    answer = ground.gateway.request("PUT", "/v1/secrets/HOST", body)
    assert answer.status == 400 and "needs the nodes" in answer.json()["error"]["message"], answer
    assert ground.gateway.request("PUT", "/v1/secrets/HOST", {**body, "nodes": ["lent"]}).status == 200


# -- trials and secrets -------------------------------------------------------------------------------------------

VALUE = "round-seven-secret-value"


@needs_bubblewrap
@pytest.mark.parametrize("tool", ["lent__Bash", "exec"])
def test_a_trial_keeps_no_value_of_a_secret_in_the_record(ground: Ground, tool: str) -> None:
    """What it printed and changed is shown and kept by calls that do not name the secret."""
    assert ground.gateway.request("PUT", "/v1/secrets/TRIED", {"value": VALUE}).status == 200
    command = f"echo {{{{secret:TRIED}}}} > {tool}.txt; cat {tool}.txt"
    tried = ground.call(tool, {"command": command, "trial": True})
    assert tried["ok"] is True and "***" in json.dumps(tried["result"]["changes"]), tried
    path = f"/v1/trials/{tried['request_id']}"
    assert ground.gateway.request("GET", path).status == 200
    assert ground.gateway.request("POST", f"{path}/keep", {}).status == 200
    folder = ground.root if tool == "lent__Bash" else ground.gateway.home / "agents" / "main"
    assert (folder / f"{tool}.txt").read_text() == f"{VALUE}\n"
    store = sqlite3.connect(f"file:{ground.gateway.home / 'farhand.db'}?mode=ro", uri=True)
    with contextlib.closing(store):
        rows = store.execute("SELECT * FROM calls WHERE tool LIKE '%rial' OR args LIKE '%trial%'").fetchall()
        assert rows and not any(VALUE in str(value) for row in rows for value in row)


@needs_bubblewrap
def test_a_token_does_not_use_up_the_trials_of_a_machine(ground: Ground) -> None:
    who = made(ground.gateway, "tools.exec", tools=["lent__Bash", "lent__Trial"])["token"]

    def attempt(number: int) -> Any:
        return ground.call("lent__Bash", {"command": f"touch trial-{number}", "trial": True}, who)

    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(attempt, range(MOST_OF_CALLER + 2)))
    refused = [one["error"]["message"] for one in ended if not one["ok"]]
    assert len(refused) == 2 and all("trials of this caller wait" in reason for reason in refused), ended
    mine = ground.call("lent__Bash", {"command": "touch mine", "trial": True})
    assert mine["ok"] is True
    for one in (*ended, mine):
        if one["ok"]:
            ground.gateway.request("POST", f"/v1/trials/{one['request_id']}/discard", {})


# -- budgets ------------------------------------------------------------------------------------------------------

ROUTES = [
    ("PUT", "/v1/workspace/main/budget.txt", b"x" * 100),
    ("GET", "/v1/workspace/main/budget.txt", None),
    ("HEAD", "/v1/workspace/main/budget.txt", None),
    ("GET", "/v1/workspace/main", None),
    ("GET", "/v1/workspace/main/nowhere", None),
    ("GET", "/v1/memory/search?q=x", None),
    ("POST", "/v1/memory/reindex", {}),
    ("DELETE", "/v1/workspace/main/budget.txt", None),
]


def limited(ground: Ground, unit: str, amount: int) -> dict[str, Any]:
    return made(ground.gateway, "tools.exec", budget=[{"unit": unit, "amount": amount}])


def test_no_route_is_free_where_calls_are_counted(ground: Ground) -> None:
    token = limited(ground, "calls", len(ROUTES))["token"]
    for method, path, body in ROUTES:
        answer = ground.gateway.request(method, path, body, token=token)
        assert answer.status in (200, 404), (method, path, answer)
    for method, path, body in ROUTES:
        answer = ground.gateway.request(method, path, body, token=token)
        assert answer.status == 403, (method, path, answer)
    assert "is used up" in ground.gateway.request("GET", ROUTES[1][1], token=token).json()["error"]["message"]


def test_files_of_the_workspace_count_as_bytes(ground: Ground) -> None:
    assert ground.gateway.request("PUT", "/v1/workspace/main/large.txt", b"x" * 50_000).status == 200
    reader, writer = (limited(ground, "bytes", 60_000)["token"] for _ in range(2))
    assert ground.gateway.request("GET", "/v1/workspace/main/large.txt", token=reader).status == 200
    part = {"Range": "bytes=0-9"}
    assert ground.gateway.request("GET", "/v1/workspace/main/large.txt", token=reader, headers=part).status == 206
    assert ground.gateway.request("GET", "/v1/workspace/main/large.txt", token=reader).status == 403
    for path, status in (("a", 200), ("b", 200), ("c", 403)):
        answer = ground.gateway.request("PUT", f"/v1/workspace/main/{path}", b"x" * 40_000, token=writer)
        assert answer.status == status, answer
    absent = {"If-None-Match": "*"}
    other = limited(ground, "bytes", 60_000)["token"]
    for size, status in ((70_000, 403), (50_000, 200), (50_000, 403)):
        path = f"/v1/workspace/main/absent-{size}-{status}"
        answer = ground.gateway.request("PUT", path, b"x" * size, token=other, headers=absent)
        assert answer.status == status, answer


# -- further attempts that fail -----------------------------------------------------------------------------------

CALLERS = [
    ("free__Bash", {"command": "true", "trial": True, "caller": ""}),
    ("free__Trial", {"trialId": "../../x", "action": "keep"}),
    ("free__Trial", {"trialId": "x", "action": "keep", "caller": "owner"}),
    ("gsv__Transfer", {"source": "free:/etc/hostname\0", "destination": "gsv:x"}),
    ("gsv__Transfer", {"source": "gsv:agents/other/x", "destination": "free:/tmp/x"}),
    ("gsv__WriteFile", {"path": "..%2f..%2ftoken", "content": "x"}),
    ("free__Read", {"path": "/etc/hostname", "secrets": {}}),
    ("node_bash", {"node": "free__Bash", "command": "true"}),
    ("gsv__Cron", {"action": "update", "id": "heartbeat:main", "patch": {"node": "free"}}),
]


def test_arguments_name_no_part_of_the_protocol(ground: Ground) -> None:
    for tool, args in CALLERS:
        answer = ground.call(tool, args)
        assert answer["ok"] is False, (tool, args, answer)


BUDGETS = [-1, -0.5, 1e30, float("nan"), "1", None, True]


@pytest.mark.parametrize("amount", BUDGETS)
def test_no_amount_makes_a_budget_endless(ground: Ground, amount: Any) -> None:
    limits = [{"unit": "calls", "amount": amount}]
    body = {"subject": "token:x", "limits": limits}
    assert ground.gateway.request("PUT", "/v1/budgets", body).status == 400
    assert ground.gateway.request("POST", "/v1/tokens", {"label": "x", "budget": limits}).status == 400


REDIRECTS = ["https://client.example/cb#x", "https://user@client.example/cb", "javascript:alert(1)", "http://evil.org/"]
REDIRECTS += [
    "http://127.0.0.1.evil.org/",
    "https://client.example\\@evil.org/",
    "data:text/html,x",
    "//evil.org/cb",
    "",
]


@pytest.mark.parametrize("uri", REDIRECTS)
def test_no_client_gets_codes_at_such_an_address(ground: Ground, uri: str) -> None:
    answer = ground.gateway.request("POST", "/oauth/register", {"redirect_uris": [uri]}, token=None)
    assert answer.status == 400, answer
