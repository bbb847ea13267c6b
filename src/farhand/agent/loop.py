"""The agent loop: ask the model, run the tools it calls, send it the results, until it answers.

One function over plain data that yields events (see `events.py` for their order and guarantees). It does no I/O of its
own and has no knowledge of sessions or machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from farhand.agent import events as run_events
from farhand.agent.compaction import Compactor
from farhand.agent.events import (
    Appended,
    Compacted,
    Completed,
    Event,
    Injected,
    RunFailed,
    StepRetrying,
    StepStarted,
    Stopped,
    ToolCalled,
    ToolEnded,
)
from farhand.agent.tokens import message_tokens, messages_tokens, text_tokens, tools_tokens
from farhand.agent.tool_outcome import Outcome, argument_fault, cancelled, shortened
from farhand.agent.tools import Tools
from farhand.llm import messages as model_events
from farhand.llm.errors import BudgetSpent, ContextOverflow, ModelError, ModelRefused, NotConfigured
from farhand.llm.messages import Content, Finished, FinishReason, Message, StreamEvent, Text, ToolUse, Usage
from farhand.llm.model import Model, ModelRequest, Thinking
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import ToolError

log = logging.getLogger(__name__)

EMPTY_RETRIES: Final = 2
# Maximum number of buffered model events.
AHEAD: Final = 1000
TOOL_CHOICE: Final = "tool_choice"


class JoiningMessage(msgspec.Struct, frozen=True):
    """A message that arrived during the run."""

    id: str
    message: Message


class Limits(msgspec.Struct, frozen=True):
    # Maximum rounds of tool calls in one run.
    max_rounds: int = 100
    # Maximum tool calls at the same time.
    parallel: int = 16
    # How long a stopped run waits for its tools to end.
    stop_seconds: float = 0.8
    # Number of identical results of the same call in a row after which the model is warned.
    repeats: int = 4


def no_messages() -> Sequence[JoiningMessage]:
    return ()


async def run(
    model: Model,
    messages: Sequence[Message],
    tools: Tools,
    *,
    inbox: Callable[[], Sequence[JoiningMessage]] = no_messages,
    stop: asyncio.Event | None = None,
    limits: Limits | None = None,
    compactor: Compactor | None = None,
    thinking: Thinking | None = None,
    max_tokens: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    handed: Collection[str] = (),
) -> AsyncGenerator[Event, None]:
    """Yield the events of a run until the model has answered `messages`, which start with the system prompt.

    `inbox` is polled between tool rounds for messages to add to the run; each is injected once. Setting `stop` ends the
    run within a second. A reader that leaves early calls `aclose()`, which also ends the tools, without reporting their
    results. `parameters` are added to each request to the model; a `tool_choice` among them applies to the first only.
    Calls of the tools in `handed` are not run here: they end the run once the other calls of the same reply have
    results.
    """
    stop = stop or asyncio.Event()
    state = _Run(model, messages, tools, inbox, stop, limits or Limits(), compactor, thinking, max_tokens)
    state.parameters = dict(parameters or {})
    state.handed = frozenset(handed)
    async with contextlib.aclosing(state.steps()) as steps:
        async for event in steps:
            yield event


class _Run:
    def __init__(
        self,
        model: Model,
        messages: Sequence[Message],
        tools: Tools,
        inbox: Callable[[], Sequence[JoiningMessage]],
        stop: asyncio.Event,
        limits: Limits,
        compactor: Compactor | None,
        thinking: Thinking | None,
        max_tokens: int | None,
    ) -> None:
        self.model = model
        self.messages = list(messages)
        self.tools = tools
        self.inbox = inbox
        self.stop = stop
        self.limits = limits
        self.compactor = compactor
        self.thinking = thinking
        self.max_tokens = max_tokens
        self.step = 0
        self.usage = Usage()
        self.injected: set[str] = set()
        # Tokens of the last request and its reply, as counted by the provider, plus what was added since.
        self.context = 0
        self.reply: Finished | None = None
        self.parameters: dict[str, Any] = {}
        self.handed: frozenset[str] = frozenset()
        # Results of earlier calls, by name and arguments.
        self.before: dict[tuple[str, str], _Result] = {}

    async def steps(self) -> AsyncGenerator[Event, None]:
        rounds = 0
        while not self.stop.is_set():
            self.step += 1
            yield StepStarted(self.step, self.model.name)
            self.reply = None
            try:
                async with contextlib.aclosing(self._ask()) as asking:
                    async for event in asking:
                        yield event
            except ModelError as error:
                yield RunFailed(_kind(error), error.message, self.usage, self.step)
                return
            except Exception as error:
                log.exception("model %s raised an unexpected exception", self.model.name)
                yield RunFailed("failed", f"{type(error).__name__}: {error}", self.usage, self.step)
                return
            if self.reply is None:
                break
            if not self.reply.message.tool_calls:
                yield Completed(self.reply.message.text, self.usage, self.step, self.reply.finish_reason)
                return
            handed = self._handed_over(self.reply)
            async with contextlib.aclosing(self._use_tools(self.reply, handed)) as using:
                async for event in using:
                    yield event
            if self.stop.is_set():
                break
            if handed:
                yield Completed(self.reply.message.text, self.usage, self.step, "tool_calls", handed)
                return
            rounds += 1
            if rounds >= self.limits.max_rounds:
                message = Message("assistant", _rounds_text(rounds))
                yield Appended(self.step, message)
                yield Completed(message.text, self.usage, self.step, "rounds")
                return
            for event in self._inject():
                yield event
        yield Stopped("stopped", self.usage, self.step)

    async def _ask(self) -> AsyncGenerator[Event, None]:
        """Ask the model once and set `reply`, or leave it None if the run was stopped. Raises ModelError."""
        overflowed = False
        empty = 0
        while True:
            async with contextlib.aclosing(self._make_room(force=overflowed)) as room:
                async for event in room:
                    yield event
            tools = tuple(self.tools.offered(self.messages))
            request = ModelRequest(tuple(self.messages), tools, self.max_tokens, self.thinking, self._parameters())
            finished: Finished | None = None
            said = _Said()
            try:
                async with contextlib.aclosing(self._until_stopped(request)) as stream:
                    async for heard in stream:
                        if isinstance(heard, Finished):
                            finished = heard
                        else:
                            said.take(heard)
                            yield self._step_event(heard)
            except ContextOverflow:
                if overflowed or self.compactor is None:
                    raise
                overflowed = True
                continue
            if finished is None:
                for event in self._broken_off(said, tools):
                    yield event
                return
            finished = self._counted(finished, tools)
            if finished.message.text or finished.message.tool_calls or self.step > 1:
                yield self._answered(finished)
                return
            self.usage += finished.usage
            empty += 1
            reason = _empty_text(self.model.name, finished.finish_reason)
            if empty > EMPTY_RETRIES:
                raise _Empty(reason)
            yield StepRetrying(self.step, reason, 0.0, self.model.name, void=True)

    def _parameters(self) -> dict[str, Any]:
        if self.step == 1:
            return self.parameters
        return {name: value for name, value in self.parameters.items() if name != TOOL_CHOICE}

    async def _until_stopped(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        """Yield the model's events; end early, without `Finished`, if the run is stopped."""
        queue: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue(AHEAD)

        async def read() -> None:
            try:
                async with contextlib.aclosing(self.model.stream(request)) as stream:
                    async for event in stream:
                        await queue.put(event)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        async def watch() -> None:
            await self.stop.wait()
            with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes the reader anyway
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(watch())]
        try:
            while (event := await queue.get()) is not None and not self.stop.is_set():
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await _end(tasks, self.limits.stop_seconds)

    def _step_event(self, event: StreamEvent) -> Event:
        match event:
            case model_events.TextDelta(text):
                return run_events.StepText(self.step, text)
            case model_events.ThinkingDelta(text):
                return run_events.StepThinking(self.step, text)
            case model_events.Retrying(reason, delay, model, void):
                return StepRetrying(self.step, reason, delay, model, void)
        raise AssertionError(f"{event} is no delta")

    def _answered(self, finished: Finished) -> Event:
        self.reply = finished
        self.usage += finished.usage
        self.context = finished.usage.total_tokens
        self.messages.append(finished.message)
        return Appended(
            self.step,
            finished.message,
            finished.usage,
            finished.finish_reason,
            finished.model or self.model.name,
        )

    def _broken_off(self, said: _Said, tools: Sequence[ToolSpec]) -> list[Event]:
        """Return the events of an interrupted reply: its text is kept, its unfinished calls are not."""
        message = Message("assistant", "".join(said.text), thinking="".join(said.thinking))
        if not message.text:
            return []
        usage = self._estimate(message, tools)
        self.usage += usage
        self.messages.append(message)
        return [Appended(self.step, message, usage, None, self.model.name)]

    def _counted(self, finished: Finished, tools: Sequence[ToolSpec]) -> Finished:
        """Return the reply with estimated usage if the provider sent none."""
        if finished.usage.total_tokens:
            return finished
        counted = self._estimate(finished.message, tools)
        return msgspec.structs.replace(finished, usage=msgspec.structs.replace(counted, cost=finished.usage.cost))

    def _estimate(self, message: Message, tools: Sequence[ToolSpec]) -> Usage:
        prompt = messages_tokens(self.messages) + tools_tokens(tools)
        return Usage(prompt, messages_tokens([message]) + text_tokens(message.thinking))

    async def _make_room(self, *, force: bool) -> AsyncGenerator[Event, None]:
        if self.compactor is None:
            return
        if not force and not self.compactor.due(self.messages, self.context, self.model.context_tokens):
            return
        compacting = asyncio.ensure_future(self.compactor.compact(self.model, self.messages))
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({compacting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            compaction = await compacting if compacting.done() else None
        finally:
            await _end([compacting, stopping], self.limits.stop_seconds)
        if compaction is None:
            return
        self.messages = compaction.applied(self.messages)
        self.usage += compaction.usage
        self.context = 0
        yield Compacted(self.step, compaction)

    async def _use_tools(self, finished: Finished, handed: Sequence[ToolUse]) -> AsyncGenerator[Event, None]:
        """Run the calls of a reply concurrently, except those handed to the client.

        Afterwards each has exactly one result, even if stopped; a stopped run also answers those for the client.
        """
        uses = [use for use in finished.message.tool_calls if use not in handed]
        for use in uses:
            yield ToolCalled(self.step, use)
        queue: asyncio.Queue[tuple[int, Outcome, float] | None] = asyncio.Queue(len(uses) + 1)
        room = asyncio.Semaphore(self.limits.parallel)
        started: dict[int, float] = {}

        async def work(index: int, use: ToolUse) -> None:
            async with room:
                started[index] = time.monotonic()
                outcome = await self._outcome(use, finished.finish_reason)
                queue.put_nowait((index, outcome, time.monotonic() - started[index]))

        async def watch() -> None:
            await self.stop.wait()
            queue.put_nowait(None)

        tasks = [asyncio.ensure_future(work(index, use)) for index, use in enumerate(uses)]
        watching = asyncio.ensure_future(watch())
        results: dict[int, Message] = {}
        try:
            while len(results) < len(uses) and (ended := await queue.get()) is not None:
                index, outcome, seconds = ended
                results[index] = outcome.message(uses[index])
                yield ToolEnded(self.step, uses[index], outcome, seconds)
                yield Appended(self.step, results[index])
            await _end([watching, *tasks], self.limits.stop_seconds)
            while not queue.empty():
                if (ended := queue.get_nowait()) is not None:
                    index, outcome, seconds = ended
                    results[index] = outcome.message(uses[index])
                    yield ToolEnded(self.step, uses[index], outcome, seconds)
                    yield Appended(self.step, results[index])
            for index, use in enumerate(uses):
                if index not in results:
                    seconds = time.monotonic() - started[index] if index in started else 0.0
                    outcome = cancelled(began=index in started, ended=tasks[index].done())
                    results[index] = outcome.message(use)
                    yield ToolEnded(self.step, use, outcome, seconds)
                    yield Appended(self.step, results[index])
        finally:
            await _end([watching, *tasks], self.limits.stop_seconds)
        for index in range(len(uses)):
            self._add(results[index])
        for use in handed if self.stop.is_set() else ():
            outcome = cancelled(began=False, ended=True)
            yield ToolEnded(self.step, use, outcome, 0.0)
            yield Appended(self.step, outcome.message(use))

    def _handed_over(self, finished: Finished) -> tuple[ToolUse, ...]:
        """Return the calls of a reply that the client runs. Invalid calls go back to the model as usual."""
        reason = finished.finish_reason
        uses = finished.message.tool_calls
        return tuple(use for use in uses if use.name in self.handed and argument_fault(use, reason) is None)

    async def _outcome(self, use: ToolUse, finish_reason: FinishReason) -> Outcome:
        if (fault := argument_fault(use, finish_reason)) is not None:
            return Outcome.failed("invalid_args", fault)
        try:
            return self._noted(use, self._cut(await self.tools.call(use)))
        except ToolError as error:
            return Outcome.of_error(error)
        except Exception as error:
            log.exception("tool %s raised an unexpected exception", use.name)
            return Outcome.failed("failed", f"{type(error).__name__}: {error}")

    def _cut(self, outcome: Outcome) -> Outcome:
        """Limit a single result to about half of the context, to leave room for an answer."""
        longest = max(2_000, self.model.context_tokens * 2)
        if isinstance(outcome.content, str):
            return msgspec.structs.replace(outcome, content=shortened(outcome.content, longest))
        blocks = tuple(
            Text(shortened(block.text, longest)) if isinstance(block, Text) else block for block in outcome.content
        )
        return msgspec.structs.replace(outcome, content=blocks)

    def _noted(self, use: ToolUse, outcome: Outcome) -> Outcome:
        """Return the outcome, with a warning if the same call gave the same result several times in a row."""
        key = (use.name, use.arguments)
        before = self.before.get(key)
        same = before is not None and before.content == outcome.content and before.step >= self.step - 1
        times = before.times + (before.step < self.step) if before is not None and same else 1
        self.before[key] = _Result(outcome.content, self.step, times)
        if times < self.limits.repeats:
            return outcome
        note = f"[the same call has given the same result {times} times in a row; do something else, or answer]"
        if isinstance(outcome.content, str):
            return msgspec.structs.replace(outcome, content=f"{outcome.content}\n{note}")
        return msgspec.structs.replace(outcome, content=(*outcome.content, Text(note)))

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self.context += message_tokens(message) if self.context else 0

    def _inject(self) -> list[Event]:
        injected_events: list[Event] = []
        for incoming in self.inbox():
            if incoming.id not in self.injected:
                self.injected.add(incoming.id)
                self._add(incoming.message)
                injected_events.append(Injected(self.step, incoming.id, incoming.message))
                injected_events.append(Appended(self.step, incoming.message, incoming=incoming.id))
        return injected_events


class _Result(msgspec.Struct, frozen=True):
    """The result of a call, and the number of consecutive steps that gave it."""

    content: Content
    step: int
    times: int


class _Said:
    """The reply received so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thinking: list[str] = []

    def take(self, event: StreamEvent) -> None:
        if isinstance(event, model_events.TextDelta):
            self.text.append(event.text)
        elif isinstance(event, model_events.ThinkingDelta):
            self.thinking.append(event.text)
        elif isinstance(event, model_events.Retrying) and event.void:
            self.text.clear()
            self.thinking.clear()


class _Empty(ModelError):
    pass


def _kind(error: ModelError) -> str:
    match error:
        case NotConfigured():
            return "not_configured"
        case ContextOverflow():
            return "context_overflow"
        case ModelRefused():
            return "refused"
        case BudgetSpent():
            return "denied"
        case _Empty():
            return "empty"
    return "unavailable"


def _rounds_text(rounds: int) -> str:
    return (
        f"I stopped after {rounds} rounds of tool calls, the limit for one run ([agent] max_rounds), and am not done. "
        "What was done so far is above; say “continue” and I go on from there."
    )


def _empty_text(model: str, finish_reason: FinishReason) -> str:
    if finish_reason == "length":
        return f"{model} reached its token limit before it said anything; raise max_tokens"
    if finish_reason == "content_filter":
        return f"the provider of {model} withheld the reply (content filter)"
    return f"{model} returned an empty reply"


async def _end(tasks: Sequence[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel running tasks and wait at most `seconds`: a tool that does not end must not block the run."""
    open_tasks = [task for task in tasks if not task.done()]
    for task in open_tasks:
        task.cancel()
    if open_tasks:
        await asyncio.wait(open_tasks, timeout=seconds)
    for task in open_tasks:
        if not task.done():
            log.warning("a task of a stopped run is still running after %g s", seconds)
