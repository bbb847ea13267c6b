"""The owner's policy: for each call `allow`, `ask` or `deny`, by the first rule that matches it.

A pattern over text is not a security boundary: a path has many spellings, and a command can hide another. So whatever
can be read in several ways is read against the caller. A rule that stops calls (`ask`, `deny`) matches if one reading
matches. A rule that allows them matches only if all readings do, and never a command with a shell operator that the
rule does not spell out. What a caller claims about itself, such as its session, can only narrow its rights.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, cast

import msgspec

from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.pinning import TRANSFER
from farhand.gateway.calls.policy_paths import (
    Reach,
    Reached,
    Reading,
    agent_path,
    at_or_below,
    at_path,
    below_end,
    below_path,
    below_workspace_path,
    found_by,
    leads_out,
    machine_path,
    native_path,
    paths_of_end,
)
from farhand.gateway.calls.policy_subject import OF_AGENT, PATHS, RECURSIVE, VIA, Subject
from farhand.gateway.nodes.endpoints import longest_id
from farhand.machine.search.overlap import loose_glob, regex_glob
from farhand.protocol.names import MAIN_AGENT, source_name

Decision = Literal["allow", "ask", "deny", "trial"]
DefaultDecision = Literal["allow", "ask", "deny"]
RulePreview = Literal["", "trial"]
Patterns = str | list[str]

REGEX: Final = "re:"
TAG: Final = "tag:"
# The argument name that stands for every text in the arguments.
ANYWHERE: Final = "*"
COMMANDS: Final = frozenset({"command"})
# Tools that find files by the argument `pattern`, which may be absolute.
SEARCHES: Final = frozenset({"glob"})
# Tools that list the names in a folder.
LISTS: Final = frozenset({"ls", "gsv__readfile"})
# A name in a folder that no pattern spells out.
_ANY_NAME: Final = "\x01" * 8
# Arguments that do not change what a command does.
HARMLESS: Final = frozenset({"timeout", "timeoutMs", "timeout_ms", "timeout_seconds", "background", "yieldMs"})
ROUTES: Final = ("node", "native", "local", "mcp")
# Values of one call that a rule is compared with.
MAX_TEXTS: Final = 10_000
# Characters of a text that a glob with `?` or `[` is compared with; a longer one matches every rule that stops.
MAX_GLOB_CHARACTERS: Final = 64 * 1024
# Characters of the paths of one call that are resolved.
MAX_PATH_CHARACTERS: Final = 64 * 1024
MAX_SECONDS: Final = 30 * 86_400
_OPERATORS: Final = re.compile(r"[;&|<>`$(){}\n\r\\!#~]")
_SPECIAL: Final = re.compile(r"[?\[]")
_WILDCARD: Final = re.compile(r"[*?\[]")


class PolicyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table `[[policy.rules]]`. A key that is left out matches anything; one match in a list is enough."""

    decision: Decision
    # How `policy explain`, the journal and messages call the rule; by default `rule` and its number.
    name: str = ""
    # Globs, ignoring case: `laptop__Bash`, `*__Write`, `Bash` (on any node), `gsv__*`, `notes.*`.
    tool: Patterns = []
    # Globs of node ids, or `tag:prod`.
    node: Patterns = []
    # `node`, `native` (gsv__*), `local` (the gateway's own machine).
    route: Patterns = []
    # By argument name, `*` for any text in the arguments: a glob, or a regular expression after `re:`.
    args: dict[str, Patterns] = {}
    # Where the call comes from: `http`, `direct`, `cron:*`, `telegram`, `hook:*` and so on.
    origin: Patterns = []
    # `owner`, the id of a token, `agent:main` and so on. A rule that stops calls also matches those made on behalf of
    # the credential, and by tokens that it made.
    credential: Patterns = []
    # The credential on whose behalf an agent acts; never matches a direct call.
    on_behalf_of: Patterns = []
    # Globs of session keys.
    session: Patterns = []
    # For `ask`: how long to wait for an answer, instead of `approval_seconds`.
    seconds: float | None = None
    # For `ask`: `trial` runs the command as a trial first and shows the approver what it changed.
    preview: RulePreview = ""
    # Shown to the caller, and to the approver.
    reason: str = ""


class PolicySettings(msgspec.Struct, forbid_unknown_fields=True):
    """The table `[policy]`; read again whenever the file changes."""

    # The decision if no rule matches.
    default: DefaultDecision = "allow"
    rules: list[PolicyRule] = []
    # How long a call waits to be approved before it is denied.
    approval_seconds: float = 600.0
    # Who is asked, and may answer, on channels: `telegram:4711`, `email:me@example.org`.
    approvers: list[str] = []


class Verdict(msgspec.Struct, frozen=True):
    """The decision on a call, and the rule that made it."""

    decision: Decision
    rule: str
    reason: str = ""
    seconds: float | None = None
    preview: RulePreview = ""


class Forbidden(Denied):
    """The policy denies the call."""


class Policy:
    def __init__(self, settings: PolicySettings, workspace: str | None = None, agents: str | None = None) -> None:
        """`workspace` is where relative paths start for tools of the gateway's own machine, `agents` the folder of the
        agents' workspaces on it. Raises ValueError for invalid settings."""
        if not 0 < settings.approval_seconds <= MAX_SECONDS:
            raise ValueError(
                f"[policy] approval_seconds must be above 0 and at most 30 days, not {settings.approval_seconds:g}"
            )
        self.settings = settings
        self._workspace = workspace
        self._agents = agents
        self._rules = [_Rule(rule, number) for number, rule in enumerate(settings.rules, 1)]
        # Whether a rule lets calls run as trials only.
        self.tries = any(rule.decision == "trial" for rule in settings.rules)
        # Whether a rule has calls run as trials before their owner is asked.
        self.previews = any(rule.preview for rule in settings.rules)
        self._default = Verdict(settings.default, "default")

    @classmethod
    def of(cls, settings: PolicySettings, workspace: str | None = None, agents: str | None = None) -> Policy | None:
        """Return the policy; None if it allows everything. Raises ValueError."""
        policy = cls(settings, workspace, agents)
        return policy if settings.rules or settings.default != "allow" else None

    def judge(self, subject: Subject) -> Verdict:
        """Return the verdict of the first rule that matches."""
        subject = self._with_workspace(subject)
        return next((rule.verdict for rule in self._rules if rule.matches(subject)), self._default)

    def all_matching(self, subject: Subject) -> list[Verdict]:
        """Return the verdicts of all rules that match, the deciding one first and the default last."""
        subject = self._with_workspace(subject)
        return [*(rule.verdict for rule in self._rules if rule.matches(subject)), self._default]

    def _with_workspace(self, subject: Subject) -> Subject:
        paths_long = (
            sum(len(text) for name in PATHS for text in _texts(subject.args.get(name, []))) > MAX_PATH_CHARACTERS
        )
        subject = msgspec.structs.replace(subject, paths_long=paths_long, memo={})
        if subject.route == "native" and subject.agents is None:
            return msgspec.structs.replace(subject, agents=self._agents)
        if subject.route != "local" or subject.workspace is not None:
            return subject
        return msgspec.structs.replace(subject, workspace=self._workspace, agents=self._agents)

    def seconds(self, verdict: Verdict) -> float:
        """Return how long a call waits to be approved."""
        return self.settings.approval_seconds if verdict.seconds is None else verdict.seconds


class _Rule:
    def __init__(self, rule: PolicyRule, number: int) -> None:
        # A rule that stops calls is satisfied by one reading, one that allows them needs all.
        self._stops = rule.decision != "allow"
        where = rule.name or f"rule {number}"
        if rule.seconds is not None and not 0 < rule.seconds <= MAX_SECONDS:
            raise ValueError(f"[policy] {where}: seconds must be above 0 and at most 30 days, not {rule.seconds:g}")
        if rule.seconds is not None and rule.decision != "ask":
            raise ValueError(f"[policy] {where}: seconds belong to a rule that asks")
        if rule.preview and rule.decision != "ask":
            raise ValueError(f"[policy] {where}: preview belongs to a rule that asks")
        self.verdict = Verdict(rule.decision, where, rule.reason, rule.seconds, rule.preview)
        self._tools = [pattern.casefold() for pattern in _listed(rule.tool)]
        self._nodes = _listed(rule.node)
        self._routes = _listed(rule.route)
        for route in self._routes:
            if route not in ROUTES:
                raise ValueError(f"[policy] {where}: unknown route {route!r}; {_suggestion(route)}")
        self._origins = _listed(rule.origin)
        self._credentials = _listed(rule.credential)
        self._askers = _listed(rule.on_behalf_of)
        self._sessions = _listed(rule.session)
        self._args = {
            name: [_Pattern(one, where, whole=not self._stops) for one in _listed(given)]
            for name, given in rule.args.items()
        }

    def matches(self, subject: Subject) -> bool:
        names = (*subject.names, *subject.typed_into) if self._stops else subject.names
        if self._tools and not _any(names, self._tools):
            return False
        if self._routes and subject.route not in self._routes:
            return False
        if self._nodes and not self._node_matches(subject):
            return False
        if self._credentials and not self._credential_matches(subject):
            return False
        if self._askers and not self._askers_match(subject):
            return False
        if self._origins and not self._origins_match(subject):
            return False
        if self._sessions:
            if subject.session_key is None or not (self._stops or subject.session_proven):
                return False
            if not _any((subject.session_key,), self._sessions):
                return False
        return all(self._argument_matches(subject, name, patterns) for name, patterns in self._args.items())

    def _origins_match(self, subject: Subject) -> bool:
        """A run does not escape the rules for its origin by having another run do the work."""
        if self._stops:
            return _any((origin.removeprefix(VIA) for origin in subject.origins), self._origins)
        return all(_any((origin,), self._origins) for origin in subject.origins if not origin.startswith(VIA))

    def _credential_matches(self, subject: Subject) -> bool:
        """A token does not escape the rules for it by letting an agent, or a token it made, act for it."""
        acting = (subject.credential, *subject.askers, *subject.makers) if self._stops else (subject.credential,)
        return _any(acting, self._credentials)

    def _askers_match(self, subject: Subject) -> bool:
        if not subject.askers:
            return False
        askers = (*subject.askers, *subject.makers) if self._stops else subject.askers
        return self._each(_any((one,), self._askers) for one in askers)

    def _node_matches(self, subject: Subject) -> bool:
        """A rule that stops the calls of a node also stops calls that name it, such as transfers."""
        nodes = [] if subject.node_id is None else [Reached(subject.node_id, subject.tags)]
        if self._stops:
            nodes += subject.reached
        return any(_node_is(node, pattern) for node in nodes for pattern in self._nodes)

    def _argument_matches(self, subject: Subject, name: str, patterns: list[_Pattern]) -> bool:
        name = subject.aliases.get(name, name)
        if name == ANYWHERE:
            return self._anything_matches(subject, patterns)
        if name in PATHS and subject.paths_long:  # too long to resolve
            return self._stops
        if name == "path" and self._stops and (subject.paths_unknown or self._matches_an_end(subject, patterns)):
            return True
        if name in PATHS and self._stops and self._matches_below(subject, name, patterns):
            return True
        if name == "path" and not self._stops and "pattern" not in self._args and _searches_elsewhere(subject):
            return False
        values = list(_texts(subject.args.get(name, []), keys=self._stops))
        if name in COMMANDS and self._stops and subject.typed_into:
            values.append(subject.typed)
        if not any(values) and self._stops and name in subject.left_out:
            values = ["."]
        if not values:
            return False
        if len(values) > MAX_TEXTS:  # too many to compare
            return self._stops
        if name in COMMANDS and not self._stops:
            others = (other for other, value in subject.args.items() if value not in (None, "", {}, []))
            if any(other not in self._args and other != name and other not in HARMLESS for other in others):
                return False  # a folder, variables or input change what the same command does
        return self._values_match(subject, name, values, patterns)

    def _anything_matches(self, subject: Subject, patterns: list[_Pattern]) -> bool:
        """One text in the call, or one reading of a path, is enough for a rule that stops it; a rule that allows it
        must match each text for which it has no other pattern."""
        if self._stops:
            values = list(_texts(subject.args, keys=True))
            if len(values) > MAX_TEXTS or any(pattern.matches(text) for text in values for pattern in patterns):
                return True
            return any(self._argument_matches(subject, name, patterns) for name in sorted(PATHS))
        rest = {
            name: list(_texts(value, keys=True))
            for name, value in subject.args.items()
            if name not in self._args and name not in HARMLESS
        }
        if not 0 < sum(map(len, rest.values())) <= MAX_TEXTS or subject.paths_long:
            return False
        return all(self._values_match(subject, name, values, patterns) for name, values in rest.items())

    def _values_match(self, subject: Subject, name: str, values: list[str], patterns: list[_Pattern]) -> bool:
        if name in COMMANDS and not self._stops:
            return all(any(pattern.spells(text) for pattern in patterns) for text in values)
        is_path = name in PATHS
        folds = is_path and subject.folds and self._stops
        lists = is_path and self._stops and not LISTS.isdisjoint(subject.names)
        return self._each(
            any(
                pattern.matches(spelling, folds=folds) or (lists and pattern.is_below(spelling, folds=folds))
                for spelling in reading
                for pattern in patterns
            )
            for text in values
            for reading in (self._readings(name, text, subject) if is_path else [(text,)])
        )

    def _readings(self, name: str, text: str, subject: Subject) -> list[Reading]:
        """Return the readings of a path; for a rule that stops calls, its literal text is one of them."""
        key = (name, text, self._stops)
        if key not in subject.memo:
            subject.memo[key] = self._read(name, text, subject)
        return cast(list[Reading], subject.memo[key])

    def _read(self, name: str, text: str, subject: Subject) -> list[Reading]:
        texts = _transfer_ends(subject).get(name, [text]) if self._stops else [text]
        if not text:
            return [(text,)]
        if subject.route == "native":
            # A caller that only names an agent is not covered by an `allow` that does not name the agent.
            owner = subject.owner if self._stops or _names_another(subject) else None
            found = [one for end in texts for one in native_path(end, subject.reached, stops=self._stops, owner=owner)]
        else:
            found = machine_path(text, subject.workspace, local=subject.route == "local")
            if (own := _own_workspace(subject)) is not None:
                found += machine_path(text, own, local=True)
            if self._stops and subject.agents is not None:
                found += agent_path(found, subject.agents)
        return [(text,), *found] if self._stops else found

    def _matches_an_end(self, subject: Subject, patterns: list[_Pattern]) -> bool:
        """Whether a pattern for `path` matches an end of a transfer."""
        for texts in _transfer_ends(subject).values():
            readings = [one for end in texts for one in paths_of_end(end, subject.reached, subject.owner)]
            if any(
                one.matches(path, folds=subject.folds) for reading in readings for path in reading for one in patterns
            ):
                return True
        return False

    @staticmethod
    def _matches_below(subject: Subject, name: str, patterns: list[_Pattern]) -> bool:
        """Whether a pattern may match a path below a folder that the call searches or transfers."""
        if name not in subject.memo:
            subject.memo[name] = _reaches(subject, name)
        return any(pattern.meets(reach, folds=subject.folds) for reach in subject.memo[name] for pattern in patterns)

    def _each(self, matches: Iterable[bool]) -> bool:
        """One reading is enough to stop a call; it takes all to allow it."""
        return any(matches) if self._stops else all(matches)


def _transfer_ends(subject: Subject) -> dict[str, list[str]]:
    """Return the ends of a transfer, by argument name.

    A transfer into a folder writes a file in it, named after the source. Whether the destination is a folder is not
    known here, so a rule that stops either path stops the call.
    """
    if TRANSFER.casefold() not in subject.names:
        return {}
    ends = {name: [text] for name in ("source", "destination") if isinstance(text := subject.args.get(name), str)}
    if len(ends) == 2:
        [source], [destination] = ends.values()
        node_id = longest_id(source, (one.node_id for one in subject.reached))
        if inside := source_name(source[len(node_id) + 1 :] if node_id else source):
            ends["destination"].append(f"{destination.rstrip('/')}/{inside}")
    return ends


def _reaches(subject: Subject, name: str) -> list[Reach]:
    """Return what the call reaches below the folder in an argument."""
    own = _own_workspace(subject)
    workspaces = [subject.workspace] if own is None else [subject.workspace, own]
    found = [at_or_below(read, one) for read in subject.reads for one in workspaces] if name == "path" else []
    if name == "path":
        found += [subject.owner.reach(at_path(file)) for file in subject.files]
        found += [subject.owner.reach(at_or_below(read, None)) for read in subject.reads]
    if not subject.recursive and RECURSIVE.isdisjoint(subject.names):
        return found
    ends = _transfer_ends(subject)
    if ends:
        chosen = [text for role, texts in ends.items() if name in (role, "path") for text in texts]
        return [*found, *(below_end(text, subject.reached, subject.owner)[name == "path"] for text in chosen)]
    folder = subject.args.get(name)
    if name in subject.left_out or folder in (None, ""):
        folder = "." if name == "path" else None
    if not isinstance(folder, str):
        return found
    pattern, include = subject.args.get("pattern"), subject.args.get("include")
    if not SEARCHES.isdisjoint(subject.names) and isinstance(pattern, str):
        return [*found, found_by(pattern, folder, subject.workspace, subject.agents)] if name == "path" else found
    if subject.route == "native":
        return [*found, subject.owner.reach(below_workspace_path(folder))]
    names = include if isinstance(include, str) else None
    local = subject.route == "local"
    return [*found, below_path(folder, subject.workspace, local=local, agents=subject.agents, names=names)]


def _names_another(subject: Subject) -> bool:
    """Whether a caller that is no run of an agent works in the workspace of another one than the main one."""
    return subject.agent != MAIN_AGENT and not subject.session_proven


def _own_workspace(subject: Subject) -> str | None:
    """Return the folder of the agent in which a tool of the gateway's machine works beside the main one's."""
    if subject.agents is None or subject.agent == MAIN_AGENT or OF_AGENT.isdisjoint(subject.names):
        return None
    return f"{subject.agents.rstrip('/')}/{subject.agent}"


def _searches_elsewhere(subject: Subject) -> bool:
    pattern = subject.args.get("pattern")
    return not SEARCHES.isdisjoint(subject.names) and isinstance(pattern, str) and leads_out(pattern)


class _Pattern:
    """A glob or a regular expression; with `whole`, the expression has to match the whole text, as a glob does."""

    def __init__(self, text: str, where: str, *, whole: bool = False) -> None:
        self._text = text
        self._folded = _folded(text)
        # The literal parts of a glob without other special characters than `*`.
        self._parts = None if _SPECIAL.search(text) else text.split("*")
        self._stops = not whole
        self._loose = loose_glob(text)
        self._regex: Any = None
        if text.startswith(REGEX):
            expression = text.removeprefix(REGEX)
            self._loose = regex_glob(expression)
            try:
                self._regex = _compiled(expression)
                if whole:
                    self._regex = _compiled(f"^(?:{expression})$")
                self._folded_regex = _compiled(f"(?i){expression}")
            except ValueError as error:
                raise ValueError(f"[policy] {where}: {text!r} is not a regular expression: {error}") from None

    def matches(self, text: str, *, folds: bool = False) -> bool:
        """`folds`: also ignore case and compatibility forms of letters."""
        if self._regex is not None:
            return self._regex.is_valid(text) or (folds and self._folded_regex.is_valid(_folded(text)))
        if self._parts is not None:
            fits = _fits(text, self._parts)
        elif len(text) > MAX_GLOB_CHARACTERS:
            return self._stops  # it would take too long to compare
        else:
            fits = fnmatchcase(text, self._text)
        return fits or (folds and fnmatchcase(_folded(text), self._folded))

    def is_below(self, folder: str, *, folds: bool) -> bool:
        """Whether it matches any name in a folder, or is a pattern for names in this very folder."""
        if self.matches(f"{folder.rstrip('/')}/{_ANY_NAME}" if folder else _ANY_NAME, folds=folds):
            return True
        parent, slash, _ = self._text.rpartition("/")
        if self._regex is not None or not slash or _WILDCARD.search(parent.rpartition("/")[2]):
            return False
        spelled = folder.rstrip("/")
        return fnmatchcase(spelled, parent) or (folds and fnmatchcase(_folded(spelled), _folded(parent)))

    def meets(self, reach: Reach, *, folds: bool) -> bool:
        """Whether it may match a path that a call reaches."""
        return reach.meets(self._loose) or (folds and reach.folded(_folded).meets(_folded(self._loose)))

    def spells(self, text: str) -> bool:
        """Whether it matches a command literally, or one without shell operators."""
        return text == self._text or (self.matches(text) and _OPERATORS.search(text) is None)


def _fits(text: str, parts: list[str]) -> bool:
    """Return whether a text consists of these parts in this order, with anything between them."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return text == first
    end = len(text) - len(last)
    if end < len(first) or not text.startswith(first) or not text.endswith(last):
        return False
    at = len(first)
    for part in parts[1:-1]:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _node_is(node: Reached, pattern: str) -> bool:
    if pattern.startswith(TAG):
        return pattern.removeprefix(TAG) in node.tags
    return fnmatchcase(node.node_id, pattern)


def _compiled(expression: str) -> Any:
    """Return a matcher without backtracking: the text comes from a model and must not be able to block the gateway."""
    import jsonschema_rs  # noqa: PLC0415 - see `catalog`

    schema = {"type": "string", "pattern": expression}
    return jsonschema_rs.Draft202012Validator(schema, pattern_options=jsonschema_rs.RegexOptions())


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _texts(value: Any, *, keys: bool = False) -> Iterable[str]:
    """Yield every text in a value, numbers and the like as JSON. `keys`: also the names in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if keys:
                yield str(name)
            yield from _texts(one, keys=keys)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, keys=keys)
    else:
        yield msgspec.json.encode(value).decode()


def _suggestion(route: str) -> str:
    close = difflib.get_close_matches(route, ROUTES, 1)
    known = f"use one of {', '.join(ROUTES)}"
    return f"did you mean {close[0]!r}? {known}" if close else known


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _any(texts: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)
