"""Builds the parts of a gateway and connects them, by constructor arguments only.

Where two parts need each other, the one that is built first gets a function that looks the other one up when called.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from farhand.agent.compaction import Compactor
from farhand.agent.loop import Limits
from farhand.api.mcp.approval_forms import ApprovalForms
from farhand.api.mcp.content import McpContent
from farhand.api.mcp.server import McpRoutes
from farhand.api.mcp.server_routes import McpServerRoutes
from farhand.api.mcp.tasks import Tasks
from farhand.api.node_socket.services import NodeServices
from farhand.api.openai.agent_runs import AgentRuns
from farhand.api.openai.completions import ChatRoutes
from farhand.api.openai.responses import ResponseRoutes
from farhand.api.routes.agent.agent_process import AgentProcessRoutes
from farhand.api.routes.agent.channels import ChannelRoutes
from farhand.api.routes.agent.cron import CronRoutes
from farhand.api.routes.agent.memory import MemoryRoutes
from farhand.api.routes.agent.sessions import SessionRoutes
from farhand.api.routes.agent.workspace import WorkspaceRoutes
from farhand.api.routes.approvals import ApprovalRoutes
from farhand.api.routes.budgets import BudgetRoutes
from farhand.api.routes.calls import CallRoutes, ReceiptRoutes
from farhand.api.routes.fanout import FanOutRoutes
from farhand.api.routes.freeze import FreezeRoutes
from farhand.api.routes.health import HealthRoutes
from farhand.api.routes.invoke import InvokeRoutes, UndoRoutes
from farhand.api.routes.journal import JournalRoutes
from farhand.api.routes.metrics import MetricsRoutes
from farhand.api.routes.nodes import NodeRoutes
from farhand.api.routes.pairing import PairingRoutes
from farhand.api.routes.policy import PolicyRoutes
from farhand.api.routes.secrets import SecretRoutes
from farhand.api.routes.tokens import TokenRoutes
from farhand.api.routes.transfers import TransferRoutes
from farhand.api.routes.trials import TrialRoutes
from farhand.api.server.router import Route, routes_of
from farhand.api.terminals.routes import TerminalRoutes
from farhand.app.agents import build_prompts, build_skills, open_memory, open_models
from farhand.app.fleet import fleet_routes, settings_digest
from farhand.app.fleet_connections import FleetConnections, FleetParts
from farhand.app.home import OpenedStore, check_objects, open_objects
from farhand.app.local_machine import open_machine
from farhand.app.messaging import Messaging
from farhand.app.plugins import CHANNELS, Plugins
from farhand.app.policy import policy_file
from farhand.app.sandbox import open_trials
from farhand.app.schedule import open_schedule, schedule_settings
from farhand.config import LIVE_SECTIONS, Config, LiveConfig
from farhand.gateway.access.budgets import Budgets
from farhand.gateway.access.credentials import OWNER, Credentials
from farhand.gateway.access.daily_budget import keyed_call_budget, message_budget
from farhand.gateway.access.freeze_hold import FreezeHold
from farhand.gateway.access.oauth import OAuth
from farhand.gateway.access.oauth_clients import ClientDocuments
from farhand.gateway.access.principal import Principal
from farhand.gateway.access.secrets import Secrets, secrets_key
from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.access.tokens import Tokens, owner_token
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.policy import Policy
from farhand.gateway.calls.refusals import RefusalBudget
from farhand.gateway.calls.search import CallSearch
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.control.fanout import FanOuts
from farhand.gateway.control.freeze import Freeze
from farhand.gateway.control.policy_review import PolicyReview
from farhand.gateway.control.previews import CallPreviews
from farhand.gateway.control.receipts import Receipts, receipt_seed
from farhand.gateway.control.terminals import Terminals
from farhand.gateway.control.trial_previews import TrialPreviews
from farhand.gateway.control.trials import TrialCalls
from farhand.gateway.control.undo import Undo
from farhand.gateway.control.undo_run import RunUndo
from farhand.gateway.mcp.servers import McpServers
from farhand.gateway.nodes.addresses import GatewayAddress
from farhand.gateway.nodes.egress import ProxyCredentials
from farhand.gateway.nodes.end_orders import EndOrders
from farhand.gateway.nodes.installers import Installers
from farhand.gateway.nodes.inventory import NodeInventory, connected_tokens, disconnect_token
from farhand.gateway.nodes.logs_tool import NodeLogs
from farhand.gateway.nodes.machines_tool import NodeList
from farhand.gateway.nodes.metrics import MetricsHistory
from farhand.gateway.nodes.output import RemoteCommands
from farhand.gateway.nodes.pairing import PairingCodes
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.schedule.scheduler import Scheduler
from farhand.gateway.schedule.tools import cron_tools
from farhand.gateway.sessions.agent_process import Direct, SessionAgent
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.budgeted_model import BudgetedModel
from farhand.gateway.sessions.responses import Responses
from farhand.gateway.sessions.run_calls import RunServices
from farhand.gateway.sessions.runner import Turns
from farhand.gateway.sessions.sessions import Sessions
from farhand.gateway.sessions.tools import SessionTools
from farhand.gateway.transfers.tool import transfer_tool
from farhand.gateway.transfers.transfers import Transfers
from farhand.gateway.transfers.workspace_endpoint import workspace_end
from farhand.gateway.upkeep.backups import Backups, BackupSettings
from farhand.gateway.upkeep.metrics_file import FOLDER as METRICS_FOLDER
from farhand.gateway.upkeep.metrics_file import MetricsFile
from farhand.gateway.upkeep.node_metrics import NodeMetricsTask
from farhand.gateway.upkeep.retention import HistoryLimits, HistoryRetention, Retention
from farhand.gateway.upkeep.token_expiry import TokenExpiry
from farhand.gateway.upkeep.token_uses import TokenUses
from farhand.gateway.workspace.files_tools import NativeFiles
from farhand.gateway.workspace.settings_tool import Settings
from farhand.gateway.workspace.workspace import Workspace
from farhand.llm.model import Model
from farhand.machine.freeze_file import FREEZE_FILE, FreezeFile
from farhand.machine.jobs.job import Ending
from farhand.memory.tools import memory_tools
from farhand.node.mcp_servers import ServerHost
from farhand.protocol.redaction import KnownSecrets
from farhand.store.journal.seal import load_key
from farhand.store.tables.access.secrets import all_secrets
from farhand.store.tables.access.tokens import all_tokens
from farhand.store.tables.accounts.budgets import all_limits
from farhand.store.tables.standing_approvals import all_standing
from farhand.tools.agent_files import AgentFileTools
from farhand.tools.agent_shell import AgentShellTools
from farhand.tools.agent_tools import main_agent_tools, sub_agent_tools
from farhand.tools.http_guide import GuideTools
from farhand.tools.skill_paths import SkillPaths


@dataclass(frozen=True)
class Parts:
    """What the process of a gateway starts, serves and stops."""

    store: OpenedStore
    secrets: KnownSecrets
    credentials: Credentials
    gate: Gate
    transfers: Transfers
    end_orders: EndOrders
    inventory: NodeInventory
    freeze: Freeze
    sessions: Sessions
    messaging: Messaging
    scheduler: Scheduler
    fleet: FleetParts | None
    # Used as context managers while the gateway runs.
    periodic: Sequence[contextlib.AbstractAsyncContextManager[object]]
    routes: Sequence[Route]
    node_services: NodeServices
    terminals: Terminals
    oauth: OAuth

    async def close(self) -> None:
        """Stop calls and transfers, and record every node as offline; the store is closed by its own stack."""
        self.gate.close()
        self.end_orders.close()
        await self.transfers.close()
        self.inventory.close()


async def build(
    home: Path,
    workspace_folder: Path,
    config: Config,
    environ: Mapping[str, str],
    store: OpenedStore,
    stack: contextlib.AsyncExitStack,
    *,
    ending: asyncio.Event,
    address: GatewayAddress,
    open: bool,  # noqa: A002
) -> Parts:
    """Build everything on an open store. What the parts hold open is closed with the stack.

    `ending` is set when the gateway stops; `address` is where it listens. Raises SettingsError, FarhandError.
    """
    database, node_registry, journal, member = store.database, store.node_registry, store.journal, store.member
    first_number = 1 if member is None else member.first_number
    clock = node_registry.clock
    others = None
    if member is not None:
        others = FleetConnections(member, database, node_registry, lambda: services, lambda: sessions)
    live = LiveConfig(home, config, environ)
    plugins = Plugins()
    machine = await open_machine(home, workspace_folder, live, environ, stack)
    objects = open_objects(home, config.objects, plugins, machine.undo_log)
    stack.push_async_callback(objects.close)
    if member is not None:
        await check_objects(objects, config.objects.url)
    workspace = Workspace(objects)
    secrets = KnownSecrets()

    owner = owner_token(home)
    secrets.add(owner, *store.node_tokens.secrets)
    secrets.add_settings([msgspec.to_builtins(config), environ])
    credentials = Credentials(
        owner,
        database.query(all_tokens),
        store.node_tokens,
        open=open,
        tokens_beside_keys=config.gateway.tokens_beside_keys,
        lent={
            "hook": lambda name: messaging.hooks.scopes_of(name),
            "channel": lambda name: messaging.inbound.scopes_of_channel(name),
            "peer": lambda name: messaging.inbound.scopes_of_peer(name),
        },
    )
    tokens = Tokens(
        home,
        database,
        journal,
        credentials,
        clock=clock,
        connected=partial(connected_tokens, node_registry),
        disconnect=partial(disconnect_token, node_registry),
    )

    handles = Secrets(database, clock, secrets, functools.cache(lambda: secrets_key(home, environ)))
    handles.load(database.query(all_secrets))
    models = open_models(live, environ, plugins, secrets, handles)
    stack.push_async_callback(models.close)

    # Calls and transfers.
    frozen = FreezeHold()
    server_host = ServerHost(workspace_folder, machine.variables, frozen=frozen, confinement=machine.confinement)
    stack.push_async_callback(server_host.close)
    queries = Queries(
        node_registry,
        {"output": machine.questions.output, "jobs": machine.questions.jobs, "mcp": server_host.query},
        first_number=first_number,
    )
    proxy_credentials = ProxyCredentials(node_registry, queries, handles)
    end_orders = EndOrders(database, node_registry, clock)
    catalog = Catalog(node_registry, lambda: live.now.tools.disabled)
    previews = CallPreviews(queries)
    standing = StandingApprovals(database.query(all_standing), journal, clock, credentials.ended)
    approvals = Approvals(
        database,
        lambda: gate.waiting_calls,
        previews,
        TrialPreviews(lambda: gate, catalog, clock),
        clock,
        standing,
        lineage=credentials.lineage,
        notify=lambda approval: messaging.ask(approval),
    )
    budgets = Budgets(database, credentials, lambda: live.now.budgets, clock)
    budgets.load(database.query(all_limits))
    gate = Gate(
        database,
        node_registry,
        catalog,
        credentials,
        approvals=approvals,
        policy=live.derive(
            lambda settings: Policy.of(settings.policy, str(workspace_folder), str(machine.agents_folder))
        ),
        changed_files=previews.changed_files,
        standing=standing,
        frozen=frozen,
        refusals=RefusalBudget(
            lambda: (
                live.now.retention.refused_bytes_per_credential,
                live.now.retention.refused_calls_per_credential,
            )
        ),
        keyed_calls=keyed_call_budget(lambda: live.now.retention.keyed_bytes_per_credential),
        secrets=secrets,
        handles=handles,
        fleet=None if others is None else others.calls,
        budgets=budgets,
    )
    transfers = Transfers(
        database,
        node_registry,
        queries,
        workspace=partial(workspace_end, workspace),
        frozen=frozen,
        invalid=credentials.ended,
        first_number=1 if member is None else member.first_stream,
        check_folder=gate.check_folder_transfer,
        reserve=gate.charge_transfer,
    )
    credentials.subscribe(gate.credential_ended)
    credentials.subscribe(transfers.credential_ended)
    inventory = NodeInventory(
        node_registry,
        queries,
        journal,
        store.gateway_id,
        joined=(
            lambda connection: freeze.node_joined(connection),
            gate.node_calls.joined,
            end_orders.node_joined,
            proxy_credentials.node_joined,
            transfers.node_joined,
        ),
        lost=(queries.left, lambda connection: freeze.left(connection), transfers.node_left),
        left=(gate.node_calls.left, end_orders.node_left),
        changed=(gate.waiting_calls.resume,),
        joined_elsewhere=(gate.node_calls.joined, transfers.node_joined),
        links=None if others is None else others.links,
    )

    async def is_open(call_id: str) -> bool:
        record = await gate.find(call_id)
        return record is not None and record.ended_at is None

    commands = RemoteCommands(node_registry, queries, secrets, is_open=is_open, closing=lambda: gate.closing)
    terminals = Terminals(gate, node_registry, commands, journal.note)

    # Agents and their tools.
    settings = Settings(
        lambda: {
            **msgspec.to_builtins(config),
            **{name: msgspec.to_builtins(getattr(live.now, name)) for name in (*LIVE_SECTIONS, "agent")},
        }
    )
    skills = build_skills(home, workspace_folder, config, workspace, node_registry, inventory, machine, settings)
    memory = open_memory(home, workspace_folder, config, objects, models, secrets)
    stack.push_async_callback(memory.close)
    skill_paths = SkillPaths(str(workspace_folder), str(machine.skill_files))
    trials = open_trials(home, workspace_folder, machine.files, machine.confinement)
    shell = AgentShellTools(machine.jobs, machine.files, machine.confinement, secrets, skill_paths, trials)
    machine_tools = [*AgentFileTools(machine.files, secrets=secrets, skills=skill_paths).tools(), *shell.tools()]
    remembering = memory_tools(memory)
    budget = message_budget(lambda: live.now.retention.message_bytes_per_credential)
    run_services = RunServices(database, credentials, node_registry, store.returning, catalog, gate, end_orders)
    agents = Agents(lambda: live.now.agents)
    turns = Turns(
        run_services,
        models,
        agents,
        build_prompts(home, workspace_folder, agents, node_registry, objects, skills, secrets),
        sub_agent_tools(machine_tools, remembering),
        limits=Limits(max_rounds=config.agent.max_rounds),
        compactor=Compactor(config.agent.context_tokens),
        end_jobs=machine.end_jobs,
    )
    sessions = Sessions(
        database,
        turns,
        clock=clock,
        dm_scope=config.sessions.dm_scope,
        compact=turns.compact,
        describe_model=turns.model_name,
        check_model=turns.check_model,
        freeze=lambda by, reason: freeze.asked_in_a_chat(by, reason),
        elsewhere=None if others is None else others.runs,
        budget=budget,
        invalid=credentials.ended,
    )

    def stop_runs_of(token_id: str) -> None:
        reason = credentials.ended([token_id]) or f"the token {token_id} was revoked"
        sessions.credential_ended(token_id, reason)

    credentials.subscribe(stop_runs_of)
    messaging = Messaging(
        config,
        environ,
        database,
        sessions,
        workspace,
        approvals,
        credentials,
        secrets,
        handles,
        kinds=plugins.loaders(CHANNELS),
        clock=clock,
        frozen=frozen,
        approvers=lambda: live.now.policy.approvers,
        member=member,
    )
    stack.push_async_callback(messaging.close)
    schedule = live.derive(partial(schedule_settings, environ=environ))
    scheduler, jobs = await open_schedule(
        schedule,
        database,
        node_registry,
        credentials,
        secrets,
        objects,
        sessions,
        gate,
        catalog,
        held=lambda: frozen() is not None,
        delivery=messaging.outbox,
        alone=member is None,
    )

    def model_of_servers() -> Model:
        limits = partial(budgets.limits, Principal(OWNER), None)
        return BudgetedModel(models.chosen(), budgets, limits, models.prices())

    scheme = "https" if config.gateway.tls_cert else "http"
    mcp_servers = McpServers(
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
        model=model_of_servers,
        frozen=frozen,
        address=f"{scheme}://localhost:{config.gateway.port}",
    )

    async def end_commands() -> Ending:
        await server_host.end_all()
        return await machine.jobs.end_all()

    freeze = Freeze(
        FreezeFile(home / FREEZE_FILE),  # not in the store: restoring an older copy must not lift a freeze
        frozen,
        gate,
        transfers,
        node_registry,
        gateway_id=store.gateway_id,
        note=journal.note,
        stop_runs=sessions.stop_all,
        end_jobs=end_commands,
        thawed=(gate.waiting_calls.resume, scheduler.wake, mcp_servers.wake),
        first_number=first_number,
    )
    undo = Undo(gate, catalog, node_registry, machine.undo_log, machine.files, objects)
    logs, metrics = NodeLogs(node_registry, queries), MetricsHistory()
    guide = GuideTools(machine.files, machine.jobs, machine.confinement, secrets).tools()
    session_tools = SessionTools(
        sessions, agents, model_of=turns.agent_model, spawn_seconds=config.agent.sub_agent_seconds
    )
    message_tools, job_tools = messaging.tools(), cron_tools(jobs, sessions.pin_of)
    main_agent = main_agent_tools(machine_tools, job_tools, message_tools, session_tools.tools(), remembering)
    trial_calls = TrialCalls(gate, trials)
    catalog.serve([*guide, *undo.tools(), *trial_calls.tools(), *NodeList(node_registry).tools()], offered=False)
    catalog.serve([transfer_tool(transfers), *NativeFiles(workspace).tools(), *settings.tools(), *logs.tools()])
    catalog.serve([*main_agent, *session_tools.native_tools()])
    catalog.serve([one for one in (*message_tools, *job_tools) if one not in main_agent])
    catalog.serve(plugins.tools(catalog.own))

    backups = Backups(
        database, journal, home, BackupSettings(config.backup.every_seconds, config.backup.keep), clock=clock
    )
    direct = Direct(database, gate, catalog, guide, SessionAgent(sessions), clock=clock, budget=budget)
    policy_review = PolicyReview(database, node_registry, catalog, credentials.makers, standing)
    forms = ApprovalForms(approvals, secrets)
    search = CallSearch(database, gate)
    mcp_routes = McpRoutes(
        store.gateway_id,
        node_registry,
        catalog,
        gate,
        commands,
        Tasks(database, gate, forms, clock),
        forms,
        McpContent(gate, skills, search, commands, lambda: agents.names),
        ending,
        (lambda _: None) if others is None else others.tell,
    )
    agent_runs = AgentRuns(sessions, agents)
    routes = routes_of(
        HealthRoutes(
            store.gateway_id,
            database,
            node_registry,
            gate,
            backups,
            store.recovery,
            lambda: freeze.order,
            lambda: live.pending,
        ),
        NodeRoutes(node_registry, inventory, credentials, logs, gate, metrics),
        InvokeRoutes(gate, clock, lambda: schedule()[0].zone),
        CallRoutes(catalog, gate, search, commands, ending),
        UndoRoutes(gate, undo, RunUndo(database, gate, catalog, undo)),
        TrialRoutes(gate, trial_calls),
        ReceiptRoutes(Receipts(store.gateway_id, receipt_seed(load_key(home)), database, gate, credentials, clock)),
        TerminalRoutes(terminals, gate),
        SecretRoutes(handles, proxy_credentials),
        FanOutRoutes(FanOuts(database, node_registry, gate), ending),
        TransferRoutes(transfers, gate, ending, clock),
        JournalRoutes(database, journal, secrets, ending, lambda: gate.closing),
        TokenRoutes(tokens, budgets),
        BudgetRoutes(budgets),
        PairingRoutes(
            node_registry,
            credentials,
            tokens,
            journal,
            store.gateway_id,
            address,
            Installers(home),
            PairingCodes(database, clock),
        ),
        FreezeRoutes(freeze),
        ApprovalRoutes(approvals),
        PolicyRoutes(
            policy_review,
            lambda: live.now.policy,
            str(workspace_folder),
            str(machine.agents_folder),
            standing,
            policy_file(home, live, journal, alone=member is None),
        ),
        mcp_routes,
        MetricsRoutes(database, node_registry, gate, "" if member is None else member.id),
        WorkspaceRoutes(journal, workspace, skills, gate),
        MemoryRoutes(memory, gate),
        SessionRoutes(sessions, turns, ending),
        ChatRoutes(agent_runs, ending),
        ResponseRoutes(agent_runs, Responses(database, sessions), sessions, ending),
        AgentProcessRoutes(direct, ending, {*plugins.loaders(CHANNELS), *config.channels}),
        ChannelRoutes(messaging.outbox, messaging.inbound, messaging.hooks),
        CronRoutes(gate, jobs),
        fleet_routes(config, store.gateway_id, member, database, node_registry),
        McpServerRoutes(mcp_servers),
    )
    services = NodeServices(
        store.gateway_id,
        credentials,
        node_registry,
        inventory,
        gate,
        end_orders,
        queries,
        freeze,
        transfers,
        None if others is None else others.links,
    )

    async def take_up() -> None:
        assert member is not None
        await gate.recover(member.owned("calls"))
        await transfers.recover(member.owned("transfers"))
        await sessions.start(member.owned("runs"))
        await messaging.take_up()
        scheduler.wake()

    fleet: FleetParts | None = None
    if others is not None:
        fleet = FleetParts(
            others,
            database,
            services,
            tokens,
            mcp=mcp_routes,
            followed={
                "policy.always_added": partial(standing.refresh, database),
                "policy.always_removed": partial(standing.refresh, database),
                "hook.saved": messaging.hooks.refresh,
                "hook.removed": messaging.hooks.refresh,
                "channel.": messaging.inbound.refresh,
                "mcp.": mcp_servers.refresh,
                "secret.": handles.refresh,
                "budget.": budgets.refresh,
            },
            approvals=approvals,
            settings=lambda: settings_digest(live.now),
            resume=take_up,
        )
    return Parts(
        store,
        secrets,
        credentials,
        gate,
        transfers,
        end_orders,
        inventory,
        freeze,
        sessions,
        messaging,
        scheduler,
        fleet,
        (
            backups,
            Retention(database, lambda: live.now.retention.keep_days, clock=clock),
            HistoryRetention(
                database,
                lambda: HistoryLimits(live.now.retention.history_days, live.now.retention.history_mb),
                clock=clock,
                has_undo=lambda call: machine.undo_log.find(call) is not None,
            ),
            TokenUses(database, credentials),
            TokenExpiry(credentials),
            MetricsFile(home / METRICS_FOLDER, metrics, clock),
            NodeMetricsTask(node_registry, queries, metrics, clock),
            mcp_servers,
        ),
        routes,
        services,
        terminals,
        OAuth(database, journal, credentials, tokens, ClientDocuments(), clock=clock),
    )
