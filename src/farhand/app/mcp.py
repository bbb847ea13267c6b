"""Builds the parts of MCP: servers behind the gate with their routes, and the routes that serve MCP clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from farhand.api.mcp.approval_forms import ApprovalForms
from farhand.api.mcp.content import McpContent
from farhand.api.mcp.server import McpRoutes
from farhand.api.mcp.servers import McpServerRoutes
from farhand.api.mcp.sessions import SessionNotice
from farhand.api.mcp.tasks import Tasks
from farhand.app.sandbox import LiveConfinement
from farhand.config import Config, LiveConfig
from farhand.gateway.access.budgets import Budgets
from farhand.gateway.access.credentials import OWNER, Credentials
from farhand.gateway.access.freeze_hold import FreezeHold
from farhand.gateway.access.principal import Principal
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.search import CallSearch
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.journal import EventJournal
from farhand.gateway.mcp.servers import McpServers
from farhand.gateway.nodes.output import RemoteCommands
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.budgeted_model import BudgetedModel
from farhand.gateway.workspace.skills import Skills
from farhand.llm.model import Model
from farhand.llm.registry import Models
from farhand.machine.jobs.job import Ending
from farhand.machine.jobs.jobs import Jobs
from farhand.node.mcp_servers import ServerHost
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import Store


def local_host(
    workspace: Path, variables: Mapping[str, str], frozen: FreezeHold, confinement: LiveConfinement
) -> ServerHost:
    """Return the host of the servers that run on the gateway's own machine."""
    return ServerHost(workspace, variables, frozen=frozen, confinement=confinement)


def open_mcp(
    home: Path,
    config: Config,
    live: LiveConfig,
    database: Store,
    journal: EventJournal,
    catalog: Catalog,
    node_registry: NodeRegistry,
    queries: Queries,
    credentials: Credentials,
    secrets: KnownSecrets,
    handles: Secrets,
    models: Models,
    frozen: FreezeHold,
    budgets: Budgets,
) -> tuple[McpServers, McpServerRoutes]:
    """Return the service, which its owner uses as a context manager, and its routes."""

    def model() -> Model:
        chosen, limits = models.chosen(), lambda: budgets.limits(Principal(OWNER), None)
        return BudgetedModel(chosen, budgets, limits, models.prices())

    scheme = "https" if config.gateway.tls_cert else "http"
    servers = McpServers(
        home,
        database,
        journal,
        catalog,
        node_registry,
        queries,
        secrets,
        handles,
        settings=lambda: live.now.mcp,
        named_nodes=lambda: credentials.named_nodes,
        model=model,
        frozen=frozen,
        address=f"{scheme}://localhost:{config.gateway.port}",
    )
    return servers, McpServerRoutes(servers)


def open_door(
    gateway_id: str,
    database: Store,
    node_registry: NodeRegistry,
    catalog: Catalog,
    gate: Gate,
    commands: RemoteCommands,
    secrets: KnownSecrets,
    approvals: Approvals,
    skills: Skills,
    agents: Agents,
    ending: asyncio.Event,
    tell: Callable[[SessionNotice], None],
) -> McpRoutes:
    """Return the routes that serve MCP clients."""
    forms = ApprovalForms(approvals, secrets)
    tasks = Tasks(database, gate, forms, node_registry.clock)
    content = McpContent(gate, skills, CallSearch(database, gate), commands, secrets, lambda: agents.names)
    return McpRoutes(gateway_id, node_registry, catalog, gate, commands, secrets, tasks, forms, content, ending, tell)


def end_with_servers(jobs: Jobs, host: ServerHost) -> Callable[[], Awaitable[Ending]]:
    """Return a function that ends the commands and the MCP servers of this machine."""

    async def end_all() -> Ending:
        await host.end_all()
        return await jobs.end_all()

    return end_all
