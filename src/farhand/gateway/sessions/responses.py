"""Stored responses of the OpenAI Responses API: each shows one run, to the credential that made it alone."""

from __future__ import annotations

from functools import partial
from typing import Final

from farhand.gateway.access.credentials import Credential
from farhand.gateway.sessions.entries import message_of
from farhand.gateway.sessions.runs import Run
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Message
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.store.ports import Store, Tx
from farhand.store.tables import responses, sessions
from farhand.store.tables.responses import ResponseRecord
from farhand.store.tables.sessions import Entry

PREFIX: Final = "resp_"
MAX_ID: Final = 100


class Responses:
    def __init__(self, database: Store, chats: Sessions) -> None:
        self._database = database
        self._sessions = chats

    async def add(self, run: Run, credential: Credential, facts: bytes) -> None:
        """Store the response of a run. Raises OverBudget, StoreError."""
        record = ResponseRecord(response_id(run), run.id, credential.id, run.record.created_at, facts)
        self._sessions.budget.take(credential, len(facts), self._sessions.now())
        await self._database.write(lambda store: responses.add_response(store, record))

    async def find(self, name: str, credential: Credential) -> tuple[ResponseRecord, Run]:
        """Return a response and its run. Raises NotFound, also for a response of another credential."""
        found = None
        if len(name) <= MAX_ID:
            found = await self._database.read(lambda store: responses.find_response(store, name, credential.id))
        if found is None:
            raise NotFound(f"there is no response {name[:MAX_ID]!r} of this credential")
        return found, await self._sessions.run(found.run_id)

    async def remove(self, name: str, credential: Credential) -> None:
        """Forget a response; its run stays in the record. Raises NotFound."""
        found, _ = await self.find(name, credential)
        await self._database.write(lambda store: responses.remove_response(store, found.id))

    async def said(self, run: Run) -> list[Message]:
        """Return what a run has added to its conversation so far, oldest first."""
        return [message_of(entry) for entry in await self._database.read(partial(_entries, run=run))]

    async def conversation(self, name: str, credential: Credential) -> list[Message]:
        """Return the conversation up to the end of a response, for a request that continues it.

        Raises NotFound, and InvalidArgs while its run has not ended.
        """
        _, run = await self.find(name, credential)
        if not run.over:
            raise InvalidArgs(f"the response {name!r} has not ended; wait for its end before continuing it")

        def read(store: Tx) -> list[Entry]:
            own = _entries(store, run)
            if not own:
                return []
            last = own[-1]
            return sessions.conversation(store, last.session_key, last.session_id, last.seq)

        return [message_of(entry) for entry in await self._database.read(read)]


def response_id(run: Run) -> str:
    return f"{PREFIX}{run.id.replace('-', '')}"


def _entries(store: Tx, run: Run) -> list[Entry]:
    """Return the entries of a run; a message that joined another run has those of that run."""
    joined = run.record.joined_to if run.joined is None else run.joined.id
    return sessions.entries_of_run(store, run.session_key, joined or run.id)
