"""The file, search and shell tools of all machines under one name each: `node_bash {"node": "laptop", …}`.

A caller with many machines sees seven tools instead of seven per machine. Names and descriptions are the gateway's own:
a node cannot change what callers of other nodes read. The gate turns such a call into one of `laptop__Bash` before it
checks anything, so rights, policy and the record see the tool that runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.json_limits import decode_bounded
from farhand.protocol.names import COMMON_PREFIX, SEPARATOR, join_tool
from farhand.protocol.node_tools import NODE_TOOLS, BuiltinTool
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import DEFAULT_TIMEOUT_MS, NodeShellTools
from farhand.tools.schema import Parameters

NODE: Final = "node"
# The classes with the methods of the listed tools; `node.program` creates them.
CLASSES: Final = (NodeFileTools, NodeShellTools)
_MEMBERS: Final = {f"{COMMON_PREFIX}{tool.name.lower()}": tool for tool in NODE_TOOLS.values() if tool.listed}
_LONGEST_IDS: Final = 90


def node_spec(declared: BuiltinTool, method: Callable[..., Any], *, skip: int = 0) -> ToolSpec:
    """Return the description of a tool of a node, made from its method."""
    schema = Parameters(method, skip=skip).schema
    unlisted = {name: schema["properties"].pop(name) for name in declared.unlisted}
    return ToolSpec(
        name=declared.name,
        description=inspect.getdoc(method) or "",
        parameters=schema,
        read_only=not declared.changes,
        capability=declared.capability,
        timeout_ms=DEFAULT_TIMEOUT_MS,
        timeout_parameter=declared.timeout_parameter,
        unlisted=unlisted,
    )


def family_of(spec: ToolSpec) -> str | None:
    """Return the common name of a tool that a node announces; None if it is not one of the seven."""
    name = f"{COMMON_PREFIX}{spec.name.lower()}"
    member = _MEMBERS.get(name)
    return name if member is not None and (member.name, member.capability) == (spec.name, spec.capability) else None


def families(specs: Iterable[ToolSpec], nodes: Iterable[str] = ()) -> list[ToolSpec]:
    """Return a description under the common name for each of the seven tools that occurs among `specs`.

    `nodes`: ids for the description of the parameter, as many as fit.
    """
    found = {name for spec in specs if (name := family_of(spec)) is not None}
    known = bounded_list(sorted(nodes), _LONGEST_IDS)
    return [_family(name, f": {known}" if known else "") for name in _MEMBERS if name in found]


def bounded_list(items: Sequence[str], longest: int) -> str:
    """Join the first items that fit with commas, followed by the number of the others."""
    shown: list[str] = []
    for item in items:
        if shown and sum(len(one) + 2 for one in shown) + len(item) > longest:
            break
        shown.append(item)
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def resolved(call: ToolCall) -> ToolCall:
    """Return a call under a common name as a call of the tool of its machine; any other call unchanged.

    Raises InvalidArgs if it does not name a machine.
    """
    tool = _MEMBERS.get(call.tool)
    if tool is None:
        return call
    try:
        arguments = decode_bounded(bytes(call.args))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgs(f"arguments: {error}") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise InvalidArgs(f"arguments: expected an object, got {type(arguments).__name__}")
    node = arguments.pop(NODE, None)
    if node is None:
        raise InvalidArgs(f"missing required parameter '{NODE}': the id of the machine on which {call.tool} acts")
    if not isinstance(node, str) or not node or SEPARATOR in node:
        raise InvalidArgs(f"parameter '{NODE}': expected the id of a machine, got {str(node)[:100]!r}")
    return msgspec.structs.replace(
        call, tool=join_tool(node, tool.name), args=msgspec.Raw(msgspec.json.encode(arguments))
    )


@lru_cache(maxsize=64)
def _family(name: str, known: str) -> ToolSpec:
    tool = _MEMBERS[name]
    method = next(getattr(one, tool.name) for one in CLASSES if hasattr(one, tool.name))
    spec = node_spec(tool, method, skip=1)
    schema = spec.parameters
    parameters = {
        **schema,
        "properties": {NODE: {"type": "string", "description": f"Id of the machine{known}."}, **schema["properties"]},
        "required": [NODE, *schema.get("required", ())],
    }
    described = re.sub(r"th(is|e) node\b", "the machine `node`", spec.description, count=1)
    return msgspec.structs.replace(spec, name=name, description=described, parameters=parameters)
