"""Build what agents work with: models, memory, skills and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from farhand.agent.skills import PromptSkill
from farhand.app.local_machine import LocalMachine
from farhand.app.plugins import MODELS, Plugins
from farhand.config import Config, LiveConfig, SettingsError
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.nodes.inventory import NodeInventory
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.keys import MAIN
from farhand.gateway.sessions.prompts import Prompts, StoredFiles, files_in
from farhand.gateway.workspace.memory_sources import memory_sources
from farhand.gateway.workspace.settings_tool import Settings
from farhand.gateway.workspace.skill_folders import SkillFolders
from farhand.gateway.workspace.skills import LocalSkills, Skills
from farhand.gateway.workspace.workspace import Workspace
from farhand.llm.errors import NotConfigured
from farhand.llm.registry import ModelChoice, Models
from farhand.llm.settings import ProviderSettings
from farhand.machine.files.local_paths import AGENTS_FOLDER
from farhand.memory.memory import Memory
from farhand.memory.registry import Provider, make_embedder
from farhand.protocol.errors import ToolError
from farhand.protocol.redaction import KnownSecrets
from farhand.store.objects.base import Objects
from farhand.store.objects.folder import FolderObjects

MEMORY_FILE = "memory.db"


def build_skills(
    home: Path,
    workspace_folder: Path,
    config: Config,
    workspace: Workspace,
    node_registry: NodeRegistry,
    inventory: NodeInventory,
    machine: LocalMachine,
    settings: Settings,
) -> Skills:
    objects = workspace.objects
    own_workspace = workspace_folder.resolve() == (home / AGENTS_FOLDER / MAIN).resolve()
    same_folder = own_workspace and isinstance(objects, FolderObjects)
    return Skills(
        workspace,
        node_registry,
        inventory.probe,
        holds=settings.holds,
        folders=SkillFolders(objects, machine.skill_files),
        local=LocalSkills(machine.files, MAIN if same_folder else None, None if same_folder else MAIN),
        entries=config.skills.entries,
    )


def build_prompts(
    home: Path,
    workspace_folder: Path,
    agents: Agents,
    node_registry: NodeRegistry,
    objects: Objects,
    known: Skills,
    secrets: KnownSecrets,
) -> Prompts:
    folders = home / AGENTS_FOLDER
    stored = None if isinstance(objects, FolderObjects) else StoredFiles(objects)

    async def files(agent: str) -> Mapping[str, str]:
        # Plain files are read as such; with --workspace, what the agent's own folder lacks is taken from there.
        workspace = [workspace_folder] if agent == MAIN else []
        found = await files_in([*([folders / agent] if stored is None else []), *workspace])
        whole = found if stored is None else {**found, **await stored.of(agent)}
        return {name: secrets.redact_text(text) for name, text in whole.items()}

    async def skills(agent: str) -> tuple[PromptSkill, ...]:
        eligible = [skill for skill in await known.eligible(agent) if skill.model_invocable]
        return tuple(PromptSkill(skill.name, skill.description, skill.file) for skill in eligible)

    return Prompts(agents, node_registry, workspace=workspace_folder, files=files, skills=skills)


def open_models(
    live: LiveConfig, environ: Mapping[str, str], plugins: Plugins, secrets: KnownSecrets, handles: Secrets
) -> Models:
    """Return the models of the settings in force. A key that is added to the file is hidden from then on."""

    def choice(config: Config) -> ModelChoice:
        secrets.add_settings([msgspec.to_builtins(config.providers)])
        others = tuple(agent.model for agent in config.agents.values())
        return ModelChoice(config.providers, config.models, config.agent.model, others)

    def resolved(name: str, provider: ProviderSettings) -> ProviderSettings:
        """Put the values of secrets in the place of `{{secret:NAME}}`. Raises NotConfigured."""
        try:
            found = handles.resolved(msgspec.to_builtins(provider), f"provider:{name}")
        except ToolError as error:
            raise NotConfigured(f"[providers.{name}]: {error.message}.") from None
        return msgspec.convert(found, ProviderSettings)

    return Models(
        environ=environ,
        apis=plugins.loaders(MODELS),
        current=live.derive(choice),
        resolved=resolved,
        secrets_version=lambda: handles.version,
    )


def open_memory(
    home: Path, workspace: Path, config: Config, objects: Objects, models: Models, secrets: KnownSecrets
) -> Memory:
    """Return the agents' memory. Raises SettingsError for an invalid setting."""
    settings = config.memory
    if settings.min_score is not None and not 0 <= settings.min_score <= 1:
        raise SettingsError(f"memory.min_score must be between 0 and 1, not {settings.min_score:g}")
    embedder = make_embedder(settings, Provider(*models.server()))
    sources = memory_sources(home, workspace, objects)
    return Memory(home / MEMORY_FILE, sources, embedder, min_score=settings.min_score, secrets=secrets)
