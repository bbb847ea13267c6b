"""The agent's tools for agents and sessions, and the native tools `gsv__Sessions*`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.principal import limited, principal_of, readable_owner
from farhand.gateway.calls.policy_subject import handed_on
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.entries import message_of
from farhand.gateway.sessions.runs import Run, RunOptions, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Image, Text
from farhand.machine.time_zone import utc_text
from farhand.protocol.errors import Cancelled, Failed, InvalidArgs, NotAllowed, NotFound, Timeout
from farhand.store.tables.sessions import Entry, RunState, SessionRecord
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool, tool

GRACE_MS = 20_000
DEFAULT_HISTORY = 50
MAX_HISTORY = 1000
MAX_LISTED = 1000
# Maximum total bytes of messages in a result of gsv__SessionsList.
MOST_LISTED_BYTES = 4 * 1024 * 1024

SessionId = Annotated[str, Meta(description="Session key; `main` is the main session.")]
_time = partial(utc_text, timespec="milliseconds")


class SessionTools:
    """The session tools: seven of the agent, two native ones."""

    def __init__(
        self,
        sessions: Sessions,
        agents: Agents,
        *,
        model_of: Callable[[str], str],
        spawn_seconds: float,
    ) -> None:
        """`model_of` returns the model name of an agent."""
        self._sessions = sessions
        self._agents = agents
        self._model_of = model_of
        self._spawn_seconds = spawn_seconds
        # Sessions that wait for a reply, with the session they wait for.
        self._awaited: dict[str, str] = {}

    def tools(self) -> list[Tool]:
        """Return the agent's seven tools."""
        spawn_ms = int(self._spawn_seconds * 1000) + GRACE_MS
        return [
            tool(self.agents_list, read_only=True),
            tool(self.sessions_list, read_only=True),
            tool(self.sessions_history, read_only=True),
            tool(self.sessions_send, aliases={"message": "content"}, preview=self.preview_send, takes_handles=True),
            tool(self.sessions_spawn, timeout_ms=spawn_ms, continues=True, takes_handles=True),
            tool(self.subagents, read_only=True),
            tool(self.sessions_status, read_only=True),
        ]

    def native_tools(self) -> list[Tool]:
        return [
            tool(self.list_native, name="gsv__SessionsList", read_only=True),
            tool(self.send_native, name="gsv__SessionSend", preview=self.preview_send_native, takes_handles=True),
        ]

    # -- the agent's ------------------------------------------------------------------------------------

    async def agents_list(self) -> str:
        """List the agents: name, model, status."""
        busy = {session_keys.agent_of(key) for key in self._sessions.busy}
        names = [*self._agents.names, *sorted(busy - set(self._agents.names))]
        return "\n".join(
            f"name={name}\tmodel={self._model_of(name)}\tstatus={'active' if name in busy else 'idle'}"
            for name in names
        )

    async def sessions_list(self, context: CallContext, limit: int = 20, offset: int = 0) -> str:
        """List sessions, oldest first."""
        limit, offset = _page(limit, offset, MAX_LISTED)
        found, _ = await self._sessions.listed(limit, offset, oldest_first=True, **self._visible(context))
        return "\n".join(
            f"{session_keys.short(record.key)}\t{record.title}\tmessages={record.messages}"
            f"\tcreated={_time(record.created_at)}\tupdated={_time(record.updated_at)}"
            for record in found
        )

    async def sessions_history(
        self, context: CallContext, session_id: SessionId, limit: int = DEFAULT_HISTORY, offset: int = 0
    ) -> str:
        """Read the newest messages of a session; offset skips that many of the newest."""
        limit, offset = _page(limit, offset, MAX_HISTORY)
        await self._check_visible(context, session_id)
        entries = await self._sessions.history(session_id, limit, offset=offset)
        return "\n".join(entry_text(entry) for entry in entries)

    async def sessions_send(self, context: CallContext, session_id: SessionId, content: str) -> str:
        """Send a message to a session; its agent works on it."""
        await self._sessions.find(session_id)
        await self._send(context, session_id, content)
        return f"message sent to session {session_id}"

    async def sessions_spawn(self, context: CallContext, prompt: str, title: str = "") -> str:
        """Have a read-only sub-agent research something; returns its answer. Several may run at once."""
        if not prompt.strip():
            raise InvalidArgs("sessions_spawn parameter prompt is required")
        parent = self._sessions.canonical(context.session_key or session_keys.MAIN)
        agent = session_keys.agent_of(parent)
        key = session_keys.child_key(agent, context.call_id)
        run_id = f"spawn-{context.call_id}"
        try:
            run = await self._sessions.run(run_id)  # the same call, resumed after a restart
        except NotFound:
            run = await self._sessions.send(
                key,
                prompt,
                origin=f"agent:{agent}",
                credential=limited(principal_of(context).asker, Scope.READ, Scope.TOOLS_READ),
                options=RunOptions(
                    timeout_seconds=self._spawn_seconds,
                    pin=self._sessions.pin_of(parent, principal_of(context)),
                    origins=handed_on(context.origins),
                ),
                kind="child",
                parent_key=parent,
                title=title,
                run_id=run_id,
                commands_too=False,
                own_key=True,
            )
        return _answer(await self._until_ended(run))

    async def _until_ended(self, run: Run) -> RunOutcome:
        try:
            return await run.reply()
        except asyncio.CancelledError:
            # The answer is no longer needed, unless the gateway stops and the run resumes later.
            if not self._sessions.paused:
                self._sessions.ask_to_stop(run, RunState.STOPPED, "its parent was stopped")
            raise

    async def subagents(self, context: CallContext) -> str:
        """List the sub-agents of this session that are at work."""
        parent = self._sessions.canonical(context.session_key or session_keys.MAIN)
        found, _ = await self._sessions.listed(
            MAX_LISTED, oldest_first=True, kinds=("child",), parent_key=parent, own_to=readable_owner(context)
        )
        return "\n".join(
            f"id={record.key}\ttitle={record.title}\tstarted_at={_time(record.created_at)}"
            for record in found
            if self._sessions.current(record.key) is not None
        )

    async def sessions_status(self, context: CallContext, session_id: str = "") -> str:
        """Show this session: id, messages, tokens, cost."""
        key = session_id or context.session_key or session_keys.MAIN
        if not self._works_in(context, key):
            await self._check_visible(context, key)
        record = await self._sessions.find(key)
        return "\n".join(
            [
                f"id={session_keys.short(record.key)}",
                f"title={record.title}",
                f"message_count={record.messages}",
                f"prompt_tokens={record.prompt_tokens}",
                f"completion_tokens={record.completion_tokens}",
                f"cost={record.cost:.6f}",
                f"updated_at={_time(record.updated_at)}",
            ]
        )

    def _visible(self, context: CallContext) -> dict[str, str | None]:
        """Return the filters for the sessions that a caller may see."""
        owner = readable_owner(context)
        return {"own_to": owner, "key": self._session_of(context) or "" if _is_shared(owner) else None}

    async def _check_visible(self, context: CallContext, key: str) -> None:
        """Raise NotAllowed for a session that a caller may not see."""
        await self._sessions.check_visible(key, principal_of(context))
        if _is_shared(readable_owner(context)) and not self._works_in(context, key):
            raise NotAllowed(f"session {key[:100]!r} is that of another person; reading it needs the scope 'read'")

    def _works_in(self, context: CallContext, key: str) -> bool:
        """Return whether a call is by the session's own run. Other callers only claim to belong to a session."""
        return self._sessions.canonical(key) == self._session_of(context)

    def _session_of(self, context: CallContext) -> str | None:
        """Return the session of the run that makes a call; None for other callers, which merely name one."""
        if context.session_key is None or principal_of(context).on_behalf_of is None:
            return None
        return self._sessions.canonical(context.session_key)

    # -- the gateway's ----------------------------------------------------------------------------------

    async def list_native(
        self,
        context: CallContext,
        limit: Annotated[float, Meta(description="1-100, default 20.")] = 20,
        offset: float = 0,
        messageLimit: Annotated[float, Meta(description="Recent messages per session, 0-20.")] = 0,  # noqa: N803
    ) -> dict[str, Any]:
        """List sessions, those used last first."""
        limit, offset = min(max(int(limit), 1), 100), max(int(offset), 0)
        messages = min(max(int(messageLimit), 0), 20)
        found, count = await self._sessions.listed(limit, offset, **self._visible(context))
        shown, left = [], MOST_LISTED_BYTES
        for record in found:
            view, size = await self._shown(record, messages if left > 0 else 0, left)
            shown.append(view)
            left -= size
        listed = {"sessions": shown, "count": count, "offset": offset, "limit": limit}
        if left <= 0:
            listed["note"] = f"messages are cut off after {MOST_LISTED_BYTES} bytes; ask for fewer sessions at once"
        return listed

    async def _shown(self, record: SessionRecord, messages: int, most_bytes: int) -> tuple[dict[str, Any], int]:
        """Return a session with its newest messages, and their size; messages beyond `most_bytes` are left out."""
        shown: dict[str, Any] = {
            "sessionKey": record.key,
            "label": record.title,
            "lastActiveAt": record.updated_at,
            "createdAt": record.created_at,
            "messageCount": record.messages,
        }
        size = 0
        if messages:
            entries = await self._sessions.history(record.key, messages, session_id=record.id, most_bytes=most_bytes)
            kept: list[dict[str, Any]] = []
            for entry in reversed(entries):
                size += len(bytes(entry.message))
                if size > most_bytes:
                    break
                message = message_of(entry)
                kept.append({"role": message.role, "content": message.text, "timestamp": entry.at})
            shown["messages"] = kept[::-1]
        return shown, size

    async def send_native(
        self,
        context: CallContext,
        sessionKey: Annotated[str, Meta(description='For example "main" or "agent:helper:main".')],  # noqa: N803
        message: str,
        waitSeconds: Annotated[float, Meta(description="0-120, default 30; 0: do not wait.")] = 30,  # noqa: N803
    ) -> dict[str, Any]:
        """Send a message into another session and wait for its reply."""
        if not sessionKey.strip():
            raise InvalidArgs("sessionKey is required")
        if not message.strip():
            raise InvalidArgs("message is required")
        seconds = min(max(waitSeconds, 0), 120)
        run = await self._send(context, sessionKey, message)
        answer: dict[str, Any] = {"status": "accepted", "runId": run.id, "sessionKey": run.session_key}
        caller = self._session_of(context)
        if seconds == 0 or (caller is not None and self._waits_for(run.session_key, caller)):
            if seconds:
                answer["note"] = "not waited for: that session waits for this one"
            return {**answer, "queued": self._sessions.current(run.session_key) not in (None, run)}
        if caller is not None:
            self._awaited[caller] = run.session_key
        try:
            outcome = await run.reply(seconds)
        except TimeoutError:
            return {**answer, "status": "timeout", "waitedSeconds": seconds}
        finally:
            if caller is not None:
                self._awaited.pop(caller, None)
        if not outcome.ok:
            raise Failed(f"run {run.id} in session {run.session_key}: {outcome.text or outcome.state.value}")
        return {**answer, "status": "ok", "reply": outcome.reply}

    async def preview_send(self, session_id: str, content: str) -> Preview:
        record = await self._sessions.find(session_id)
        return Preview(summary=f"sends a message to session {record.key}, whose agent acts on it:\n{content}")

    async def preview_send_native(self, sessionKey: str, message: str, waitSeconds: float) -> Preview:  # noqa: ARG002, N803
        key = self._sessions.canonical(sessionKey)
        return Preview(summary=f"sends a message to session {key}, whose agent acts on it:\n{message}")

    def _waits_for(self, one: str, other: str) -> bool:
        """Return whether waiting would deadlock: the session is the caller itself, or waits for it, even indirectly."""
        seen = set()
        while one != other and one in self._awaited and one not in seen:
            seen.add(one)
            one = self._awaited[one]
        return one == other

    async def _send(self, context: CallContext, key: str, text: str) -> Run:
        principal = principal_of(context)
        # Only the session of a run is verified; other callers merely name one.
        proven = context.session_key is not None and principal.on_behalf_of is not None
        sender = session_keys.short(context.session_key or "") if proven else context.credential
        return await self._sessions.send(
            key,
            text,
            origin=f"session:{sender}",
            credential=principal.asker,
            options=RunOptions(
                pin=self._sessions.pin_of(context.session_key, principal), origins=handed_on(context.origins)
            ),
            # Commands are for people: a model must not freeze every machine, nor end its owner's conversation.
            commands_too=principal.on_behalf_of is None,
        )


def _is_shared(owner: str | None) -> bool:
    """Return whether a credential stands for everyone on a channel; a person's own session is where they talk."""
    return owner is not None and owner.startswith("channel:")


def entry_text(entry: Entry) -> str:
    """Format an entry as one line: the role and its parts."""
    message = message_of(entry)
    parts: list[str] = []
    if message.role == "tool":
        failed = "true" if message.is_error else "false"
        parts.append(f"[tool_result call={message.tool_call_id} error={failed}] {_flat(message.text)}".rstrip())
    elif isinstance(message.content, str):
        parts += [_flat(message.content)] if message.content else []
    if not isinstance(message.content, str):
        for block in message.content:
            if isinstance(block, Text) and message.role != "tool":
                parts.append(_flat(block.text))
            elif isinstance(block, Image):
                parts.append(_picture(block))
    if message.thinking:
        parts.append(f"[reasoning] {_flat(message.thinking)}")
    parts += [f"[tool_call name={use.name} id={use.id}]" for use in message.tool_calls]
    return f"{message.role}\t{' | '.join(parts)}"


def _picture(image: Image) -> str:
    head, comma, data = image.url.partition(",")
    if not comma:
        return f"[image {image.url}]"
    return f"[binary mime={head.removeprefix('data:').removesuffix(';base64')} bytes={len(data) * 3 // 4}]"


def _flat(text: str) -> str:
    return text.replace("\n", "\\n")


def _answer(outcome: RunOutcome) -> str:
    where = f"its transcript is session {outcome.session_key}"
    match outcome.state:
        case RunState.OK:
            return outcome.reply
        case RunState.TIMEOUT:
            raise Timeout(f"the sub-agent did not finish: {outcome.text}; {where}")
        case RunState.STOPPED:
            raise Cancelled(f"the sub-agent was stopped: {outcome.text}; {where}")
    raise Failed(f"the sub-agent failed: {outcome.text}; {where}")


def _page(limit: int, offset: int, most: int) -> tuple[int, int]:
    if limit < 1:
        raise InvalidArgs(f"limit must be at least 1, not {limit}")
    if offset < 0:
        raise InvalidArgs(f"offset must be at least 0, not {offset}")
    return min(limit, most), offset
