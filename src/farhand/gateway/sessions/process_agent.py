"""The agent behind `POST /agent/process`: each of its chats is a session of the agent `main`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator

from farhand.agent.events import Completed, Event, Failed, Stopped
from farhand.gateway.access.credentials import Credential
from farhand.gateway.calls.admission import Denied
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.sessions.agent_process import Turn
from farhand.gateway.sessions.keys import MAIN, token
from farhand.gateway.sessions.runs import Recorded
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import NotAllowed, NotFound
from farhand.store.tables.chats import ChatKey
from farhand.store.tables.sessions import RunState

NAME_CHARACTERS = 40


class SessionAgent:
    """Answers turns with runs of their chat's session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def answer(self, turn: Turn) -> AsyncGenerator[Event, None]:
        """Yield the events of the run, the last of them `Completed`, `Stopped` or `Failed`; closing this ends the run.

        Raises ToolError for a rejected message, IdempotencyConflict, StoreError.
        """
        try:
            run = await self._sessions.send(
                session_key(turn.chat),
                turn.text,
                origin="direct",
                credential=turn.credential,
                title=turn.text[:NAME_CHARACTERS],
                own_key=True,
                idempotency_key=turn.idempotency_key,
            )
        except NotAllowed as error:
            raise Denied(error.message) from None
        try:
            async for event in run.follow():
                if isinstance(event, Completed | Stopped | Failed):
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
            yield Failed(outcome.error.kind, outcome.error.message, outcome.usage, outcome.steps)
        else:
            yield Completed(outcome.reply, outcome.usage, outcome.steps)

    async def check_forget(self, chat: ChatKey, credential: Credential) -> None:
        """Raise Denied if another credential started the conversation in the chat's session."""
        try:
            await self._sessions.check_owner(session_key(chat), credential)
        except NotAllowed as error:
            raise Denied(error.message) from None

    async def forget(self, chat: ChatKey) -> None:
        """Stop what runs in the chat's session and start a new conversation; the old one stays in the history."""
        key = session_key(chat)
        await self._sessions.stop(key, "a new conversation was begun")
        with contextlib.suppress(NotFound):
            await self._sessions.begin_anew(key)


def session_key(chat: ChatKey) -> str:
    """Return the session key of a chat: a readable name and a digest that makes it unique."""
    parts = (chat.channel, chat.user_id, chat.session_id)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    name = ".".join(token(part)[:NAME_CHARACTERS] for part in parts)
    return f"agent:{MAIN}:process:{name}.{digest}"
