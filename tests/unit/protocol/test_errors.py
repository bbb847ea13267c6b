"""The closed set of failures: six kinds, one class each, and what becomes of anything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.calls import NULL, ToolCall, ToolFailure, ToolResult
from farhand.protocol.errors import (
    Cancelled,
    ErrorKind,
    Failed,
    FarhandError,
    InvalidArgs,
    NotAllowed,
    NotFound,
    ProtocolError,
    Timeout,
    ToolError,
)

KINDS: dict[str, type[ToolError]] = {
    "invalid_args": InvalidArgs,
    "not_allowed": NotAllowed,
    "timeout": Timeout,
    "failed": Failed,
    "cancelled": Cancelled,
    "not_found": NotFound,
}


def test_there_are_six_kinds() -> None:
    assert {kind.value for kind in ErrorKind} == set(KINDS)


@pytest.mark.parametrize(("kind", "error"), KINDS.items())
def test_each_kind_has_its_class(kind: str, error: type[ToolError]) -> None:
    assert error.kind is ErrorKind(kind)
    raised = ToolError.of(kind, "why")
    assert type(raised) is error
    assert raised.message == str(raised) == "why"
    assert ToolFailure.of(raised) == ToolFailure(kind, "why")
    assert msgspec.json.encode(ToolFailure.of(raised)) == f'{{"kind":"{kind}","message":"why"}}'.encode()


@pytest.mark.parametrize("kind", ["", "FAILED", "Failed", "exploded", "time_out", "ünï"])
def test_an_unknown_kind_is_failed_and_keeps_its_text(kind: str) -> None:
    assert ErrorKind.read(kind) is ErrorKind.FAILED
    error = ToolError.of(kind, "the text")
    assert type(error) is Failed
    assert error.message == "the text"
    assert ToolFailure(kind, "the text") == ToolFailure("failed", "the text")
    assert ToolResult.failed(kind, "the text").error == ToolFailure("failed", "the text")


def test_the_tree() -> None:
    assert issubclass(ToolError, FarhandError)
    assert issubclass(ProtocolError, FarhandError)
    assert not issubclass(ProtocolError, ToolError)
    assert {error.__bases__ for error in KINDS.values()} == {(ToolError,)}
    assert ToolError("x").kind is ErrorKind.FAILED


def test_a_failure_can_carry_an_exception_as_its_message() -> None:
    """`raise Failed(error)` is what a Python author writes; the wire carries text."""
    error = Failed(ValueError("no such album"))
    assert error.message == "no such album"
    assert ToolFailure.of(error) == ToolFailure("failed", "no such album")


@given(st.text(), st.text())
def test_any_kind_and_text_make_a_failure_of_the_six(kind: str, message: str) -> None:
    failure = ToolFailure(kind, message)
    assert failure.kind in KINDS
    assert failure.message == message
    assert msgspec.json.decode(msgspec.json.encode(failure), type=ToolFailure) == failure


def test_a_call_without_arguments_says_null() -> None:
    assert bytes(ToolCall("id", "tool").args) == b"null"
    assert bytes(ToolResult(ok=True).result) == bytes(NULL)
