"""Work on a run: ask the model, and store each event of the loop before asking for the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any, get_args

import msgspec

from farhand.agent import loop
from farhand.agent import tool_recording as recording
from farhand.agent.compaction import Compaction, Compactor
from farhand.agent.events import Appended, Compacted, Completed, Event, RunFailed, Stopped
from farhand.agent.loop import JoiningMessage, Limits
from farhand.agent.prompt import Prompted, PromptParts
from farhand.agent.tokens import text_tokens
from farhand.agent.tool_outcome import Outcome, argument_fault, cancelled
from farhand.agent.tool_search import CORE, ToolCost, ToolShelf
from farhand.agent.tools import AgentTool, Call, ToolList, Tools, WithClients
from farhand.agent.transcript import interrupted, mend, unanswered
from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import offered_to
from farhand.gateway.calls.pinning import Pinned, of_a_machine
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.repeating import BackgroundTasks
from farhand.gateway.sessions import client_tools as client_calls
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.budgeted_model import BudgetedModel
from farhand.gateway.sessions.entries import entry_of, message_of
from farhand.gateway.sessions.event_redaction import EventRedactor
from farhand.gateway.sessions.keys import main_key
from farhand.gateway.sessions.prompts import Prompts
from farhand.gateway.sessions.recorder import AskedModel, Asking, RunSettings
from farhand.gateway.sessions.run_calls import EndJobs, RunCalls, RunServices
from farhand.gateway.sessions.runs import FROZEN, Recorded, Run, RunFailure, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.errors import ModelError, NotConfigured
from farhand.llm.messages import Message, ToolUse, Usage
from farhand.llm.model import Model, Thinking
from farhand.llm.recording import RecordingModel, ReplayModel
from farhand.llm.registry import Models
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import split_tool
from farhand.store.ports import Tx
from farhand.store.tables import sessions as transcript
from farhand.store.tables.idempotency import claimed_below
from farhand.store.tables.sessions import Entry, RunState, SessionRecord
from farhand.tools.node_family import families
from farhand.tools.tool import Tool

TITLE_LENGTH = 60
# Maximum characters of a message that its title is made from.
TITLE_SOURCE = 4096
MAX_ATTEMPTS = 10
STOP_SECONDS = 0.9


# Tools that reveal data of the owner or act in the owner's name; not for people the owner has not named.
NOT_FOR_GUESTS = frozenset(
    {"memory_search", "memory_get", "agents_list", "cron", "subagents"}
    | {"sessions_list", "sessions_history", "sessions_send", "sessions_spawn", "sessions_status"}
    | {"gsv__ConfigGet", "gsv__Cron", "gsv__LogsGet", "gsv__SessionSend", "gsv__SessionsList"}
)


class Budget(msgspec.Struct, frozen=True):
    """Estimated tokens of the prompt and of each tool."""

    prompt: int
    tools: list[ToolCost]

    @property
    def total(self) -> int:
        return self.prompt + sum(tool.tokens for tool in self.tools if tool.offered)


class Turns:
    """Calling it works on one run. If cancelled, it leaves the run as stored, to be resumed."""

    def __init__(
        self,
        services: RunServices,
        models: Models,
        agents: Agents,
        prompt: Prompts,
        sub_agent: Sequence[Tool],
        *,
        limits: Limits | None = None,
        compactor: Compactor | None = None,
        end_jobs: EndJobs | None = None,
    ) -> None:
        """`sub_agent`: the tools of a sub-agent; the main agent has the whole catalog."""
        self.services = services
        self.models = models
        self.agents = agents
        self.prompt = prompt
        self.sub_agent = {tool.name: tool for tool in sub_agent}
        self.limits = limits or Limits()
        self.compactor = compactor or Compactor()
        self.end_jobs = end_jobs
        # Tasks that end what stopped runs left running.
        self.endings = BackgroundTasks()

    async def __call__(self, sessions: Sessions, run: Run) -> RunOutcome:
        order = self.services.gate.frozen
        if order is not None:
            return run.failed(FROZEN, order.refusal().message)
        ended = self.services.credentials.ended(Principal(run.asker).ids)
        if ended is not None:
            return run.stopped(f"{ended}, and the run acted on its behalf")
        returning = self.services.returning
        if run.record.created_at < returning.started_at or run.record.origin.startswith(("cron:", "heartbeat")):
            await returning.wait(run.stop)
        record: Any = await sessions.read(lambda store: transcript.find_session(store, run.session_key))
        return await _Turn(self, sessions, run, record).work()

    # -- models -----------------------------------------------------------------------------------------

    def model_name(self, record: SessionRecord) -> str:
        """Return the display name of a session's model; empty if none is configured."""
        return record.model or self.agents.of(record.agent_id).model or self.models.default

    def agent_model(self, agent_id: str) -> str:
        return self.agents.of(agent_id).model or self.models.default

    def check_model(self, name: str) -> str:
        """Return the model's full name. Raises InvalidArgs if it cannot be used."""
        try:
            return self.models.chosen(name).name
        except NotConfigured as error:
            raise InvalidArgs(error.message) from None

    def budgeted(self, model: Model, name: str, principal: Principal, session_key: str | None) -> Model:
        """Return a model whose requests count against the budgets of a principal and a session, if there is one."""
        budgets = self.services.gate.budgets
        return BudgetedModel(model, budgets, lambda: budgets.limits(principal, session_key), self.models.prices(name))

    # -- tools ------------------------------------------------------------------------------------------

    def specs(self, principal: Principal, pinned: Pinned | None = None) -> list[ToolSpec]:
        """Return the tools that a principal may call, by their callable names; those of offline machines are marked."""
        reach = self.services.catalog if pinned is None else pinned
        nodes = self.services.node_registry.nodes
        callable_ = {
            name: (spec, host)
            for name, (spec, host) in reach.specs().items()
            if offered_to(principal, name, spec, host)
        }
        listed = [
            AgentTool.of(spec, name, machine=host if host in nodes else "") for name, (spec, host) in callable_.items()
        ]
        if pinned is None:
            listed += [AgentTool.of(spec) for spec in families(spec for spec, _ in callable_.values())]
        unlisted = [
            AgentTool.of(spec, machine=host)
            for spec, host in reach.families()
            if offered_to(principal, spec.name, spec, host)
        ]
        away = [
            AgentTool.of(spec, name, machine=node.card.node_id, offline=f"last seen {node.seen}")
            for name, spec, node in reach.absent()
            if offered_to(principal, name, spec, node.card.node_id)
        ]
        return [_in_its_words(spec) for spec in (*listed, *unlisted, *away)]

    def sub_agent_specs(self, principal: Principal, pinned: Pinned | None = None) -> list[ToolSpec]:
        known = {name: tool.spec for name, tool in self.sub_agent.items()}
        if pinned is not None:  # it reads on these machines instead of here
            known = {name: spec for name, spec in known.items() if not of_a_machine(name, spec)}
            known |= {name: spec for name, (spec, _) in pinned.specs().items() if pinned.reads_on_a_node(name)}
        return [
            spec if spec.name == name else msgspec.structs.replace(spec, name=name)
            for name, spec in known.items()
            if not self.services.catalog.switched_off(name) and self._sub_agent_may(principal, name, spec)
        ]

    def _sub_agent_may(self, principal: Principal, name: str, spec: ToolSpec) -> bool:
        node = split_tool(name)
        return offered_to(principal, name, spec, "local" if node is None or name in self.sub_agent else node[0])

    async def budget(self, agent_id: str) -> Budget:
        """Return the tokens that every request to an agent's model carries."""

        async def nothing(use: ToolUse) -> Outcome:
            return Outcome.failed("not_found", f"tool not found: {use.name}")

        record = SessionRecord(key=main_key(agent_id), id="", agent_id=agent_id, created_at=0, updated_at=0)
        specs = self.specs(Principal.agent(agent_id, OWNER))
        tools = ToolShelf(lambda: specs, nothing).costs()
        return Budget(text_tokens((await self.prompt(record, specs)).text), tools)

    # -- on request -------------------------------------------------------------------------------------

    async def compact(self, sessions: Sessions, record: SessionRecord, asker: Credential) -> str:
        """Summarise the older part of a conversation now, on behalf of `asker`. Raises InvalidArgs, Frozen."""
        if self.services.gate.frozen is not None:
            raise self.services.gate.frozen.refusal()
        entries = await sessions.conversation(record)
        try:
            model = self.models.chosen(self.model_name(record))
        except NotConfigured as error:
            raise InvalidArgs(error.message) from None
        if not isinstance(model, ReplayModel):
            agent = Principal.agent(record.agent_id, asker)
            model = self.budgeted(model, self.model_name(record), agent, record.key)
        compactor = msgspec.structs.replace(self.compactor, keep=0.0)
        messages = [Message("system", ""), *mend([message_of(entry) for entry in entries])]
        compaction = await compactor.compact(model, messages)
        if compaction is None:
            return "There is nothing to compact yet."
        await _keep_summary(sessions, record, None, [entry.seq for entry in entries], compaction, model.name)
        return f"Compacted: a summary stands for {compaction.count} messages, which stay in the history."


class _Turn:
    def __init__(self, turns: Turns, sessions: Sessions, run: Run, record: SessionRecord) -> None:
        self._turns = turns
        self._sessions = sessions
        self._run = run
        self._record = record
        self._is_child = record.kind == "child"
        agent = turns.agents.of(record.agent_id)
        self._agent = agent
        self._principal = Principal.agent(record.agent_id, run.asker)
        pin = run.options.pin
        self._pinned = None if pin is None else Pinned(pin, turns.services.catalog, turns.services.node_registry)
        self._calls = RunCalls(
            turns.services,
            session_key=record.key,
            agent_id=record.agent_id,
            principal=self._principal,
            stopped=lambda: run.stopping and run.stopping[1],
            origins=sessions.origins(run, record),
            only=turns.sub_agent if self._is_child else None,
            pinned=self._pinned,
            end_jobs=turns.end_jobs,
            asked=lambda approval: run.happened(ApprovalRequested.of(approval)),
        )
        self._clients = frozenset(spec.name for spec in run.options.client_tools)
        self._stopped_at: float | None = None
        # Numbers of the entries that the model sees, in order.
        self._positions: list[int] = []
        # The last entry with tool calls, and these calls.
        self._asked: tuple[int, tuple[ToolUse, ...]] = (0, ())
        self._incoming: dict[str, Run] = {}

    async def work(self) -> RunOutcome:
        run = self._run
        if run.stopping is None and run.options.timeout_seconds is not None:
            seconds = run.options.timeout_seconds
            reason = f"the run did not end within {seconds:g} s"
            stop = self._sessions.ask_to_stop
            timer = asyncio.get_running_loop().call_later(seconds, stop, run, RunState.TIMEOUT, reason)
            run.when_over(timer.cancel)
        await self._begin()
        if run.record.attempts >= MAX_ATTEMPTS:
            return await self._give_up()
        try:
            model = self._model()
        except ModelError as error:
            return self._ended(RunState.FAILED, error=RunFailure("not_configured", error.message))
        # A machine that does not answer must not block: it gets the order as soon as possible.
        ending = self._turns.endings.start(self._end_when_stopped())
        try:
            return await self._answer(model)
        finally:
            if run.stopping is None:
                ending.cancel()
            since = 0.0 if self._stopped_at is None else asyncio.get_running_loop().time() - self._stopped_at
            await asyncio.wait({ending}, timeout=max(0.0, STOP_SECONDS - since))

    async def _answer(self, model: Model) -> RunOutcome:
        prompt = asyncio.ensure_future(self._prompt())
        try:
            entries = await self._sessions.conversation(self._record)
            if self._run.record.state is RunState.RUNNING or unanswered([message_of(entry) for entry in entries]):
                if (outcome := await self._take_up(model, entries)) is not None:
                    return outcome
                entries = await self._sessions.conversation(self._record)
            await self._unless_stopped([prompt])
        finally:
            prompt.cancel()
        self._positions = [entry.seq for entry in entries]
        # A run that was stopped meanwhile sends no request, so it needs no prompt.
        prompted = prompt.result() if prompt.done() and not prompt.cancelled() else Prompted(PromptParts())
        messages = [Message("system", prompted.text), *mend([message_of(entry) for entry in entries])]
        return self._outcome(await self._think(model, messages, prompted))

    # -- start ------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Mark the run as running and add its message to the transcript, in one transaction."""
        run, now, current = self._run, self._sessions.now(), self._record
        again = run.record.state is RunState.RUNNING
        new_id, actor, keys = self._sessions.new_id(), self._principal.id, self._key("")
        options, message = run.options, run.message
        title = self._turns.services.gate.secrets.truncate(" ".join(message.text[:TITLE_SOURCE].split()), TITLE_LENGTH)

        def write(store: Tx) -> tuple[SessionRecord, dict[str, str]]:
            record = current
            transcript.start_run(store, run.id, now)
            if again:
                return record, claimed_below(store, actor, keys)
            if options.fresh and record.messages:
                record = transcript.begin_anew(store, record, new_id, now)
            if not record.title and title:
                transcript.change_session(store, record.key, title=title)
            said = [message] if message.content else []
            for one in (*client_calls.results(store, record, options.answers), *said):
                transcript.append_entry(store, entry_of(record, run.id, now, one))
            return record, {}

        self._record, made = await self._sessions.write(write)
        self._calls.made(made)

    async def _give_up(self) -> RunOutcome:
        entries = await self._sessions.conversation(self._record)
        for use in unanswered([message_of(entry) for entry in entries]):
            await self._keep(Appended(0, interrupted(use)))
        times = self._run.record.attempts
        reason = f"the run was abandoned: the gateway stopped {times} times at the same point of it"
        return self._ended(RunState.FAILED, error=RunFailure("failed", reason))

    async def _take_up(self, model: Model, entries: list[Entry]) -> RunOutcome | None:
        """Answer the calls left open by a stop of the gateway; return the outcome if the reply was stored already."""
        messages = [message_of(entry) for entry in entries]
        last = next((index for index in range(len(entries) - 1, -1, -1) if messages[index].role == "assistant"), None)
        if last is None:
            return None
        if messages[last] is messages[-1] and not messages[last].tool_calls and entries[last].run_id == self._run.id:
            return self._ended(RunState.OK, messages[last].text)
        own = entries[last].run_id == self._run.id  # calls of another run that crashed stay unanswered
        open_uses = unanswered(messages)
        handed = tuple(use for use in open_uses if own and use.name in self._clients)
        if uses := [use for use in open_uses if use not in handed]:
            if own:
                self._asked = (entries[last].seq, messages[last].tool_calls)
            call = self._caller(model)
            tasks = [asyncio.ensure_future(self._again(call, use)) for use in uses]
            await self._unless_stopped(tasks)
            for use, task in zip(uses, tasks, strict=True):
                known = task.done() and not task.cancelled()
                outcome = task.result() if known else cancelled(began=True, ended=task.done())
                await self._keep(Appended(0, outcome.message(use)))
        if not handed:
            return None
        ended = self._ended(RunState.OK, messages[last].text)
        return msgspec.structs.replace(ended, finish_reason="tool_calls", handed=handed)

    async def _unless_stopped(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Wait for tasks. If the run is stopped, cancel them and wait only until they have ended."""
        stopped = asyncio.ensure_future(self._run.stop.wait())
        waiting = set(tasks)
        try:
            while waiting and not stopped.done():
                done, _ = await asyncio.wait({stopped, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
        finally:
            for task in (stopped, *waiting):
                task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=self._turns.limits.stop_seconds)

    async def _again(self, call: Call, use: ToolUse) -> Outcome:
        if use not in self._asked[1]:
            return Outcome.failed("failed", interrupted(use).text)
        if (fault := argument_fault(use, "stop")) is not None:
            return Outcome.failed("invalid_args", fault)
        return await call(use)

    def _model(self) -> Model:
        """Return the model of the run. Raises NotConfigured."""
        model = self._turns.models.chosen(self._run.options.model or self._turns.model_name(self._record))
        return RecordingModel(model, self._recorded) if self._run.options.record else model

    def _budgeted(self, model: Model) -> Model:
        """Return the model with requests that count against the budgets of this run."""
        if isinstance(model, ReplayModel):
            return model
        return self._turns.budgeted(
            model, self._run.options.model or self._turns.model_name(self._record), self._principal, self._record.key
        )

    async def _prompt(self) -> Prompted:
        prompt = await self._turns.prompt(self._record, self._specs(), guest=self._run.options.guest)
        return prompt.adding(self._run.options.instructions)

    # -- loop -------------------------------------------------------------------------------------------

    async def _think(self, model: Model, messages: list[Message], prompt: Prompted) -> Event:
        """Run the loop to its end and return its last event."""
        run, turns = self._run, self._turns
        tools = self._tools(model)
        rounds = self._agent.max_rounds
        settings = RunSettings(
            model.name,
            model.context_tokens,
            prompt,
            msgspec.structs.replace(turns.limits, max_rounds=rounds) if rounds else turns.limits,
            turns.compactor,
            thinking=run.options.thinking or _thinking(self._record.thinking) or self._agent.thinking,
            max_tokens=run.options.max_tokens,
            child=self._is_child,
            core=None if self._pinned is None else tuple({*CORE, *self._pinned.names()}),
            judges=self._pinned is not None,
        )
        asking = Asking(turns.services.database, run.id, self._specs)
        asking.begin(settings, self._sessions.now(), max(self._positions, default=0))
        steps = loop.run(
            AskedModel(self._budgeted(model), asking),
            messages,
            tools,
            inbox=self._inbox,
            stop=run.stop,
            limits=settings.limits,
            compactor=settings.compactor,
            thinking=settings.thinking,
            max_tokens=settings.max_tokens,
            parameters=run.options.parameters,
            handed=self._clients,
        )
        last: Event | None = None
        redactor = EventRedactor(turns.services.gate.secrets)
        async with contextlib.aclosing(steps):
            async for event in steps:
                if isinstance(event, Appended):
                    await self._keep(event)
                elif isinstance(event, Compacted):
                    self._positions = await _keep_summary(
                        self._sessions, self._record, run.id, self._positions, event.compaction, model.name
                    )
                if not isinstance(event, Appended):  # it repeats earlier events
                    for shown in redactor.shown(event):
                        run.happened(shown)
                last = event
        assert last is not None
        return last

    def _specs(self) -> list[ToolSpec]:
        specs = self._turns.sub_agent_specs if self._is_child else self._turns.specs
        found = specs(self._principal, self._pinned)
        return [spec for spec in found if spec.name not in NOT_FOR_GUESTS] if self._run.options.guest else found

    def _tools(self, model: Model) -> Tools:
        options = self._run.options
        own = self._own_tools(self._caller(model), offered=options.own_tools)
        return WithClients(own, options.client_tools) if options.client_tools else own

    def _own_tools(self, call: Call, *, offered: bool) -> Tools:
        if self._is_child or not offered:
            return ToolList(self._specs() if offered else (), call)
        if self._pinned is None:
            return ToolShelf(self._specs, call)
        return ToolShelf(self._specs, call, core={*CORE, *self._pinned.names()}, judges=True)

    def _caller(self, model: Model) -> Call:
        """Return the function that runs calls: from the recording in a replay, else through the gate."""
        if isinstance(model, ReplayModel):
            return self._replayed(model)
        return recording.recording(self._call, self._recorded) if self._run.options.record else self._call

    def _replayed(self, model: ReplayModel) -> Call:
        async def replayed(use: ToolUse) -> Outcome:
            return await recording.replaying(await model.recording())(use)

        return replayed

    async def _call(self, use: ToolUse) -> Outcome:
        if self._run.options.guest and use.name in NOT_FOR_GUESTS:
            return Outcome.failed("not_allowed", f"{use.name} is not for people whom the owner has not named")
        seq, uses = self._asked
        # Its place in the transcript identifies the call after a restart.
        place = uses.index(use) if use in uses else use.id
        return await self._calls.call(use, self._key(f"{seq}:{place}"))

    def _key(self, place: str) -> str:
        return f"run:{self._run.id}:{place}"

    def _recorded(self, line: bytes) -> None:
        self._run.happened(Recorded(line.decode()))

    def _inbox(self) -> list[JoiningMessage]:
        joining = self._sessions.joining(self._run)
        self._incoming |= {one.id: one for one in joining}
        return [JoiningMessage(one.id, one.message) for one in joining]

    async def _keep(self, event: Appended) -> None:
        """Store an entry of the transcript, with its usage and the message it came from."""
        now = self._sessions.now()
        usage = event.usage or Usage()
        joined = None if event.incoming is None else self._incoming.pop(event.incoming)
        run_id = self._run.id if joined is None else joined.id
        entry = entry_of(self._record, run_id, now, event.message, usage=usage, model=event.model)
        context = None if event.usage is None else usage.total_tokens

        own_id, parent_key = self._run.id, self._record.parent_key

        def write(store: Tx) -> int:
            if joined is not None:
                transcript.join_run(store, run_id, own_id, now)
            if parent_key is not None and event.usage is not None:
                transcript.count_usage(store, parent_key, now, **msgspec.structs.asdict(usage))
            transcript.got_on(store, own_id)
            return transcript.append_entry(store, entry, context_tokens=context)

        seq = await self._sessions.write(write)
        self._positions.append(seq)
        if event.message.tool_calls:
            self._asked = (seq, event.message.tool_calls)
        if joined is not None:
            self._sessions.joined(joined, self._run)

    # -- end --------------------------------------------------------------------------------------------

    async def _end_when_stopped(self) -> None:
        """End what the calls of a stopped run started and left running."""
        await self._run.stop.wait()
        self._stopped_at = asyncio.get_running_loop().time()
        await self._calls.end_processes()

    def _outcome(self, last: Event) -> RunOutcome:
        match last:
            case Completed():
                ended = self._ended(RunState.OK, last.reply, usage=last.usage, steps=last.steps)
                return msgspec.structs.replace(ended, finish_reason=last.finish_reason, handed=last.handed)
            case RunFailed():
                failure = RunFailure(last.kind, last.message)
                return self._ended(RunState.FAILED, error=failure, usage=last.usage, steps=last.steps)
            case Stopped():
                state, reason = self._run.stopping or (RunState.STOPPED, last.reason)
                kind = "timeout" if state is RunState.TIMEOUT else "cancelled"
                return self._ended(state, error=RunFailure(kind, reason), usage=last.usage, steps=last.steps)
        raise AssertionError(f"{type(last).__name__} does not end a run")

    def _ended(
        self,
        state: RunState,
        reply: str = "",
        *,
        error: RunFailure | None = None,
        usage: Usage = Usage(),  # noqa: B008
        steps: int = 0,
    ) -> RunOutcome:
        return RunOutcome(self._run.id, self._run.session_key, state, reply, error, usage, steps)


async def _keep_summary(
    sessions: Sessions,
    record: SessionRecord,
    run_id: str | None,
    positions: list[int],
    compaction: Compaction,
    model: str,
) -> list[int]:
    """Store a summary beside the entries it replaces; return the entries that the model sees from now on."""
    kept = positions[compaction.count :]
    keeps_from = kept[0] if kept else positions[-1] + 1
    usage, now = compaction.usage, sessions.now()
    entry = entry_of(record, run_id, now, compaction.summary, usage=usage, model=model, keeps_from=keeps_from)

    def write(store: Tx) -> int:
        transcript.count_compaction(store, record.key)
        if record.parent_key is not None:
            transcript.count_usage(store, record.parent_key, now, **msgspec.structs.asdict(usage))
        return transcript.append_entry(store, entry, context_tokens=0)

    return [await sessions.write(write), *kept]


def _in_its_words(spec: AgentTool) -> AgentTool:
    """Return a machine's tool with its description marked as the machine's own text."""
    if not spec.machine or not spec.description:
        return spec
    return msgspec.structs.replace(spec, description=f"{spec.machine} says: {spec.description}")


def _thinking(level: str | None) -> Thinking | None:
    return next((known for known in get_args(Thinking) if known == level), None)
