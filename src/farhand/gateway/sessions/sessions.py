"""Sessions: stored conversations with agents, each with one run at a time.

A message is on disk before its sender gets an answer. Its run then works on it (`runner.py`), alone in its session and
concurrently with other sessions. A message that arrives during a run joins it between two rounds of tool calls if the
run acts on behalf of the same credential; otherwise it waits for a run of its own. Runs that were open when the
gateway stopped resume at its next start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import DailyBudget, message_budget
from farhand.gateway.access.principal import Principal, encode_credential
from farhand.gateway.calls.gate import IdempotencyConflict
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.calls.policy_subject import VIA
from farhand.gateway.calls.refusals import ROW_BYTES
from farhand.gateway.repeating import BackgroundTasks
from farhand.gateway.sessions import client_tools as client_calls
from farhand.gateway.sessions import commands
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.entries import entry_of
from farhand.gateway.sessions.keys import DmScope
from farhand.gateway.sessions.runs import Run, RunOptions, RunOutcome
from farhand.llm.messages import Message, ToolUse
from farhand.protocol import canonical_json as sameness
from farhand.protocol.errors import Failed, FarhandError, InvalidArgs, NotAllowed, NotFound, ToolError
from farhand.store.ports import Store, Tx
from farhand.store.tables import idempotency as keys
from farhand.store.tables import sessions
from farhand.store.tables.sessions import Entry, RunRecord, RunState, SessionRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED = 100
MAX_MESSAGE_BYTES = 15 * 1024 * 1024
# Number of ended runs that can still be followed from their beginning.
KEPT_RUNS = 64
# Maximum characters of a title.
MAX_TITLE = 1000


class QueueFull(Failed):
    """Too many messages wait in a session."""


class RunsElsewhere(Protocol):
    """The runs of the other gateways that share the store. A session is worked on by one gateway at a time."""

    def worker(self, tx: Tx, key: str) -> str | None:
        """Return another gateway that works on a session."""

    def assign(self, tx: Tx, run_id: str, replica: str) -> None:
        """Make a new run one of another gateway."""

    async def wake(self, replica: str) -> None:
        """Have a gateway take up the runs that were stored for it."""

    async def stop(self, replica: str, key: str, reason: str) -> list[str]:
        """Stop the runs of a session at another gateway and return their ids. Raises FarhandError."""

    def copy(self, record: RunRecord) -> Run:
        """Return a run of another gateway as one that can be followed and awaited here."""


class _SessionQueue:
    """An active session: its run, and the waiting messages."""

    def __init__(self) -> None:
        self.current: Run | None = None
        self.waiting: deque[Run] = deque()
        self.task: asyncio.Task[None] | None = None


# Works on a run until it has an outcome. Cancelled when the gateway stops: the run resumes later.
Work = Callable[["Sessions", Run], Awaitable[RunOutcome]]


class Sessions:
    """Call `start` before the first message, `pause` when the gateway stops."""

    def __init__(
        self,
        database: Store,
        work: Work,
        *,
        clock: Callable[[], int],
        dm_scope: DmScope = "main",
        compact: Callable[[Sessions, SessionRecord, Credential], Awaitable[str]] | None = None,
        describe_model: Callable[[SessionRecord], str] = lambda record: record.model or "",
        check_model: Callable[[str], str] = lambda name: name,
        freeze: Callable[[str, str], Awaitable[str]] | None = None,
        budget: DailyBudget | None = None,
        elsewhere: RunsElsewhere | None = None,
        invalid: Callable[[Iterable[str]], str | None] = lambda _: None,
    ) -> None:
        """`check_model` returns a model's full name, or raises InvalidArgs if it cannot be used. `freeze` stops
        everything, in a person's name and for a reason, and returns the reply. `invalid` returns why one of these
        credentials was revoked or has expired. `elsewhere`: the runs of other gateways that share the store.
        """
        self._elsewhere = elsewhere
        self._invalid = invalid
        self._database = database
        self._work = work
        self._clock = clock
        self._dm_scope = dm_scope
        self._compact = compact
        self.describe_model = describe_model
        self.check_model = check_model
        self._freeze = freeze
        self.budget = budget or message_budget()
        self._queues: dict[str, _SessionQueue] = {}
        self._live: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._endings = BackgroundTasks()
        self._started = asyncio.Event()
        self._paused = False

    # -- sending ----------------------------------------------------------------------------------------

    async def send(
        self,
        key: str,
        message: str | Message,
        *,
        origin: str,
        credential: Credential,
        options: RunOptions | None = None,
        channel: Mapping[str, str] | None = None,
        history: Collection[Message] = (),
        kind: str = "chat",
        parent_key: str | None = None,
        title: str = "",
        run_id: str | None = None,
        idempotency_key: str | None = None,
        commands_too: bool = True,
        own_key: bool = False,
        chosen: bool = False,
        enter: Callable[[Tx, SessionRecord, int], object] | None = None,
    ) -> Run:
        """Send a message to a session. Returns once it is on disk; await the run's `reply()` for the outcome.

        `origin` is where it came from (`http`, `cron:<job>`, `telegram` …). The agent acts on behalf of `credential`,
        with its rights and no others. `channel` is where answers of this session go from now on; `history` is the
        beginning of a new session. A text that is a command (`/new`, `/stop` …) is carried out at once. `own_key`: the
        gateway made the key, not the caller. `chosen`: the settings of a channel or hook chose the session, so it need
        not be the credential's own. `enter` is called with the session and the time in the transaction that
        stores the message; it begins a new conversation if what was said there without a run is not for `credential`.

        Raises InvalidArgs for an invalid key or message; NotAllowed for a credential without the scope `read` in a
        session that is not its own, or that would start one with a reserved key; QueueFull if too many messages wait;
        IdempotencyConflict; StoreError.
        """
        key = self.canonical(key)
        said = Message("user", message) if isinstance(message, str) else message
        options = options or RunOptions()
        if not said.images and not said.text.strip() and not options.answers:
            raise InvalidArgs("message is required: it must not be blank")
        if self._paused:
            raise Failed("the gateway is stopping; the message was not taken")
        body = msgspec.json.encode(said)
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidArgs(f"a message has at most {MAX_MESSAGE_BYTES} bytes, this one has {len(body)}")
        command = commands.read(said.text) if commands_too and not said.images else None
        if command is not None and command.name in commands.OF_THE_OWNER:
            await self.check_owner(key, credential)  # refused before it is stored; checked again when it runs
        queue = self._queues.get(key)
        if queue is not None and len(queue.waiting) >= MAX_QUEUED:
            waiting = len(queue.waiting)
            raise QueueFull(f"{waiting} messages wait in session {session_keys.short(key)!r}; try again later")
        now = self._clock()
        said_before = sum(len(earlier.text) for earlier in history)
        self.budget.take(credential, ROW_BYTES + len(body) + said_before, now)
        record = RunRecord(
            id=run_id or self.new_id(),
            session_key=key,
            origin=origin,
            credential=credential.id,
            scopes=tuple(sorted(credential.scopes)),
            asker=msgspec.Raw(encode_credential(credential)),
            message=msgspec.Raw(body),
            options=msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(options, command=command is not None))),
            created_at=now,
        )
        session = SessionRecord(
            key=key,
            id=self.new_id(),
            agent_id=session_keys.agent_of(key),
            kind=kind,
            parent_key=parent_key,
            title=" ".join(title[:MAX_TITLE].split()),
            created_at=now,
            updated_at=now,
        )

        # The model answers from the whole conversation, so talking in a session amounts to reading it.
        own_only = not chosen and not credential.may(Scope.READ)
        # Likewise, the first message in a session that others will use stays in its conversation.
        if own_only and session_keys.is_main(key):
            raise NotAllowed(
                f"session {session_keys.short(key)!r} is the owner's; talking in it needs the scope 'read'"
            )
        may_begin = own_key or not session_keys.is_reserved(key)

        def write(store: Tx) -> tuple[str, str | None]:
            unused = sessions.is_unused(store, key) or (enter is not None and not sessions.has_runs(store, key))
            usable = (may_begin and unused) or sessions.is_own(store, key, credential.id)
            if own_only and not usable:
                raise NotAllowed(
                    f"session {session_keys.short(key)!r} is not this credential's own; talking in it needs the scope "
                    "'read', and new sessions have names without 'agent:'"
                )
            if idempotency_key is not None:
                asked = body if options.plain else body + sameness.canonical(msgspec.json.encode(options))
                digest = hashlib.sha256(b"message\0%b\0%b" % (key.encode(), asked)).digest()
                first, first_digest = keys.claim(store, credential.id, idempotency_key, digest, record.id, now)
                if first_digest != digest:
                    raise IdempotencyConflict(f"the idempotency key {idempotency_key!r} was used for another request")
                if first != record.id:
                    return first, None
            known = sessions.add_session(store, session)
            if channel is not None:
                sessions.change_session(store, key, channel=msgspec.Raw(msgspec.json.encode(dict(channel))))
            if known is session:
                for earlier in history:
                    sessions.append_entry(store, entry_of(session, None, now, earlier))
            if enter is not None:
                enter(store, known, now)
            other = None if self._elsewhere is None else self._elsewhere.worker(store, key)
            sessions.add_run(store, record)
            if other is not None and self._elsewhere is not None:
                self._elsewhere.assign(store, record.id, other)
            return record.id, other

        first, other = await self._database.write(write)
        if first != record.id:
            return await self.run(first)
        if other is not None and self._elsewhere is not None:
            await self._elsewhere.wake(other)
            return self._elsewhere.copy(record)
        run = Run(record)
        self._live[run.id] = run
        if command is not None:
            await self._obey(run, command)
        else:
            self._enqueue(run)
        return run

    async def check_owner(self, key: str, credential: Credential) -> None:
        """Raise NotAllowed for a token that did not start a session, or while the run of another credential is in it.

        People on a channel are in a session of the channel.
        """
        if credential.may(Scope.ADMIN) or not credential.is_token:
            return
        key = self.canonical(key)
        open_runs = await self.open_runs_of(key)
        if any(run.credential != credential.id for run in open_runs):
            raise NotAllowed(
                f"session {session_keys.short(key)!r} has a run of another credential; "
                "stopping it or changing the session needs that one, or the scope 'admin'"
            )
        first = await self._database.read(lambda store: sessions.first_credential(store, key))
        if first not in (None, credential.id):
            raise NotAllowed(
                f"session {session_keys.short(key)!r} was begun with another credential; "
                "stopping or changing it needs that one, or the scope 'admin'"
            )

    async def check_visible(self, key: str, principal: Principal) -> None:
        """Raise NotAllowed for a session that is not the caller's own, if it lacks the scope `read`.

        A session is a credential's own while all of its runs act on behalf of that credential.
        """
        if principal.may(Scope.READ):
            return
        key = self.canonical(key)
        if not await self._database.read(lambda store: sessions.is_own(store, key, principal.asker.id)):
            raise NotAllowed(
                f"session {session_keys.short(key)!r} is not this credential's own; reading it needs the scope 'read'"
            )

    async def stop(self, key: str, reason: str = "stopped on request") -> list[str]:
        """End a session's run, every process it started, and the waiting runs; return the ids of these runs.

        Raises Failed if another gateway works on the session and does not answer.
        """
        ended = await self.stop_here(key, reason)
        elsewhere, canonical = self._elsewhere, self.canonical(key)
        if elsewhere is None:
            return ended
        other = await self._database.read(lambda tx: elsewhere.worker(tx, canonical))
        if other is None:
            return ended
        try:
            return [*ended, *await elsewhere.stop(other, canonical, reason)]
        except FarhandError as error:
            raise Failed(f"gateway {other} works on this session and does not answer: {error}; try again") from None

    async def stop_here(self, key: str, reason: str) -> list[str]:
        """End the runs of a session that this gateway works on; return their ids."""
        queue = self._queues.get(self.canonical(key))
        if queue is None:
            return []
        waiting = list(queue.waiting)
        queue.waiting.clear()
        for run in waiting:
            await self.end(run, run.stopped(reason))
        ended = [run.id for run in waiting]
        if queue.current is not None:
            current = queue.current
            self.ask_to_stop(current, RunState.STOPPED, reason)
            ended.insert(0, current.id)
            await current.reply()
        return ended

    async def stop_all(self, reason: str) -> int:
        """End every run with every process it started, and all waiting runs; return their number."""
        stopped = await asyncio.gather(*(self.stop_here(key, reason) for key in list(self._queues)))
        return sum(len(runs) for runs in stopped)

    def credential_ended(self, token_id: str, reason: str) -> None:
        """Stop the runs that act on behalf of a token which was revoked or has expired."""
        for run in list(self._live.values()):
            if token_id in Principal(run.asker).ids and run.joined is None:
                self.ask_to_stop(run, RunState.STOPPED, f"{reason}, and the run acted on its behalf")

    def ask_to_stop(self, run: Run, state: RunState, reason: str) -> None:
        """Stop a run soon: an active one with everything it started, a waiting one before it starts."""
        if run.stopping is not None or run.over:
            return
        run.stopping = (state, reason)
        run.stop.set()
        queue = self._queues.get(run.session_key)
        if queue is not None and run in queue.waiting:
            queue.waiting.remove(run)
            self._endings.start(self.end(run, run.stopped(reason, state)))

    # -- queries ----------------------------------------------------------------------------------------

    def canonical(self, key: str) -> str:
        """Return the canonical form of a key. Raises InvalidArgs for an invalid key."""
        return session_keys.canonical(key, self._dm_scope)

    async def find(self, key: str) -> SessionRecord:
        """Return a session; an agent's main session exists even before its first message. Raises NotFound."""
        wanted = self.canonical(key)
        found = await self._database.read(lambda store: sessions.find_session(store, wanted))
        if found is not None:
            return found
        agent = session_keys.agent_of(wanted)
        if wanted != session_keys.main_key(agent):
            raise NotFound(f"there is no session {session_keys.short(wanted)!r}; `farhand sessions` lists them")
        now = self._clock()
        return SessionRecord(key=wanted, id="", agent_id=agent, created_at=now, updated_at=now)

    async def listed(self, limit: int, offset: int = 0, **options: Any) -> tuple[list[SessionRecord], int]:
        """Return a page of sessions, last used first, and their total; options as in `store.tables.sessions`."""
        return await self._database.read(
            lambda store: sessions.list_sessions(store, limit=limit, offset=offset, **options)
        )

    async def history(self, key: str, limit: int, **options: Any) -> list[Entry]:
        """Return the newest entries of a transcript, oldest first; options as in `store.tables.sessions`. Raises
        NotFound.
        """
        found = await self.find(key)
        return await self._database.read(lambda store: sessions.history(store, found.key, limit=limit, **options))

    async def conversation(self, record: SessionRecord) -> list[Entry]:
        """Return the entries that the model sees."""
        return await self._database.read(lambda store: sessions.conversation(store, record.key, record.id))

    async def open_calls(self, key: str) -> list[ToolUse]:
        """Return the calls of the current conversation that wait for the client's results."""
        found = await self.find(key)
        return await self._database.read(lambda store: client_calls.open_calls(store, found))

    async def run(self, run_id: str) -> Run:
        """Return a run, active or ended. Raises NotFound."""
        await self._started.wait()  # a resumed call may ask for a run that is about to be resumed
        run = self._live.get(run_id) or self._ended.get(run_id)
        if run is None:
            record = await self._database.read(lambda store: sessions.find_run(store, run_id))
            if record is None:
                raise NotFound(f"there is no run {run_id!r}")
            if self._elsewhere is not None and record.state in sessions.OPEN_STATES:
                # Of another gateway, or about to be taken up here.
                return self._elsewhere.copy(record)
            run = Run(record)
        return run

    def known(self, run_id: str) -> Run | None:
        """Return a run that this gateway works on, or has ended lately."""
        return self._live.get(run_id) or self._ended.get(run_id)

    async def open_runs_of(self, key: str) -> list[RunRecord]:
        """Return the runs that are open in a session, whichever gateway works on them: the active one first."""
        if self._elsewhere is not None:
            found = await self._database.read(sessions.open_runs)
            ours = [run for run in found if run.session_key == key]
            return sorted(ours, key=lambda run: run.state is RunState.QUEUED)
        queue = self._queues.get(key)
        return [] if queue is None else [run.record for run in (*filter(None, [queue.current]), *queue.waiting)]

    async def activity(self) -> dict[str, tuple[str | None, int]]:
        """Return the active run of each session that has one, and how many wait, whichever gateway works on them."""
        if self._elsewhere is None:
            queues = self._queues.items()
            return {key: (queue.current.id if queue.current else None, len(queue.waiting)) for key, queue in queues}
        found: dict[str, tuple[str | None, int]] = {}
        for run in await self._database.read(sessions.open_runs):
            current, waiting = found.get(run.session_key, (None, 0))
            if run.state is RunState.RUNNING:
                current = run.id
            elif run.state is RunState.QUEUED:
                waiting += 1
            found[run.session_key] = current, waiting
        return found

    def current(self, key: str) -> Run | None:
        """Return the active run of a session, if this gateway works on it."""
        queue = self._queues.get(key)
        return queue.current if queue else None

    def pin_of(self, key: str | None, principal: Principal) -> Pin | None:
        """Return the pin of the work that makes a call in a session: the caller's, or that of the active run.

        A call of a scheduled job has no session.
        """
        run = self.current(self.canonical(key)) if key else None
        return Pin.of_caller(principal) or (run.options.pin if run is not None else None)

    def origins(self, run: Run, record: SessionRecord) -> tuple[str, ...]:
        """Return the origins of a run; for a sub-agent, including those of the run it works for."""
        above = None if record.parent_key is None else self.current(record.parent_key)
        runs = [run] if above is None else [run, above]
        own = [one.record.origin for one in runs]
        led = [f"{VIA}{origin}" for one in runs for origin in one.options.origins if origin not in own]
        return tuple(dict.fromkeys([*own, *led]))

    def waiting(self, key: str) -> int:
        queue = self._queues.get(key)
        return len(queue.waiting) if queue else 0

    @property
    def busy(self) -> list[str]:
        return [key for key, queue in self._queues.items() if queue.current is not None]

    # -- for the runner -----------------------------------------------------------------------------------

    def write(self, operation: Callable[[Tx], Any]) -> asyncio.Future[Any]:
        return self._database.write(operation)

    async def read(self, query: Callable[[Tx], T]) -> T:
        return await self._database.read(query)

    def now(self) -> int:
        return self._clock()

    def new_id(self) -> str:
        return str(uuid.uuid4())

    def joining(self, run: Run) -> list[Run]:
        """Return waiting messages that may join a run: those of the credential on whose behalf it acts, and with the
        same origins for the policy.
        """
        queue = self._queues.get(run.session_key)
        if queue is None or run.stopping is not None or run.options.pin is not None:
            return []
        return [one for one in queue.waiting if one.options.plain and one.asker == run.asker and _alike(one, run)]

    def joined(self, one: Run, to: Run) -> None:
        """Mark a waiting message as part of another run's transcript."""
        self._queues[to.session_key].waiting.remove(one)
        one.join(to)

    async def begin_anew(self, key: str) -> SessionRecord:
        """Start a new conversation under the same key; the old one stays in the history."""
        found = await self.find(key)
        new_id, now = self.new_id(), self._clock()
        return await self._database.write(lambda store: sessions.begin_anew(store, found, new_id, now))

    async def change(self, key: str, **values: Any) -> None:
        await self._database.write(lambda store: sessions.change_session(store, key, **values))

    async def end(self, run: Run, outcome: RunOutcome) -> None:
        """Record a run's end, then notify its waiters."""
        usage = outcome.usage
        ended = msgspec.structs.replace(
            run.record,
            state=outcome.state,
            ended_at=self._clock(),
            reply=outcome.reply if outcome.ok or outcome.reply else None,
            error_kind=outcome.error.kind if outcome.error else None,
            error_message=outcome.error.message if outcome.error else None,
            steps=outcome.steps,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            cost=usage.cost,
            finish_reason=outcome.finish_reason,
            handed=msgspec.Raw(msgspec.json.encode(outcome.handed)) if outcome.handed else None,
        )
        await self._database.write(lambda store: sessions.end_run(store, ended))
        shared = [one for one in self._live.values() if one.joined is run]
        for one in [run, *shared]:
            one.settle(msgspec.structs.replace(outcome, run_id=one.id))
            self._live.pop(one.id, None)
            self._ended[one.id] = one
        while len(self._ended) > KEPT_RUNS:
            self._ended.popitem(last=False)

    # -- start and stop ---------------------------------------------------------------------------------

    async def start(self, own: Callable[[Tx], Collection[str]] | None = None) -> int:
        """Resume the runs that were open when the gateway stopped; return their number.

        `own` returns those that belong to this gateway, where several share the store; others may be taken up later
        by another call.
        """
        found, wanted = await self._database.read(lambda tx: (sessions.open_runs(tx), None if own is None else own(tx)))
        found = [one for one in found if (wanted is None or one.id in wanted) and one.id not in self._live]
        runs = {record.id: Run(record) for record in found}
        commanded: list[Run] = []
        for run in runs.values():
            self._live[run.id] = run
            if run.record.state is RunState.JOINED and run.record.joined_to in runs:
                run.join(runs[run.record.joined_to])
            elif run.record.state is RunState.QUEUED and run.options.command:
                commanded.append(run)
            else:
                self._enqueue(run)
        for run in commanded:
            command = commands.read(run.message.text)
            if command is None:
                self._enqueue(run)
            else:
                await self._obey(run, command)
        self._started.set()
        return len(runs)

    async def pause(self) -> None:
        """Stop working; open runs resume after the next start."""
        if self._paused:
            return
        self._paused = True
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.write(sessions.forgive_attempts)
        for run in self._live.values():
            run.let_go()

    @property
    def paused(self) -> bool:
        return self._paused

    def _enqueue(self, run: Run) -> None:
        if self._paused:  # on disk; resumes after the next start
            run.let_go()
            return
        queue = self._queues.setdefault(run.session_key, _SessionQueue())
        queue.waiting.append(run)
        if queue.task is None:
            queue.task = asyncio.get_running_loop().create_task(self._serve(run.session_key, queue))

    async def _serve(self, key: str, queue: _SessionQueue) -> None:
        while queue.waiting:
            run = queue.current = queue.waiting.popleft()
            try:
                outcome = await self._work(self, run)
            except Exception as error:
                log.exception("run %s in session %s failed", run.id, key)
                outcome = run.failed("failed", f"the run failed: {type(error).__name__}: {error}")
            try:
                await self.end(run, outcome)
            except Exception:
                log.exception("failed to record the end of run %s", run.id)
                run.settle(outcome)
            queue.current = None
        del self._queues[key]

    async def _obey(self, run: Run, command: commands.Command) -> None:
        try:
            if (reason := self._invalid(Principal(run.asker).ids)) is not None:
                raise NotAllowed(f"{reason}; /{command.name} was not carried out")
            if command.name in commands.OF_THE_OWNER:
                await self.check_owner(run.session_key, run.asker)
            _check_channel_rights(run, command)
            if command.name == commands.FREEZE:
                reply = await self._stop_everything(run, command.argument)
            else:
                reply = await commands.obey(self, run.session_key, command, run.asker, self._compact)
            outcome = RunOutcome(run.id, run.session_key, RunState.OK, reply)
        except ToolError as error:
            outcome = run.failed(error.kind.value, error.message)
        await self.end(run, outcome)

    async def _stop_everything(self, run: Run, reason: str) -> str:
        """Freeze everything, if the caller may run commands on every machine. Raises NotAllowed."""
        if self._freeze is None or run.asker.narrowed or not run.asker.may(Scope.TOOLS_EXEC):
            raise NotAllowed("you may not freeze everything from here; /stop ends what runs in this session")
        return await self._freeze(run.record.credential, reason)


def _alike(one: Run, other: Run) -> bool:
    """Return whether two messages have the same origin."""
    return (one.record.origin, one.options.origins, one.options.guest) == (
        other.record.origin,
        other.options.origins,
        other.options.guest,
    )


def _check_channel_rights(run: Run, command: commands.Command) -> None:
    """Raise NotAllowed for a command that a person on a channel may not give in this session."""
    key, record = run.session_key, run.record
    if run.options.guest:
        own = ":guest:" in key  # not that of a group
        if command.name not in (commands.OF_GUESTS if own else commands.OF_GUESTS_IN_GROUPS):
            raise NotAllowed(f"/{command.name} is for people whom the owner of this agent has named")
        return
    main = key == session_keys.main_key(session_keys.agent_of(key))
    limited = record.credential.startswith("channel:") and not run.asker.may(Scope.TOOLS_EXEC)
    if main and limited and command.name in commands.OF_THE_OWNER:
        raise NotAllowed(f'/{command.name} in the main session needs a channel with tools = "all"')
