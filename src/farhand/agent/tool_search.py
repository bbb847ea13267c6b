"""Offer a few tools in the prompt and find all others by search.

A request carries the core tools and `tool_search`. Any other tool can be called by name at any time; once a search
has found it, or it was called, its schema is offered too. `macos.notes.*` stands for tools that their node does not
list. The offered tools depend on the conversation alone, in the order they were found, so the beginning of the
prompt stays the same from turn to turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from math import log
from typing import Final

import msgspec

from farhand.agent.tokens import tool_tokens
from farhand.agent.tool_outcome import Outcome
from farhand.agent.tools import AgentTool, Call, machine_part, not_found
from farhand.llm.messages import Message, ToolUse
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import ANY_BELOW, COMMON_PREFIX, NATIVE, SEPARATOR, covers, letter_spellings, same_letters
from farhand.tools.agent_tools import MAIN_AGENT
from farhand.tools.schema import canonical_names

NAME: Final = "tool_search"
MOST_FOUND: Final = 8
MOST_MACHINES: Final = 200
# With more machines than this, a search that names none of them finds `node_bash` instead of the `Bash` of each.
MOST_ALIKE: Final = 2
# Limits of a query, since each of its words is compared with every machine: its characters, and the parts of a word
# that can form one name.
LONGEST_QUERY: Final = 2000
MOST_PARTS: Final = 8
ABSENT: Final = (
    "The tools of an offline machine cannot be called until it is back. Tell your user; do not use another machine in "
    "its place unless your user agrees."
)
# Maximum found tools offered at once; the oldest are dropped.
MOST_OFFERED: Final = 24

# The main agent's own tools are in every request; native tools, nodes and plug-ins are found by search.
CORE: Final = MAIN_AGENT

SPEC: Final = ToolSpec(
    name=NAME,
    description=(
        "Find further tools by what they do or by name (e.g. 'schedule a job', 'laptop', 'cron'); 'machines' lists the "
        "machines. Found tools can then be called by name."
    ),
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words, or exact tool names separated by commas."},
            "limit": {"type": "integer", "minimum": 1, "maximum": MOST_FOUND},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
    read_only=True,
)

_WORD = re.compile(r"[a-z]+|\d+")
_BETWEEN = re.compile(r"[,\s]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PART = re.compile(r"[^\W_]+")
_POSSESSIVE = re.compile(r"['\u2019]s\b")
_COMMON = frozenset({"and", "are", "can", "for", "from", "get", "how", "the", "that", "this", "tool", "use", "with"})


class ToolCost(msgspec.Struct, frozen=True):
    """The cost of a tool in each request that carries it."""

    name: str
    tokens: int
    # False: it is found by `tool_search` and costs nothing until then.
    offered: bool


class ToolShelf:
    """The tools of the main agent. `specs` returns all tools that can be called now; `call` runs one of them.

    `judges`: `call` itself reports names that are not among them.
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
        specs = [spec for spec in self._specs() if not _offline(spec)]
        further = [spec for spec in specs if spec.name not in self._core]
        core = [spec for spec in specs if spec.name in self._core]
        mentioned = [name for name in _found_in(messages) if name not in self._core]
        found = [spec for name in mentioned if (spec := _named(name, further)) is not None]
        # If there is nothing to find, `tool_search` is not offered.
        search = [SPEC] if further or len(specs) < len(self._specs()) else []
        return [*core, *search, *found[-MOST_OFFERED:]]

    async def call(self, use: ToolUse) -> Outcome:
        specs = self._specs()
        if use.name == NAME:
            return _searched(use, [spec for spec in specs if spec.name not in self._core])
        callable_ = [spec for spec in specs if not _offline(spec)]
        if not self._judges and _named(use.name, callable_) is None and not self._of_other_machine(use.name, specs):
            return not_found(use.name, [spec.name for spec in callable_])
        return await self._call(use)

    @staticmethod
    def _of_other_machine(name: str, specs: Sequence[ToolSpec]) -> bool:
        """Return whether `call` must report a name, because its machine is offline or unknown."""
        if _named(name, [spec for spec in specs if _offline(spec)]) is not None:
            return True
        machine = machine_part(name)
        return bool(machine) and all(machine_part(spec.name) != machine for spec in specs if not _offline(spec))

    def costs(self) -> list[ToolCost]:
        """Return each tool with its cost, those in every request first, for `farhand tools --cost`."""
        offered = {spec.name for spec in self.offered(())}
        further = (spec for spec in self._specs() if spec.name not in offered and not _offline(spec))
        specs = [*self.offered(()), *further]
        return [ToolCost(spec.name, tool_tokens(spec), spec.name in offered) for spec in specs]


def _named(name: str, specs: Sequence[ToolSpec]) -> ToolSpec | None:
    """Return the tool of this name: a listed one, or one of an unlisted family."""
    if name.endswith(ANY_BELOW):
        return None
    family: ToolSpec | None = None
    for spec in specs:
        if spec.name == name:
            return spec
        if spec.name.endswith(ANY_BELOW) and covers(spec.name.removesuffix(ANY_BELOW), name):
            family = spec
    return None if family is None else msgspec.structs.replace(family, name=name)


def search(query: str, specs: Sequence[ToolSpec], limit: int = MOST_FOUND) -> list[ToolSpec]:
    """Return the best matches of a query. An exact name comes first; rarer words weigh more."""
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


def overview(specs: Sequence[ToolSpec]) -> str:
    """Return a line for each group of tools that is found by search, for the prompt.

    Tools of machines are left out: the prompt lists them with their machine.
    """
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if spec.name in CORE or (isinstance(spec, AgentTool) and spec.machine):
            continue
        group, separator, name = spec.name.partition(SEPARATOR)
        if separator:
            groups.setdefault(f"{group}{SEPARATOR}", []).append(name)
        else:
            groups.setdefault("", []).append(spec.name)
    return "\n".join(f"- {group or 'others: '}{', '.join(sorted(names))}" for group, names in sorted(groups.items()))


def _searched(use: ToolUse, specs: Sequence[ToolSpec]) -> Outcome:
    arguments = msgspec.json.decode(use.arguments)
    try:
        canonical_names(arguments, SPEC.parameters["properties"], {})
    except InvalidArgs as error:
        return Outcome.failed("invalid_args", error.message)
    query, limit = arguments.get("query"), arguments.get("limit", MOST_FOUND)
    if not isinstance(query, str) or not query.strip():
        return Outcome.failed("invalid_args", f"{NAME} parameter query is required")
    if len(query) > LONGEST_QUERY:
        return Outcome.failed(
            "invalid_args", f"{NAME} parameter query has {len(query)} characters; at most {LONGEST_QUERY} are allowed"
        )
    if not isinstance(limit, int) or isinstance(limit, bool):
        return Outcome.failed("invalid_args", f"parameter 'limit': expected int, got {type(limit).__name__}")
    limit = max(1, min(limit, MOST_FOUND))
    machines = _machines(specs)
    if query.strip().casefold() in ("machine", "machines"):
        return Outcome(_all_machines(machines))
    words = [word for word in _BETWEEN.split(query) if word]
    meant = _meant(query, machines)
    named = {machine_part(word) for word in words} - {"", NATIVE}
    unknown = sorted(one for one in named if not any(same_letters(one, machine) for machine in machines))
    # A query that names a machine excludes the tools of other machines, unless the query names these tools.
    exact = {spec.name for word in words if (spec := _named(word, specs)) is not None}
    among = [
        spec
        for spec in specs
        if not (meant or unknown) or _machine(spec) in meant or not _machine(spec) or _named_by(spec, exact)
    ]
    found = search(query, among if meant or exact else _collapsed(among), limit)
    notes = [f"There is no machine {one!r}; search for 'machines' to see them." for one in unknown[:3]]
    notes += [
        f"{machine} is offline, {state}." for machine, state in sorted(machines.items()) if state and machine in meant
    ]
    if notes and not unknown:
        notes.append(ABSENT)
    if not found:
        names = ", ".join(spec.name for spec in among if not _offline(spec))
        return Outcome("\n".join([*notes, f"No tool fits {query!r}. There are: {names[:2_000]}"]))
    there = [spec for spec in found if not _offline(spec)]
    lines = ["Found; call them by name:", *(f"{spec.name}: {_description(spec)}" for spec in there)] if there else []
    away = [f"- {spec.name} (offline, {_offline(spec)})" for spec in found if _offline(spec)]
    if away:
        lines += ["Offline now, cannot be called:", *away]
        notes = notes or [ABSENT]
    return Outcome("\n".join([*lines, *notes]))


def _collapsed(specs: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Return the tools with `node_bash` in place of the `Bash` of many machines."""
    of_machines = [
        (spec, f"{COMMON_PREFIX}{spec.name.partition(SEPARATOR)[2].lower()}") for spec in specs if _machine(spec)
    ]
    often = Counter(name for spec, name in of_machines if not _offline(spec))
    common = {spec.name for spec in specs if spec.name.startswith(COMMON_PREFIX) and often[spec.name] > MOST_ALIKE}
    left_out = {spec.name for spec, name in of_machines if name in common and not _offline(spec)}
    return [spec for spec in specs if spec.name not in left_out]


def _description(spec: ToolSpec) -> str:
    """Return the first line of a description."""
    return spec.description.partition("\n")[0]


def _machine(spec: ToolSpec) -> str:
    if isinstance(spec, AgentTool):
        return spec.machine
    machine = machine_part(spec.name)
    return "" if machine == NATIVE else machine


def _offline(spec: ToolSpec) -> str:
    return spec.offline if isinstance(spec, AgentTool) else ""


def _machines(specs: Sequence[ToolSpec]) -> dict[str, str]:
    """Return each machine that has a tool, with the reason why it is unreachable, if so."""
    machines: dict[str, str] = {}
    for spec in specs:
        if machine := _machine(spec):
            machines[machine] = _offline(spec)
    return machines


def _named_by(spec: ToolSpec, names: Collection[str]) -> bool:
    return any(spec.name == name or _named(name, [spec]) is not None for name in names)


def _named_machine(word: str) -> str:
    """Return the machine that a word of a query may name: `laptop` in `laptop__Bash` and in `laptop`."""
    return word.partition(SEPARATOR)[0]


def _meant(query: str, machines: Iterable[str]) -> set[str]:
    """Return the machines a query names: `laptop` in `laptop__Bash`, `laptop's`, `laptop.local` and `lap top`.

    Of the parts of one word the longest name counts: `nas-2` does not name the machine `nas`.
    """
    known: dict[str, set[str]] = {}
    for machine in machines:
        for spelling in letter_spellings(machine):
            known.setdefault(spelling, set()).add(machine)

    def named(parts: Sequence[str]) -> set[str]:
        return {machine for one in letter_spellings("".join(parts)) for machine in known.get(one, ())}

    plain = _POSSESSIVE.sub("", query[:LONGEST_QUERY])
    words = [_PART.findall(_named_machine(word)) for word in _BETWEEN.split(plain)]
    meant: set[str] = set()
    for one, other in pairwise([*words, []]):
        meant |= named([*one, *other])
        parts = one
        while parts:
            longest = next((end for end in range(min(len(parts), MOST_PARTS), 0, -1) if named(parts[:end])), 0)
            meant |= named(parts[:longest])
            parts = parts[longest or 1 :]
    return meant


def _all_machines(machines: dict[str, str]) -> str:
    lines = [f"- {machine}: {f'offline, {state}' if state else 'connected'}" for machine, state in machines.items()]
    shown = sorted(lines)[:MOST_MACHINES]
    more = [f"({len(lines) - len(shown)} more are not listed)"] if len(lines) > len(shown) else []
    return "\n".join(["Machines; search for one's id to see its tools:", *shown, *more])


def _found_in(messages: Sequence[Message]) -> list[str]:
    """Return the names of tools that were found or called, in order of their last mention."""
    names: dict[str, None] = {}
    for message in messages:
        mentioned: list[str] = [use.name for use in message.tool_calls]
        if message.role == "tool" and message.name == NAME and not message.is_error:
            mentioned += [line.partition(": ")[0] for line in message.text.splitlines()[1:] if ": " in line]
        for name in mentioned:
            names.setdefault(name)
    return list(names)


def _words(text: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub(" ", text).casefold())
