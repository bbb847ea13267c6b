"""Find the skills of an agent, the machines each one needs, and why a skill cannot be used now.

A skill is a folder `skills/{name}/` with a `SKILL.md`; an agent's own skill hides a global one of the same name.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.gateway.workspace.skill_file import Requirements, SkillEntry, SkillFile, read_skill, unreadable_skill
from farhand.gateway.workspace.skill_folders import SKILL_FILE, SkillFolders
from farhand.gateway.workspace.workspace import Workspace
from farhand.machine.files.files import Files
from farhand.machine.files.listing import list_folder
from farhand.protocol.errors import Failed, NotFound, ToolError
from farhand.protocol.names import MAIN_AGENT
from farhand.store.objects.base import AGENTS, SKILLS

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 10.0
PROBED_FOR_MS: Final = 5 * 60 * 1000
LARGEST_SKILL: Final = 1024 * 1024
MOST_HERE: Final = 500
_BIN: Final = re.compile(r"[A-Za-z0-9._+-]{1,128}")
_OS: Final = {"macos": "darwin", "osx": "darwin", "mac": "darwin", "win32": "windows", "win": "windows"}

Probe = Callable[[str, list[str]], Awaitable[Any]]


class Skill(msgspec.Struct, frozen=True):
    """Describe a skill that an agent can use, or why it cannot."""

    name: str
    description: str
    # The path in the agent's workspace.
    path: str
    # The key of the object.
    location: str
    source: str
    always: bool
    eligible: bool
    # The nodes that meet every requirement.
    hosts: list[str]
    reasons: list[str]
    requirements: Requirements
    # The path of the SKILL.md for file tools on the gateway's machine.
    file: str = ""
    # If False, the prompt does not list it.
    model_invocable: bool = True


class LocalSkills(msgspec.Struct, frozen=True):
    """Describe where skills are on the gateway's machine.

    `files`: what its tools may read. `own`: the agent whose objects are the workspace files, if any. `workspace_of`:
    the agent that also has the skills of a separate workspace, if any.
    """

    files: Files
    own: str | None
    workspace_of: str | None


class Skills:
    """Find skills and check their requirements.

    `holds` returns whether a setting is set; `probe` asks a node for programs. `folders` copies skills to where the
    file tools can open them; `local` determines which need no copy.
    """

    def __init__(
        self,
        workspace: Workspace,
        node_registry: NodeRegistry,
        probe: Probe,
        *,
        holds: Callable[[str], bool],
        folders: SkillFolders,
        local: LocalSkills,
        entries: Mapping[str, SkillEntry] | None = None,
    ) -> None:
        self._folders = folders
        self._local = local
        self._workspace = workspace
        self._node_registry = node_registry
        self._probe = probe
        self._holds = holds
        self._entries = entries or {}

    async def eligible(self, agent_id: str | None = None) -> list[Skill]:
        """Return the skills an agent can use now, by name."""
        return [skill for skill in await self.all(agent_id) if skill.eligible]

    async def all(self, agent_id: str | None = None) -> list[Skill]:
        """Return every skill an agent can see, with the reasons if it cannot be used."""
        agent = agent_id or MAIN_AGENT
        folder = await self._workspace.folder(agent, SKILLS)
        names = {name.split("/")[1] for name in folder.directories} if folder else set()
        await self._folders.prune(agent, names)
        local = await asyncio.to_thread(self._names_here) if agent == self._local.workspace_of else set()
        found = await asyncio.gather(*(self._read(agent, name, name in local) for name in sorted(names | local)))
        files = [file for file in found if file is not None]
        await self._probe_for([file for file, _ in files])
        return [self._judged(file, place) for file, place in sorted(files, key=lambda pair: pair[0].name)]

    async def refresh(self, name: str) -> None:
        """Update the shared copy of a skill after a change."""
        try:
            await self._folders.copy(name)
        except NotFound:
            return  # it was removed, and so was its copy
        except ToolError as error:
            log.warning("file tools cannot open the skill %r: %s", name, error)

    async def _read(self, agent: str, name: str, local: bool) -> tuple[SkillFile, str] | None:
        """Return a parsed skill and the path of its SKILL.md for file tools; None if it does not exist."""
        file = await self._stored(agent, name)
        # An agent's own objects take precedence, as for its files.
        if local and (file is None or file.source != "agent"):
            return await asyncio.to_thread(self._read_here, name)
        if file is None:
            return None
        if file.unreadable:
            return file, file.path
        try:
            return file, await self._openable(agent, name, file)
        except ToolError as error:
            return unreadable_skill(name, file.path, error.message), file.path

    async def _openable(self, agent: str, name: str, file: SkillFile) -> str:
        """Return the path of a skill's SKILL.md for file tools, after copying it if necessary."""
        shared = bool((await self._workspace.objects.list(f"{SKILLS}/{name}/", limit=1)).objects)
        if file.source == "agent" and agent == self._local.own and not shared:
            return file.path
        overlaid = bool((await self._workspace.objects.list(f"{AGENTS}/{agent}/{SKILLS}/{name}/", limit=1)).objects)
        return str(await self._folders.copy(name, agent if overlaid else None) / SKILL_FILE)

    def _names_here(self) -> set[str]:
        """Return the names of the skills in a separate workspace."""
        try:
            entries = list_folder(self._local.files, SKILLS)
        except ToolError:
            return set()
        names = {entry.name for entry in entries if entry.kind != "file" and entry.name.isprintable()}
        return set(sorted(names)[:MOST_HERE])

    def _read_here(self, name: str) -> tuple[SkillFile, str] | None:
        path = f"{SKILLS}/{name}/{SKILL_FILE}"
        try:
            with self._local.files.open(path) as file:
                data = file.read(LARGEST_SKILL + 1)
        except NotFound:
            return None
        except ToolError as error:
            return unreadable_skill(name, path, error.message), path
        if len(data) > LARGEST_SKILL:
            return unreadable_skill(name, path, f"it has more than {LARGEST_SKILL} bytes"), path
        return self._with_settings(read_skill(name, data.decode(errors="replace"), path, path, "workspace")), path

    async def _stored(self, agent: str, name: str) -> SkillFile | None:
        """Return a stored skill: the agent's own, or else the global one."""
        path = f"{SKILLS}/{name}/{SKILL_FILE}"
        try:
            found = await self._workspace.find(agent, path)
            if found is None:
                return None
            if found.info.size > LARGEST_SKILL:
                raise Failed(f"it has {found.info.size} bytes, more than {LARGEST_SKILL}")
            _, data = await self._workspace.objects.get(found.info.key)
        except NotFound:
            return None  # removed meanwhile
        except ToolError as error:  # a faulty skill must not affect the others
            return unreadable_skill(name, path, error.message)
        # In a thread: YAML parsing is slow, and the file may be large.
        text = data.decode(errors="replace")
        file = await asyncio.to_thread(read_skill, name, text, path, found.info.key, found.source)
        return self._with_settings(file)

    def _with_settings(self, file: SkillFile) -> SkillFile:
        """Return a skill with the requirements from the settings applied."""
        entry = self._entry(file)
        if entry is None or entry.requires is None:
            return file
        given = {name: value for name, value in msgspec.structs.asdict(entry.requires).items() if value}
        return msgspec.structs.replace(file, requirements=msgspec.structs.replace(file.requirements, **given))

    def _entry(self, file: SkillFile) -> SkillEntry | None:
        for name in (file.name, file.folder, file.location):
            if name in self._entries:
                return self._entries[name]
        return None

    # -- programs ---------------------------------------------------------------------------------------

    async def _probe_for(self, files: list[SkillFile]) -> None:
        """Ask the connected nodes for the programs that skills need, if the answer is unknown or old."""
        wanted = {name for file in files for name in (*file.requirements.bins, *file.requirements.anyBins)}
        wanted = {name for name in wanted if _BIN.fullmatch(name)}
        if not wanted:
            return
        asked = [
            self._ask(node.card.node_id, sorted(missing))
            for node in self._node_registry.nodes.values()
            if "probe" in self._node_registry.queries(node.card.node_id) and (missing := self._unknown(node, wanted))
        ]
        await asyncio.gather(*asked)

    def _unknown(self, node: Node, wanted: set[str]) -> set[str]:
        runtime = node.card.runtime
        at = runtime.get("hostBinStatusUpdatedAt")
        known = runtime.get("hostBinStatus")
        if not isinstance(known, dict) or not isinstance(at, int) or self._node_registry.clock() - at > PROBED_FOR_MS:
            return wanted
        return wanted - known.keys()

    async def _ask(self, node_id: str, bins: list[str]) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._probe(node_id, bins)
        except (ToolError, TimeoutError) as error:
            log.warning("failed to list the programs of node %s: %s", node_id, error or "time-out")

    # -- requirements -----------------------------------------------------------------------------------

    def _judged(self, file: SkillFile, place: str) -> Skill:
        entry = self._entry(file)
        always = file.always if entry is None or entry.always is None else entry.always
        requirements = file.requirements
        hosts: list[str] = []
        reasons: list[str] = []
        if entry is not None and not entry.enabled:
            reasons = ["disabled by skills.entries policy"]
        elif file.unreadable:
            reasons = [f"cannot be read: {file.unreadable}"]
        elif always:
            hosts = sorted(name for name, node in self._node_registry.nodes.items() if node.online)
        elif not file.well_formed or not all(
            _BIN.fullmatch(name) for name in (*requirements.bins, *requirements.anyBins)
        ):
            reasons = ["invalid requirement identifiers"]
        else:
            hosts, reasons = self._hosts(requirements)
        return Skill(
            name=file.name,
            description=file.description,
            path=file.path,
            location=file.location,
            source=file.source,
            always=always,
            eligible=not reasons,
            hosts=hosts if not reasons else [],
            reasons=reasons,
            requirements=requirements,
            file=place,
            model_invocable=file.model_invocable,
        )

    def _hosts(self, needs: Requirements) -> tuple[list[str], list[str]]:
        """Return the nodes that meet every requirement; if none does, what the closest one lacks."""
        online = [node for node in self._node_registry.nodes.values() if node.online]
        names = sorted(node.card.node_id for node in online)
        missing = [f"requires config: {path}" for path in needs.config if not self._holds(path)]
        if not needs.of_a_host:
            return names, missing
        if not online:
            return [], ["no connected hosts", *missing]
        steps: list[tuple[str, Callable[[Node], list[str]]]] = [
            ("hostRoles", lambda node: _lacks_all(needs.hostRoles, {node.card.role})),
            ("capabilities", lambda node: _lacks(needs.capabilities, _capabilities(node))),
            ("anyCapabilities", lambda node: _lacks_all(needs.anyCapabilities, _capabilities(node))),
            ("os", lambda node: _lacks_all(needs.os, _spellings(str(node.card.runtime.get("hostOs", "")), needs.os))),
            ("env", lambda node: _lacks(needs.env, _names(node, "hostEnv"))),
            ("bins", lambda node: _lacks(needs.bins, _bins(node))),
            ("anyBins", lambda node: _lacks_all(needs.anyBins, _bins(node))),
        ]
        left = online
        for name, lacks in steps:
            lacking = [lacks(node) for node in left]
            left = [node for node, lacked in zip(left, lacking, strict=True) if not lacked]
            if not left:
                nearest = min(lacking, key=len)
                return [], [f"requires {name}: {', '.join(nearest)}", *missing]
        return sorted(node.card.node_id for node in left), missing


def _lacks(wanted: list[str], there: set[str]) -> list[str]:
    return [name for name in wanted if name not in there]


def _lacks_all(wanted: list[str], there: set[str]) -> list[str]:
    """Return all of `wanted` if none of them is in `there`, otherwise nothing."""
    return wanted if there.isdisjoint(wanted) else []


def _capabilities(node: Node) -> set[str]:
    return {*node.card.capabilities, *(spec.capability for spec in node.card.tools if spec.capability)}


def _names(node: Node, field: str) -> set[str]:
    names = node.card.runtime.get(field)
    return {str(name) for name in names} if isinstance(names, list) else set()


def _bins(node: Node) -> set[str]:
    status = node.card.runtime.get("hostBinStatus")
    return {name for name, there in status.items() if there is True} if isinstance(status, dict) else set()


def _spellings(system: str, wanted: list[str]) -> set[str]:
    """Return which of the wanted names match a node's operating system."""
    return {name for name in wanted if _system(name) == _system(system)}


def _system(name: str) -> str:
    return _OS.get(name.lower(), name.lower())
