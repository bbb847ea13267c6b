"""The memory tools of an agent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from farhand.memory.memory import MOST_PASSAGE, Memory, Passage, SearchResult
from farhand.protocol.names import MAIN_AGENT
from farhand.tools.tool import CallContext, Tool, tool

Query = Annotated[str, Meta(description="What to look for: a question or some words.")]
MaxResults = Annotated[int, Meta(description="Most passages to return.")]
MinScore = Annotated[float | None, Meta(description="Leave out passages below this score, 0 to 1 (default 0.35).")]
PassagePath = Annotated[str, Meta(description="MEMORY.md or memory/NAME.md, as memory_search shows it.")]
From = Annotated[int, Meta(ge=0, description="First line, counted from 1.")]
Lines = Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="How many lines (default: to the end).")]


def memory_tools(memory: Memory) -> list[Tool]:
    """`memory_search` and `memory_get`."""

    async def memory_search(
        query: Query, context: CallContext, max_results: MaxResults = 6, min_score: MinScore = None
    ) -> str:
        """Search MEMORY.md and memory/*.md for what was written down earlier: decisions, people, dates, preferences.

        Returns passages with path, lines and score; read around one with memory_get.
        """
        found = await memory.search(
            query, agent=context.agent_id or MAIN_AGENT, max_results=max_results, min_score=min_score
        )
        return format_result(found)

    async def memory_get(path: PassagePath, context: CallContext, from_: From = 1, lines: Lines = None) -> str:
        """Read lines of a memory file, for instance around a passage that memory_search found."""
        agent = context.agent_id or MAIN_AGENT
        return format_passage(await memory.get(path, agent=agent, start=from_, lines=lines))

    return [
        tool(
            memory_search,
            aliases={"limit": "max_results"},
            read_only=True,
            reads=("MEMORY.md", "memory"),
            takes_handles=True,  # the query may be sent to a service
        ),
        tool(memory_get, aliases={"chunk_id": "path"}, read_only=True),
    ]


def format_result(found: SearchResult) -> str:
    """Return the hits as text; empty if there are neither hits nor a note."""
    parts = [
        f"[{hit.path}:{hit.start_line}-{hit.end_line}] (score: {hit.score:.2f})\n{hit.text}\n" for hit in found.hits
    ]
    if parts or found.note:
        parts.append(f"index: {found.index}{f' ({found.note})' if found.note else ''}")
    return "\n".join(parts)


def format_passage(passage: Passage) -> str:
    """Return the lines with their position in the file; a passage that is too long ends with how to continue."""
    text = passage.text
    end = passage.end_line
    rest = ""
    if len(text) > MOST_PASSAGE:
        lines = text[:MOST_PASSAGE].split("\n")
        whole = lines[:-1] or lines  # a single overlong line is cut
        text, end = "\n".join(whole), passage.start_line + len(whole) - 1
        left = passage.end_line - end
        rest = f"\n[{left} more lines; go on with from={end + 1}]" if left else "\n[the rest of this line is left out]"
    return f"[{passage.path}:{passage.start_line}-{end}]\n{text}{rest}"
