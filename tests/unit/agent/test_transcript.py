"""Transcripts made valid, and conversations made shorter."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.agent.compaction import MARK, Compaction, Compactor
from farhand.agent.tokens import messages_tokens
from farhand.agent.transcript import INTERRUPTED, mend, unanswered
from farhand.llm.errors import Unavailable
from farhand.llm.messages import Message, ToolUse
from tests.unit.agent.doubles import ScriptedModel, assert_valid, says

ONE, TWO = ToolUse("1", "read"), ToolUse("2", "ls")
ASKED = Message("assistant", tool_calls=(ONE, TWO))


def result(use: ToolUse, text: str = "x") -> Message:
    return Message("tool", text, tool_call_id=use.id, name=use.name)


def test_a_valid_transcript_stays_as_it_is() -> None:
    messages = [Message("user", "a"), ASKED, result(ONE), result(TWO), Message("assistant", "b")]
    assert mend(messages) == messages
    assert unanswered(messages) == []


def test_a_call_without_result_has_an_unknown_outcome() -> None:
    messages = [Message("user", "a"), ASKED, result(TWO)]
    assert unanswered(messages) == [ONE]
    mended = mend(messages)
    assert [message.tool_call_id for message in mended] == [None, None, "1", "2"]
    assert (mended[2].text, mended[2].is_error) == (INTERRUPTED, True)


def test_results_are_put_in_order_and_strays_left_out() -> None:
    stray = Message("tool", "?", tool_call_id="9")
    mended = mend([stray, ASKED, result(TWO), Message("user", "meanwhile"), result(ONE), result(ONE, "twice"), stray])
    assert mended == [ASKED, result(ONE), result(TWO), Message("user", "meanwhile")]


def test_ids_used_again_in_a_later_round_are_distinguished() -> None:
    messages = [ASKED, result(ONE, "old"), result(TWO, "old"), ASKED, result(ONE, "new"), result(TWO, "new")]
    assert mend(messages) == messages


def conversations() -> st.SearchStrategy[list[Message]]:
    identity = st.sampled_from(["1", "2", "3"])
    entry = st.one_of(
        st.builds(lambda text: Message("user", text), st.text(max_size=60)),
        st.builds(
            lambda ids: Message("assistant", "t", tool_calls=tuple(ToolUse(i, "n") for i in ids)),
            st.lists(identity, unique=True),
        ),
        st.builds(lambda i: Message("tool", "word " * 30, tool_call_id=i, name="n"), identity),
    )
    return st.lists(entry, max_size=25)


@given(conversations())
def test_anything_can_be_mended(messages: list[Message]) -> None:
    mended = mend(messages)
    assert_valid(mended)
    assert mend(mended) == mended
    said = [message for message in messages if message.role != "tool"]
    assert sorted(map(repr, said)) == sorted(repr(message) for message in mended if message.role != "tool")


@given(conversations(), st.integers(10, 2_000))
def test_compaction_never_parts_a_call_from_its_result(messages: list[Message], context: int) -> None:
    mended = [Message("system", "s"), *mend(messages)]
    count = Compactor().cut(mended, context)
    assert 0 <= count < max(1, len(mended) - 1)
    if count:
        applied = Compaction(Message("user", "summary"), count).applied(mended)
        assert_valid(applied)
        assert applied[0] == mended[0]
        assert applied[2:] == mended[1 + count :]


def long_conversation() -> list[Message]:
    messages = [Message("system", "s"), Message("user", "Never delete anything.")]
    for number in range(20):
        use = ToolUse(str(number), "read")
        messages += [Message("assistant", f"step {number}", tool_calls=(use,)), result(use, "word " * 100)]
    return messages


def test_compaction_is_due_at_four_fifths() -> None:
    messages = long_conversation()
    size = messages_tokens(messages)
    assert Compactor().due(messages, 0, int(size / 0.75)) is False
    assert Compactor().due(messages, 0, int(size / 0.85))
    assert Compactor().due(messages, 85_000, 100_000)
    assert Compactor(context_tokens=1_000).due(messages, 0, 1_000_000)


def test_a_long_history_is_summarised_in_parts() -> None:
    messages = long_conversation()
    model = ScriptedModel(*[says(f"summary {number}") for number in range(20)], context_tokens=1_000)
    compaction = asyncio.run(Compactor().compact(model, messages))
    assert compaction is not None
    assert len(model.requests) > 2
    assert f"summary {len(model.requests) - 2}" in model.requests[-1].messages[1].text
    assert compaction.summary.text.startswith(f"{MARK}\n\nsummary {len(model.requests) - 1}")
    assert compaction.summary.text.endswith("Last request from user was: Never delete anything.")
    assert compaction.usage.prompt_tokens == 10 * len(model.requests)
    assert messages_tokens(compaction.applied(messages)) < 1_000


def test_the_request_survives_a_second_compaction() -> None:
    messages = long_conversation()
    model = ScriptedModel(*[says("sum")] * 40, context_tokens=1_000)
    first = asyncio.run(Compactor().compact(model, messages))
    assert first is not None
    again = [*first.applied(messages), *long_conversation()[2:]]
    second = asyncio.run(Compactor().compact(model, again))
    assert second is not None
    assert second.summary.text.endswith("Last request from user was: Never delete anything.")


@pytest.mark.parametrize("trouble", [Unavailable("busy"), says("")])
def test_without_a_summary_the_conversation_still_becomes_shorter(trouble: Unavailable) -> None:
    messages = long_conversation()
    compaction = asyncio.run(Compactor().compact(ScriptedModel(trouble, context_tokens=4_000), messages))
    assert compaction is not None
    assert "no summary could be made" in compaction.summary.text


def test_a_short_conversation_has_nothing_to_spare() -> None:
    assert asyncio.run(Compactor().compact(ScriptedModel(), [Message("user", "a")])) is None
