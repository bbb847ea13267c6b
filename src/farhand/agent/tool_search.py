"""Few tools in the prompt, all of them in reach.

A request carries the core tools and `tool_search`. Any other tool can be called by its name at any time; once a search
has found it, or it was called, its schema is offered too. `macos.notes.*` stands for tools that their node does not
list. What is offered follows from the conversation alone, in the order things were found, so the beginning of the
prompt stays the same from turn to turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import log
from typing import Final

import msgspec

from farhand.agent.outcome import Outcome
from farhand.agent.tokens import tool_tokens
from farhand.agent.tools import Call, not_found
from farhand.llm.messages import Message, ToolUse
from farhand.protocol.calls import ToolSpec
from farhand.protocol.names import FAMILY, SEPARATOR, covers
from farhand.tools.agent_family import MAIN_AGENT

NAME: Final = "tool_search"
MOST_FOUND: Final = 8
MOST_OFFERED: Final = 24
"""Found tools that are offered at once; the oldest make room."""

CORE: Final = MAIN_AGENT
"""The agent's own twenty are in every request; native tools, nodes and plug-ins are found."""

SPEC: Final = ToolSpec(
    name=NAME,
    description=(
        "Find further tools by what they do or by name (e.g. 'schedule a job', 'laptop', 'cron'). "
        "Found tools can then be called by name."
    ),
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words, or exact tool names separated by commas."},
            "limit": {"type": "integer", "minimum": 1, "maximum": MOST_FOUND},
        },
        "required": ["query"],
    },
    read_only=True,
)

_WORD = re.compile(r"[a-z]+|\d+")
_BETWEEN = re.compile(r"[,\s]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_COMMON = frozenset({"and", "are", "can", "for", "from", "get", "how", "the", "that", "this", "tool", "use", "with"})


class ToolCost(msgspec.Struct, frozen=True):
    """What a tool costs in each request that carries it."""

    name: str
    tokens: int
    offered: bool
    """False: it is found by `tool_search` and costs nothing before."""


class ToolShelf:
    """The tools of the main agent. `specs` gives all that may be called right now; `call` runs one of them.

    `judges`: `call` itself says what is wrong with a name that is not among them.
    """

    def __init__(
        self,
        specs: Callable[[], Sequence[ToolSpec]],
        call: Call,
        *,
        core: Collection[str] = CORE,
        judges: bool = False,
    ) -> None:
        self._specs = specs
        self._call = call
        self._core = frozenset(core)
        self._judges = judges

    def offered(self, messages: Sequence[Message]) -> Sequence[ToolSpec]:
        specs = self._specs()
        further = [spec for spec in specs if spec.name not in self._core]
        core = [spec for spec in specs if spec.name in self._core]
        mentioned = [name for name in _found_in(messages) if name not in self._core]
        found = [spec for name in mentioned if (spec := _named(name, further)) is not None]
        # Without anything to find there is nothing to search.
        search = [SPEC] if further else []
        return [*core, *search, *found[-MOST_OFFERED:]]

    async def call(self, use: ToolUse) -> Outcome:
        specs = self._specs()
        if use.name == NAME:
            return _searched(use, [spec for spec in specs if spec.name not in self._core])
        if not self._judges and _named(use.name, specs) is None:
            return not_found(use.name, [spec.name for spec in specs])
        return await self._call(use)

    def costs(self) -> list[ToolCost]:
        """Each tool with its cost, those in every request first: what `farhand tools --cost` shows."""
        offered = {spec.name for spec in self.offered(())}
        specs = [*self.offered(()), *(spec for spec in self._specs() if spec.name not in offered)]
        return [ToolCost(spec.name, tool_tokens(spec), spec.name in offered) for spec in specs]


def _named(name: str, specs: Sequence[ToolSpec]) -> ToolSpec | None:
    """The tool of this name: one that is listed, or one of a family, of which nothing more is known."""
    if name.endswith(FAMILY):
        return None
    family: ToolSpec | None = None
    for spec in specs:
        if spec.name == name:
            return spec
        if spec.name.endswith(FAMILY) and covers(spec.name.removesuffix(FAMILY), name):
            family = spec
    return None if family is None else msgspec.structs.replace(family, name=name)


def search(query: str, specs: Sequence[ToolSpec], limit: int = MOST_FOUND) -> list[ToolSpec]:
    """The tools that fit a query best. An exact name comes first; words count more the fewer tools have them."""
    words = [word for word in _BETWEEN.split(query) if word]
    exact = {word.casefold() for word in words}
    specs = [*specs, *(spec for word in words if (spec := _named(word, specs)) is not None and spec not in specs)]
    described = [(spec, set(_words(spec.name)), set(_words(spec.description))) for spec in specs]
    often = Counter(word for _, name, text in described for word in name | text)
    wanted = [word for word in dict.fromkeys(_words(query)) if len(word) > 1 and word not in _COMMON]
    scored: list[tuple[float, str, ToolSpec]] = []
    for spec, name, text in described:
        score = 1_000.0 if spec.name.casefold() in exact else 0.0
        for word in wanted:
            rarity = 1 + log((len(specs) + 1) / (often[word] + 1))
            if word in name:
                score += 3 * rarity
            elif word in text:
                score += rarity
            elif any(other.startswith(word) for other in name):
                score += 1.5 * rarity
        if score > 0:
            scored.append((-score, spec.name, spec))
    return [spec for _, _, spec in sorted(scored, key=lambda entry: entry[:2])[:limit]]


def overview(specs: Sequence[ToolSpec], core: Collection[str] = CORE) -> str:
    """One line for each group of tools that must be searched: what the prompt says about them."""
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if spec.name in core:
            continue
        group, separator, name = spec.name.partition(SEPARATOR)
        if separator:
            groups.setdefault(f"{group}{SEPARATOR}", []).append(name)
        else:
            groups.setdefault("", []).append(spec.name)
    return "\n".join(f"- {group or 'others: '}{', '.join(sorted(names))}" for group, names in sorted(groups.items()))


def _searched(use: ToolUse, specs: Sequence[ToolSpec]) -> Outcome:
    arguments = msgspec.json.decode(use.arguments)
    query, limit = arguments.get("query"), arguments.get("limit", MOST_FOUND)
    if not isinstance(query, str) or not query.strip():
        return Outcome.failed("invalid_args", f"{NAME} parameter query is required")
    if not isinstance(limit, int) or isinstance(limit, bool):
        return Outcome.failed("invalid_args", f"parameter 'limit': expected int, got {type(limit).__name__}")
    found = search(query, specs, max(1, min(limit, MOST_FOUND)))
    if not found:
        return Outcome(f"No tool fits {query!r}. There are: {', '.join(spec.name for spec in specs)[:2_000]}")
    lines = [f"{spec.name}: {spec.description.partition(chr(10))[0]}" for spec in found]
    return Outcome("Found; call them by name:\n" + "\n".join(lines))


def _found_in(messages: Sequence[Message]) -> list[str]:
    """Names of tools that were found or called, the latest mention last."""
    names: dict[str, None] = {}
    for message in messages:
        mentioned: list[str] = [use.name for use in message.tool_calls]
        if message.role == "tool" and message.name == NAME and not message.is_error:
            mentioned += [line.partition(": ")[0] for line in message.text.splitlines()[1:]]
        for name in mentioned:
            names.setdefault(name)
    return list(names)


def _words(text: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub(" ", text).casefold())
