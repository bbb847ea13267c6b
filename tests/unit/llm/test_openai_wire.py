"""Names, schemas and messages on the wire."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.llm.messages import Message, ToolUse
from farhand.llm.openai_wire import messages_to_wire, names_of
from farhand.llm.sse import EventLines
from farhand.llm.tool_names import ToolNames, normal_schema


def test_names_the_api_takes_are_sent_as_they_are() -> None:
    names = ToolNames(["read", "laptop__Read", "gsv__Cron"])
    assert [names.sent(name) for name in ("read", "laptop__Read", "gsv__Cron")] == ["read", "laptop__Read", "gsv__Cron"]


def test_dots_become_underscores_and_come_back() -> None:
    names = ToolNames(["macos.notes.search", "laptop__Read"])
    assert names.sent("macos.notes.search") == "macos_notes_search"
    assert names.meant("macos_notes_search") == "macos.notes.search"
    assert names.meant("macos.notes.search") == "macos.notes.search"


@given(st.lists(st.text(min_size=1, max_size=90), unique=True, max_size=12))
def test_any_names_are_accepted_different_and_reversible(given_names: list[str]) -> None:
    names = ToolNames(given_names)
    sent = [names.sent(name) for name in given_names]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in sent)
    assert [names.meant(name) for name in sent] == given_names


def test_a_name_chosen_to_look_like_another_takes_nothing_from_it() -> None:
    first = ToolNames(["a.b", "a:b"])
    forged = [first.sent("a.b"), first.sent("a:b"), "a_b"]
    names = ToolNames(["a.b", "a:b", *forged])
    sent = [names.sent(name) for name in ("a.b", "a:b", *forged)]
    assert len(set(sent)) == 5
    assert [names.meant(name) for name in sent] == ["a.b", "a:b", *forged]


def test_names_that_would_collide_are_both_callable() -> None:
    names = ToolNames(["a.b", "a:b", "a_b", "x" * 100, "x" * 101])
    assert names.sent("a_b") == "a_b"
    assert len({names.sent(name) for name in ("a.b", "a:b", "a_b", "x" * 100, "x" * 101)}) == 5


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({}, {"type": "object", "properties": {}}),
        ({"type": "object"}, {"type": "object", "properties": {}}),
        ({"type": "string"}, {"type": "object", "properties": {}}),
        (
            {"properties": {"a": {"type": "object"}}, "title": "T", "$schema": "x", "required": []},
            {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}},
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}},
            {"type": "object", "properties": {"a": {"type": "integer"}}},
        ),
        (
            {
                "oneOf": [
                    {"properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
                    {"properties": {"b": {"type": "string"}}, "required": ["b"]},
                ]
            },
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
                "required": ["b"],
            },
        ),
        ({"properties": "nonsense", "required": 7}, {"type": "object", "properties": {}}),
    ],
)
def test_schemas_have_an_object_at_the_root_and_properties(schema: dict[str, Any], shown: dict[str, Any]) -> None:
    assert normal_schema(schema) == shown


def test_a_schema_without_bottom_is_cut() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"x": schema}}
    assert normal_schema(schema)["type"] == "object"


def test_arguments_that_are_not_object_are_wrapped_for_the_provider() -> None:
    messages = [Message("assistant", tool_calls=(ToolUse("1", "read", '{"path": '), ToolUse("2", "read", "[1]")))]
    (sent,) = messages_to_wire(messages, names_of(messages, ()))
    assert [call["function"]["arguments"] for call in sent["tool_calls"]] == [
        '{"not_a_json_object":"{\\"path\\": "}',
        '{"not_a_json_object":"[1]"}',
    ]


def test_an_empty_assistant_message_is_not_sent() -> None:
    messages = [Message("user", "a"), Message("assistant"), Message("user", "b")]
    assert [entry["content"] for entry in messages_to_wire(messages, names_of(messages, ()))] == ["a", "b"]


@given(st.lists(st.sampled_from([b"data: a", b": c", b"event: x", b"data:\xc3\xa9", b""])), st.data())
def test_event_lines_are_the_same_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"])) for line in lines)
    whole = EventLines()
    expected = whole.feed(stream) + whole.end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events = EventLines()
    assert [found for piece in pieces for found in events.feed(piece)] + events.end() == expected
    assert expected == [line[5:].strip() for line in lines if line.startswith(b"data:")]
