"""What docstrings and annotations say about parameters reaches callers."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta

from farhand.sdk import ToolContext, ToolRegistry
from farhand.sdk.docstrings import split_docstring

GOOGLE = """Search the notes.

    Longer text.

    Args:
        query (str): What to look for,
            in any language.
        limit: How many: at most 9.

    Returns:
        The hits.
    """
NUMPY = """Search the notes.

    Longer text.

    Parameters
    ----------
    query : str
        What to look for,
        in any language.
    limit : int, optional
        How many: at most 9.

    Returns
    -------
    dict
        The hits.
    """
TEXTS = {"query": "What to look for, in any language.", "limit": "How many: at most 9."}


@pytest.mark.parametrize(
    ("text", "rest"), [(GOOGLE, "Returns:\n    The hits."), (NUMPY, "Returns\n-------\ndict\n    The hits.")]
)
def test_both_styles_are_read(text: str, rest: str) -> None:
    description, texts = split_docstring(text)
    assert texts == TEXTS
    assert description == f"Search the notes.\n\nLonger text.\n\n{rest}"


@pytest.mark.parametrize("text", ["", "One line.", "Args:\n", "Args: none", "Uses\n----\nnothing", "Parameters\n---\n"])
def test_other_docstrings_stay_as_they_are(text: str) -> None:
    assert split_docstring(text) == (text.strip(), {})


def schema_of(registry: ToolRegistry, name: str) -> Any:
    (spec,) = [one for one in registry.specs() if one.name == name]
    return {key: value.get("description") for key, value in spec.parameters["properties"].items()}


def test_annotations_come_before_the_docstring() -> None:
    registry = ToolRegistry("notes")

    @registry.tool
    async def search(
        ctx: ToolContext,
        query: Annotated[str, "Words."],
        limit: Annotated[int, Meta(ge=1, description="Most hits.")] = 5,
        order: str = "",
        plain: int = 0,
    ) -> None:
        """Search.

        Args:
            query: unused
            limit: unused
            order: The order.
        """

    assert schema_of(registry, "notes.search") == {
        "query": "Words.",
        "limit": "Most hits.",
        "order": "The order.",
        "plain": None,
    }
    (spec,) = registry.specs()
    assert spec.description == "Search." and spec.parameters["properties"]["limit"]["minimum"] == 1


def test_a_bare_decorator_registers_or_raises() -> None:
    registry = ToolRegistry()

    @registry.tool
    def first(ctx: ToolContext) -> None:
        """One."""

    @registry.tool()
    def second(ctx: ToolContext) -> None:
        """Two."""

    assert registry.tool_names() == ["first", "second"] and first.__name__ == "first"
    with pytest.raises(ValueError, match="a name or a function"):
        registry.tool(7)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="context"):
        registry.tool(lambda: None)
    with pytest.raises(ValueError):
        ToolRegistry("two words")
