"""Skills: folders with a `SKILL.md`, of which the prompt lists only name, description and path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

LARGEST_SKILL: Final = 256 * 1024
MOST_SKILLS: Final = 150
LONGEST_LIST: Final = 30 * 1024
SHORTEST_DESCRIPTION: Final = 40


class Skill(msgspec.Struct, frozen=True):
    name: str
    description: str
    path: str
    """Where the agent reads it when it applies."""


def read_skill(text: str, folder: str, path: str) -> Skill | None:
    """The skill of a `SKILL.md`; its name falls back to the folder's. None for a file that is too large."""
    if len(text.encode(errors="replace")) > LARGEST_SKILL:
        return None
    values = _frontmatter(text)
    return Skill(values.get("name") or folder, values.get("description", ""), path)


def listed(skills: Iterable[Skill]) -> str:
    """One line for each, by name, within the budget: descriptions are cut first, then skills are left out."""
    chosen = sorted(skills, key=lambda skill: (skill.name, skill.path))
    left_out = max(0, len(chosen) - MOST_SKILLS)
    chosen = chosen[:MOST_SKILLS]
    longest = max((len(skill.description) for skill in chosen), default=0)
    lines = [_line(skill, longest) for skill in chosen]
    while sum(len(line) + 1 for line in lines) > LONGEST_LIST and longest > SHORTEST_DESCRIPTION:
        longest = max(SHORTEST_DESCRIPTION, longest * 9 // 10)
        lines = [_line(skill, longest) for skill in chosen]
    while sum(len(line) + 1 for line in lines) > LONGEST_LIST:
        lines.pop()
        left_out += 1
    if left_out:
        lines.append(f"({left_out} more are not listed)")
    return "\n".join(lines)


def _line(skill: Skill, longest: int) -> str:
    description = " ".join(skill.description.split())
    if len(description) > longest:
        description = description[: max(0, longest - 1)] + "…"
    return f"- {skill.name}: {description} ({skill.path})" if description else f"- {skill.name} ({skill.path})"


def _frontmatter(text: str) -> dict[str, str]:
    """Plain `key: value` lines between two lines of dashes; quotes around a value are taken off, `>` and `|` joined."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    values: dict[str, str] = {}
    key = ""
    for line in lines[1:]:
        if line.strip() == "---":
            return values
        if line[:1] in (" ", "\t") and key:
            values[key] = f"{values[key]} {line.strip()}".strip()
            continue
        name, separator, value = line.partition(":")
        if separator:
            key = name.strip()
            value = value.strip()
            if value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1:
                value = value[1:-1]
            values[key] = "" if value in (">", "|", ">-", "|-") else value
    return {}
