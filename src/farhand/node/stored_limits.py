"""The limits and tags of a node, stored with it: they apply to every later start until they are reset.

Limits given on the command line are stored beside the node's key. Limits in the `[node]` table of `farhand.toml`
apply to every node of that home and are changed only there.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.machine.files.private_files import replace_private
from farhand.machine.sandbox.egress import NetworkRule
from farhand.machine.sandbox.levels import BUBBLEWRAP, LANDLOCK, LEVELS
from farhand.machine.sandbox.resources import RESOURCES, ResourceLimits
from farhand.node.limits import ToolLimits
from farhand.protocol.errors import FarhandError
from farhand.protocol.node_tools import NODE_TOOLS

LENT_FILE: Final = "lent.json"
SETTINGS_FILE: Final = "farhand.toml"
_KNOWN: Final = tuple(NODE_TOOLS)


class LendingError(FarhandError):
    """Limits that cannot be read, or that would allow more than before."""


class LendingLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits and tags of one node, under the names of the `[node]` table."""

    root: tuple[str, ...] = ()
    read_only: bool = False
    allow_tools: tuple[str, ...] = ()
    deny_tools: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    # How commands are confined to the roots: `auto` (the default), `bubblewrap`, `landlock` or `none`.
    sandbox: str = ""
    # What confined commands may connect to: `host` (the default), `none`, `local` or `allow:HOST,...`.
    network: str = ""
    # What confined commands may use: `2G`, `1.5`, `200`, and what each may add to the roots, `10G`.
    memory: str = ""
    cpus: str = ""
    processes: str = ""
    disk: str = ""

    @property
    def resources(self) -> ResourceLimits:
        return ResourceLimits.read(self.memory, self.cpus, self.processes, self.disk)

    @property
    def network_rule(self) -> NetworkRule:
        return NetworkRule.read(self.network)

    @property
    def limits(self) -> ToolLimits:
        return ToolLimits(self.read_only, bool(self.root), self.allow_tools, self.deny_tools)

    def check(self) -> None:
        """Raise LendingError for an unknown tool: a typing error must not allow what was to be denied."""
        for name in (*self.allow_tools, *self.deny_tools):
            if name not in _KNOWN:
                raise LendingError(f"unknown tool {name!r} in the limits; known: {', '.join(_KNOWN)}")
        if self.sandbox not in ("", *LEVELS):
            raise LendingError(f"unknown sandbox {self.sandbox!r}; known: {', '.join(LEVELS)}")
        try:
            NetworkRule.read(self.network)
            _ = self.resources
        except ValueError as error:
            raise LendingError(str(error)) from None

    def narrowed(self, given: LendingLimits) -> LendingLimits:
        """Return these limits with the given ones added. Raises LendingError if that would allow more than these."""
        outside = [root for root in given.root if self.root and not _inside(root, self.root)]
        if outside:
            raise LendingError(f"--root {outside[0]} is outside of {' and '.join(self.root)}, which alone is lent")
        together = LendingLimits(
            root=given.root or self.root,
            read_only=self.read_only or given.read_only,
            allow_tools=_together(self.allow_tools, given.allow_tools),
            deny_tools=_together(self.deny_tools, given.deny_tools),
            tags=given.tags or self.tags,
            **{name: getattr(given, name) or getattr(self, name) for name in ("sandbox", "network", *RESOURCES)},
        )
        if not together.resources.is_within(self.resources):
            raise LendingError("--memory, --cpus, --processes or --disk allows more than before")
        if not together.network_rule.is_within(self.network_rule):
            raise LendingError(f"--network {given.network} allows more than --network {self.network}")
        if self.sandbox in (BUBBLEWRAP, LANDLOCK) and together.sandbox != self.sandbox:
            raise LendingError(f"--sandbox {given.sandbox} would replace --sandbox {self.sandbox}")
        wider = [name for name in _KNOWN if self.limits.refusal(name) and not together.limits.refusal(name)]
        if wider:
            raise LendingError(f"--allow-tool would lend {' and '.join(wider)}, which is not lent so far")
        return together

    def described(self) -> str:
        """Return the equivalent command-line options."""
        options = [f"--root {root}" for root in self.root]
        options += ["--read-only"] if self.read_only else []
        options += [f"--allow-tool {name}" for name in self.allow_tools]
        options += [f"--deny-tool {name}" for name in self.deny_tools]
        options += [f"--sandbox {self.sandbox}"] if self.sandbox else []
        options += [f"--network {self.network}"] if self.network else []
        for name in RESOURCES:
            options += [f"--{name} {getattr(self, name)}"] if getattr(self, name) else []
        options += [f"--tag {tag}" for tag in self.tags]
        return " ".join(options)

    def announced(self) -> dict[str, Any]:
        """Return the limits as a node announces them, for display only."""
        shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, tags=()))
        return shown


def effective_limits(home: Path, folder: Path, given: LendingLimits, *, reset: bool = False) -> LendingLimits:
    """Return the limits of the node of `folder` when it is started with `given`; store nothing.

    `reset` ignores stored limits. Raises LendingError if `given` would allow more than the stored limits, or if those
    cannot be read.
    """
    given.check()
    stored = LendingLimits() if reset else _stored(folder / LENT_FILE)
    try:
        together = stored.narrowed(given)
    except LendingError as error:
        holds = f"stored for this node: {stored.described()}"
        raise LendingError(f"{error} ({holds}); give --reset-limits to replace the stored limits") from None
    settings = _settings(home / SETTINGS_FILE)
    tags = _together(settings.tags, together.tags)
    try:
        return msgspec.structs.replace(settings.narrowed(together), tags=tags)
    except LendingError as error:
        raise LendingError(f"{error} by [node] in {home / SETTINGS_FILE}; change it there") from None


def store_limits(folder: Path, given: LendingLimits, *, reset: bool = False) -> None:
    """Store the given limits for later starts, in addition to the stored ones unless `reset`."""
    path = folder / LENT_FILE
    kept = given if reset else _stored(path).narrowed(given)
    if kept == LendingLimits() and not path.exists():
        return
    replace_private(path, msgspec.json.encode(kept))


def _stored(path: Path) -> LendingLimits:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LendingLimits)
    except FileNotFoundError:
        return LendingLimits()
    except (OSError, msgspec.MsgspecError) as error:
        raise LendingError(
            f"the limits of this node in {path} cannot be read: {error}; correct the file, or give the limits again "
            "together with --reset-limits"
        ) from None


def _settings(path: Path, environ: Mapping[str, str] = os.environ) -> LendingLimits:
    """Read `[node]`; `FARHAND_NODE_<KEY>` overrides a key, as in every other table."""
    try:
        values = tomllib.loads(path.read_text()).get("node", {}) if path.exists() else {}
        for field in msgspec.structs.fields(LendingLimits):
            if (text := environ.get(f"FARHAND_NODE_{field.name}".upper())) is not None:
                values[field.name] = _value(field.type, text)
        if isinstance(values, dict) and isinstance(values.get("root"), str):
            values = {**values, "root": [values["root"]]}
        if isinstance(values, dict):
            numbers = {name: values[name] for name in RESOURCES if type(values.get(name)) in (int, float)}
            values = {**values, **{name: str(number) for name, number in numbers.items()}}
        settings = msgspec.convert(values, LendingLimits)
    except (OSError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise LendingError(f"[node] in {path} cannot be read: {error}; correct it") from None
    settings.check()
    for root in settings.root:
        if not root.startswith(("/", "~")):
            raise LendingError(f"[node] in {path}: root {root!r} must be an absolute path")
    return msgspec.structs.replace(settings, root=tuple(str(Path(root).expanduser()) for root in settings.root))


def _value(kind: Any, text: str) -> Any:
    if kind is bool:
        return msgspec.json.decode(text, type=bool)
    return text if kind is str else [word for part in text.split(",") if (word := part.strip())]


def _inside(path: str, roots: Iterable[str]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(root)) for root in roots)


def _together(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))
