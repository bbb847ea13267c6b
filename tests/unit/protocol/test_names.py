"""Names: what the guide accepts and rejects, the node id grammar, and a tool on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.names import (
    acceptable_name,
    covers,
    join_tool,
    split_tool,
    validate_capability,
    validate_node_id,
)
from farhand.protocol.version import MAX_NAME_LENGTH, MAX_NODE_ID_LENGTH


@pytest.mark.parametrize(
    "name",
    ["a", "macos", "macos.notes", "macos.notes.search", "a.b.c.d", "Macos.Notes", "ünï", "*", "exec", "a-b_c.d/e"],
)
def test_a_capability_that_is_accepted(name: str) -> None:
    assert validate_capability(name) == name
    assert acceptable_name(name)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "empty"),
        ("macos notes", "whitespace"),
        (" macos", "whitespace"),
        ("macos ", "whitespace"),
        ("macos\t.notes", "whitespace"),
        ("macos\n", "whitespace"),
        ("macos\u00a0notes", "whitespace"),
        ("macos\u2003notes", "whitespace"),
        ("macos\u3000notes", "whitespace"),
        ("macos\u0085notes", "whitespace"),
        ("macos\u2028notes", "whitespace"),
        ("macos..notes", "empty segment"),
        ("macos...notes", "empty segment"),
        ("a..b..c", "empty segment"),
        (".macos", "dot"),
        ("macos.", "dot"),
        (".", "dot"),
        ("..", "dot"),
        ("...", "dot"),
    ],
)
def test_a_capability_that_is_rejected_says_why(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        validate_capability(name)
    assert not acceptable_name(name)


def test_a_listed_name_is_bounded_and_printable() -> None:
    assert acceptable_name("a" * MAX_NAME_LENGTH)
    assert not acceptable_name("a" * (MAX_NAME_LENGTH + 1))
    assert not acceptable_name("a\x00b")
    assert not acceptable_name("a\x1b[31m")


@given(st.text())
def test_a_capability_is_accepted_exactly_when_its_segments_are_whole(name: str) -> None:
    whole = all(segment and not any(c.isspace() for c in segment) for segment in name.split("."))
    if whole:
        assert validate_capability(name) == name
    else:
        with pytest.raises(ValueError):
            validate_capability(name)


@pytest.mark.parametrize(
    "node_id",
    ["a", "7", "mac-01", "mac_studio", "macos:studio.local", "user@host", "A", "ünï", "x" * MAX_NODE_ID_LENGTH, "gsv2"],
)
def test_a_node_id_that_is_accepted(node_id: str) -> None:
    assert validate_node_id(node_id) == node_id


@pytest.mark.parametrize(
    ("node_id", "rule"),
    [
        ("", "empty"),
        ("x" * (MAX_NODE_ID_LENGTH + 1), "at most"),
        ("gsv", "reserved"),
        ("GSV", "reserved"),
        ("Gsv", "reserved"),
        ("a__b", "__"),
        ("a___b", "__"),
        ("__", "__"),
        ("_a", "not a node id"),
        ("a_", "not a node id"),
        ("_", "not a node id"),
        (":a", "not a node id"),
        ("a:", "not a node id"),
        ("-a", "not a node id"),
        ("a b", "not a node id"),
        ("a\n", "not a node id"),
        ("\na", "not a node id"),
        ("a/b", "not a node id"),
        ("../a", "not a node id"),
        ("a\x00", "not a node id"),
        ("a\ud800b", "not a node id"),
        ("a%20b", "not a node id"),
        ("a,b", "not a node id"),
        ("a\u202eb", "not a node id"),
    ],
)
def test_a_node_id_that_is_rejected_says_why(node_id: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        validate_node_id(node_id)


@pytest.mark.parametrize(
    ("capability", "tool", "served"),
    [
        ("macos.notes", "macos.notes", True),
        ("macos.notes", "macos.notes.search", True),
        ("macos.notes", "macos.notes.a.b", True),
        ("macos.notes", "macos.notesx", False),
        ("macos.notes", "macos", False),
        ("macos.notes", "macos.clipboard.get", False),
        ("macos", "macos.notes.search", True),
        ("macos.notes", "MacOS.Notes.Search", True),
        ("MacOS", "macos.notes", True),
        ("a", "a.", True),
        ("a.b", "a_b.c", False),
    ],
)
def test_a_capability_serves_itself_and_what_lies_below(capability: str, tool: str, served: bool) -> None:
    assert covers(capability, tool) is served


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("laptop__Bash", ("laptop", "Bash")),
        ("type:host__node.fs.read_text", ("type:host", "node.fs.read_text")),
        ("a__b__c", ("a", "b__c")),
        ("a___b", ("a", "_b")),
        ("gsv__ConfigGet", ("gsv", "ConfigGet")),
        ("Bash", None),
        ("macos.notes.search", None),
        ("a_b", None),
        ("__Bash", None),
        ("laptop__", None),
        ("__", None),
        ("", None),
    ],
)
def test_a_tool_on_a_node(name: str, parts: tuple[str, str] | None) -> None:
    assert split_tool(name) == parts


node_ids = st.from_regex(r"[a-zA-Z0-9](?:[a-zA-Z0-9.:@_-]{0,10}[a-zA-Z0-9])?", fullmatch=True).filter(
    lambda node_id: "__" not in node_id and node_id.lower() != "gsv"
)


@given(node_ids, st.text(min_size=1))
def test_joined_names_come_apart_where_they_were_joined(node_id: str, tool: str) -> None:
    assert validate_node_id(node_id) == node_id
    assert split_tool(join_tool(node_id, tool)) == (node_id, tool)


@given(st.text(st.characters(codec=None, categories=None)))
def test_a_node_id_is_accepted_or_rejected_and_nothing_else(node_id: str) -> None:
    try:
        accepted = validate_node_id(node_id)
    except ValueError as error:
        assert str(error)
    else:
        assert accepted == node_id
        assert "__" not in node_id
        assert not any(character.isspace() for character in node_id)
        assert 0 < len(node_id) <= MAX_NODE_ID_LENGTH
        node_id.encode()
