"""The chats of `/agent/process` with an agent; over HTTP, tests/integration/test_http_guide.py has the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from farhand.agent.events import Appended, Completed, Event, RunFailed, StepStarted, StepText, ToolCalled, ToolEnded
from farhand.agent.tool_outcome import Outcome
from farhand.api.routes.agent.agent_process import AgentProcessRoutes
from farhand.api.server.http import Problem, Request
from farhand.api.server.http_exchange import HttpExchange
from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.sessions.agent_process import Direct, Turn
from farhand.gateway.sessions.keys import process_key
from farhand.llm.messages import Message, ToolUse, Usage
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.chats import ChatKey


class ScriptedAgent:
    """Answers every turn with the same events."""

    def __init__(self, *events: Event) -> None:
        self.events = events
        self.asked: list[str] = []
        self.forgotten: list[str] = []
        self.closed = 0

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        self.asked.append(turn.text)
        try:
            for event in self.events:
                yield event
        finally:
            self.closed += 1

    async def check_forget(self, key: str, credential: Credential) -> None:
        """Every credential may start the chat afresh."""

    async def forget(self, key: str) -> None:
        self.forgotten.append(key)


USE = ToolUse("c1", "laptop__Bash", '{"command": "ls"}')
ANSWER: tuple[Event, ...] = (
    StepStarted(1, "model"),
    StepText(1, "Let me "),
    Appended(1, Message("assistant", "Let me ", (USE,))),
    ToolCalled(1, USE),
    ToolEnded(1, USE, Outcome("listed " * 50), 0.1),
    StepStarted(2, "model"),
    StepText(2, "Done."),
    Completed("Done.", Usage(), 2),
)


def request(text: str, **fields: Any) -> Request:
    body = {"session_id": "s", "user_id": "u", "input": [{"content": text}], **fields}
    scope = {"method": "POST", "path": "/agent/process", "query_string": b"", "scheme": "http"}
    whole = Request(scope, HttpExchange(cast(Any, None), keep_alive=True), {}, Principal(OWNER))
    whole.rewind(json.dumps(body).encode())
    return whole


def run(path: Path, agent: ScriptedAgent, test: Callable[[AgentProcessRoutes, Direct], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = SqliteStore.open(path / "farhand.db")
        registry = NodeRegistry()
        catalog = Catalog(registry)
        gate = Gate(database, registry, catalog)
        try:
            direct = Direct(database, gate, catalog, [], agent, clock=registry.clock)
            await test(AgentProcessRoutes(direct, asyncio.Event()), direct)
        finally:
            gate.close()
            await database.close()

    asyncio.run(whole())


def test_the_agent_answers_what_names_no_tool(tmp_path: Path) -> None:
    agent = ScriptedAgent(*ANSWER)

    async def test(door: AgentProcessRoutes, direct: Direct) -> None:
        answer = json.loads((await door.process(request("What is there?"))).body)
        assert answer["reply"] == "Done." and agent.asked == ["What is there?"]
        shown = [
            (event["type"], event.get("delta") or event.get("tool_call") or event.get("reply"))
            for event in answer["events"]
        ]
        assert shown == [
            ("step_started", None),
            ("assistant_delta", "Let me "),
            ("tool_call", {"name": "laptop__Bash", "input": {"command": "ls"}}),
            ("tool_result", None),
            ("step_started", None),
            ("assistant_delta", "Done."),
            ("completed", "Done."),
        ]
        result = answer["events"][3]["tool_result"]
        assert result["ok"] and result["summary"].endswith("...") and len(result["summary"]) == 163

    run(tmp_path, agent, test)


def test_new_reaches_the_agent(tmp_path: Path) -> None:
    agent = ScriptedAgent(*ANSWER)

    async def test(door: AgentProcessRoutes, direct: Direct) -> None:
        await door.process(request("/new"))
        assert agent.forgotten == [process_key("console", "u", "s")] and agent.asked == []
        assert await direct.chats({}, 9) == []

    run(tmp_path, agent, test)


@pytest.mark.parametrize(
    ("kind", "status", "code"), [("not_configured", 503, "model_not_configured"), ("refused", 502, "model_failed")]
)
def test_a_run_that_failed_is_an_error(tmp_path: Path, kind: str, status: int, code: str) -> None:
    agent = ScriptedAgent(StepStarted(1, "m"), RunFailed(kind, "no reply", Usage(), 1))

    async def test(door: AgentProcessRoutes, direct: Direct) -> None:
        with pytest.raises(Problem) as raised:
            await door.process(request("hello"))
        assert (raised.value.status, raised.value.code) == (status, code)
        reply = await door.process(request("hello", stream=True))
        assert reply.pieces is not None
        pieces = [piece async for piece in reply.pieces]
        assert code.encode() in pieces[1] and pieces[-1] == b"data: [DONE]\n\n"

    run(tmp_path, agent, test)


def test_closing_a_stream_ends_the_run(tmp_path: Path) -> None:
    agent = ScriptedAgent(*ANSWER)

    async def test(door: AgentProcessRoutes, direct: Direct) -> None:
        events = direct.answer(Turn(ChatKey("s", "u", "c"), [("user", "x")], OWNER))
        await anext(events)
        await events.aclose()
        assert agent.closed == 1

    run(tmp_path, agent, test)
