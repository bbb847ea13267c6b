"""The loop, over a scripted model and scripted tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from farhand.agent.compaction import MARK, Compactor
from farhand.agent.events import (
    Appended,
    Compacted,
    Completed,
    Event,
    Injected,
    RunFailed,
    StepRetrying,
    StepStarted,
    StepText,
    StepThinking,
    Stopped,
    ToolCalled,
    ToolEnded,
)
from farhand.agent.loop import JoiningMessage, Limits, run
from farhand.agent.tool_outcome import Outcome
from farhand.agent.tools import Tools
from farhand.llm import messages as model_events
from farhand.llm.errors import ContextOverflow, ModelRefused, NotConfigured, Unavailable
from farhand.llm.messages import Finished, Image, Message, Text, ToolUse, Usage
from farhand.protocol.errors import Cancelled, NotAllowed
from tests.unit.agent.doubles import ScriptedModel, assert_valid, end, says, tools, transcript, uses

START = (Message("system", "be good"), Message("user", "hello"))


def go(
    model: ScriptedModel, given: Tools | None = None, messages: Sequence[Message] = START, **options: Any
) -> list[Event]:
    async def main() -> list[Event]:
        async with asyncio.timeout(60):
            events = [event async for event in run(model, messages, given or tools(), **options)]
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return events

    events = asyncio.run(main())
    assert_valid(transcript(events))
    for event in events:
        assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
    return events


def results(events: Sequence[Event]) -> list[tuple[str, bool]]:
    return [(message.text, message.is_error) for message in transcript(events) if message.role == "tool"]


def test_a_plain_answer() -> None:
    events = go(ScriptedModel(says("hi there")))
    message = Message("assistant", "hi there")
    assert events == [
        StepStarted(1, "test/scripted"),
        StepText(1, "hi there"),
        Appended(1, message, Usage(10, 5, 0, 0.5), "stop", "test/scripted"),
        Completed("hi there", Usage(10, 5, 0, 0.5), 1),
    ]


def test_a_tool_round() -> None:
    model = ScriptedModel(uses(("c1", "read", {"path": "a"}), text="Let me see."), says("It says x."))
    events = go(model, tools(read="x"))
    use = ToolUse("c1", "read", '{"path":"a"}')
    assert [type(event) for event in events] == [
        StepStarted, StepText, Appended, ToolCalled, ToolEnded, Appended, StepStarted, StepText, Appended, Completed,
    ]  # fmt: skip
    assert events[3] == ToolCalled(1, use)
    assert transcript(events)[1] == Message("tool", "x", tool_call_id="c1", name="read")
    assert model.requests[1].messages == (*START, *transcript(events)[:2])
    assert end(events) == Completed("It says x.", Usage(20, 10, 0, 1.0), 2)


def test_nothing_runs_before_its_call_is_read() -> None:
    """A reader that saves what it reads has the call on disk before the tool starts."""
    ran: list[str] = []

    async def act(use: ToolUse) -> Outcome:
        ran.append(use.id)
        return Outcome("done")

    async def main() -> None:
        model = ScriptedModel(uses(("c1", "act", {})), says("ok"))
        async for event in run(model, START, tools(act=act)):
            if isinstance(event, Appended) and event.message.tool_calls:
                await asyncio.sleep(0.01)
                assert ran == []
        assert ran == ["c1"]

    asyncio.run(main())


def test_calls_run_at_the_same_time_and_results_keep_their_order_for_the_model() -> None:
    met = [asyncio.Event(), asyncio.Event()]

    async def first(use: ToolUse) -> Outcome:
        met[0].set()
        await met[1].wait()
        return Outcome("first")

    async def second(use: ToolUse) -> Outcome:
        await met[0].wait()
        met[1].set()
        return Outcome("second")

    model = ScriptedModel(uses(("1", "first", {}), ("2", "second", {})), says("ok"))
    events = go(model, tools(first=first, second=second))
    assert [message.text for message in model.requests[1].messages if message.role == "tool"] == ["first", "second"]
    assert sorted(text for text, _ in results(events)) == ["first", "second"]


def test_no_more_calls_at_once_than_allowed() -> None:
    running = most = 0

    async def act(use: ToolUse) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Outcome("x")

    model = ScriptedModel(uses(*((str(n), "act", {}) for n in range(12))), says("ok"))
    go(model, tools(act=act), limits=Limits(parallel=3))
    assert most == 3


@pytest.mark.parametrize(
    ("arguments", "finish", "reported"),
    [
        ('{"path": ', "tool_calls", "the arguments of read are not valid JSON"),
        ('{"path": "/ho', "length", "the reply was cut at its token limit"),
        ("[1]", "tool_calls", "must be a JSON object, not '[1]'"),
        ("null", "tool_calls", "must be a JSON object"),
        ("[" * 100_000, "tool_calls", "not valid JSON"),
    ],
)
def test_bad_arguments_go_back_to_the_model(arguments: str, finish: Any, reported: str) -> None:
    bad = msgspec.structs.replace(uses(("1", "read", arguments)), finish_reason=finish)
    events = go(ScriptedModel(bad, says("sorry")), tools(read="must not run"))
    ((text, failed),) = results(events)
    assert reported in text
    assert failed
    assert isinstance(end(events), Completed)


def test_an_unknown_tool_goes_back_to_the_model() -> None:
    events = go(ScriptedModel(uses(("1", "raed", {})), says("ok")), tools(read="x"))
    assert results(events) == [("tool not found: raed (did you mean read?)", True)]


def test_errors_of_tools_go_back_to_the_model() -> None:
    async def forbidden(use: ToolUse) -> Outcome:
        raise NotAllowed("not in here")

    async def broken(use: ToolUse) -> Outcome:
        raise KeyError("oh")

    events = go(
        ScriptedModel(uses(("1", "forbidden", {}), ("2", "broken", {})), says("ok")),
        tools(forbidden=forbidden, broken=broken),
    )
    assert sorted(results(events)) == [("KeyError: 'oh'", True), ("not in here", True)]
    kinds = {event.use.name: event.outcome.kind for event in events if isinstance(event, ToolEnded)}
    assert kinds == {"forbidden": "not_allowed", "broken": "failed"}


def test_the_limit_on_rounds_ends_with_a_clear_message() -> None:
    model = ScriptedModel(*(uses((str(n), "read", {})) for n in range(9)))
    events = go(model, tools(read="x"), limits=Limits(max_rounds=3))
    finish = end(events)
    assert isinstance(finish, Completed)
    assert finish.finish_reason == "rounds"
    assert finish.reply.startswith("I stopped after 3 rounds of tool calls")
    assert transcript(events)[-1] == Message("assistant", finish.reply)
    assert len(model.requests) == 3


def test_messages_that_arrive_are_injected_between_rounds_once() -> None:
    late = JoiningMessage("m1", Message("user", "and another thing"))
    model = ScriptedModel(uses(("1", "read", {})), uses(("2", "read", {})), says("ok"))
    events = go(model, tools(read="x"), inbox=lambda: [late])
    assert [event for event in events if isinstance(event, Injected)] == [Injected(1, "m1", late.message)]
    assert Appended(1, late.message, incoming="m1") in events
    assert [message.role for message in model.requests[1].messages] == ["system", "user", "assistant", "tool", "user"]


def stopping(*steps: Any, given: Tools | None = None, when: Any) -> tuple[list[Event], float]:
    """Runs until an event of which `when` is true, then stops the run; the events and how long the stop took."""
    stop = asyncio.Event()

    async def main() -> tuple[list[Event], float]:
        events: list[Event] = []
        at = 0.0
        async for event in run(ScriptedModel(*steps), START, given or tools(), stop=stop):
            events.append(event)
            if when(event):
                asyncio.get_running_loop().call_soon(stop.set)
                at = time.monotonic()
        return events, time.monotonic() - at

    return asyncio.run(main())


def test_stop_while_the_model_replies_keeps_the_text_so_far() -> None:
    never = asyncio.Event()
    events, seconds = stopping(
        [model_events.ThinkingDelta("hm"), model_events.TextDelta("Once upon"), never],
        when=lambda event: isinstance(event, StepText),
    )
    (message,) = transcript(events)
    assert message == Message("assistant", "Once upon", thinking="hm")
    assert isinstance(end(events), Stopped)
    assert seconds < 5


def test_stop_before_the_model_replies() -> None:
    events, _ = stopping([asyncio.Event()], when=lambda event: isinstance(event, StepStarted))
    assert transcript(events) == []
    assert isinstance(end(events), Stopped)


def test_stop_cancels_tools_and_answers_every_call() -> None:
    cancelled: list[str] = []

    async def hang(use: ToolUse) -> Outcome:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(use.id)
            raise
        return Outcome("never")

    async def tidy(use: ToolUse) -> Outcome:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Cancelled("Cancelled: ended 3 processes") from None
        return Outcome("never")

    events, _ = stopping(
        uses(("1", "quick", {}), ("2", "hang", {}), ("3", "tidy", {})),
        given=tools(quick="fine", hang=hang, tidy=tidy),
        when=lambda event: isinstance(event, ToolEnded),
    )
    assert_valid(transcript(events))
    reported = {message.tool_call_id: message for message in transcript(events) if message.role == "tool"}
    assert reported["1"].text == "fine"
    assert reported["2"].text.startswith("Cancelled: the run was stopped")
    assert reported["3"].text == "Cancelled: ended 3 processes"
    assert reported["2"].is_error and reported["3"].is_error
    assert cancelled == ["2"]
    assert isinstance(end(events), Stopped)


def test_a_tool_that_ignores_its_end_does_not_hold_the_run() -> None:
    release = asyncio.Event()

    async def stubborn(use: ToolUse) -> Outcome:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return Outcome("late")

    async def main() -> None:
        stop = asyncio.Event()
        events: list[Event] = []
        model = ScriptedModel(uses(("1", "stubborn", {})))
        async for event in run(model, START, tools(stubborn=stubborn), stop=stop, limits=Limits(stop_seconds=0.05)):
            events.append(event)
            if isinstance(event, ToolCalled):
                asyncio.get_running_loop().call_later(0.01, stop.set)
        release.set()
        assert "has not confirmed its end" in transcript(events)[-1].text
        assert isinstance(end(events), Stopped)

    asyncio.run(main())


def test_a_run_stopped_before_its_start_asks_no_model() -> None:
    stop = asyncio.Event()
    stop.set()
    model = ScriptedModel()
    assert go(model, stop=stop) == [Stopped("stopped", Usage(), 0)]


def test_leaving_early_ends_the_model_and_the_tools() -> None:
    ended = False

    async def hang(use: ToolUse) -> Outcome:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True
        return Outcome("never")

    async def main() -> None:
        model = ScriptedModel(uses(("1", "quick", {}), ("2", "hang", {})))
        events = run(model, START, tools(quick="x", hang=hang))
        async for event in events:
            if isinstance(event, ToolEnded):
                break
        await events.aclose()
        assert ended
        assert model.closed == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_images_of_a_tool_reach_the_model() -> None:
    async def picture(use: ToolUse) -> Outcome:
        return Outcome((Text("Image file: a.png"), Image("data:image/png;base64,AA")))

    model = ScriptedModel(uses(("1", "picture", {})), says("a cat"))
    go(model, tools(picture=picture))
    assert model.requests[1].messages[-1].images == (Image("data:image/png;base64,AA"),)


def test_a_result_too_long_for_the_context_is_cut_and_says_so() -> None:
    model = ScriptedModel(uses(("1", "read", {})), says("ok"), context_tokens=1_000)
    ((text, _),) = results(go(model, tools(read="a" * 9_000 + "end")))
    assert len(text) < 2_200
    assert "characters left out" in text
    assert text.endswith("end")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotConfigured("set FARHAND_MODEL"), "not_configured"),
        (ModelRefused("wrong key", status=401), "refused"),
        (Unavailable("busy"), "unavailable"),
        (ContextOverflow("too long"), "context_overflow"),
    ],
)
def test_failures_of_the_model_end_the_run(error: Any, kind: str) -> None:
    assert go(ScriptedModel(error))[-1] == RunFailed(kind, error.message, Usage(), 1)


def test_retries_are_reported_and_void_earlier_text() -> None:
    never = asyncio.Event()
    events, _ = stopping(
        [
            model_events.TextDelta("half"),
            model_events.Retrying("cut", 0.5, "test/scripted", void=True),
            model_events.TextDelta("again"),
            never,
        ],
        when=lambda event: isinstance(event, StepText) and event.text == "again",
    )
    assert StepRetrying(1, "cut", 0.5, "test/scripted", void=True) in events
    assert transcript(events) == [Message("assistant", "again")]


def test_an_empty_reply_is_asked_for_again() -> None:
    events = go(ScriptedModel(says(""), says("now")))
    assert [event.reason for event in events if isinstance(event, StepRetrying)] == [
        "test/scripted returned an empty reply"
    ]
    assert end(events) == Completed("now", Usage(20, 10, 0, 1.0), 1)


def test_a_model_that_says_nothing_fails() -> None:
    finish = end(go(ScriptedModel(*[says("", finish_reason="length")] * 3)))
    assert isinstance(finish, RunFailed)
    assert (finish.kind, finish.usage.prompt_tokens) == ("empty", 30)
    assert "token limit" in finish.message


def test_nothing_left_to_say_after_tools_is_an_end() -> None:
    events = go(ScriptedModel(uses(("1", "message", {})), says("")), tools(message="message sent"))
    assert end(events) == Completed("", Usage(20, 10, 0, 1.0), 2)


def test_usage_is_estimated_where_the_provider_does_not_count() -> None:
    finish = end(go(ScriptedModel(Finished(Message("assistant", "twelve words or so")))))
    assert isinstance(finish, Completed)
    assert finish.usage.prompt_tokens > 0
    assert finish.usage.completion_tokens > 0


def test_thinking_is_reported_and_kept() -> None:
    step = [model_events.ThinkingDelta("hm"), Finished(Message("assistant", "ok", thinking="hm"))]
    events = go(ScriptedModel(step))
    assert StepThinking(1, "hm") in events
    assert transcript(events)[0].thinking == "hm"


def test_a_conversation_too_long_is_compacted_once_and_asked_again() -> None:
    history = [START[0], *(Message("user" if n % 2 == 0 else "assistant", "word " * 200) for n in range(9))]
    model = ScriptedModel(ContextOverflow("too long"), *[says("the summary")] * 2, says("fine"), context_tokens=2_000)
    compactor = Compactor(threshold=100.0)
    events = go(model, messages=history, compactor=compactor)
    (compacted,) = [event for event in events if isinstance(event, Compacted)]
    assert model.requests[-1].messages == tuple(compacted.compaction.applied(history))
    assert model.requests[-1].messages[1].text.startswith(f"{MARK}\n\nthe summary")
    assert isinstance(end(events), Completed)
    assert events[-1].usage == Usage(30, 15, 0, 1.5)


def test_a_long_run_makes_room_by_itself() -> None:
    model = ScriptedModel(
        *(uses((str(n), "read", {}), usage=Usage(50 + 605 * n, 10)) for n in range(3)),
        *[says("the summary")] * 2,
        says("done"),
        context_tokens=2_000,
    )
    events = go(model, tools(read="word " * 600), compactor=Compactor())
    assert [event.step for event in events if isinstance(event, Compacted)] == [4]
    sent = model.requests[-1].messages
    assert "Last request from user was: hello" in sent[1].text
    assert_valid(sent)


def test_a_model_that_repeats_itself_is_warned() -> None:
    answers = iter(["same"] * 5 + ["other"] + ["same"] * 2)

    async def look(use: ToolUse) -> Outcome:
        return Outcome(next(answers))

    model = ScriptedModel(*(uses((str(number), "look", {})) for number in range(8)), says("done"))
    reported = [text for text, _ in results(go(model, tools(look=look)))]
    assert [text.startswith("same\n[the same call") for text in reported] == [False] * 3 + [True] * 2 + [False] * 3
    assert "4 times in a row" in reported[3]


def test_the_same_call_twice_in_one_reply_is_not_a_repetition() -> None:
    rounds = [uses((f"a{n}", "look", {}), (f"b{n}", "look", {}), (f"c{n}", "look", {})) for n in range(3)]
    assert {text for text, _ in results(go(ScriptedModel(*rounds, says("done")), tools(look="same")))} == {"same"}


def test_calls_that_are_handed_over_end_the_run_after_the_others() -> None:
    model = ScriptedModel(uses(("1", "look", {}), ("2", "theirs", {}), ("3", "theirs", "{no"), text="both"))
    events = asyncio.run(_all(run(model, START, tools(look="seen"), handed=["theirs"])))
    assert results(events)[0] == ("seen", False) and len(results(events)) == 2
    last = end(events)
    assert isinstance(last, Completed) and (last.reply, last.finish_reason) == ("both", "tool_calls")
    assert [use.id for use in last.handed] == ["2"]


def test_a_choice_of_tools_is_for_the_first_request_only() -> None:
    model = ScriptedModel(uses(("1", "look", {})), says("done"))
    go(model, tools(look="seen"), parameters={"tool_choice": "required", "seed": 1})
    assert [request.parameters for request in model.requests] == [{"tool_choice": "required", "seed": 1}, {"seed": 1}]


async def _all(events: Any) -> list[Event]:
    return [event async for event in events]
