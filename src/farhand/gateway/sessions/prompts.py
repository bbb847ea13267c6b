"""Collect the inputs of an agent's prompt: its files, skills, connected machines and the date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from farhand.agent.prompt import FILES, Machine, Prompted, PromptParts
from farhand.agent.skills import PromptSkill
from farhand.agent.tool_search import overview
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.agents import Agents
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import NotFound, ToolError
from farhand.protocol.names import ANY_BELOW, SEPARATOR
from farhand.protocol.untrusted import quoted
from farhand.store.objects.base import AGENTS, Objects
from farhand.store.tables.sessions import SessionRecord

log = logging.getLogger(__name__)

LARGEST_FILE = 1024 * 1024
MOST_TAGS = 4
# Identity and rules of the agent; the other files are about its owner.
FOR_GUESTS = frozenset({"SOUL.md", "AGENTS.md", "IDENTITY.md"})

AgentFiles = Callable[[str], Awaitable[Mapping[str, str]]]
AgentSkills = Callable[[str], Awaitable[Sequence[PromptSkill]]]


class Prompts:
    """Builds the system prompt of a session. `files` and `skills` return those of an agent."""

    def __init__(
        self, agents: Agents, node_registry: NodeRegistry, *, workspace: Path, files: AgentFiles, skills: AgentSkills
    ) -> None:
        self._agents = agents
        self._node_registry = node_registry
        self._workspace = workspace
        self._files = files
        self._skills = skills

    async def __call__(self, record: SessionRecord, tools: Sequence[ToolSpec], /, *, guest: bool = False) -> Prompted:
        """Build the prompt of a session whose agent may call these tools; for a guest, without the owner's data."""
        agent = record.agent_id
        minimal = record.kind == "child"
        parts = PromptParts(
            agent_id=agent,
            mode="minimal" if minimal else "full",
            workspace="" if guest else str(self._workspace),
            files={name: text for name, text in (await self._files(agent)).items() if not guest or name in FOR_GUESTS},
            private=record.key == session_keys.main_key(agent) and not guest,
            guest=guest,
            skills=() if minimal else await self._skills_of(agent),
            machines=self._machines({spec.name for spec in tools}, guest=guest),
            further_tools=overview(tools),
            date=f"{datetime.now().astimezone():%Y-%m-%d (%Z)}",
        )
        return Prompted(parts, "" if minimal else self._agents.of(agent).instructions or "")

    async def _skills_of(self, agent: str) -> tuple[PromptSkill, ...]:
        try:
            return tuple(await self._skills(agent))
        except ToolError as error:  # an agent without its skills is better than none
            log.warning("skills of %s are missing from the prompt: %s", agent, error)
            return ()

    def _machines(self, callable_: set[str], *, guest: bool) -> tuple[Machine, ...]:
        """Return the machines for the prompt; for a guest, only those with tools it may call."""
        machines = []
        for node_id, node in sorted(self._node_registry.nodes.items()):
            if not node.online and guest:
                continue
            if not node.online:
                machines.append(Machine(node_id, offline=node.seen))
                continue
            names = tuple(
                spec.name
                for spec in node.lent
                if spec.name in callable_ or f"{node_id}{SEPARATOR}{spec.name}" in callable_
            )
            if not node.card.tools:
                names = tuple(
                    family for each in node.card.capabilities if (family := f"{each}{ANY_BELOW}") in callable_
                )
            if guest and not names:
                continue
            system = node.card.runtime.get("hostOs")
            tags = [quoted(tag) for tag in node.tags[:MOST_TAGS]]
            described = [*([system] if isinstance(system, str) else []), *([f"tags {' '.join(tags)}"] if tags else [])]
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
    """Return the prompt's files; a file in several folders is taken from the first.

    Commands in a sandbox can write to these folders, so links out of the folder are not followed: they would show the
    model files that the sandbox does not have. Pipes are not opened, since that would block.
    """

    def read() -> dict[str, str]:
        found: dict[str, str] = {}
        for folder in folders:
            try:
                files = Files(folder, roots=[ConfinedRoot(folder)])
            except NotFound:
                continue
            for name in FILES:
                if name in found:
                    continue
                try:
                    with files.open(name) as file:
                        found[name] = file.read(LARGEST_FILE).decode(errors="replace")
                except NotFound:
                    continue
                except (ToolError, OSError) as error:
                    log.warning("%s is left out of the prompt: %s", folder / name, error)
        return found

    return await asyncio.to_thread(read)
