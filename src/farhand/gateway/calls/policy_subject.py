"""A call as the rules of the policy see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.gateway.calls.command_input import input_of
from farhand.gateway.calls.pinning import LOGS, TRANSFER
from farhand.gateway.calls.policy_paths import Owner, Reached
from farhand.gateway.nodes.endpoints import longest_id
from farhand.gateway.nodes.registry import Node
from farhand.machine.patch.parse import parse
from farhand.protocol.errors import ToolError
from farhand.protocol.names import COMMON_PREFIX, MAIN_AGENT, join_tool
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.store.tables.standing_approvals import agent_of
from farhand.tools.node_family import family_of

# The origin of a call that no run makes.
HTTP: Final = ("http",)
# The origin of what the gateway does by itself, such as ending the commands of a stopped run; no rule applies to it.
GATEWAY: Final = ("gateway",)
# Marks the origin of work that led to a run, by a message or a job, and is not the run's own.
VIA: Final = "via:"
MAX_ORIGINS: Final = 16
# Parameters that are paths.
PATHS: Final = frozenset({"path", "file_path", "workdir", "working_dir", "cwd", "source", "destination"}).union(
    *(tool.paths for tool in NODE_TOOLS.values())
)

# Tools that reach every file below their paths: those of nodes, and those of the gateway with the same names.
RECURSIVE: Final = frozenset(tool.name.casefold() for tool in NODE_TOOLS.values() if tool.recursive)
RECURSIVE_CAPABILITIES: Final = frozenset(tool.capability for tool in NODE_TOOLS.values() if tool.recursive)
# Tools of the gateway's machine that work in the workspace of the agent; the others work in that of the main one.
OF_AGENT: Final = frozenset({"memory_get", "memory_search"})
# A tool of the gateway that lists a folder, with `depth` also the folders in it.
TREE: Final = "ls"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the rules see it."""

    # Every name of the tool, in lower case.
    names: tuple[str, ...]
    route: str
    node_id: str | None = None
    tags: tuple[str, ...] = ()
    args: Mapping[str, Any] = {}
    # Other names of the tool's parameters: a rule may use them, the arguments never do.
    aliases: Mapping[str, str] = {}
    # The folder that relative paths start from, if it is known.
    workspace: str | None = None
    # The folder of the agents' workspaces, for paths on the gateway's machine.
    agents: str | None = None
    # The agent in whose workspace the gateway's own tools work.
    agent: str = MAIN_AGENT
    # Parameters that are paths and were left out: they mean the folder that relative paths start from.
    left_out: frozenset[str] = frozenset()
    # Whether `/ETC` may be `/etc` on the machine.
    folds: bool = False
    # The nodes that the arguments name, such as the ends of a transfer.
    reached: tuple[Reached, ...] = ()
    # For input to a running command: the names of the tool that starts such commands, in lower case, and the text.
    # Rules that stop that tool stop the input, too.
    typed_into: tuple[str, ...] = ()
    typed: str = ""
    # Where the call comes from; for a sub-agent, also where its parents' runs come from.
    origins: tuple[str, ...] = HTTP
    credential: str = "owner"
    # The credentials on whose behalf the acting one acts.
    askers: tuple[str, ...] = ()
    # The tokens that made any of these, directly or through others.
    makers: tuple[str, ...] = ()
    # Whether the call changes files that are not known.
    paths_unknown: bool = False
    # Whether the call reaches every file below its paths; tools named in `RECURSIVE` always do.
    recursive: bool = False
    # Files and folders of the workspace that the call reads although no argument names them.
    reads: tuple[str, ...] = ()
    # Files of the workspace that the call names in other arguments than its paths.
    files: tuple[str, ...] = ()
    session_key: str | None = None
    # Whether the paths are too long to resolve, and what was found out about them: set while a policy is applied.
    paths_long: bool = False
    memo: dict[Any, Any] = {}

    @property
    def session_proven(self) -> bool:
        """Whether the gateway itself set session and agent, as for a run; any other caller only claims them."""
        return self.credential.startswith("agent:")

    @property
    def owner(self) -> Owner:
        return Owner(self.agent, self.agents)


def subject_of(
    target: Target,
    args: msgspec.Raw,
    *,
    credential: str,
    askers: tuple[str, ...] = (),
    makers: tuple[str, ...] = (),
    session_key: str | None,
    origins: Sequence[str],
    agent_id: str | None = None,
    nodes: Mapping[str, Node] = MappingProxyType({}),
    changed: tuple[str, ...] | None = (),
    folder: bool = False,
) -> Subject:
    """Return a call as the rules see it; `args` are those of `Catalog.checked`. Raises InvalidArgs.

    `nodes` are those that the arguments can name. `changed`: files that the call changes without naming them, as an
    undo does; None if they are not known. `folder`: whether a transfer is known to be one of a folder.
    """
    arguments = read_arguments(args)
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"": arguments}
    node = target.node
    # The node that runs the MCP server of the tool: rules about the node apply, as they do to what it runs.
    runs_on = node if target.own is None else nodes.get(target.own.node)
    named = [] if node is not None else _named_nodes(target.tool, arguments, nodes)
    schema = {} if target.spec is None else target.spec.parameters.get("properties")
    names = [target.tool] if node is None else [join_tool(node.card.node_id, target.tool), target.tool]
    if node is not None and target.spec is not None and (common := family_of(target.spec)) is not None:
        names.append(common)
    typed = input_of(target, arguments)
    return Subject(
        names=tuple(name.casefold() for name in names),
        route=target.kind,
        node_id=None if runs_on is None else runs_on.card.node_id,
        tags=() if runs_on is None else tuple(runs_on.tags),
        args={**_with_patched_paths(target.tool, arguments), **({"path": list(changed)} if changed else {})},
        paths_unknown=changed is None,
        recursive=folder
        or (target.own is None and target.capability in RECURSIVE_CAPABILITIES)
        or (target.tool == TRANSFER and _names_folder(arguments))
        or (target.own is not None and target.tool == TREE and arguments.get("depth") not in (None, 1)),
        reads=() if target.own is None else target.own.reads,
        files=() if target.own is None else tuple(_files(arguments, target.own.files)),
        aliases={} if target.own is None else target.own.aliases,
        agent=agent_of(agent_id, credential),
        workspace=None if node is None else _workspace_of(node),
        left_out=frozenset(name for name in PATHS if name in schema and arguments.get(name) in (None, ""))
        if isinstance(schema, dict)
        else frozenset(),
        folds=any(one.card.runtime.get("hostOs") != "linux" for one in ([node] if node is not None else named)),
        reached=tuple(Reached(one.card.node_id, tuple(one.tags), _workspace_of(one)) for one in named),
        typed_into=() if typed is None else _shell_names(node, typed.tool),
        typed="" if typed is None else typed.text,
        origins=tuple(origins),
        credential=credential,
        askers=askers,
        makers=makers,
        session_key=session_key,
    )


def handed_on(origins: Iterable[str]) -> tuple[str, ...]:
    """Return the origins of what a call starts: its own, then those that led to it."""
    known = sorted(origins, key=lambda origin: not origin.startswith(VIA))
    return tuple(dict.fromkeys(origin.removeprefix(VIA) for origin in known))[:MAX_ORIGINS]


def _named_nodes(tool: str, arguments: Mapping[str, Any], nodes: Mapping[str, Node]) -> list[Node]:
    """Return the nodes that a call of a gateway tool works on."""
    if tool == TRANSFER:
        ends = [arguments.get(role) for role in ("source", "destination")]
        ids = [longest_id(end, nodes) for end in ends if isinstance(end, str)]
        return [nodes[node_id] for node_id in dict.fromkeys(ids) if node_id in nodes]
    if tool == LOGS:
        asked = arguments.get("nodeId")
        return [node for name, node in nodes.items() if name == asked or (not asked and node.online)]
    return []


def _shell_names(node: Node | None, tool: str) -> tuple[str, ...]:
    names = (tool,) if node is None else (join_tool(node.card.node_id, tool), tool, f"{COMMON_PREFIX}{tool}")
    return tuple(name.casefold() for name in names)


def _files(arguments: Mapping[str, Any], parameters: Iterable[str]) -> Iterator[str]:
    for name in parameters:
        given = arguments.get(name)
        yield from (one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str))


def _names_folder(arguments: Mapping[str, Any]) -> bool:
    """Whether the source of a transfer is written as a folder. Otherwise it may be one; the offer of its node says."""
    source = arguments.get("source")
    return isinstance(source, str) and source.rstrip().endswith("/")


def _workspace_of(node: Node) -> str | None:
    workspace = node.card.runtime.get("workspace")
    return workspace if isinstance(workspace, str) else None


def _with_patched_paths(tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with the files that a patch names in its text as its paths."""
    patch = arguments.get("patch")
    if tool != "apply_patch" or not isinstance(patch, str):
        return arguments
    own = arguments.get("path")
    try:
        sections = parse(patch, path=own if isinstance(own, str) else None)
    except ToolError:
        return arguments  # the tool rejects it too
    paths = [path for section in sections for path in (section.path, section.move_to) if path]
    return {**arguments, "path": paths}
