"""The owner's policy: for each call `allow`, `ask` or `deny`, by the first rule that fits it.

A pattern over text is no wall: a path may be spelled in many ways and a command can hide another. So whatever may be
read in several ways is read against the caller: a rule that stops (`ask`, `deny`) fits when one reading fits, a rule
that lets through (`allow`) only when all of them do, and never a command with an operator of the shell in it that the
rule does not spell out. What a caller merely says of itself (the session it names) can only narrow what it may do.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.gateway.calls.pinning import LOGS, TRANSFER
from farhand.gateway.calls.policy_paths import (
    Reached,
    Reading,
    leads_out,
    machine_path,
    native_path,
    paths_of_end,
    search_reaches,
)
from farhand.gateway.nodes.endpoints import longest_id
from farhand.gateway.nodes.registry import Node
from farhand.machine.patch.parse import parse
from farhand.protocol.errors import ToolError
from farhand.protocol.names import join_tool, source_name

Decision = Literal["allow", "ask", "deny"]
Patterns = str | list[str]

# The origin of a call that comes by itself, not from a run.
HTTP: Final = ("http",)
# Marks an origin that a run does not have itself, but whose work led to it: by a message or a job.
VIA: Final = "via:"
MOST_ORIGINS: Final = 16
# The origin of what the gateway does by itself, as ending what a stopped run left running; no rule stops that.
GATEWAY: Final = ("gateway",)
REGEX: Final = "re:"
TAG: Final = "tag:"
# The name that stands for every text in the arguments.
ANYWHERE: Final = "*"
PATHS: Final = frozenset({"path", "file_path", "workdir", "working_dir", "cwd", "source", "destination"})
COMMANDS: Final = frozenset({"command"})
# Tools that find files by a pattern, which may be absolute.
SEARCHES: Final = frozenset({"glob"})
# What may stand beside a command without changing what it does.
HARMLESS: Final = frozenset({"timeout", "timeoutMs", "timeout_ms", "timeout_seconds", "background", "yieldMs"})
ROUTES: Final = ("node", "native", "local")
# Values of one call that a rule is compared with.
MOST_TEXTS: Final = 10_000
_OPERATORS: Final = re.compile(r"[;&|<>`$(){}\n\r\\!#~]")


class PolicyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table `[[policy.rules]]`. What is left out fits anything; of a list, one is enough."""

    decision: Decision
    # What `policy explain`, the journal and the caller are told; by default its place.
    name: str = ""
    # Globs, without regard to case: `laptop__Bash`, `*__Write`, `Bash` (on any node), `gsv__*`, `notes.*`.
    tool: Patterns = []
    # Globs of node ids, or `tag:prod`.
    node: Patterns = []
    # `node`, `native` (gsv__*), `local` (the gateway's own machine).
    route: Patterns = []
    # By the argument's name, `*` for any text in them: a glob, or a regular expression after `re:`.
    args: dict[str, Patterns] = {}
    # Where the call comes from: `http`, `direct`, `cron:*`, `telegram`, `hook:*` … as the run says that makes it.
    origin: Patterns = []
    # `owner`, the id of a token, `agent:main`, … A rule that stops also fits what is done on behalf of these.
    credential: Patterns = []
    # The same for the credential on whose behalf an agent acts; it never fits a direct call.
    on_behalf_of: Patterns = []
    # Globs of session keys.
    session: Patterns = []
    # Of `ask`: how long it waits for an answer, where that is not `approval_seconds`.
    seconds: float | None = None
    # Told to whoever made the call, and to whoever is asked.
    reason: str = ""


class PolicySettings(msgspec.Struct, forbid_unknown_fields=True):
    """The table `[policy]`; read again whenever the file changes."""

    # What holds where no rule fits.
    default: Decision = "allow"
    rules: list[PolicyRule] = []
    # How long a call waits to be approved; then it is denied.
    approval_seconds: float = 600.0
    # Who is asked, and may answer, on channels: `telegram:4711`, `email:me@example.org`.
    approvers: list[str] = []


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A call, as the rules see it."""

    # Every name the tool goes by, lower case.
    names: tuple[str, ...]
    route: str
    node_id: str | None = None
    tags: tuple[str, ...] = ()
    args: Mapping[str, Any] = {}
    # Other names of the tool's parameters: a rule may use them, the arguments never do.
    aliases: Mapping[str, str] = {}
    # Where the node's relative paths begin, if it says so.
    workspace: str | None = None
    # Parameters that are paths and left out: they stand for the folder where relative paths begin.
    left_out: frozenset[str] = frozenset()
    # Whether `/ETC` may be `/etc` on the machine that is reached.
    folds: bool = False
    # The nodes that the arguments name, as the ends of a transfer do.
    reached: tuple[Reached, ...] = ()
    # Where the call comes from, and for a sub-agent where its parents' runs do.
    origins: tuple[str, ...] = HTTP
    credential: str = "owner"
    # The credentials on whose behalf the acting one acts.
    askers: tuple[str, ...] = ()
    session_key: str | None = None

    @property
    def session_proven(self) -> bool:
        """A run's session is the gateway's own word; anybody else only says which it is."""
        return self.credential.startswith("agent:")


class Verdict(msgspec.Struct, frozen=True):
    """What the policy says to a call, and the rule that said it."""

    decision: Decision
    rule: str
    reason: str = ""
    seconds: float | None = None


class Forbidden(Denied):
    """The policy denies the call."""


class Policy:
    """The rules, ready to judge. Raises ValueError for settings that cannot be meant."""

    def __init__(self, settings: PolicySettings, workspace: str | None = None) -> None:
        """`workspace`: where relative paths begin for the tools of the gateway's own machine."""
        if not 0 < settings.approval_seconds <= 30 * 86_400:
            raise ValueError(
                f"[policy] approval_seconds must be above 0 and at most 30 days, not {settings.approval_seconds:g}"
            )
        self.settings = settings
        self._workspace = workspace
        self._rules = [_Rule(rule, number) for number, rule in enumerate(settings.rules, 1)]
        self._default = Verdict(settings.default, "default")

    @classmethod
    def of(cls, settings: PolicySettings, workspace: str | None = None) -> Policy | None:
        """None where everything is allowed anyway: then there is nothing to judge."""
        policy = cls(settings, workspace)
        return policy if settings.rules or settings.default != "allow" else None

    def judge(self, subject: Subject) -> Verdict:
        """By the first rule that fits."""
        subject = self._placed(subject)
        return next((rule.verdict for rule in self._rules if rule.fits(subject)), self._default)

    def all_fitting(self, subject: Subject) -> list[Verdict]:
        """The verdict of each rule that fits, the deciding one first, and the default last."""
        subject = self._placed(subject)
        return [*(rule.verdict for rule in self._rules if rule.fits(subject)), self._default]

    def _placed(self, subject: Subject) -> Subject:
        local = subject.route == "local" and subject.workspace is None
        return msgspec.structs.replace(subject, workspace=self._workspace) if local else subject

    def seconds(self, verdict: Verdict) -> float:
        return self.settings.approval_seconds if verdict.seconds is None else verdict.seconds


def subject_of(
    target: Target,
    args: msgspec.Raw,
    *,
    credential: str,
    askers: tuple[str, ...] = (),
    session_key: str | None,
    origins: Sequence[str],
    nodes: Mapping[str, Node] = MappingProxyType({}),
) -> Subject:
    """Return a call as the rules see it; `args` are those of `Catalog.checked`. Raises InvalidArgs.

    `nodes` are those that the arguments can name.
    """
    arguments = read_arguments(args)
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"": arguments}
    node = target.node
    named = [] if node is not None else _named_nodes(target.tool, arguments, nodes)
    schema = {} if target.spec is None else target.spec.parameters.get("properties")
    names = [target.tool] if node is None else [join_tool(node.card.node_id, target.tool), target.tool]
    workspace = None if node is None else node.card.runtime.get("workspace")
    return Subject(
        names=tuple(name.casefold() for name in names),
        route=target.kind,
        node_id=None if node is None else node.card.node_id,
        tags=() if node is None else tuple(node.card.tags),
        args=_with_paths(target.tool, arguments),
        aliases={} if target.own is None else target.own.aliases,
        workspace=workspace if isinstance(workspace, str) else None,
        left_out=frozenset(name for name in PATHS if name in schema and arguments.get(name) in (None, ""))
        if isinstance(schema, dict)
        else frozenset(),
        folds=any(one.card.runtime.get("hostOs") != "linux" for one in ([node] if node is not None else named)),
        reached=tuple(_reached(one) for one in named),
        origins=tuple(origins),
        credential=credential,
        askers=askers,
        session_key=session_key,
    )


def handed_on(origins: Iterable[str]) -> tuple[str, ...]:
    """The origins of what a call sets going, which are those of the call; the first ones come first."""
    known = sorted(origins, key=lambda origin: not origin.startswith(VIA))
    return tuple(dict.fromkeys(origin.removeprefix(VIA) for origin in known))[:MOST_ORIGINS]


def _named_nodes(tool: str, arguments: Mapping[str, Any], nodes: Mapping[str, Node]) -> list[Node]:
    """The nodes that a call of the gateway's own tools works on."""
    if tool == TRANSFER:
        ends = [arguments.get(role) for role in ("source", "destination")]
        ids = [longest_id(end, nodes) for end in ends if isinstance(end, str)]
        return [nodes[node_id] for node_id in dict.fromkeys(ids) if node_id in nodes]
    if tool == LOGS:
        asked = arguments.get("nodeId")
        return [node for name, node in nodes.items() if name == asked or (not asked and node.online)]
    return []


def _reached(node: Node) -> Reached:
    workspace = node.card.runtime.get("workspace")
    return Reached(node.card.node_id, tuple(node.card.tags), workspace if isinstance(workspace, str) else None)


def _with_paths(tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A patch names its files in its text; they are its paths as much as any other's."""
    patch = arguments.get("patch")
    if tool != "apply_patch" or not isinstance(patch, str):
        return arguments
    own = arguments.get("path")
    try:
        sections = parse(patch, path=own if isinstance(own, str) else None)
    except ToolError:
        return arguments  # it will not apply either
    paths = [path for section in sections for path in (section.path, section.move_to) if path]
    return {**arguments, "path": paths}


class _Rule:
    def __init__(self, rule: PolicyRule, number: int) -> None:
        self._rule = rule
        self._lenient = rule.decision != "allow"
        where = rule.name or f"rule {number}"
        if rule.seconds is not None and not 0 < rule.seconds <= 30 * 86_400:
            raise ValueError(f"[policy] {where}: seconds must be above 0 and at most 30 days, not {rule.seconds:g}")
        if rule.seconds is not None and rule.decision != "ask":
            raise ValueError(f"[policy] {where}: seconds belong to a rule that asks")
        self.verdict = Verdict(rule.decision, where, rule.reason, rule.seconds)
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
            name: [_Pattern(one, where, whole=not self._lenient) for one in _listed(given)]
            for name, given in rule.args.items()
        }

    def fits(self, subject: Subject) -> bool:
        if self._tools and not _any(subject.names, self._tools):
            return False
        if self._routes and subject.route not in self._routes:
            return False
        if self._nodes and not self._node_fits(subject):
            return False
        if self._credentials and not self._credential_fits(subject):
            return False
        if self._askers and not (subject.askers and self._each(_any((one,), self._askers) for one in subject.askers)):
            return False
        if self._origins and not self._origins_fit(subject):
            return False
        if self._sessions:
            if subject.session_key is None or not (self._lenient or subject.session_proven):
                return False
            if not _any((subject.session_key,), self._sessions):
                return False
        return all(self._argument_fits(subject, name, patterns) for name, patterns in self._args.items())

    def _origins_fit(self, subject: Subject) -> bool:
        """A run is not rid of the rules that stop its origin by having another run do the work."""
        if self._lenient:
            return _any((origin.removeprefix(VIA) for origin in subject.origins), self._origins)
        return all(_any((origin,), self._origins) for origin in subject.origins if not origin.startswith(VIA))

    def _credential_fits(self, subject: Subject) -> bool:
        """A token is not rid of the rules that stop it by letting an agent act for it."""
        acting = (subject.credential, *subject.askers) if self._lenient else (subject.credential,)
        return _any(acting, self._credentials)

    def _node_fits(self, subject: Subject) -> bool:
        """A call runs on one node. What stops a node's calls also stops those that name it, as a transfer does."""
        nodes = [] if subject.node_id is None else [Reached(subject.node_id, subject.tags)]
        if self._lenient:
            nodes += subject.reached
        return any(self._is_node(node, pattern) for node in nodes for pattern in self._nodes)

    @staticmethod
    def _is_node(node: Reached, pattern: str) -> bool:
        if pattern.startswith(TAG):
            return pattern.removeprefix(TAG) in node.tags
        return fnmatchcase(node.node_id, pattern)

    def _argument_fits(self, subject: Subject, name: str, patterns: list[_Pattern]) -> bool:
        name = subject.aliases.get(name, name)
        if name == ANYWHERE:
            return self._anything_fits(subject, patterns)
        if name == "path" and self._lenient and self._reaches_elsewhere(subject, patterns):
            return True
        if name == "path" and not self._lenient and "pattern" not in self._args and _searches_elsewhere(subject):
            return False
        values = list(_texts(subject.args.get(name, []), keys=self._lenient))
        if not any(values) and self._lenient and name in subject.left_out:
            values = ["."]
        if not values:
            return False
        if len(values) > MOST_TEXTS:  # too many to look at: what stops a call fits, what lets it through does not
            return self._lenient
        if name in COMMANDS and not self._lenient:
            others = (other for other, value in subject.args.items() if value not in (None, "", {}, []))
            if any(other not in self._args and other != name and other not in HARMLESS for other in others):
                return False  # a folder, variables or input make another thing of the same command
        return self._values_fit(subject, name, values, patterns)

    def _anything_fits(self, subject: Subject, patterns: list[_Pattern]) -> bool:
        """Of all the texts in a call one is enough to be stopped; to be let through takes each one that the rule has
        no other pattern for."""
        if self._lenient:
            values = list(_texts(subject.args, keys=True))
            return len(values) > MOST_TEXTS or any(pattern.fits(text) for text in values for pattern in patterns)
        rest = {
            name: list(_texts(value, keys=True))
            for name, value in subject.args.items()
            if name not in self._args and name not in HARMLESS
        }
        if not 0 < sum(map(len, rest.values())) <= MOST_TEXTS:
            return False
        return all(self._values_fit(subject, name, values, patterns) for name, values in rest.items())

    def _values_fit(self, subject: Subject, name: str, values: list[str], patterns: list[_Pattern]) -> bool:
        if name in COMMANDS and not self._lenient:
            return all(any(pattern.spells(text) for pattern in patterns) for text in values)
        is_path = name in PATHS
        folds = is_path and subject.folds and self._lenient
        return self._each(
            any(pattern.fits(spelling, folds=folds) for spelling in reading for pattern in patterns)
            for text in values
            for reading in (self._paths(name, text, subject) if is_path else [(text,)])
        )

    def _paths(self, name: str, text: str, subject: Subject) -> list[Reading]:
        """Return the readings of a path; for a rule that stops, also its spelling."""
        texts = _transfer_ends(subject).get(name, [text]) if self._lenient else [text]
        if not text:
            return [(text,)]
        if subject.route == "native":
            found = [one for end in texts for one in native_path(end, subject.reached, stops=self._lenient)]
        else:
            found = machine_path(text, subject.workspace, local=subject.route == "local")
        return [(text,), *found] if self._lenient else found

    def _reaches_elsewhere(self, subject: Subject, patterns: list[_Pattern]) -> bool:
        """Return whether a rule that stops a `path` fits a path that the call has under another name: an end of a
        transfer, or the pattern of a search that leads out of its folder."""
        for texts in _transfer_ends(subject).values():
            readings = [one for end in texts for one in paths_of_end(end, subject.reached)]
            if any(one.fits(path, folds=subject.folds) for reading in readings for path in reading for one in patterns):
                return True
        if not _searches_elsewhere(subject):
            return False
        pattern, folder = subject.args["pattern"], subject.args.get("path")
        base = folder if isinstance(folder, str) else ""
        return any(one.fits_search(pattern, base, subject.workspace, folds=subject.folds) for one in patterns)

    def _each(self, fits: Iterable[bool]) -> bool:
        """One reading is enough to be stopped; it takes all to be let through."""
        return any(fits) if self._lenient else all(fits)


def _transfer_ends(subject: Subject) -> dict[str, list[str]]:
    """Return the ends of a transfer, by the names of its arguments.

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


def _searches_elsewhere(subject: Subject) -> bool:
    pattern = subject.args.get("pattern")
    return not SEARCHES.isdisjoint(subject.names) and isinstance(pattern, str) and leads_out(pattern)


class _Pattern:
    """A glob, or a regular expression; with `whole`, one that has to fit the whole text, as a glob does."""

    def __init__(self, text: str, where: str, *, whole: bool = False) -> None:
        self._text = text
        self._folded = _folded(text)
        self._regex: Any = None
        if text.startswith(REGEX):
            expression = text.removeprefix(REGEX)
            try:
                self._regex = _compiled(expression)
                if whole:
                    self._regex = _compiled(f"^(?:{expression})$")
                self._folded_regex = _compiled(f"(?i){expression}")
            except ValueError as error:
                raise ValueError(f"[policy] {where}: {text!r} is no regular expression: {error}") from None

    def fits(self, text: str, *, folds: bool = False) -> bool:
        """`folds`: also where upper and lower case, and forms of the same letter, make no difference."""
        if self._regex is not None:
            return self._regex.is_valid(text) or (folds and self._folded_regex.is_valid(_folded(text)))
        return fnmatchcase(text, self._text) or (folds and fnmatchcase(_folded(text), self._folded))

    def fits_search(self, pattern: str, folder: str, workspace: str | None, *, folds: bool) -> bool:
        """Fits a file that a search may find outside its folder."""
        if self._regex is not None:
            return self.fits(pattern, folds=folds)
        if search_reaches(pattern, folder, workspace, self._text):
            return True
        return folds and search_reaches(_folded(pattern), _folded(folder), workspace, self._folded)

    def spells(self, text: str) -> bool:
        """Fits, and what it leaves open holds nothing that a shell would act upon."""
        if text == self._text:
            return True
        return self.fits(text) and _OPERATORS.search(text) is None


def _compiled(expression: str) -> Any:
    """A matcher without backtracking: the text is the model's, and must not be able to hold the gateway up."""
    import jsonschema_rs  # noqa: PLC0415 - see `catalog`

    schema = {"type": "string", "pattern": expression}
    return jsonschema_rs.Draft202012Validator(schema, pattern_options=jsonschema_rs.RegexOptions())


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _texts(value: Any, *, keys: bool = False) -> Iterable[str]:
    """Every text in a value; numbers and the like as JSON writes them. `keys`: also the names within it."""
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
    if route == "mcp":
        return 'calls from MCP clients have origin = "mcp"'
    close = difflib.get_close_matches(route, ROUTES, 1)
    known = f"use one of {', '.join(ROUTES)}"
    return f"did you mean {close[0]!r}? {known}" if close else known


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _any(texts: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)
