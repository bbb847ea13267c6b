"""Input of a narrow token, a node or a model that is made to stall the gateway: other clients are still served."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import ROOT, Answer, GatewayProcess

LONG = os.environ.get("FARHAND_SIEGE") == "long"
BACKTRACKING_GLOB = "*?" * 9 + "*!"
# No call is for these paths; each call is compared with all of them.
RULES = "".join(f'[[policy.rules]]\ndecision = "deny"\nargs = {{ path = "/nowhere/{n}/*" }}\n' for n in range(20))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("gateway") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(f"[policy]\n{RULES}")
    with GatewayProcess(home) as process:
        workspace = process.home / "agents" / "main"
        workspace.mkdir(parents=True, exist_ok=True)
        (workspace / ("a" * 200)).write_text("a\n" * 10)
        yield process


@pytest.fixture(scope="module")
def reader(gateway: GatewayProcess) -> str:
    """A token that may call tools that only read."""
    return token_of(gateway, "tools.read")


def token_of(gateway: GatewayProcess, scope: str) -> str:
    return str(Command(gateway.home)("token", "create", "--scope", scope, "--json").json()["token"])


def call(gateway: GatewayProcess, token: str, tool: str, args: Any) -> Answer:
    return gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args}, token=token, timeout=60)


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("glob", {"pattern": BACKTRACKING_GLOB}),
        ("glob", {"pattern": "**/" * 30 + BACKTRACKING_GLOB}),
        ("grep", {"pattern": "a", "include": BACKTRACKING_GLOB}),
        ("grep", {"pattern": "a", "include": BACKTRACKING_GLOB, "path": "a" * 200}),
    ],
)
def test_a_pattern_of_many_stars_is_answered(
    gateway: GatewayProcess, reader: str, tool: str, args: dict[str, Any]
) -> None:
    """S3: these held the interpreter lock for years."""
    answer = call(gateway, reader, tool, args)
    assert answer.json()["ok"], answer
    assert "aaa" not in answer.json()["result"]["content"]


# -- every tool and door, watched from outside ------------------------------------------------------------------------


class Watched:
    """Another process that asks a gateway under attack and an idle one for their health, turn by turn."""

    def __init__(self, gateway: GatewayProcess, control: GatewayProcess) -> None:
        ports = [str(gateway.port), str(control.port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.health_probe", *ports],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.attacked: list[float] = []
        self.idle: list[float] = []

    def __enter__(self) -> Watched:
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        out, _ = self._process.communicate("over\n", timeout=180)
        self.attacked, self.idle = json.loads(out)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def bombs() -> list[Any]:
    """Values that are made to take a parser, a pattern or a reader long."""
    nested: Any = "x"
    for _ in range(120):
        nested = [nested]
    return [
        BACKTRACKING_GLOB,
        "(a+)+" * 20 + "b",
        "(a|aa)+$" + "a" * 5000,
        "{a,b}" * 500,
        "**/" * 3000 + "*",
        "[" * 50_000,
        "# a" + " " * 100_000 + "x",
        " " * 1_000_000 + "x",
        "a." * 500_000,
        "../" * 100_000,
        "/" * 1_000_000,
        "/a" * 500_000,
        "x" * 4_000_000,
        "é" * 1_000_000,
        "\n" * 1_000_000,
        "(" * 200_000,
        "\\u0000" * 100_000,
        "in " + "1 hour " * 50_000,
        "*/1 " * 50_000,
        "replay:/dev/zero",
        "/dev/zero",
        10**300,
        -1,
        [[]] * 3_000_000,
        {str(number): number for number in range(100_000)},
        nested,
    ]


def attempts(gateway: GatewayProcess) -> Iterator[tuple[str, str, bytes]]:
    """Requests for every tool and every route, as the gateway itself lists them, with a bomb in each place."""
    tools = gateway.get("/v1/tools")["tools"]
    values = [json.dumps(bomb).encode() for bomb in bombs()]
    for number, tool in enumerate(tools):
        properties = (tool.get("parameters") or {}).get("properties", {})
        for place, name in enumerate(properties):
            for offset in range(3 if LONG else 1):
                value = values[(number + place + offset * 8) % len(values)]
                others = {other: "a" for other in properties if other != name}
                arguments = json.dumps(others).encode()[:-1] + (b"," if others else b"")
                body = b'{"tool":%b,"args":%b%b:%b}}' % (
                    json.dumps(tool["name"]).encode(), arguments, json.dumps(name).encode(), value,
                )  # fmt: skip
                yield "POST", "/v1/tools/invoke", body
    for path in ("/v1/tools/invoke", "/mcp", "/agent/process", "/v1/sessions/s/messages", "/v1/chat/completions"):
        yield "POST", path, b'{"a":"' + b"\\n" * 7_000_000
        yield "POST", path, b'{"a":"' + b"\\u00e9" * 2_500_000
        yield "POST", path, b'{"args":[' + b"[]," * 4_000_000 + b"1]}"
    for number, (path, methods) in enumerate(gateway.get("/v1/openapi.json")["paths"].items()):
        for method in methods:
            value = values[number % len(values)]
            where = path.replace("{", "").replace("}", "").replace("...", "")
            if method == "get":
                yield "GET", f"{where}?limit={'9' * 300}&q={'%2A%3F' * 400}&pattern={'*%3F' * 400}", b""
            else:
                yield method.upper(), where, value
                yield method.upper(), where, b'{"message":%b,"text":%b,"args":%b}' % (value, value, value)


def send(gateway: GatewayProcess, token: str, method: str, path: str, body: bytes) -> int:
    """The status; 0 for a connection that was closed on us, which is an answer, too."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=90)
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        if "text/event-stream" in (response.getheader("Content-Type") or ""):
            return response.status
        response.read()
        return response.status
    except (ConnectionError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@pytest.mark.siege
@pytest.mark.timeout(600)
def test_no_expensive_input_to_any_tool_or_route_stalls_the_gateway(
    gateway: GatewayProcess, reader: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Part 5: p99 of `/healthz` stays under 250 ms, or under a multiple of what an idle gateway takes meanwhile."""
    tokens = [reader, *(token_of(gateway, scope) for scope in ("read", "chat"))]
    with GatewayProcess(tmp_path_factory.mktemp("idle") / "home") as control:
        with Watched(gateway, control) as watched:
            statuses: Counter[int] = Counter()
            for number, (method, path, body) in enumerate(attempts(gateway)):
                token = reader if path == "/v1/tools/invoke" else tokens[number % len(tokens)]
                statuses[send(gateway, token, method, path, body)] += 1
        report = {
            "probes": len(watched.attacked),
            "p50": percentile(watched.attacked, 0.5),
            "p99": percentile(watched.attacked, 0.99),
            "worst": max(watched.attacked),
            "idle p99": percentile(watched.idle, 0.99),
            "idle worst": max(watched.idle),
            "statuses": dict(statuses),
        }
        print(report)
    assert statuses.total() > 200 and statuses[500] == 0, report
    assert report["p99"] < max(0.25, 20 * report["idle p99"]), report
    assert report["worst"] < max(2.0, 30 * report["idle worst"]), report
