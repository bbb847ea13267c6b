"""Skills: folders with a `SKILL.md`; the prompt lists only their name, description and path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

MOST_SKILLS: Final = 150
LONGEST_LIST: Final = 30 * 1024
SHORTEST_DESCRIPTION: Final = 40


class PromptSkill(msgspec.Struct, frozen=True):
    name: str
    description: str
    # Path from which the agent reads it.
    path: str


def listed(skills: Iterable[PromptSkill]) -> str:
    """Return a line per skill, sorted by name, within the budget: cut descriptions first, then drop skills."""
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


def _line(skill: PromptSkill, longest: int) -> str:
    description = " ".join(skill.description.split())
    if len(description) > longest:
        description = description[: max(0, longest - 1)] + "…"
    return f"- {skill.name}: {description} ({skill.path})" if description else f"- {skill.name} ({skill.path})"
