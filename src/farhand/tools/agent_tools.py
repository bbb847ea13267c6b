"""Which tools an agent has: the twenty of the main agent, the six of a sub-agent. Two functions that return lists."""

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
# All of them only read.
SUB_AGENT: Final = ("read", "grep", "glob", "ls", "memory_search", "memory_get")


def main_agent_tools(*families: Iterable[Tool]) -> list[Tool]:
    """The main agent's twenty, out of the families that have them, in the order of the reference."""
    return _chosen(MAIN_AGENT, families)


def sub_agent_tools(*families: Iterable[Tool]) -> list[Tool]:
    """A sub-agent's six, out of the families that have them; it cannot change anything, nor start another."""
    return _chosen(SUB_AGENT, families)


def _chosen(names: Iterable[str], families: Iterable[Iterable[Tool]]) -> list[Tool]:
    found = {tool.name: tool for family in families for tool in family}
    return [found[name] for name in names]
