"""The agent behind `POST /agent/process`: each of its chats is a session of the agent `main`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial

from farhand.agent.events import Completed, Event, RunFailed, Stopped
from farhand.gateway.access.credentials import Credential
from farhand.gateway.calls.admission import Denied
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.sessions.agent_process import Turn, enter_chat
from farhand.gateway.sessions.runs import Recorded
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import NotAllowed, NotFound
from farhand.store.tables.sessions import RunState


class SessionAgent:
    """Answers turns with runs of their chat's session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield the events of the run, the last one `Completed`, `Stopped` or `RunFailed`; closing this ends the run.

        Raises ToolError for a rejected message, IdempotencyConflict, StoreError.
        """
        try:
            run = await self._sessions.send(
                turn.session_key,
                turn.text,
                origin="direct",
                credential=turn.credential,
                title=turn.title,
                own_key=True,
                enter=partial(enter_chat, turn),
                idempotency_key=turn.idempotency_key,
            )
        except NotAllowed as error:
            raise Denied(error.message) from None
        try:
            async for event in run.follow():
                if isinstance(event, Completed | Stopped | RunFailed):
                    break  # the outcome has the same information, even if these events were not sent
                if not isinstance(event, Recorded | ApprovalRequested):
                    yield event
            outcome = await run.reply()
        finally:
            if not run.over:
                self._sessions.ask_to_stop(run, RunState.STOPPED, "the client hung up")
        if outcome.state is RunState.STOPPED:
            yield Stopped(outcome.text, outcome.usage, outcome.steps)
        elif outcome.error is not None:
            yield RunFailed(outcome.error.kind, outcome.error.message, outcome.usage, outcome.steps)
        else:
            yield Completed(outcome.reply, outcome.usage, outcome.steps)

    async def check_forget(self, key: str, credential: Credential) -> None:
        """Raise Denied if another credential started the conversation in a session."""
        try:
            await self._sessions.check_owner(key, credential)
        except NotAllowed as error:
            raise Denied(error.message) from None

    async def forget(self, key: str) -> None:
        """Stop what runs in a session and start a new conversation; the old one stays in the history."""
        await self._sessions.stop(key, "a new conversation was begun")
        with contextlib.suppress(NotFound):
            await self._sessions.begin_anew(key)
