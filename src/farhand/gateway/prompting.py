"""What an agent's prompt is told: its files, its skills, the machines that are connected, the day."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from farhand.agent.prompt import FILES, Machine, PromptParts, system_prompt
from farhand.agent.skills import Skill
from farhand.agent.tool_search import overview
from farhand.gateway import session_keys
from farhand.gateway.agents import Agents
from farhand.gateway.roster import Roster
from farhand.protocol.calls import ToolSpec
from farhand.protocol.names import SEPARATOR
from farhand.store.sessions import SessionRecord

LARGEST_FILE = 1024 * 1024

AgentFiles = Callable[[str], Awaitable[Mapping[str, str]]]
AgentSkills = Callable[[str], Awaitable[Sequence[Skill]]]


class Prompts:
    """Writes the system prompt of a session. `files` and `skills` give those of an agent."""

    def __init__(
        self, agents: Agents, roster: Roster, *, workspace: Path, files: AgentFiles, skills: AgentSkills
    ) -> None:
        self._agents = agents
        self._roster = roster
        self._workspace = workspace
        self._files = files
        self._skills = skills

    async def __call__(self, record: SessionRecord, tools: Sequence[ToolSpec]) -> str:
        agent = record.agent_id
        minimal = record.kind == "child"
        # Tools of machines are told with their machine.
        elsewhere = tuple(f"{node_id}{SEPARATOR}" for node_id in self._roster.nodes)
        parts = PromptParts(
            agent_id=agent,
            mode="minimal" if minimal else "full",
            workspace=str(self._workspace),
            files=await self._files(agent),
            private=record.key == session_keys.main_key(agent),
            skills=() if minimal else tuple(await self._skills(agent)),
            machines=self._machines({spec.name for spec in tools}),
            further_tools=overview([spec for spec in tools if not spec.name.startswith(elsewhere)]),
            date=f"{datetime.now().astimezone():%Y-%m-%d (%Z)}",
        )
        prompt = system_prompt(parts)
        more = self._agents.of(agent).instructions
        return f"{prompt}\n\n{more}" if more and not minimal else prompt

    def _machines(self, callable_: set[str]) -> tuple[Machine, ...]:
        machines = []
        for node_id, node in sorted(self._roster.nodes.items()):
            if not node.online:
                continue
            names = tuple(
                spec.name
                for spec in node.card.tools
                if spec.name in callable_ or f"{node_id}{SEPARATOR}{spec.name}" in callable_
            )
            system = node.card.runtime.get("hostOs")
            described = [*([system] if isinstance(system, str) else []), *node.card.tags]
            machines.append(Machine(node_id, ", ".join(described), names))
        return tuple(machines)


async def files_in(folders: Sequence[Path]) -> dict[str, str]:
    """The prompt's files; one that is in several of the folders counts where it is found first."""

    def read() -> dict[str, str]:
        found: dict[str, str] = {}
        for name in FILES:
            for folder in folders:
                try:
                    with (folder / name).open("rb") as file:
                        found[name] = file.read(LARGEST_FILE).decode(errors="replace")
                    break
                except OSError:
                    continue
        return found

    return await asyncio.to_thread(read)
