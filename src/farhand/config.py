"""Settings: `farhand.toml` in the home folder, each key overridden by `FARHAND_<SECTION>_<KEY>`."""

from __future__ import annotations

import difflib
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from farhand.gateway.access.budgets import BudgetsSection
from farhand.gateway.calls.policy import Policy, PolicySettings
from farhand.gateway.mcp.settings import McpServerSettings
from farhand.gateway.messaging.hooks import HookSettings
from farhand.gateway.messaging.inbound import Binding
from farhand.gateway.sessions.agents import AgentSettings
from farhand.gateway.sessions.keys import DmScope
from farhand.gateway.workspace.skill_file import SkillEntry
from farhand.llm.settings import ModelSettings, ProviderSettings
from farhand.machine.home import DEFAULT_PORT
from farhand.machine.sandbox.egress import NetworkRule
from farhand.machine.sandbox.resources import ResourceLimits
from farhand.memory.settings import MemorySettings
from farhand.protocol.errors import FarhandError

log = logging.getLogger(__name__)

FILE = "farhand.toml"
# Applied whenever the file changes; changes of anything else apply from the next start.
LIVE_SECTIONS = (
    *("tools", "policy", "schedule", "heartbeat", "retention", "sandbox", "mcp"),
    *("agents", "providers", "models", "budgets"),
)
LIVE_KEYS = ("agent.model",)
T = TypeVar("T")


class SettingsError(FarhandError):
    """A setting that cannot be used."""


class GatewaySection(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    # Further names under which this gateway may be addressed.
    hosts: list[str] = []
    # Web pages, by origin, that may call this gateway.
    origins: list[str] = []
    # The address under which clients reach this gateway through a proxy, such as `https://gateway.example`.
    public_url: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    # Whether a gateway that listens beyond this machine without a certificate makes its own.
    tls: Literal["auto", "off"] = "auto"
    # Whether a node that has a key may log in with a token all the same.
    tokens_beside_keys: bool = False


class ConsoleSection(msgspec.Struct, forbid_unknown_fields=True):
    # A console session ends after this time without a request; an open page makes one every few seconds.
    idle_hours: float = 24.0
    # And after this time in any case.
    max_days: float = 14.0


class LogSection(msgspec.Struct, forbid_unknown_fields=True):
    level: str = "info"


class ToolsSection(msgspec.Struct, forbid_unknown_fields=True):
    """Read again whenever the file changes."""

    # Folders that the tools of this machine may use besides the workspace.
    roots: list[str] = []
    # Tools that are switched off.
    disabled: list[str] = []


class AgentSection(msgspec.Struct, forbid_unknown_fields=True):
    # A model of `[models]`, or `provider/model`; `FARHAND_MODEL` wins.
    model: str = ""
    # How much of a conversation the model is sent; 0: what the model takes.
    context_tokens: int = 0
    # Rounds of tool calls after which a run ends.
    max_rounds: int = 100
    # How long a sub-agent may take.
    sub_agent_seconds: float = 300.0


class MountSetting(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    # Where the commands see it; empty: at the same place.
    container: str = ""
    mode: Literal["ro", "rw"] = "ro"


class SandboxSection(msgspec.Struct, forbid_unknown_fields=True):
    """Read again whenever the file changes."""

    enabled: bool = False
    # `auto` takes the best that works here.
    level: Literal["auto", "bubblewrap", "landlock"] = "auto"
    # `none`, `host`, `local` or `allow:HOST,...`.
    network: str = "none"
    # What commands may use: `2G`, 1.5, 200, and what each command may add to its folders, `10G`.
    memory: str | int = ""
    cpus: str | float = ""
    processes: str | int = ""
    disk: str | int = ""
    # `uid`, `uid:gid` or a name; empty: the gateway's own. Another than its own needs a gateway that runs as root.
    user: str = ""
    mounts: list[MountSetting] = []
    # First words of commands that go to the host over SSH.
    host_commands: list[str] = []
    ssh_host: str = "127.0.0.1"
    ssh_port: int = 22
    ssh_user: str = ""
    # Private key; default `keys/host_ed25519` in the home.
    ssh_key: str = ""
    # The file with the host's key; default `keys/known_hosts` in the home.
    ssh_known_hosts: str = ""

    @property
    def network_rule(self) -> NetworkRule:
        return NetworkRule.read(self.network or "none")

    @property
    def resources(self) -> ResourceLimits:
        return ResourceLimits.read(str(self.memory), str(self.cpus), str(self.processes), str(self.disk))

    def check(self) -> None:
        """Raise ValueError for an invalid network or limit."""
        try:
            _ = self.network_rule, self.resources
        except ValueError as error:
            raise ValueError(f"[sandbox] {error}") from None


class SessionsSection(msgspec.Struct, forbid_unknown_fields=True):
    # The session of people who write directly through a channel: the agent's main one, or one of their own.
    dm_scope: DmScope = "main"
    # People with several addresses: a name, and their addresses as `telegram:123` or `+3162…`.
    identity_links: dict[str, list[str]] = {}


class StoreSection(msgspec.Struct, forbid_unknown_fields=True):
    """Where the record is kept: in the home folder, unless `url` names a database that several gateways can share."""

    # `postgresql://user:password@host/database`; needs the extra `farhand[fleet]`, `[bus] url` and `[objects] url`.
    url: str = ""
    # At least 32 characters, the same for all gateways: the owner's token and the journal's key of a new home are
    # derived from it. Without it, copy both files from the home of the first gateway.
    secret: str = ""


class BusSection(msgspec.Struct, forbid_unknown_fields=True):
    """How gateways that share a store reach each other."""

    # `nats://host:4222`.
    url: str = ""


class ObjectsSection(msgspec.Struct, forbid_unknown_fields=True):
    """Where workspace files and skills lie: in the home folder, unless `url` names a bucket."""

    # `s3://bucket` or `s3://bucket/prefix`; needs the extra `farhand[s3]`.
    url: str = ""
    # The address of an S3-compatible service other than AWS.
    endpoint: str = ""
    region: str = ""
    access_key_id: str = ""
    # Without the two, the usual AWS environment and profile count.
    secret_access_key: str = ""


class BackupSection(msgspec.Struct, forbid_unknown_fields=True):
    """Copies of the store that the gateway keeps in the home."""

    # 0: none.
    every_seconds: float = 3600.0
    keep: int = 24


class RetentionSection(msgspec.Struct, forbid_unknown_fields=True):
    """Read again whenever the file changes."""

    # How long sent messages, processed posts of hooks, runs of removed jobs and the ids that identify repeated requests
    # are kept; 0: without a limit.
    keep_days: float = 30.0
    # How long the journal and the record of calls are kept, in days; 0: without a limit.
    history_days: float = 180.0
    # How much they may take, in megabytes; 0: without a limit.
    history_mb: int = 4096
    # What is stored of one credential's refused calls in a day; 0: without a limit.
    refused_bytes_per_credential: int = 16 * 1024 * 1024
    refused_calls_per_credential: int = 10_000
    # How many bytes of messages a token may send in a day; 0: without a limit.
    message_bytes_per_credential: int = 1024 * 1024 * 1024
    # How many bytes a token's calls with an idempotency key may take in a day; 0: without a limit.
    keyed_bytes_per_credential: int = 1024 * 1024 * 1024


class UndoSection(msgspec.Struct, forbid_unknown_fields=True):
    """What files held before calls changed them, on the gateway's own machine; nodes have `--undo-quota`."""

    # How much is kept, the newest; 0: nothing.
    quota_mb: int = 512
    # Larger files are not kept.
    largest_mb: int = 64


class SkillsSection(msgspec.Struct, forbid_unknown_fields=True):
    # By the skill's name: `enabled`, `always`, `requires`.
    entries: dict[str, SkillEntry] = {}


class ScheduleSection(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool = True
    # The user's, an IANA name; empty: this machine's.
    timezone: str = ""
    max_jobs: int = 200
    # How much of each job's history is kept.
    keep_runs: int = 200
    max_concurrent: int = 4
    # How long a run may take whose job does not say.
    timeout_seconds: float = 3600.0
    # Whether a job that begins to fail is reported to people; the journal has it either way.
    report_failures: bool = True


class HeartbeatSection(msgspec.Struct, forbid_unknown_fields=True):
    # `0` turns heartbeats off.
    every: str = "30m"
    agents: list[str] = msgspec.field(default_factory=lambda: ["main"])
    prompt: str = ""
    # `last`, `none`, or the name of a channel.
    target: str = "last"
    active_start: str = "08:00"
    active_end: str = "23:00"
    # Of the active hours; empty: the user's.
    timezone: str = ""


class NodeSection(msgspec.Struct, forbid_unknown_fields=True):
    """What the nodes of this home lend; `farhand.node.stored_limits` reads it when a node starts."""

    root: str | list[str] = []
    read_only: bool = False
    allow_tools: list[str] = []
    deny_tools: list[str] = []
    tags: list[str] = []
    sandbox: str = ""
    network: str = ""
    memory: str | int = ""
    cpus: str | float = ""
    processes: str | int = ""
    disk: str | int = ""


class Config(msgspec.Struct, forbid_unknown_fields=True):
    gateway: GatewaySection = msgspec.field(default_factory=GatewaySection)
    console: ConsoleSection = msgspec.field(default_factory=ConsoleSection)
    log: LogSection = msgspec.field(default_factory=LogSection)
    tools: ToolsSection = msgspec.field(default_factory=ToolsSection)
    policy: PolicySettings = msgspec.field(default_factory=PolicySettings)
    backup: BackupSection = msgspec.field(default_factory=BackupSection)
    agent: AgentSection = msgspec.field(default_factory=AgentSection)
    agents: dict[str, AgentSettings] = {}
    sessions: SessionsSection = msgspec.field(default_factory=SessionsSection)
    providers: dict[str, ProviderSettings] = {}
    models: dict[str, ModelSettings] = {}
    sandbox: SandboxSection = msgspec.field(default_factory=SandboxSection)
    node: NodeSection = msgspec.field(default_factory=NodeSection)
    objects: ObjectsSection = msgspec.field(default_factory=ObjectsSection)
    store: StoreSection = msgspec.field(default_factory=StoreSection)
    bus: BusSection = msgspec.field(default_factory=BusSection)
    retention: RetentionSection = msgspec.field(default_factory=RetentionSection)
    budgets: BudgetsSection = msgspec.field(default_factory=BudgetsSection)
    skills: SkillsSection = msgspec.field(default_factory=SkillsSection)
    undo: UndoSection = msgspec.field(default_factory=UndoSection)
    memory: MemorySettings = msgspec.field(default_factory=MemorySettings)
    schedule: ScheduleSection = msgspec.field(default_factory=ScheduleSection)
    heartbeat: HeartbeatSection = msgspec.field(default_factory=HeartbeatSection)
    # By name; each adapter knows its own keys and checks them when the gateway starts.
    channels: dict[str, dict[str, Any]] = {}
    hooks: dict[str, HookSettings] = {}
    bindings: list[Binding] = []
    # MCP servers by name. Read again whenever the file changes.
    mcp: dict[str, McpServerSettings] = {}


def load(home: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Raises SettingsError naming the key at fault."""
    path = home / FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    return parse(text, path, environ)


def parse(text: str, path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings that the file `path` has with this text. Raises SettingsError naming the key at fault."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    for section in msgspec.structs.fields(Config):
        if get_origin(section.type) in (dict, list):
            continue
        for key in msgspec.structs.fields(section.type):
            name = f"FARHAND_{section.name}_{key.name}".upper()
            if name in environ and isinstance(values.setdefault(section.name, {}), dict):
                values[section.name][key.name] = _read(name, environ[name], key.type)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {_worded(str(error))}") from None
    try:
        if fault := next(_faults(config), None):
            raise ValueError(fault)
        Policy(config.policy)
        config.budgets.check()
        config.sandbox.check()
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return config


def _faults(config: Config) -> Iterator[str]:
    """Yield what is wrong with values that have the right type."""
    port, console, backup, kept = config.gateway.port, config.console, config.backup, config.retention
    if not 0 <= port <= 65535:
        yield f"[gateway] port must be a number from 0 to 65535, not {port}"
    for name, value in (("idle_hours", console.idle_hours), ("max_days", console.max_days)):
        if not 0 < value < 100_000:
            yield f"[console] {name} must be greater than 0 and less than 100000, not {value:g}"
    for root in config.tools.roots:
        if not root.startswith(("/", "~")):
            yield f"[tools] roots: {root!r} must be an absolute path"
    if backup.every_seconds < 0 or backup.keep < 1:
        yield "[backup] every_seconds must not be negative, and keep at least 1"
    if not 0 <= kept.keep_days < 100_000:
        yield f"[retention] keep_days must not be negative, and not {kept.keep_days:g}; 0 is for ever"
    if not (kept.history_days == 0 or 1 <= kept.history_days < 100_000):
        yield f"[retention] history_days must be at least 1, not {kept.history_days:g}; 0 is without a limit"
    if kept.history_mb < 0:
        yield f"[retention] history_mb must not be negative, not {kept.history_mb}; 0 is without a limit"
    for name in ("refused_bytes_per_credential", "refused_calls_per_credential"):
        if getattr(kept, name) < 0:
            yield f"[retention] {name} must not be negative; 0 is without a limit"


def changed_settings(before: Config, after: Config) -> list[str]:
    """Return the settings that differ, as `section.key`."""
    found = []
    for section in msgspec.structs.fields(Config):
        one, other = (msgspec.to_builtins(getattr(config, section.name)) for config in (before, after))
        if not isinstance(one, dict) or not isinstance(other, dict):
            found += [section.name] if one != other else []
            continue
        keys = dict.fromkeys([*one, *other])
        found += [f"{section.name}.{key}" for key in keys if one.get(key) != other.get(key)]
    return found


def _loaded(home: Path, environ: Mapping[str, str]) -> Config | None:
    try:
        return load(home, environ)
    except SettingsError:
        return None


LOOK_SECONDS = 0.001
# How long a missing or empty file is taken for one that an editor is about to write.
GONE_SECONDS = 0.5


class LiveConfig:
    """The settings as the file has them at the moment; while it cannot be used, as they were before."""

    def __init__(self, home: Path, config: Config, environ: Mapping[str, str] = os.environ) -> None:
        """`config`: what was loaded from the file a moment ago."""
        self._home = home
        self._file = str(home / FILE)  # a Path would double the cost of a check
        self._environ = environ
        self._config = config
        # As the file has them, without the options of the command line.
        self._first = _loaded(home, environ) or config
        self._looked = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._seen = self._look()
        self._filled = self._seen is not None and self._seen[1] > 0
        self._gone_at = 0.0

    def derive(self, make: Callable[[Config], T]) -> Callable[[], T]:
        """Return a function that returns `make` of the present settings, computed once for each change.

        While `make` raises SettingsError the last value stays in force. Raises SettingsError for the first.
        """
        seen, value = self._config, make(self._config)

        def current() -> T:
            nonlocal seen, value
            if self.now is not seen:
                seen = self._config
                try:
                    value = make(seen)
                except SettingsError as error:
                    log.error("the settings stay as they were: %s", error)
            return value

        return current

    @property
    def now(self) -> Config:
        """Return the settings in force. The file's times are checked at most once in a millisecond."""
        moment = time.monotonic()
        if moment - self._looked < LOOK_SECONDS:
            return self._config
        self._looked = moment
        seen = self._look()
        if seen != self._seen:
            filled = seen is not None and seen[1] > 0
            if self._filled and not filled:
                # Editors move or empty a file before they write it again; until then the old settings apply.
                self._gone_at = self._gone_at or moment
                if moment - self._gone_at < GONE_SECONDS:
                    return self._config
            self._seen, self._filled, self._gone_at = seen, filled, 0.0
            self._read_again()
        return self._config

    def _read_again(self) -> None:
        try:
            self._config = load(self._home, self._environ)
        except SettingsError as error:
            log.error("the settings stay as they were: %s", error)
        else:
            log.info("%s has changed and was read again", self._file)
            if waiting := self._pending():
                log.warning("these changes apply after a restart: %s", ", ".join(waiting))

    @property
    def pending(self) -> list[str]:
        """The settings that differ from those of the start, and apply after a restart."""
        _ = self.now
        return self._pending()

    def _pending(self) -> list[str]:
        changed = changed_settings(self._first, self._config)
        return [name for name in changed if name not in LIVE_KEYS and name.partition(".")[0] not in LIVE_SECTIONS]

    def _look(self) -> tuple[int, int, int] | None:
        if self._seen is None and not os.access(self._file, os.F_OK):
            return None  # an exception would take four times as long
        try:
            status = os.stat(self._file)  # noqa: PTH116
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read(name: str, text: str, kind: Any) -> Any:
    if kind in (str, str | int, str | float) or (
        get_origin(kind) is Literal and all(isinstance(one, str) for one in get_args(kind))
    ):
        return text
    if kind in (list[str], str | list[str]):
        return [item for part in text.split(",") if (item := part.strip())]
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        raise SettingsError(f"{name}={text!r} is not a value of type {getattr(kind, '__name__', kind)}") from None


def _worded(text: str) -> str:
    reason, _, place = text.replace("`", "'").partition(" - at ")
    place = place.strip("'").removeprefix("$").lstrip(".")
    if "unknown field" in reason:
        wrong = reason.rsplit("'", 2)[1]
        table: type = Config
        if place:
            place = re.sub(r"\[(?:\.\.\.|\d+)\]", ".*", place)
            for name in place.split("."):
                if name == "*":
                    table = get_args(table)[-1]
                else:
                    table = next(field.type for field in msgspec.structs.fields(table) if field.name == name)
        known = [field.name for field in msgspec.structs.fields(table)]
        near = difflib.get_close_matches(wrong, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        return f"there is no setting {wrong!r} in {f'[{place}]' if place else 'the file'}; {hint}"
    return f"{place}: {reason}" if place else reason
