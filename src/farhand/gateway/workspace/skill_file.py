"""Parse the front matter of a `SKILL.md`: YAML between two lines of dashes, with tolerance for common mistakes."""

# The file format fixes the names of the requirements.
# ruff: noqa: N815

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

MOST_HEAD: Final = 16 * 1024
# Limits brackets in the front matter: the parser takes cubic time for nested lists.
MOST_BRACKETS: Final = 200
MOST_DESCRIPTION: Final = 200
NAMESPACES: Final = ("gsv", "farhand", "openclaw", "clawdbot")
_KEY: Final = re.compile(r"[A-Za-z_][\w-]*:(?:\s|$)")


class Requirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """List what a single machine must have, and (`config`) which settings must be set."""

    hostRoles: list[str] = []
    capabilities: list[str] = []
    anyCapabilities: list[str] = []
    bins: list[str] = []
    anyBins: list[str] = []
    env: list[str] = []
    config: list[str] = []
    os: list[str] = []

    @property
    def of_a_host(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__ if name != "config")


class SkillEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Define the settings of one skill."""

    enabled: bool = True
    always: bool | None = None
    requires: Requirements | None = None


class SkillFile(msgspec.Struct, frozen=True):
    name: str
    folder: str
    description: str
    path: str
    location: str
    source: str
    always: bool
    requirements: Requirements
    # If False, the requirements cannot be parsed and count as not met.
    well_formed: bool
    # Why the file cannot be read; empty if it can.
    unreadable: str = ""
    # If False, the model does not see it (`disable-model-invocation`); a user may still request it by name.
    model_invocable: bool = True


def read_skill(folder: str, text: str, path: str, location: str, source: str) -> SkillFile:
    """Parse a `SKILL.md`. Without front matter, the folder is its name and the first paragraph its description."""
    head, body = split_head(text)
    said = read_head(head)
    requirements, well_formed = _requirements(said)
    description = said.get("description")
    return SkillFile(
        name=_text(said.get("name")) or folder,
        folder=folder,
        description=_text(description) or _first_paragraph(body),
        path=path,
        location=location,
        source=source,
        always=said.get("always") is True or _namespace(said).get("always") is True,
        requirements=requirements,
        well_formed=well_formed,
        model_invocable=not _is_true(said.get("disable-model-invocation")),
    )


def unreadable_skill(folder: str, path: str, reason: str) -> SkillFile:
    return SkillFile(folder, folder, "", path, path, "unknown", False, Requirements(), True, reason)


def split_head(text: str) -> tuple[str, str]:
    text = text.removeprefix("\ufeff")
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return "", text
    for number, line in enumerate(lines[1:], 1):
        if line.strip() in ("---", "..."):
            return "\n".join(lines[1:number])[:MOST_HEAD], "\n".join(lines[number + 1 :])
    return "", text


def read_head(head: str) -> dict[str, Any]:
    """Return the values of the front matter.

    A value that is not valid YAML (`description: Use when: …`) is plain text.
    """
    whole = _yaml(head)
    if isinstance(whole, dict):
        return {str(name): value for name, value in whole.items()}
    values: dict[str, Any] = {}
    for block in _blocks(head):
        name, _, rest = block.partition(":")
        one = _yaml(block)
        values[name] = one[name] if isinstance(one, dict) and name in one else rest.strip()
    return values


def _blocks(head: str) -> Iterator[str]:
    """Split the front matter before every line that starts with a name."""
    block: list[str] = []
    for line in head.splitlines():
        if _KEY.match(line) and block:
            yield "\n".join(block)
            block = []
        if block or _KEY.match(line):
            block.append(line)
    if block:
        yield "\n".join(block)


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 (only a gateway with skills needs it)

    if text.count("[") + text.count("{") > MOST_BRACKETS:
        return None
    # Anchors could expand a small text into a large value; front matter does not need them.
    try:
        if any(isinstance(token, yaml.AnchorToken | yaml.AliasToken) for token in yaml.scan(text)):
            return None
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _namespace(said: dict[str, Any]) -> dict[str, Any]:
    metadata = said.get("metadata")
    if isinstance(metadata, dict):
        for name in NAMESPACES:
            if isinstance(metadata.get(name), dict):
                return dict(metadata[name])
    return {}


def _requirements(said: dict[str, Any]) -> tuple[Requirements, bool]:
    named = _namespace(said).get("requires")
    metadata = said.get("metadata")
    plain = metadata.get("requires") if isinstance(metadata, dict) else None
    asked: Any = next((value for value in (said.get("requires"), named, plain) if value is not None), {})
    if isinstance(asked, list):
        asked = {"bins": asked}
    if not isinstance(asked, dict):
        return Requirements(), False
    lists = {str(name): [value] if isinstance(value, str) else value for name, value in asked.items()}
    if not set(lists) <= set(Requirements.__struct_fields__):
        return Requirements(), False
    try:
        return msgspec.convert(lists, Requirements), not (isinstance(metadata, str) and metadata)
    except msgspec.ValidationError:
        return Requirements(), False


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() in ("true", "yes", "on"))


def _text(value: Any) -> str:
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""


def _first_paragraph(body: str) -> str:
    for paragraph in re.split(r"\n\s*\n", body.strip()):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith("#")]
        if text := " ".join(" ".join(lines).split()):
            return text[:MOST_DESCRIPTION]
    return ""
