"""A function's signature as JSON schema, and arguments read by the same types."""

from __future__ import annotations

import enum
import functools
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from farhand.protocol.errors import InvalidArgs
from farhand.tools.schema import Parameters


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(msgspec.Struct):
    city: str
    zip: int = 0


@dataclass
class Size:
    width: int
    height: int = 1


class Options(TypedDict, total=False):
    deep: bool


def read(function: Any, text: str, *, skip: int = 0) -> dict[str, Any]:
    return Parameters(function, skip=skip).read(Raw(text.encode()))


def simple(query: str, limit: int = 20, *, exact: bool = False) -> None: ...


def test_the_schema_of_a_signature() -> None:
    assert Parameters(simple).schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "default": 20},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_a_function_without_parameters() -> None:
    def nothing(ctx: Any) -> None: ...

    parameters = Parameters(nothing, skip=1)
    assert parameters.schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert parameters.read(Raw(b"null")) == {}
    assert parameters.read(Raw(b"{}")) == {}


def test_everything_optional_has_no_required_key() -> None:
    def optional(a: int = 1, b: str | None = None) -> None: ...

    parameters = Parameters(optional)
    assert "required" not in parameters.schema
    assert parameters.read(Raw(b"null")) == {"a": 1, "b": None}


def test_the_types_an_author_uses() -> None:
    def tool(
        colour: Colour,
        mode: Literal["fast", "slow"],
        place: Place,
        size: Size,
        options: Options,
        count: Annotated[int, msgspec.Meta(ge=1, le=9, description="How many.")],
        when: datetime,
        tags: list[str],
        table: dict[str, float],
        maybe: int | None = None,
        free: Any = None,
    ) -> None: ...

    schema = Parameters(tool).schema
    properties = schema["properties"]
    assert schema["type"] == "object"
    assert properties["mode"] == {"enum": ["fast", "slow"]}
    assert properties["count"] == {"type": "integer", "minimum": 1, "maximum": 9, "description": "How many."}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}}
    assert properties["place"] == {"$ref": "#/$defs/Place"}
    assert schema["$defs"]["Place"]["required"] == ["city"]
    assert schema["$defs"]["Colour"]["enum"] == ["blue", "red"]
    arguments = read(
        tool,
        '{"colour":"red","mode":"fast","place":{"city":"Bern"},"size":{"width":3},"options":{"deep":true},"count":9,'
        '"when":"2026-11-15T10:00:00Z","tags":["a"],"table":{"x":1.5},"free":[1]}',
    )
    assert arguments["colour"] is Colour.RED
    assert arguments["place"] == Place("Bern")
    assert arguments["size"] == Size(3)
    assert arguments["when"].year == 2026
    assert arguments["maybe"] is None
    assert arguments["free"] == [1]


def test_a_parameter_without_a_type_takes_anything() -> None:
    def loose(value, other=5): ...  # type: ignore[no-untyped-def]

    parameters = Parameters(loose)
    assert parameters.schema["properties"]["value"] == {}
    assert parameters.read(Raw(b'{"value":{"a":[1]}}')) == {"value": {"a": [1]}, "other": 5}


def test_the_leading_context_is_not_a_parameter() -> None:
    def tool(ctx: object, query: str) -> None: ...

    parameters = Parameters(tool, skip=1)
    assert list(parameters.schema["properties"]) == ["query"]
    with pytest.raises(InvalidArgs, match="unknown parameter 'ctx'"):
        parameters.read(Raw(b'{"query":"x","ctx":1}'))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("queri", "unknown parameter 'queri'; did you mean 'query'? Valid parameters: query, limit, exact"),
        ("LIMIT", "unknown parameter 'LIMIT'; did you mean 'limit'? Valid parameters: query, limit, exact"),
        ("zzz", "unknown parameter 'zzz'; valid parameters: query, limit, exact"),
        ("x" * 5000, f"unknown parameter '{'x' * 100}'; valid parameters: query, limit, exact"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_one(given: str, message: str) -> None:
    parameters = Parameters(simple)
    for decode in (lambda args: parameters.read(Raw(json.dumps(args).encode())), parameters.convert):
        with pytest.raises(InvalidArgs) as raised:
            decode({"query": "x", given: 1})
        assert raised.value.message == message


def test_aliases_stand_for_parameters_one_spelling_at_a_time() -> None:
    parameters = Parameters(simple, aliases={"q": "query", "text": "query"})
    assert parameters.read(Raw(b'{"q":"x"}')) == parameters.convert({"query": "x"})
    for arguments in ({"q": "x", "query": "x"}, {"query": "x", "text": None}, {"q": "", "text": "y"}):
        with pytest.raises(InvalidArgs, match=r"ambiguous arguments: .* names of the same parameter 'query'"):
            parameters.convert(arguments)


def test_required_after_optional_is_possible_by_keyword() -> None:
    def tool(a: int = 1, *, b: int) -> None: ...

    assert read(tool, '{"b":2}') == {"a": 1, "b": 2}
    assert Parameters(tool).schema["required"] == ["b"]


def test_a_mutable_default_is_fresh_for_each_call() -> None:
    def tool(items: list[int] = [1, 2], table: dict[str, int] = {"a": 1}, empty: list[int] = []) -> None:  # noqa: B006
        ...

    parameters = Parameters(tool)
    first = parameters.read(Raw(b"{}"))
    first["items"].append(3)
    first["table"]["b"] = 2
    first["empty"].append(4)
    assert parameters.read(Raw(b"{}")) == {"items": [1, 2], "table": {"a": 1}, "empty": []}


def test_methods_lambdas_and_partials() -> None:
    class Tools:
        def search(self, query: str) -> None: ...

    assert list(Parameters(Tools().search).schema["properties"]) == ["query"]
    assert list(Parameters(lambda ctx, x: x, skip=1).schema["properties"]) == ["x"]

    def base(ctx: object, a: int, b: int = 2) -> None: ...

    parameters = Parameters(functools.partial(base, b=3), skip=1)
    assert parameters.read(Raw(b'{"a":1}')) == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("null", "missing required parameter 'query'"),
        ("{}", "missing required parameter 'query'"),
        ('{"limit":5}', "missing required parameter 'query'"),
        ('{"query":5}', "parameter 'query': expected 'str', got 'int'"),
        ('{"query":null}', "parameter 'query': expected 'str', got 'null'"),
        ('{"query":"x","limit":"5"}', "parameter 'limit': expected 'int', got 'str'"),
        ('{"query":"x","limit":5.5}', "parameter 'limit': expected 'int', got 'float'"),
        ('{"query":"x","limit":null}', "parameter 'limit': expected 'int', got 'null'"),
        ('{"query":"x","exact":1}', "parameter 'exact': expected 'bool', got 'int'"),
        ("[]", "arguments: expected 'object', got 'array'"),
        ('["x"]', "arguments: expected 'object', got 'array'"),
        ('"x"', "arguments: expected 'object', got 'str'"),
        ("5", "arguments: expected 'object', got 'int'"),
        ("true", "arguments: expected 'object', got 'bool'"),
    ],
)
def test_wrong_arguments_name_the_parameter(arguments: str, message: str) -> None:
    with pytest.raises(InvalidArgs) as caught:
        read(simple, arguments)
    assert caught.value.message == message


def test_a_fault_deep_inside_names_its_place() -> None:
    def tool(places: list[Place], count: Annotated[int, msgspec.Meta(ge=1)] = 1) -> None: ...

    with pytest.raises(InvalidArgs, match=r"parameter 'places\[0\]\.zip': expected 'int', got 'str'"):
        read(tool, '{"places":[{"city":"Bern","zip":"x"}]}')
    with pytest.raises(InvalidArgs, match="missing required parameter 'city'"):
        read(tool, '{"places":[{}]}')
    with pytest.raises(InvalidArgs, match="parameter 'count': expected 'int' >= 1"):
        read(tool, '{"places":[],"count":0}')


def star(*values: int) -> None: ...


def stars(**values: int) -> None: ...


def position(a: int, /) -> None: ...


def strange(a: threading.Thread) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Opaque: ...


def opaque(a: Opaque) -> None: ...


def ambiguous(a: list[int] | set[int]) -> None: ...


@pytest.mark.parametrize("function", [star, stars, position, strange, opaque, ambiguous], ids=lambda f: f.__name__)
def test_a_signature_that_cannot_be_described_raises_value_error(function: Any) -> None:
    with pytest.raises(ValueError, match=function.__name__):
        Parameters(function)


def test_a_signature_shorter_than_what_is_skipped_raises_value_error() -> None:
    def nothing() -> None: ...

    with pytest.raises(ValueError, match="nothing"):
        Parameters(nothing, skip=1)


def test_an_annotation_of_the_context_need_not_resolve() -> None:
    """Plug-ins import ToolContext for the type checker alone; only what a caller sends must be known."""

    def tool(ctx: OnlyForTheTypeChecker, query: str) -> AlsoOnly: ...  # type: ignore[name-defined]  # noqa: F821

    assert Parameters(tool, skip=1).read(Raw(b'{"query":"x"}')) == {"query": "x"}


json_text = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["query", "limit", "exact", "x"]) | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())


@given(json_text | st.binary())
def test_no_arguments_raise_anything_but_invalid_args(text: bytes) -> None:
    parameters = Parameters(simple)
    try:
        arguments = parameters.read(Raw(text))
    except InvalidArgs as error:
        assert error.message
    else:
        assert isinstance(arguments["query"], str)
        assert isinstance(arguments["limit"], int)
        assert isinstance(arguments["exact"], bool)


@given(st.text(), st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_right_arguments_arrive_as_sent(query: str, limit: int, exact: bool) -> None:
    sent = {"query": query, "limit": limit, "exact": exact}
    assert Parameters(simple).read(Raw(msgspec.json.encode(sent))) == sent


def test_arguments_too_deep_are_invalid() -> None:
    def tool(value: Any) -> None: ...

    with pytest.raises(InvalidArgs):
        read(tool, '{"value":' + "[" * 100_000 + "]" * 100_000 + "}")
