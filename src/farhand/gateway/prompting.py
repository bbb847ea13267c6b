"""What an agent's prompt is told: its files, its skills, the machines that are connected, the day."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from farhand.agent.prompt import FILES, Machine, Prompted, PromptParts
from farhand.agent.skills import Skill
from farhand.agent.tool_search import overview
from farhand.gateway import session_keys
from farhand.gateway.agents import Agents
from farhand.gateway.roster import Roster
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import ToolError
from farhand.protocol.names import FAMILY, SEPARATOR
from farhand.store.objects import AGENTS, Objects
from farhand.store.sessions import SessionRecord

log = logging.getLogger("farhand.prompt")

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

    async def __call__(self, record: SessionRecord, tools: Sequence[ToolSpec]) -> Prompted:
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
            skills=() if minimal else await self._skills_of(agent),
            machines=self._machines({spec.name for spec in tools}),
            further_tools=overview([spec for spec in tools if not spec.name.startswith(elsewhere)]),
            date=f"{datetime.now().astimezone():%Y-%m-%d (%Z)}",
        )
        return Prompted(parts, "" if minimal else self._agents.of(agent).instructions or "")

    async def _skills_of(self, agent: str) -> tuple[Skill, ...]:
        try:
            return tuple(await self._skills(agent))
        except ToolError as error:  # an agent without its skills is better than none
            log.warning("the skills of %s are left out of the prompt: %s", agent, error)
            return ()

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
            if not node.card.tools:
                names = tuple(family for each in node.card.capabilities if (family := f"{each}{FAMILY}") in callable_)
            system = node.card.runtime.get("hostOs")
            described = [*([system] if isinstance(system, str) else []), *node.card.tags]
            machines.append(Machine(node_id, ", ".join(described), names))
        return tuple(machines)


class StoredFiles:
    """The prompt's files among an agent's objects; read again when their etag has changed."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[str, tuple[str, str]] = {}

    async def of(self, agent: str) -> dict[str, str]:
        keys = {name: f"{AGENTS}/{agent}/{name}" for name in FILES}
        texts = await asyncio.gather(*(self._text(key) for key in keys.values()))
        return {name: text for name, text in zip(keys, texts, strict=True) if text is not None}

    async def _text(self, key: str) -> str | None:
        try:
            info = await self._objects.head(key)
            if info is None or info.size > LARGEST_FILE:
                return None
            etag, text = self._known.get(key, ("", ""))
            if etag != info.etag:
                found, data = await self._objects.get(key)
                text = data.decode(errors="replace")
                self._known[key] = (found.etag, text)
        except ToolError as error:
            log.warning("%s is left out of the prompt: %s", key, error)
            return None
        return text


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
