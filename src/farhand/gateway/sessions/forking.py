"""Fork a session: start a new one with the messages of another up to a point. The other is not changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.calls.gate import IdempotencyConflict
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.entries import message_of
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import InvalidArgs, NotAllowed, NotFound
from farhand.protocol.version import MIB
from farhand.store.history.seal_coverage import checkpoint
from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables import idempotency as keys
from farhand.store.tables import sessions
from farhand.store.tables.sessions import Entry, SessionRecord

# A longer conversation is not copied, since it would block all other writes.
MOST_FORKED_BYTES: Final = 64 * MIB


class Forked(msgspec.Struct, frozen=True):
    """A session that was forked from another."""

    key: str
    session_key: str
    # The key of the other session.
    source: str
    # Number of copied messages.
    messages: int
    # Number of the last copied message in the other session.
    at: int
    # Messages before the chosen point that were not copied, because one of their calls had no result yet.
    left_out: int


class Forks:
    def __init__(self, chats: Sessions, clock: Callable[[], int]) -> None:
        self._chats = chats
        self._clock = clock

    async def fork(
        self,
        key: str,
        *,
        event: int | None,
        message: int | None,
        to: str | None,
        credential: Credential,
        idempotency_key: str | None = None,
    ) -> Forked:
        """Create a session with the messages up to an event of the journal, or up to a message; by default all.

        A call and its result stay together: if the point is between them, both are left out. The copies count as sent
        by `credential`. Raises NotFound, InvalidArgs, NotAllowed for a key that the credential may not use, OverBudget,
        IdempotencyConflict, StoreError.
        """
        if event is not None and message is not None:
            raise InvalidArgs("a session is forked at an event or at a message, not at both")
        source = await self._chats.find(key)
        target = self._target(source, to)
        if (
            to is not None
            and credential.is_token
            and not credential.may(Scope.ADMIN)
            and session_keys.is_reserved(target)
        ):
            raise NotAllowed(f"{to!r} is not a name for a fork: it needs the scope 'admin', or a name without 'agent:'")
        now, new_id = self._clock(), self._chats.new_id()
        digest = hashlib.sha256(repr(("fork", source.key, event, message, to)).encode()).digest()

        def plan(store: Tx) -> tuple[list[Entry], int]:
            last = _last_entry(store, source.key, event, message)
            size = sessions.transcript_bytes(store, source.key, last.session_id, last.seq)
            if size > MOST_FORKED_BYTES:
                raise InvalidArgs(
                    f"{session_keys.short(source.key)!r} has {size} bytes up to there; a fork copies at most "
                    f"{MOST_FORKED_BYTES}; choose an earlier message"
                )
            return whole(sessions.transcript(store, source.key, last.session_id, last.seq))

        def repeated(store: Tx) -> Forked | None:
            if idempotency_key is not None:
                held = keys.claimed(store, credential.id, idempotency_key, digest, "", now)
                if held[1] != digest:
                    raise IdempotencyConflict(f"the idempotency key {idempotency_key!r} was used for another request")
                if held[0]:
                    return _made(store, held[0])
            return None

        def write(store: Tx) -> Forked:
            if (made := repeated(store)) is not None:
                return made
            if sessions.find_session(store, target) is not None:
                raise InvalidArgs(f"there is a session {session_keys.short(target)!r} already; name another")
            if idempotency_key is not None:
                keys.claim(store, credential.id, idempotency_key, digest, target, now)
            return _write(store, source, target, new_id, taken, left_out, now)

        if (made := await self._chats.read(repeated)) is not None:
            return made
        taken, left_out = await self._chats.read(plan)  # reads in its own thread; the copy is written in another
        if not taken:
            raise InvalidArgs("there was no complete message by then; choose a later event or message")
        self._chats.budget.take(credential, sum(len(bytes(entry.message)) for entry in taken), now)
        forked: Forked = await self._chats.write(write)
        return forked

    def _target(self, source: SessionRecord, to: str | None) -> str:
        if to is None:
            mark = self._chats.new_id()[-8:]
            if source.key.startswith("agent:"):
                return f"agent:{source.agent_id}:fork:{mark}"
            return f"{source.key[: session_keys.MAX_KEY - 14]}-fork-{mark}"
        target = self._chats.canonical(to)
        if session_keys.agent_of(target) != source.agent_id:
            named = session_keys.agent_of(target)
            raise InvalidArgs(
                f"{to!r} is a session of the agent {named!r}, and the messages are those of {source.agent_id!r}"
            )
        return target


def whole(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return the entries without those at the end that leave a call without a result, and the number dropped."""
    open_uses: set[str] = set()
    end = 0
    for number, entry in enumerate(entries, 1):
        if entry.keeps_from is None:
            message = message_of(entry)
            if message.role == "assistant":
                open_uses = {use.id for use in message.tool_calls}
            elif message.role == "tool":
                open_uses.discard(message.tool_call_id or "")
        if not open_uses:
            end = number
    return list(entries[:end]), len(entries) - end


def _last_entry(store: Tx, key: str, event: int | None, message: int | None) -> Entry:
    if message is not None:
        found = sessions.find_entry(store, message)
        if found is None or found.session_key != key:
            raise NotFound(f"there is no message {message} in {session_keys.short(key)!r}")
        return found
    if event is not None:
        rows: list[Any] = store.execute("SELECT at FROM events WHERE id = ?", (event,)).fetchall()
        if not rows:
            cut = checkpoint(store)
            if cut is not None and event <= cut.through:
                raise NotFound(f"event {event} was pruned by retention, as were all up to {cut.through}")
            raise NotFound(f"there is no event {event}; `farhand log` shows them")
        found = sessions.entry_by(store, key, event, rows[0][0])
        if found is None:
            raise InvalidArgs(f"{session_keys.short(key)!r} had no messages by event {event}")
        return found
    entries = sessions.history(store, key, limit=1)
    if not entries:
        raise InvalidArgs(f"{session_keys.short(key)!r} has no messages yet")
    return entries[0]


def _write(
    store: Tx,
    source: SessionRecord,
    key: str,
    new_id: str,
    taken: Sequence[Entry],
    left_out: int,
    now: int,
) -> Forked:
    record = SessionRecord(
        key=key,
        id=new_id,
        agent_id=source.agent_id,
        title=source.title,
        model=source.model,
        thinking=source.thinking,
        created_at=now,
        updated_at=now,
    )
    sessions.add_session(store, record)
    places: dict[int, int] = {}
    newest = 0
    for entry in taken:
        keeps_from = None
        if entry.keeps_from is not None:
            kept = [place for number, place in places.items() if number >= entry.keeps_from]
            keeps_from = kept[0] if kept else newest + 1
        copy = msgspec.structs.replace(
            entry, session_key=key, session_id=new_id, run_id=None, keeps_from=keeps_from, at=entry.at
        )
        newest = sessions.copy_entry(store, copy, now)
        if entry.keeps_from is None:
            places[entry.seq] = newest
    data = {"from": source.key, "at": taken[-1].seq, "messages": len(places), "left_out": left_out}
    append_event(store, now, "session.forked", key, data)
    return Forked(session_keys.short(key), key, source.key, len(places), taken[-1].seq, left_out)


class _ForkEvent(msgspec.Struct):
    at: int
    messages: int
    left_out: int
    source: str = msgspec.field(name="from")


def _made(store: Tx, key: str) -> Forked:
    """Return the answer given when this session was made."""
    rows: list[Any] = store.execute(
        "SELECT data FROM events WHERE kind = 'session.forked' AND subject = ?", (key,)
    ).fetchall()
    event = msgspec.json.decode(rows[0][0], type=_ForkEvent)
    return Forked(session_keys.short(key), key, event.source, event.messages, event.at, event.left_out)
