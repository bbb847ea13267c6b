"""Runs of agents for clients of the OpenAI API: what chat completions and responses have in common."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from farhand.agent.transcript import unanswered
from farhand.api.openai.request import PRODUCT, ChatRequest, conversation, options, refuse_strangers
from farhand.api.routes.agent.sessions import problems
from farhand.api.server.http import Problem, Request
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import watching
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.runs import FROZEN, Run, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Message
from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.sessions import RunState

NOT_CONFIGURED: Final = "not_configured"
STARTED_OVER: Final = "\n\n[the connection to the model was lost; it starts over]\n\n"
HUNG_UP: Final = "the client disconnected"
# A route that starts a run.
run_route = partial(
    route, media=(JSON, EVENTS), errors=(404, 409, 423, 502, 503, 504), idempotent=True, openai=True, content=True
)


class AgentRuns:
    def __init__(self, sessions: Sessions, agents: Agents) -> None:
        self._sessions = sessions
        self._agents = agents

    @property
    def models(self) -> list[str]:
        """Return the agents by their names as models."""
        return [PRODUCT, *(f"{PRODUCT}/{name}" for name in self._agents.names)]

    async def send(
        self, request: Request, wanted: ChatRequest, named: str | None, earlier: Sequence[Message] = ()
    ) -> Run:
        """Start the run for a request.

        `named` is the stored session it belongs to; without it, the client keeps the conversation. `earlier` are the
        messages before those of the request. Raises Problem.
        """
        agent = self._agent(wanted.model)
        said = conversation(wanted)
        chosen = options(wanted, said, kept=bool(named))
        run_id = str(uuid.uuid4())
        before = (*earlier, *said.before)
        with problems():
            if named:
                key = self._key(named, agent, wanted.model)
            else:
                key = session_keys.once_key(agent, _conversation_id(request, before) or run_id)
            if said.answers:
                refuse_strangers(said.answers, await self._sessions.open_calls(key) if named else unanswered(before))
            return await self._sessions.send(
                key,
                said.new,
                origin="openai",
                credential=request.credential,
                options=chosen,
                history=() if named else before,
                kind="chat" if named else "once",
                own_key=not named,
                run_id=run_id,
                idempotency_key=request.idempotency_key,
            )

    async def outcome(self, request: Request, run: Run) -> RunOutcome:
        """Wait for the end of a run; stop it if the client disconnects, as with any model. Raises Problem."""
        with watching(request, lambda: self._hung_up(run)), problems():
            outcome = await run.reply()
        if (
            outcome.error is not None and outcome.error.kind != NOT_CONFIGURED
        ):  # without a model, its text is the answer
            status = {RunState.STOPPED: 409, RunState.TIMEOUT: 504}.get(outcome.state, 502)
            status = 423 if outcome.error.kind == FROZEN else status
            raise Problem(status, outcome.error.kind, outcome.error.message)
        return outcome

    async def streamed(
        self, run: Run, pieces: AsyncGenerator[bytes, None], *, stops: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of an answer; `stops`: the run ends if the client disconnects."""
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            if stops:
                self._hung_up(run)

    def _hung_up(self, run: Run) -> None:
        """Stop a run whose client has disconnected."""
        if not run.over:
            self._sessions.ask_to_stop(run, RunState.STOPPED, HUNG_UP)

    def _agent(self, model: str) -> str:
        if model == PRODUCT:
            return session_keys.MAIN
        if model not in self.models:
            raise no_model(model)
        return model.removeprefix(f"{PRODUCT}/")

    def _key(self, name: str, agent: str, model: str) -> str:
        key = self._sessions.canonical(name)
        if model == PRODUCT or session_keys.agent_of(key) == agent:
            return key
        if name.startswith("agent:"):
            raise InvalidArgs(f"session {name!r} belongs to another agent than the model {model!r} names")
        return self._sessions.canonical(f"agent:{agent}:{name}")


def _conversation_id(request: Request, before: Sequence[Message]) -> str | None:
    """Return an id that a repeated request with the same idempotency key has too; None without a key."""
    if request.idempotency_key is None:
        return None
    parts = (request.credential.id, request.path, request.idempotency_key, before)
    return str(uuid.UUID(bytes=hashlib.sha256(msgspec.json.encode(parts)).digest()[:16]))


def model_view(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": PRODUCT}


def no_model(name: str) -> Problem:
    reason = f"there is no model {name[:100]!r} here; `farhand` and `farhand/<agent>` are agents"
    return Problem(404, "model_not_found", reason, param="model")
