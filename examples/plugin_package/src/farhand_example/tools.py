"""Tools of the gateway: typed functions whose docstring is the description."""

from __future__ import annotations

from farhand.tools.tool import Tool, tool


def word_count(text: str) -> dict[str, int]:
    """Count the words and characters of a text."""
    return {"words": len(text.split()), "characters": len(text)}


def tools() -> list[Tool]:
    return [tool(word_count, read_only=True)]
