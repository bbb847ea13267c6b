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


def test_aliases_are_accepted_and_the_own_name_wins() -> None:
    made = tool(greet, aliases={"who": "name", "person": "name"})
    assert run(made, who="you")["content"] == "main: hello you"
    assert run(made, person="me", name="you")["content"] == "main: hello you"
    assert "who" not in made.parameters["properties"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "greet parameter name is required"), ({"name": 3}, "parameter 'name': expected 'str', got 'int'")],
)
def test_bad_arguments_name_the_parameter(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgs) as raised:
        run(tool(greet), **arguments)
    assert raised.value.message == text
