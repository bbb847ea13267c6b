"""A typed function as a tool: schema, aliases, arguments, results."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any

import pytest
from msgspec import Meta

from farhand.protocol.errors import InvalidArgs
from farhand.tools.tool import CallContext, Tool, tool

CONTEXT = CallContext("call-1", session_key="main")


def run(made: Tool, **arguments: Any) -> Any:
    return asyncio.run(made.run(arguments, CONTEXT))


async def greet(context: CallContext, *, name: Annotated[str, Meta(description="Who.")], loud: bool = False) -> str:
    """Greet somebody."""
    return f"{context.session_key}: hello {name}{'!' * loud}"


def test_the_function_says_name_description_and_schema_and_the_context_is_not_shown() -> None:
    made = tool(greet)
    assert (made.name, made.description) == ("greet", "Greet somebody.")
    assert made.parameters == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "Who."},
            "loud": {"type": "boolean", "default": False},
        },
        "required": ["name"],
        "additionalProperties": False,
    }


def test_a_text_becomes_the_content_and_anything_else_is_the_result() -> None:
    assert run(tool(greet), name="you", loud=True) == {"content": "main: hello you!"}

    def numbers() -> dict[str, int]:
        return {"one": 1}

    assert run(tool(numbers, name="digits")) == {"one": 1}
    assert tool(numbers, name="digits").name == "digits"


def test_a_plain_function_runs_in_a_thread() -> None:
    def where() -> str:
        return threading.current_thread().name

    assert run(tool(where))["content"] != threading.current_thread().name


def test_aliases_are_accepted_and_two_names_of_a_parameter_are_refused() -> None:
    made = tool(greet, aliases={"who": "name", "person": "name"})
    assert run(made, who="you")["content"] == "main: hello you"
    assert made.canonical({"person": "me", "loud": True}) == {"name": "me", "loud": True}
    with pytest.raises(InvalidArgs, match="'person' and 'name' are names of the same parameter"):
        run(made, person="me", name="me")
    assert "who" not in made.parameters["properties"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "greet parameter name is required"), ({"name": 3}, "parameter 'name': expected 'str', got 'int'")],
)
def test_bad_arguments_name_the_parameter(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgs) as raised:
        run(tool(greet), **arguments)
    assert raised.value.message == text


def test_another_casing_of_a_listed_value_becomes_that_value() -> None:
    def act(action: Annotated[str, Meta(extra_json_schema={"enum": ["add", "remove"]})], text: str = "") -> str:
        return f"{action} {text}"

    made = tool(act)
    assert made.canonical({"action": " ADD\n", "text": " X "}) == {"action": "add", "text": " X "}
    assert made.canonical({"action": "adds"}) == {"action": "adds"}
