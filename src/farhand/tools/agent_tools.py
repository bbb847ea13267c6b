"""The tools of agents: twenty for the main agent, six for a sub-agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from farhand.tools.tool import Tool

MAIN_AGENT: Final = (
    "read",
    "write",
    "edit",
    "apply_patch",
    "grep",
    "glob",
    "ls",
    "exec",
    "process",
    "cron",
    "message",
    "agents_list",
    "sessions_list",
    "sessions_history",
    "sessions_send",
    "sessions_spawn",
    "subagents",
    "sessions_status",
    "memory_search",
    "memory_get",
)
# All of them are read-only.
SUB_AGENT: Final = ("read", "grep", "glob", "ls", "memory_search", "memory_get")


def main_agent_tools(*families: Iterable[Tool]) -> list[Tool]:
    """Return the main agent's tools from the given families, in the order of `MAIN_AGENT`."""
    return _chosen(MAIN_AGENT, families)


def sub_agent_tools(*families: Iterable[Tool]) -> list[Tool]:
    """Return a sub-agent's tools from the given families; it can neither change anything nor start another agent."""
    return _chosen(SUB_AGENT, families)


def _chosen(names: Iterable[str], families: Iterable[Iterable[Tool]]) -> list[Tool]:
    found = {tool.name: tool for family in families for tool in family}
    return [found[name] for name in names]
