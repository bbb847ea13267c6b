"""Arguments are checked against a node's schema in bounded time, or not at all."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from farhand.protocol.errors import InvalidArgs
from farhand.tools.argument_schemas import ArgumentSchema

SCHEMA = {
    "type": "object",
    "description": "A tool.",
    "properties": {
        "path": {"type": "string", "minLength": 1, "pattern": "^[a-z/]+$"},
        "mode": {"enum": ["a", "b"]},
        "lines": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["path"],
    "additionalProperties": False,
}


def check(schema: dict[str, Any], arguments: Any) -> None:
    compiled = ArgumentSchema.of(schema)
    assert compiled is not None
    compiled.check(arguments, len(msgspec.json.encode(arguments)))


def test_arguments_that_match() -> None:
    check(SCHEMA, {"path": "a/b", "mode": "a", "lines": None, "tags": ["x"]})


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "parameter 'path' is missing"),
        ({"path": ""}, "parameter 'path'"),
        ({"path": "A"}, "parameter 'path'"),
        ({"path": "a", "mode": "c"}, "parameter 'mode'"),
        ({"path": "a", "lines": 0}, "parameter 'lines'"),
        ({"path": "a", "tags": ["x", 1]}, "parameter 'tags.1'"),
        ({"path": "a", "other": 1}, "arguments: "),
    ],
)
def test_the_fault_is_named(arguments: Any, fault: str) -> None:
    with pytest.raises(InvalidArgs) as raised:
        check(SCHEMA, arguments)
    assert fault in raised.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"allOf": [{}], "unevaluatedProperties": False},
        {"patternProperties": {"a": {}}},
        {"properties": {"a": {"pattern": "(a{100}){100}"}}},
        {"properties": {str(number): {} for number in range(3000)}},
        {"properties": {"a": {"enum": ["x" * 100] * 5000}}},
        {"if": {"type": "string"}, "then": {}},
        {"properties": [1]},
    ],
)
def test_a_schema_whose_cost_is_not_small_is_not_used(schema: dict[str, Any]) -> None:
    assert ArgumentSchema.of(schema) is None


def test_many_rules_over_many_values_are_not_checked() -> None:
    schema = {"properties": {"x": {"allOf": [{"items": {"type": "string"}}] * 900}}}
    check(schema, {"x": [1] * 5000})
    with pytest.raises(InvalidArgs):
        check(schema, {"x": [1]})


def test_errors_of_many_values_are_not_collected() -> None:
    began = time.process_time()
    with pytest.raises(InvalidArgs, match="do not match the schema"):
        check({"properties": {"x": {"anyOf": [{"items": {"type": "string"}}] * 50}}}, {"x": [1] * 2000})
    assert time.process_time() - began < 0.5


def test_multiples_are_not_checked() -> None:
    """They take long for numbers with extreme exponents."""
    assert ArgumentSchema.of({"properties": {"x": {"items": {"multipleOf": 1e-300}}}}) is None


def test_a_pattern_over_a_long_text_is_not_checked() -> None:
    schema = {"properties": {"x": {"pattern": "^[ab]*a" + "[ab]" * 118 + "$"}}}
    check(schema, {"x": "c" * 3_000_000})
    with pytest.raises(InvalidArgs):
        check(schema, {"x": "c"})
