"""The small examples, run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import ROOT, GatewayProcess, NodeProcess, wait_until

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("examples") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text((EXAMPLES / "policy.toml").read_text())
    with GatewayProcess(home) as started:
        yield started


@pytest.fixture(scope="module")
def node(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("laptop"), "laptop") as started:
        yield started


@pytest.fixture(scope="module")
def production(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("prod"), "prod-1") as started:
        yield started


def run(gateway: GatewayProcess, *words: str, token: str = "") -> str:
    folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FARHAND_HOME": str(gateway.home)}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**env, "FARHAND_TOKEN": token} if token else env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def token(gateway: GatewayProcess, *scopes: str) -> str:
    return str(gateway.request("POST", "/v1/tokens", {"scopes": list(scopes)}).json()["token"])


def test_the_http_client(gateway: GatewayProcess, node: NodeProcess) -> None:
    said = run(
        gateway, sys.executable, "examples/http_client.py", gateway.url, token=token(gateway, "read", "tools.exec")
    )
    assert "laptop: " in said and "%" in said and "sent twice, ran once: True" in said


def test_the_http_client_explains_itself(gateway: GatewayProcess) -> None:
    for arguments, message in (([gateway.url], "token"), (["http://127.0.0.1:9"], "start one with `farhand up`")):
        done = subprocess.run(
            [sys.executable, "examples/http_client.py", *arguments],
            cwd=ROOT,
            env={**os.environ, "FARHAND_TOKEN": "fho_wrong"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_mcp_client(gateway: GatewayProcess, node: NodeProcess) -> None:
    said = run(
        gateway,
        sys.executable,
        "examples/mcp_client.py",
        "laptop",
        gateway.url,
        token=token(gateway, "tools.exec", "tools.write"),
    )
    assert " tools, such as " in said and "hello" in said
    assert (node.workspace / "from-mcp.txt").read_text() == "hello\n"


def test_the_scheduled_report(gateway: GatewayProcess, node: NodeProcess) -> None:
    said = run(gateway, "sh", "examples/scheduled_report.sh", "laptop")
    assert "disk-report" in said
    wait_until(lambda: list((node.workspace / "reports").glob("*.txt")), what="the report")
    command = Command(gateway.home)
    job = command("cron", "show", "disk-report", "--json").json()["job"]
    assert job["schedule"]["kind"] == "cron" and job["missed"] == "once" and job["node"] == "laptop", job


@pytest.mark.parametrize(
    ("call", "decision", "rule"),
    [
        (("laptop__Read", "path=/srv/key.pem"), "deny", "no keys"),
        (("laptop__Read", "path=/home/me/.ssh/id_ed25519"), "deny", "no keys"),
        (("prod-1__Read", "path=/etc/hosts"), "allow", "looking around is free"),
        (("prod-1__Bash", "command=systemctl restart web"), "ask", "production needs a second person"),
        (("laptop__Bash", "command=make"), "allow", "default"),
    ],
)
def test_the_policy(
    gateway: GatewayProcess, node: NodeProcess, production: NodeProcess, call: tuple[str, ...], decision: str, rule: str
) -> None:
    args = dict(one.split("=", 1) for one in call[1:])
    answer = gateway.request("POST", "/v1/policy/explain", {"tool": call[0], "args": args}).json()
    assert (answer["decision"], answer["rule"]) == (decision, rule), answer
