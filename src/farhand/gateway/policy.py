"""The owner's policy: for each call `allow`, `ask` or `deny`, by the first rule that fits it.

A pattern over text is no wall: a path may be spelled in many ways and a command can hide another. So whatever may be
read in several ways is read against the caller: a rule that stops (`ask`, `deny`) fits when one reading fits, a rule
that lets through (`allow`) only when all of them do, and never a command with an operator of the shell in it that the
rule does not spell out. What a caller merely says of itself (the session it names) can only narrow what it may do.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import msgspec

from farhand.gateway.admission import Denied
from farhand.gateway.catalog import Target, read_arguments
from farhand.machine.patch_format import parse
from farhand.protocol.errors import ToolError
from farhand.protocol.names import join_tool
from farhand.tools.tool import by_their_names

Decision = Literal["allow", "ask", "deny"]
Patterns = str | list[str]

HTTP: Final = ("http",)
"""The origin of a call that comes by itself, not from a run."""
GATEWAY: Final = ("gateway",)
"""The origin of what the gateway does by itself, as ending what a stopped run left running; no rule stops that."""
REGEX: Final = "re:"
TAG: Final = "tag:"
ANYWHERE: Final = "*"
"""The name that stands for every text in the arguments."""
PATHS: Final = frozenset({"path", "file_path", "workdir", "working_dir", "cwd", "source", "destination"})
COMMANDS: Final = frozenset({"command"})
ENVIRONMENT: Final = "env"
_OPERATORS: Final = re.compile(r"[;&|<>`$(){}\n\r\\!#~]")


class PolicyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table `[[policy.rules]]`. What is left out fits anything; of a list, one is enough."""

    decision: Decision
    name: str = ""
    """What `policy explain`, the journal and the caller are told; by default its place."""
    tool: Patterns = []
    """Globs, without regard to case: `laptop__Bash`, `*__Write`, `Bash` (on any node), `gsv__*`, `notes.*`."""
    node: Patterns = []
    """Globs of node ids, or `tag:prod`."""
    route: Patterns = []
    """`node`, `native` (gsv__*), `local` (the gateway's own machine), `mcp`."""
    args: dict[str, Patterns] = {}
    """By the argument's name, `*` for any text in them: a glob, or a regular expression after `re:`."""
    origin: Patterns = []
    """Where the call comes from: `http`, `direct`, `cron:*`, `telegram`, `hook:*` … as the run says that makes it."""
    credential: Patterns = []
    """`owner`, the id of a token, `agent:main`, …"""
    session: Patterns = []
    """Globs of session keys."""
    seconds: float | None = None
    """Of `ask`: how long it waits for an answer, where that is not `approval_seconds`."""
    reason: str = ""
    """Told to whoever made the call, and to whoever is asked."""


class PolicySettings(msgspec.Struct, forbid_unknown_fields=True):
    """The table `[policy]`; read again whenever the file changes."""

    default: Decision = "allow"
    """What holds where no rule fits."""
    rules: list[PolicyRule] = []
    approval_seconds: float = 600.0
    """How long a call waits to be approved; then it is denied."""
    approvers: list[str] = []
    """Who is asked, and may answer, on channels: `telegram:4711`, `email:me@example.org`."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A call, as the rules see it."""

    names: tuple[str, ...]
    """Every name the tool goes by, lower case."""
    route: str
    node_id: str | None = None
    tags: tuple[str, ...] = ()
    args: Mapping[str, Any] = {}
    workspace: str | None = None
    """Where the node's relative paths begin, if it says so."""
    origins: tuple[str, ...] = HTTP
    """Where the call comes from, and for a sub-agent where its parents' runs do."""
    credential: str = "owner"
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
    session_key: str | None,
    origins: Sequence[str],
) -> Subject:
    """Raises InvalidArgs for arguments that cannot be read."""
    arguments = read_arguments(args)
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"": arguments}
    node = target.node
    if target.own is not None:
        arguments = by_their_names(arguments, target.own.aliases)
    names = [target.tool] if node is None else [join_tool(node.card.node_id, target.tool), target.tool]
    workspace = None if node is None else node.card.runtime.get("workspace")
    return Subject(
        names=tuple(name.casefold() for name in names),
        route=target.kind,
        node_id=None if node is None else node.card.node_id,
        tags=() if node is None else tuple(node.card.tags),
        args=_with_paths(target.tool, arguments),
        workspace=workspace if isinstance(workspace, str) else None,
        origins=tuple(origins),
        credential=credential,
        session_key=session_key,
    )


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
        self._origins = _listed(rule.origin)
        self._credentials = _listed(rule.credential)
        self._sessions = _listed(rule.session)
        self._args = {name: [_Pattern(one, where) for one in _listed(given)] for name, given in rule.args.items()}

    def fits(self, subject: Subject) -> bool:
        if self._tools and not _any(subject.names, self._tools):
            return False
        if self._routes and subject.route not in self._routes:
            return False
        if self._nodes and not self._node_fits(subject):
            return False
        if self._credentials and not _any((subject.credential,), self._credentials):
            return False
        if self._origins and not self._each(_any((origin,), self._origins) for origin in subject.origins):
            return False
        if self._sessions:
            if subject.session_key is None or not (self._lenient or subject.session_proven):
                return False
            if not _any((subject.session_key,), self._sessions):
                return False
        return all(self._argument_fits(subject, name, patterns) for name, patterns in self._args.items())

    def _node_fits(self, subject: Subject) -> bool:
        if subject.node_id is None:
            return False
        for pattern in self._nodes:
            if pattern.startswith(TAG):
                if pattern.removeprefix(TAG) in subject.tags:
                    return True
            elif fnmatchcase(subject.node_id, pattern):
                return True
        return False

    def _argument_fits(self, subject: Subject, name: str, patterns: list[_Pattern]) -> bool:
        values = list(_texts(subject.args)) if name == ANYWHERE else list(_texts(subject.args.get(name, [])))
        if not values:
            return False
        if name == ANYWHERE:  # of all the texts in a call one is meant, whatever the rule decides
            return any(pattern.fits(text) for text in values for pattern in patterns)
        if name in COMMANDS and not self._lenient:
            if subject.args.get(ENVIRONMENT) and ENVIRONMENT not in self._args:
                return False  # variables can make any program run another
            return all(any(pattern.spells(text) for pattern in patterns) for text in values)
        return self._each(
            any(pattern.fits(reading) for pattern in patterns)
            for text in values
            for reading in (self._paths(text, subject.workspace) if name in PATHS else (text,))
        )

    def _paths(self, text: str, workspace: str | None) -> tuple[str, ...]:
        """A path as it is meant; to be stopped, how it is spelled is enough."""
        meant = posixpath.normpath(posixpath.join(workspace or "", text)) if text else text
        meant = meant.removeprefix("/") if meant.startswith("//") else meant
        return (text, meant) if self._lenient else (meant,)

    def _each(self, fits: Iterable[bool]) -> bool:
        """One reading is enough to be stopped; it takes all to be let through."""
        return any(fits) if self._lenient else all(fits)


class _Pattern:
    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._regex: Any = None
        if text.startswith(REGEX):
            import jsonschema_rs  # noqa: PLC0415 - see `catalog`

            # An engine without backtracking: the text is the model's, and must not be able to hold the gateway up.
            try:
                schema = {"type": "string", "pattern": text.removeprefix(REGEX)}
                self._regex = jsonschema_rs.Draft202012Validator(schema, pattern_options=jsonschema_rs.RegexOptions())
            except ValueError as error:
                raise ValueError(f"[policy] {where}: {text!r} is no regular expression: {error}") from None

    def fits(self, text: str) -> bool:
        return self._regex.is_valid(text) if self._regex is not None else fnmatchcase(text, self._text)

    def spells(self, text: str) -> bool:
        """Fits, and what it leaves open holds nothing that a shell would act upon."""
        if text == self._text:
            return True
        return self.fits(text) and _OPERATORS.search(text) is None


def _texts(value: Any) -> Iterable[str]:
    """Every text in a value; numbers and the like as JSON writes them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    else:
        yield msgspec.json.encode(value).decode()


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _any(texts: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)
