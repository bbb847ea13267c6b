"""Skills: `SKILL.md` files an agent can read, the machines each of them needs, and why one cannot be used now.

A skill is a folder `skills/{name}/` with a `SKILL.md`; an agent's own hides a global one of the same name.
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
    """A skill as an agent may use it now, or why it may not."""

    name: str
    description: str
    # Where the agent reads it: a path of its workspace.
    path: str
    # The key of the object.
    location: str
    source: str
    always: bool
    eligible: bool
    # The nodes that have everything it requires.
    hosts: list[str]
    reasons: list[str]
    requirements: Requirements
    # The SKILL.md as the file tools of the gateway's machine open it.
    file: str = ""
    # False: the prompt does not list it.
    model_invocable: bool = True


class LocalSkills(msgspec.Struct, frozen=True):
    """Where skills are on the gateway's machine.

    `files`: what its tools may read. `own`: the agent whose objects are the files of the workspace, if that is so.
    `workspace_of`: the agent that also has the skills in a workspace elsewhere, if there is one.
    """

    files: Files
    own: str | None
    workspace_of: str | None


class Skills:
    """Finds skills and judges them. `holds` tells whether a setting is set, `probe` asks a node for programs.

    `folders` copies skills to where the file tools can open them; `local` tells which need no copy.
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
        """The skills an agent can use now, by name."""
        return [skill for skill in await self.all(agent_id) if skill.eligible]

    async def all(self, agent_id: str | None = None) -> list[Skill]:
        """Every skill an agent can see, with the reasons where it cannot be used."""
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
        """Bring the copy of a skill for all agents up to date, after it was changed."""
        try:
            await self._folders.copy(name)
        except NotFound:
            return  # it was removed, and so was its copy
        except ToolError as error:
            log.warning("the skill %r cannot be opened by file tools: %s", name, error)

    async def _read(self, agent: str, name: str, local: bool) -> tuple[SkillFile, str] | None:
        """What a skill says of itself, and where the file tools find its SKILL.md; None where there is none."""
        file = await self._stored(agent, name)
        if local and (file is None or file.source != "agent"):  # an agent's own objects come first, as for its files
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
        """The path of a skill's SKILL.md for file tools; a copy is made where the objects are not such files."""
        shared = bool((await self._workspace.objects.list(f"{SKILLS}/{name}/", limit=1)).objects)
        if file.source == "agent" and agent == self._local.own and not shared:
            return file.path
        overlaid = bool((await self._workspace.objects.list(f"{AGENTS}/{agent}/{SKILLS}/{name}/", limit=1)).objects)
        return str(await self._folders.copy(name, agent if overlaid else None) / SKILL_FILE)

    def _names_here(self) -> set[str]:
        """The skills in a workspace that lies elsewhere."""
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
        """What is stored of a skill, the agent's own or that for all."""
        path = f"{SKILLS}/{name}/{SKILL_FILE}"
        try:
            found = await self._workspace.find(agent, path)
            if found is None:
                return None
            if found.info.size > LARGEST_SKILL:
                raise Failed(f"it has {found.info.size} bytes, more than {LARGEST_SKILL}")
            _, data = await self._workspace.objects.get(found.info.key)
        except NotFound:
            return None  # removed just now
        except ToolError as error:  # the others are none the worse for it
            return unreadable_skill(name, path, error.message)
        # In a thread: YAML is slow, and whoever writes the file decides how much there is of it.
        text = data.decode(errors="replace")
        file = await asyncio.to_thread(read_skill, name, text, path, found.info.key, found.source)
        return self._with_settings(file)

    def _with_settings(self, file: SkillFile) -> SkillFile:
        """A skill with the requirements that the owner's settings give it."""
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
        """Ask the connected nodes for the programs skills need, where that is not known or was asked long ago."""
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
            log.warning("node %s did not tell its programs: %s", node_id, error or "time-out")

    # -- judging ----------------------------------------------------------------------------------------

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
        """The nodes each of which has all that is needed, or what the nearest lacks of the need that leaves none."""
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
    """All that is wanted, unless there is one of it."""
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
    """What a node's system is called among the names that are wanted."""
    return {name for name in wanted if _system(name) == _system(system)}


def _system(name: str) -> str:
    return _OS.get(name.lower(), name.lower())
