"""Sanitize a node's description of itself: names, tags, system, workspace and tool descriptions.

None of it is trusted or used for decisions. Every place that shows it (prompts, the command line, the console,
messages) shows one printable line of bounded length.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.calls import ToolSpec
from farhand.protocol.names import acceptable_name
from farhand.protocol.untrusted import one_line, plain_value
from farhand.store.tables.nodes import NodeCard

LONGEST_NAME: Final = 128
LONGEST_TAG: Final = 64
MOST_TAGS: Final = 32
LONGEST_DESCRIPTION: Final = 2000
LARGEST_SCHEMA: Final = 64 * 1024
LARGEST_RUNTIME: Final = 64 * 1024
OTHER: Final = "other"
SYSTEMS: Final = frozenset(
    {"linux", "darwin", "macos", "windows", "freebsd", "openbsd", "netbsd", "android", "ios", "aix", "sunos", "cygwin"}
)
_NAMES: Final = {"win32": "windows", "osx": "darwin", "mac os x": "darwin", "mac": "darwin"}


def cleaned(card: NodeCard) -> NodeCard:
    """Return a card that contains only printable, bounded values."""
    return msgspec.structs.replace(
        card,
        name=one_line(card.name, LONGEST_NAME) or card.node_id,
        node_type=one_line(card.node_type, LONGEST_NAME),
        version=one_line(card.version, LONGEST_NAME),
        tags=cleaned_tags(card.tags),
        tools=[cleaned_tool(spec) for spec in card.tools],
        runtime=cleaned_runtime(card.runtime),
    )


def cleaned_runtime(runtime: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plain_value(runtime)
    if len(msgspec.json.encode(found)) > LARGEST_RUNTIME:
        found = {name: found[name] for name in ("hostOs", "workspace") if isinstance(found.get(name), str)}
    if "hostOs" in found:
        found["hostOs"] = system_name(found["hostOs"])
    return found


def system_name(said: Any) -> str:
    """Return the name of an operating system from a fixed set; `other` if it is not in the set."""
    name = said.strip().lower() if isinstance(said, str) else ""
    name = _NAMES.get(name, name)
    return name if name in SYSTEMS else OTHER


def cleaned_label(text: str) -> str:
    """Return the owner's name for a node as one printable line."""
    return one_line(text, LONGEST_NAME)


def cleaned_tags(tags: list[str]) -> list[str]:
    found = (one_line(tag, LONGEST_TAG) for tag in tags)
    return list(dict.fromkeys(tag for tag in found if tag))[:MOST_TAGS]


def cleaned_tool(spec: ToolSpec) -> ToolSpec:
    """Return a tool whose description and schema contain only printable, bounded text."""
    return msgspec.structs.replace(
        spec,
        description=one_line(spec.description, LONGEST_DESCRIPTION),
        parameters=_schema(spec.parameters),
        capability=spec.capability if spec.capability is not None and acceptable_name(spec.capability) else None,
    )


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its descriptions reduced to plain lines; all other values are significant and stay."""
    try:
        if len(msgspec.json.encode(schema)) > LARGEST_SCHEMA:
            return {}
        found = _described(schema, 0)
    except RecursionError:
        return {}
    return found if isinstance(found, dict) else {}


def _described(value: Any, depth: int) -> Any:
    if depth > 64:
        raise RecursionError
    if isinstance(value, dict):
        return {
            name: one_line(item, LONGEST_DESCRIPTION)
            if name in ("description", "title", "$comment") and isinstance(item, str)
            else _described(item, depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_described(item, depth + 1) for item in value]
    return value
