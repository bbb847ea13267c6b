"""Kill the gateway with SIGKILL, over and over under traffic: nothing acknowledged is lost, nothing happens twice."""

from __future__ import annotations

import http.client
import os
import random
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.support.harness import SHARED_TOKEN, GatewayProcess, PluginProcess, wait_until

KILLS = 500 if os.environ.get("FARHAND_SIEGE") == "long" else 15
FINAL = {"ok", "error", "timeout", "cancelled", "denied", "unknown"}

PLUGIN = """
import asyncio, os, random
from farhand.sdk import NodeClient, NodeInfo, ReconnectBackoff, ToolContext, ToolRegistry

registry = ToolRegistry()
effects = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@registry.tool("siege.effect")
async def effect(ctx: ToolContext, key: str) -> dict[str, str]:
    "Leave one line behind, before or after a while."
    await asyncio.sleep(random.random() * 0.02)
    os.write(effects, f"{ctx.request_id} {key}\\n".encode())
    await asyncio.sleep(random.random() * 0.05)
    return {"call": ctx.request_id, "key": key}


@registry.tool("siege.look", read_only=True)
async def look(ctx: ToolContext, key: str) -> dict[str, str]:
    "Leave nothing behind."
    return {"call": ctx.request_id, "key": key}


client = NodeClient(
    node_info=NodeInfo.from_env("siege", "1"), reconnect_backoff=ReconnectBackoff(initial_delay=0.05, max_delay=0.2)
)
asyncio.run(client.run(registry))
"""


class Caller(threading.Thread):
    """Makes one call after another. With a key it asks until it is answered; without, a lost answer stays lost."""

    def __init__(
        self,
        gateway: GatewayProcess,
        stop: threading.Event,
        *,
        keyed: bool,
        background: bool = False,
        tool: str = "siege.effect",
    ) -> None:
        super().__init__(daemon=True)
        self._gateway = gateway
        self._stop_event = stop
        self._keyed = keyed
        self._background = background
        self._tool = tool
        self.tried = 0
        self.retries = 0
        self.answers: dict[str, Any] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                self._one(str(uuid.uuid4()))
        except BaseException as error:
            self.failure = error

    def _one(self, key: str) -> None:
        self.tried += 1
        while True:
            try:
                answer = self.post(key)
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)
                if not self._keyed:
                    return
                self.retries += 1
                continue
            assert answer.status == 200, answer
            self.answers[key] = answer.json()
            if not self.answers[key]["ok"]:
                time.sleep(0.05)  # most likely the node is not back yet
            return

    def post(self, key: str) -> Any:
        body = {
            "tool": self._tool,
            "args": {"key": key},
            "timeout_ms": 60_000,
            "session_key": key,
            "background": self._background,
        }
        headers = {"Idempotency-Key": key} if self._keyed else {}
        return self._gateway.request("POST", "/v1/tools/invoke", body, headers=headers, timeout=90)


def all_records(gateway: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = ""
    while page := gateway.get(f"/v1/calls?limit=1000{before}")["calls"]:
        found.update((call["id"], call) for call in page)
        before = f"&before={page[-1]['id']}"
    return found


@pytest.mark.siege
@pytest.mark.timeout(3600 if KILLS > 15 else 600)
def test_no_acknowledged_call_is_lost_and_no_side_effect_repeated(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    effects_file = tmp_path / "effects"
    effects_file.touch()
    env = {
        "SA_GATEWAY_WS_URL": gateway.ws_url,
        "SA_NODE_TOKEN": SHARED_TOKEN,
        "SA_NODE_ID": "siege",
        "EFFECTS": str(effects_file),
    }
    stop = threading.Event()
    callers = [
        *(Caller(gateway, stop, keyed=True) for _ in range(5)),
        *(Caller(gateway, stop, keyed=False) for _ in range(2)),
        Caller(gateway, stop, keyed=True, background=True),
        Caller(gateway, stop, keyed=False, tool="siege.look"),
    ]

    def held_up() -> None:
        for caller in callers:
            if caller.failure is not None:
                raise caller.failure

    def executed() -> int:
        return effects_file.read_bytes().count(b"\n")

    gateway.start()
    try:
        with PluginProcess(PLUGIN, tmp_path / "plugin", env):
            gateway.wait_for_node("siege", seconds=30)
            for caller in callers:
                caller.start()
            for _ in range(KILLS):
                before = executed()
                wait_until(lambda before=before: held_up() or executed() >= before + 5, 60, "traffic")
                time.sleep(random.random() * 0.15)
                gateway.kill()
                gateway.start()
            stop.set()
            for caller in callers:
                caller.join(90)
            held_up()
            assert not any(caller.is_alive() for caller in callers)
            wait_until(lambda: not gateway.get("/v1/calls?state=running")["calls"], 90, "the end of every call")

            records = all_records(gateway)
            # A call that was begun holds its key; one that was refused did not run and may be tried again.
            begun = [
                (caller, key)
                for caller in callers[:5]
                for key, answer in list(caller.answers.items())[-40:]
                if answer["state"] == "ok"
            ]
            repeated = {key: caller.post(key).json() for caller, key in begun}
            assert len(all_records(gateway)) == len(records), "a key was taken for a new call"
    finally:
        stop.set()
        gateway.stop()

    effects = Counter(line.split()[0] for line in effects_file.read_text().splitlines())
    keys = Counter(line.split()[1] for line in effects_file.read_text().splitlines())
    states = Counter(record["state"] for record in records.values())
    answers = {key: answer for caller in callers for key, answer in caller.answers.items()}
    tried = sum(caller.tried for caller in callers)
    reported = Counter(answer["state"] for answer in answers.values())
    print(
        f"\n{KILLS} kills: {tried} calls tried, {len(answers)} answered ({dict(reported)}), "
        f"{sum(caller.retries for caller in callers)} asked again, {len(records)} in the record ({dict(states)}), "
        f"{sum(effects.values())} side effects, {states['unknown']} unknown"
    )

    # No side effect happened twice, for one call or for one idempotency key.
    assert [call for call, count in effects.items() if count > 1] == []
    assert [key for key, count in keys.items() if count > 1] == []
    # Whatever ran had been written down before, and every record is in a final state.
    assert set(effects) <= set(records)
    assert set(states) <= FINAL
    held = 0
    # What was answered is in the record, with the same end.
    for key, answer in answers.items():
        record = records[answer["request_id"]]
        assert record["session_key"] == key
        if answer["state"] == "running":
            continue  # reported as running in the background
        assert record["state"] == answer["state"]
        assert record.get("result") == answer.get("result") and record.get("error") == answer.get("error")
        held += 1
    # Ok means that it happened, once; a plain failure means that it did not; and the key still gives the same answer.
    for call_id, record in records.items():
        if record["tool"] == "siege.look":
            continue
        if record["state"] == "ok":
            assert effects[call_id] == 1 and record["result"] == {"call": call_id, "key": record["session_key"]}
        elif record["state"] == "error":
            assert effects[call_id] == 0, record
    # Only how long it took may differ: an end that a kill kept from the record came again from the node.
    for key, again in repeated.items():
        assert {**again, "duration_ms": 0} == {**answers[key], "duration_ms": 0}
    # The node lived through it all, so nothing had to stay unknown; and there was traffic to speak of.
    assert states["unknown"] == states["timeout"] == states["cancelled"] == 0
    assert states["ok"] >= 5 * KILLS
    settled = sum(answer["state"] != "running" for answer in answers.values())
    print(f"answers that the record bears out, {KILLS} kills: {settled} tried, {held} held")
    print(f"side effects that were single: {sum(effects.values())} tried, {len(effects)} held")
    assert apsw.Connection(str(gateway.home / "farhand.db")).pragma("integrity_check") == "ok"
