"""Kill the gateway with SIGKILL during runs, over and over: transcripts stay valid, nothing is lost or done twice."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_kill_gateway import PLUGIN
from tests.integration.agent.test_agent import assert_valid
from tests.support.harness import SHARED_TOKEN, GatewayProcess, PluginProcess, wait_until
from tests.support.model_server import ModelServer, Reply, Request, calls, text

KILLS = 200 if os.environ.get("FARHAND_SIEGE") == "long" else 6
ROUNDS = 2


class Model:
    """For each message two rounds of two tool calls, then an answer; what it is asked must be a valid conversation."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def __call__(self, request: Request) -> Reply:
        conversation = [message for message in request.messages if message["role"] != "system"]
        self._examine(conversation)
        last = max(index for index, message in enumerate(conversation) if message["role"] == "user")
        word = conversation[last]["content"]
        done = sum(message["role"] == "assistant" for message in conversation[last:])
        if done == ROUNDS:
            return text(f"answer to {word}")
        uses = [("siege.effect", {"key": f"{word}/{done}/{number}"}) for number in range(2)]
        return calls(*uses, ids=[f"{word}-{done}-{number}" for number in range(2)])

    def _examine(self, conversation: list[Any]) -> None:
        waiting: list[str] = []
        for message in conversation:
            if message["role"] == "tool":
                if not waiting or message["tool_call_id"] != waiting.pop(0):
                    self.faults.append(f"a result out of place: {json.dumps(conversation)[-2000:]}")
            elif waiting:
                self.faults.append(f"a call without a result: {json.dumps(conversation)[-2000:]}")
            waiting += [use["id"] for use in message.get("tool_calls") or ()]
        if waiting or conversation[-1]["role"] == "assistant":
            self.faults.append(f"nothing to answer: {json.dumps(conversation)[-2000:]}")


class Sender(threading.Thread):
    """Says one thing after another in a session of its own; each with a key, asked again until it is answered."""

    def __init__(self, gateway: GatewayProcess, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._gateway = gateway
        self._stop_event = stop
        self.key = f"siege-{number}"
        self.replies: dict[str, str] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                word = f"{self.key}-{len(self.replies)}"
                self.replies[word] = self._say(word)
        except BaseException as error:
            self.failure = error

    def _say(self, word: str) -> str:
        while True:
            try:
                answer = self._gateway.request(
                    "POST",
                    f"/v1/sessions/{self.key}/messages",
                    {"message": word, "wait_seconds": 60},
                    headers={"Idempotency-Key": word},
                    timeout=90,
                )
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
                continue
            if answer.status == 503:
                continue
            assert answer.status == 200 and answer.json()["state"] == "ok", answer
            return str(answer.json()["reply"])


@pytest.mark.siege
@pytest.mark.timeout(3600 if KILLS > 6 else 300)
def test_transcripts_are_valid_and_complete_after_every_kill(tmp_path: Path) -> None:
    effects_file = tmp_path / "effects"
    effects_file.touch()
    model = Model()
    stop = threading.Event()
    with ModelServer(answer=model) as server:
        gateway = GatewayProcess(tmp_path / "home", env=dict(server.environment))
        env = {
            "SA_GATEWAY_WS_URL": gateway.ws_url,
            "SA_NODE_TOKEN": SHARED_TOKEN,
            "SA_NODE_ID": "siege",
            "EFFECTS": str(effects_file),
        }
        senders = [Sender(gateway, number, stop) for number in range(4)]

        def answered() -> int:
            for sender in senders:
                if sender.failure is not None:
                    raise sender.failure
            return sum(len(sender.replies) for sender in senders)

        gateway.start()
        try:
            with PluginProcess(PLUGIN, tmp_path / "plugin", env):
                gateway.wait_for_node("siege", seconds=30)
                for sender in senders:
                    sender.start()
                for _ in range(KILLS):
                    before = answered()
                    wait_until(lambda before=before: answered() > before, 60, "an answer")
                    time.sleep(random.random() * 0.3)
                    gateway.kill()
                    gateway.start()
                stop.set()
                for sender in senders:
                    sender.join(90)
                answered()
                assert not any(sender.is_alive() for sender in senders)
                histories = {
                    sender.key: gateway.get(f"/v1/sessions/{sender.key}/history?limit=1000")["messages"]
                    for sender in senders
                }
        finally:
            stop.set()
            gateway.stop()

    assert model.faults == []
    said = Counter(line.split()[1] for line in effects_file.read_text().splitlines())
    interrupted = 0
    for sender in senders:
        history = histories[sender.key]
        assert_valid(history)
        # Each message stands there once, in order, with its rounds and the answer that its sender was given.
        assert [one["content"] for one in history if one["role"] == "user"] == list(sender.replies)
        assert len(history) == len(sender.replies) * (2 + ROUNDS * 3)
        finals = [one["content"] for one in history if one["role"] == "assistant" and "tool_calls" not in one]
        assert finals == list(sender.replies.values()) == [f"answer to {word}" for word in sender.replies]
        interrupted += sum(one["is_error"] for one in history if one["role"] == "tool")
        # A call that the transcript says went well happened once; no call happened twice.
        for message in history:
            for use in message.get("tool_calls", ()):
                key = json.loads(use["arguments"])["key"]
                (result,) = [one for one in history if one.get("tool_call_id") == use["id"]]
                assert said[key] <= 1 and (result["is_error"] or said[key] == 1)
    messages = sum(len(sender.replies) for sender in senders)
    print(f"messages with a valid transcript, {KILLS} kills: {messages} tried, {messages} held")
    print(f"calls that a kill made fail: {interrupted}")
