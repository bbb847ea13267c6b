"""A plug-in written as the guide says: started, reloaded, refused, and its progress seen by callers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, wait_until

SLOW = """
import threading
from farhand.sdk import ToolContext, ToolRegistry

registry = ToolRegistry("slow")
gate = threading.Event()


@registry.tool
async def work(ctx: ToolContext) -> dict:
    \"\"\"Work until released.\"\"\"
    ctx.log("started %s", "well")
    ctx.progress(2, 8, "page 2")
    while not gate.is_set() and not ctx.cancel.is_cancelled():
        import asyncio
        await asyncio.sleep(0.02)
    return {"done": True}


@registry.tool
async def release(ctx: ToolContext) -> None:
    \"\"\"Release.\"\"\"
    gate.set()


if __name__ == "__main__":
    registry.run()
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("plugins") / "home") as started:
        yield started


def farhand(gateway: GatewayProcess, *words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "farhand", *words, "--home", str(gateway.home)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_new_plug_in_runs_reloads_and_passes_its_tests(gateway: GatewayProcess, tmp_path: Path) -> None:
    made = farhand(gateway, "plugin", "new", "greeter", "--json", cwd=tmp_path)
    reported = json.loads(made.communicate(timeout=60)[0])
    program = tmp_path / reported["created"][0]
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    again = farhand(gateway, "plugin", "new", "greeter", cwd=tmp_path)
    assert again.wait(60) == 1 and again.stderr is not None and "already exists" in again.stderr.read()

    dev = farhand(gateway, "plugin", "dev", str(program))
    try:
        gateway.wait_for_node("greeter-dev")
        assert gateway.invoke("greeter.greet", {"who": "Ada"})["result"] == {"greetings": ["Hello, Ada!"]}
        tool = next(one for one in gateway.get("/v1/tools")["tools"] if one["name"] == "greeter.greet")
        texts = {name: value.get("description") for name, value in tool["parameters"]["properties"].items()}
        assert texts == {"who": "The name of a person.", "times": "How often; at most 10."}
        program.write_text(program.read_text().replace("Hello", "Good morning"))
        wait_until(
            lambda: "Good" in str(gateway.invoke("greeter.greet", {"who": "Ada"}).get("result")), 60, "the reload"
        )
    finally:
        dev.send_signal(signal.SIGINT)
        _, said = dev.communicate(timeout=60)
    assert dev.returncode == 0, said
    assert "connected to ws://" in said and "greeter.py changed; restarting" in said
    tokens = [one for one in gateway.get("/v1/tokens")["tokens"] if one["node_id"] == "greeter-dev"]
    assert tokens and all(one["revoked_at"] is not None for one in tokens)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"SA_NODE_TOKEN": "fhn_wrong"}, "farhand token create --node"),
        ({"SA_GATEWAY_WS_URL": "ftp://nowhere"}, "gateway_ws_url must be"),
    ],
)
def test_a_wrong_setting_is_one_line(
    gateway: GatewayProcess, tmp_path: Path, settings: dict[str, str], reported: str
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    env = {**os.environ, "SA_GATEWAY_WS_URL": gateway.ws_url, "SA_NODE_ID": "slow-x", **settings}
    ended = subprocess.run(
        [sys.executable, "slow.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1 and reported in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.startswith("slow.py: ")


def test_progress_and_log_reach_callers(gateway: GatewayProcess, tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    dev = farhand(gateway, "plugin", "dev", str(program), "--id", "slow")
    try:
        gateway.wait_for_node("slow")
        call_id = gateway.request("POST", "/v1/tools/invoke", {"tool": "slow.work", "background": True}).json()[
            "request_id"
        ]
        seen = wait_until(
            lambda: (record := gateway.get(f"/v1/calls/{call_id}")).get("progress") and record, 60, "progress"
        )
        assert {name: seen["progress"][name] for name in ("progress", "total", "message")} == {
            "progress": 2,
            "total": 8,
            "message": "page 2",
        }
        assert [(line["level"], line["message"]) for line in seen["log"]] == [("info", "started well")]
        page = gateway.get("/v1/journal?kind=call.progress,call.log&limit=10")
        reported = {event["kind"] for event in page["events"] if event["subject"] == call_id}
        assert reported == {"call.progress", "call.log"}
        gateway.invoke("slow.release")
        ended = wait_until(lambda: (one := gateway.get(f"/v1/calls/{call_id}"))["state"] == "ok" and one, 60, "the end")
        assert "progress" not in ended and ended["result"] == {"done": True}
    finally:
        dev.send_signal(signal.SIGINT)
        dev.communicate(timeout=60)
