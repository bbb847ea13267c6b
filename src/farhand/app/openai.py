"""Assembly of the OpenAI-compatible API."""

from __future__ import annotations

import asyncio

from farhand.api.openai.agent_runs import AgentRuns
from farhand.api.openai.completions import ChatRoutes
from farhand.api.openai.responses import ResponseRoutes
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.responses import Responses
from farhand.gateway.sessions.sessions import Sessions
from farhand.store.ports import Store


def openai_routes(database: Store, sessions: Sessions, agents: Agents, ending: asyncio.Event) -> tuple[object, ...]:
    runs = AgentRuns(sessions, agents)
    return (
        ChatRoutes(runs, ending),
        ResponseRoutes(runs, Responses(database, sessions), sessions, ending),
    )
