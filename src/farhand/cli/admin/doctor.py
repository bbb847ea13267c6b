"""`doctor`: check the installation, the home folder and the running gateway."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, ParamSpec
from urllib.parse import urlsplit

import msgspec

from farhand import __version__, config
from farhand.app.model_check import ask_once
from farhand.app.plugins import Plugins, described
from farhand.app.plugins import installed as installed_plugins
from farhand.app.sandbox import host_commands, sandbox_plan
from farhand.cli.client import TOKEN_FILE, Client, ClientError, reason_of, tls_context
from farhand.cli.commands import client_command
from farhand.cli.json_output import wants_json
from farhand.cli.output import ago, on_terminal, paint, plain, show_json, wrap
from farhand.cli.store_reader import quick_look, reading
from farhand.gateway.access.credentials import NodeTokens
from farhand.llm.probe import SECONDS, ProbeResult
from farhand.machine.sandbox.levels import ChosenSandbox
from farhand.machine.sandbox.resources import RESOURCES
from farhand.protocol.errors import FarhandError
from farhand.protocol.names import is_loopback
from farhand.store.history.pruning import usage
from farhand.store.history.seal_coverage import checkpoint
from farhand.store.journal.seal import KEY_FILE
from farhand.store.sqlite.snapshots import BACKUPS_FOLDER, DAMAGED_FOLDER, STORE_FILE, Snapshots
from farhand.store.sqlite.store import SAFE_SQLITE, sqlite_version

PYTHON: Final = (3, 11)
MIN_TOKEN_LENGTH: Final = 16
FREE_FAIL: Final = 100 * 1000 * 1000
FREE_WARN: Final = 1000 * 1000 * 1000
MIB: Final = 1024 * 1024
# Longer than the gateway waits for its model.
PROBE_SECONDS: Final = SECONDS + 15
TOKEN_VARIABLES: Final = ("SA_NODE_TOKEN", "SA_NODE_TOKENS")

Status = Literal["ok", "warning", "failed"]
MARKS: Final[dict[Status, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "red"),
}
Args = ParamSpec("Args")


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    message: str


class Finding(Exception):
    """A check failed, or found something to look at."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def failed(message: str) -> Finding:
    return Finding("failed", message)


def warning(message: str) -> Finding:
    return Finding("warning", message)


def check(name: str, *, on_error: Status = "failed") -> Callable[[Callable[Args, str]], Callable[Args, Check]]:
    """Make a check of a function that returns what it found or raises Finding; other errors count as `on_error`."""

    def decorate(function: Callable[Args, str]) -> Callable[Args, Check]:
        @functools.wraps(function)
        def run(*args: Args.args, **options: Args.kwargs) -> Check:
            try:
                return Check(name, "ok", function(*args, **options))
            except Finding as finding:
                return Check(name, finding.status, str(finding))
            except FarhandError as error:
                return Check(name, on_error, str(error))

        return run

    return decorate


@client_command
def doctor(client: Client) -> int:
    """Check this installation, its home folder and the running gateway.

    The exit status is 1 if a check failed; warnings do not count.

    \b
    Examples:
      farhand doctor
      farhand doctor --json
    """
    checks = list(examine(client, os.environ))
    counts = {status: sum(one.status == status for one in checks) for status in MARKS}
    if wants_json():
        show_json({"ok": not counts["failed"], "checks": [asdict(one) for one in checks]})
        return 1 if counts["failed"] else 0
    width = max(len(one.name) for one in checks)
    for one in checks:
        mark, colour = MARKS[one.status]
        try:
            mark.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            mark = one.status.ljust(7)
        message = wrap(plain(one.message), " " * (len(mark) + width + 3)).lstrip()
        print(f"{paint(mark, colour)} {one.name.ljust(width)}  {message}")
    if counts["failed"] or counts["warning"]:
        warnings = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
        print(f"\n{counts['failed']} failed, {warnings}, {counts['ok']} ok")
    elif on_terminal():
        print(f"\nall {len(checks)} checks passed")
    return 1 if counts["failed"] else 0


def examine(client: Client, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield all checks, local ones first. None of them changes anything."""
    yield _python()
    yield _sqlite()
    if sys.platform != "win32":
        yield _package("uvloop", warning("not installed; the gateway works, but more slowly"))
        yield _package("httptools", failed("not installed; the gateway cannot start without it"))
    home = client.home
    yield _home(home)
    yield _token(home / TOKEN_FILE)
    yield from _secret_files(home)
    settings: config.Config | None = None
    try:
        settings = config.load(home, environ)
        path = home / config.FILE
        yield Check("settings", "ok", str(path) if path.exists() else "no file; using the defaults")
    except FarhandError as error:
        yield Check("settings", "failed", str(error))
    if settings is not None:
        yield from _sandbox(settings, home)
        if settings.channels:
            yield _channels(settings)
    if installed_plugins():
        yield _plugins()
    shared = settings is not None and bool(settings.store.url)
    yield _shared_store(home, settings) if shared and settings is not None else _store(home)
    yield _journal(home, settings)
    yield _history(home, settings)
    yield _disk(home)
    yield _node_tokens(environ)
    url, version, found = _gateway(client)
    yield found
    if version is not None:
        yield _version(version)
        yield _applied(client)
        yield _nodes(client)
        if shared:
            yield _fleet(client)
        if url is not None:
            yield _strangers(url, client.find().certificate)
    if settings is not None:
        yield _model(settings, client if version is not None else None, environ)
    yield _exposure(settings, url, None if url is None else _listening_hosts(url))


# -- the installation -------------------------------------------------------------------------------------


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@check("Python")
def _python() -> str:
    version = _dotted(sys.version_info[:3])
    if sys.version_info[:2] < PYTHON:
        raise failed(f"{version}; Farhand needs {_dotted(PYTHON)} or newer")
    return version


@check("SQLite")
def _sqlite() -> str:
    version = _dotted(sqlite_version())
    if sqlite_version() < SAFE_SQLITE:
        raise failed(f"{version} can damage its log; upgrade apsw to get {_dotted(SAFE_SQLITE)} or newer")
    return f"{version} (apsw)"


def _package(name: str, missing: Finding) -> Check:
    if importlib.util.find_spec(name) is not None:
        return Check(name, "ok", "installed")
    return Check(name, missing.status, str(missing))


# -- the home folder --------------------------------------------------------------------------------------


@check("home")
def _home(home: Path) -> str:
    try:
        status = home.stat()
    except FileNotFoundError:
        raise failed(f"{home} does not exist; `farhand up` creates it") from None
    except OSError as error:
        raise failed(f"cannot read {home}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise failed(f"{home} is not a folder")
    return _private(home, status, 0o700)


@check("owner token")
def _token(path: Path) -> str:
    try:
        status = path.stat()
        blank = not path.read_text().strip()
    except FileNotFoundError:
        raise failed(f"{path} does not exist; `farhand up` creates it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise failed(f"cannot read {path}: {reason_of(error)}") from None
    if blank:
        raise failed(f"{path} is blank; remove it, and `farhand up` creates a new one")
    return _private(path, status, 0o600)


def _secret_files(home: Path) -> Iterator[Check]:
    """Check the other files that only the owner may read, if they exist."""
    for path in (home / "node-token.json", home / config.FILE, *sorted(home.glob("nodes/*/key.json"))):
        try:
            _private(path, path.stat(), 0o600 if path.suffix == ".json" else 0o644)
        except OSError:
            continue
        except Finding as finding:
            yield Check(path.name, finding.status, str(finding))


def _private(path: Path, status: os.stat_result, mode: int) -> str:
    actual = stat.S_IMODE(status.st_mode)
    if actual & ~mode:
        raise failed(f"{path} has mode {actual:04o} and is open to others; run chmod {mode:o} {path}")
    if status.st_uid != os.geteuid():
        raise warning(f"{path} belongs to another user (uid {status.st_uid})")
    return f"{path} ({actual:04o})"


def _sandbox(settings: config.Config, home: Path) -> Iterator[Check]:
    """Check that this machine supports the configured sandbox and reaches the host commands."""
    if not settings.sandbox.enabled:
        said = (
            "off; commands of the agent, and of nodes of this home, run as the gateway's user. A token with tools.exec "
            "can change every file of that user, including those that steer the agent"
        )
        yield Check("sandbox", "ok", said)
        return
    workspace = home / "agents" / "main"
    try:
        folder = workspace if workspace.is_dir() else home
        egress = home / "egress"
        egress.mkdir(mode=0o755, exist_ok=True)
        sandbox = ChosenSandbox(sandbox_plan(settings.sandbox, folder, home, egress=str(egress)))
        sandbox.check()
        host = host_commands(settings.sandbox, home)
    except FarhandError as error:
        reason = str(error).removesuffix("; the command did not run")
        yield Check("sandbox", "failed", f"{reason}; until then `exec`, and Bash of this home's nodes, are refused")
        return
    limits = [f"{name} {value}" for name in RESOURCES if (value := getattr(settings.sandbox, name))]
    said = ", ".join([sandbox.level, f"network {sandbox.plan.network.text}", *limits])
    yield Check("sandbox", "ok", f"works: {said}" + (f" ({sandbox.reason})" if sandbox.reason else ""))
    if host is not None:
        try:
            host.words()
        except FarhandError as error:
            yield Check("host commands", "failed", str(error).removesuffix("; the command did not run"))
        else:
            yield Check("host commands", "ok", f"{', '.join(sorted(host.names))} over SSH to {host.host}:{host.port}")


@check("store")
def _store(home: Path) -> str:
    """Check for damaged stores and recent copies. The gateway itself checks the content."""
    damaged = sorted(str(path) for path in (home / DAMAGED_FOLDER).glob("*"))
    if damaged:
        raise warning(
            f"a damaged store was moved to {damaged[-1]}; changes after the last copy exist only there. "
            "Remove the folder when you no longer need it"
        )
    newest = next(iter(Snapshots(home / BACKUPS_FOLDER)), None)
    return f"last copied {ago(newest.taken_at)}" if newest else "no copies yet; a running gateway makes them"


@check("store")
def _shared_store(home: Path, settings: config.Config) -> str:
    """Check that the database and the other servers of a fleet are set up and can be reached."""
    with reading(home, settings) as tx:
        size = tx.used_bytes()
    return f"PostgreSQL, {size / MIB:.1f} MB; back it up with the tools of PostgreSQL"


@check("fleet", on_error="warning")
def _fleet(client: Client) -> str:
    """Check that the gateways of the fleet have the same settings and version."""
    found = client.get("/v1/fleet").value["replicas"]
    names = ", ".join(one["id"] for one in found)
    for key, what in (("settings", "settings"), ("version", "versions")):
        if len({one[key] for one in found}) > 1:
            raise warning(f"the gateways {names} have different {what}; `farhand fleet` shows them")
    return f"{len(found)} gateways with the same settings: {names}"


def _has_store(home: Path, settings: config.Config | None) -> bool:
    return (settings is not None and bool(settings.store.url)) or (home / STORE_FILE).exists()


@check("journal", on_error="warning")
def _journal(home: Path, settings: config.Config | None) -> str:
    """Check the end of the journal, which is quick; `farhand audit verify` checks all of it."""
    if not _has_store(home, settings):
        return "none yet"
    try:
        status = (home / KEY_FILE).stat()
        head, fault = quick_look(home, settings or config.Config())
    except FileNotFoundError:
        raise warning(f"{home / KEY_FILE} is missing: without it the journal cannot be checked") from None
    except OSError as error:
        raise warning(str(error)) from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        _private(home / KEY_FILE, status, 0o600)
    if fault is not None:
        raise failed(f"{fault}; `farhand audit verify` shows all faults")
    return f"the end is intact, at event {head.id}; `farhand audit verify` checks all of it"


@check("history", on_error="warning")
def _history(home: Path, settings: config.Config | None) -> str:
    """Compare the size of the journal and the call records with the limits."""
    if not _has_store(home, settings):
        return "none yet"
    with reading(home, settings or config.Config()) as connection:
        used, cut = usage(connection), checkpoint(connection)
    limits = config.RetentionSection() if settings is None else settings.retention
    size = f" of {limits.history_mb} MB" if limits.history_mb else ", no limit on size"
    age = f"kept {limits.history_days:g} days" if limits.history_days else "no limit on age"
    text = f"{used.total / MIB:.1f} MB{size}, {age}: {used.calls} calls, {used.events} events"
    if cut is not None:
        text += f"; everything before {ago(cut.until)} was pruned"
    if limits.history_mb and used.total > 1.2 * limits.history_mb * MIB:
        raise warning(text)
    return text


@check("disk")
def _disk(home: Path) -> str:
    place = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise warning(f"cannot measure {place}: {error.strerror}") from None
    amount = f"{free / 1e9:.1f} GB free" if free >= 1e9 else f"{free / 1e6:.0f} MB free"
    if free < FREE_FAIL:
        raise failed(f"only {amount} at {place}; calls cannot be recorded on a full disk")
    if free < FREE_WARN:
        raise warning(f"only {amount} at {place}")
    return f"{amount} at {place}"


@check("node tokens")
def _node_tokens(environ: Mapping[str, str]) -> str:
    given = [name for name in TOKEN_VARIABLES if name in environ]
    if blank := [name for name in given if not environ[name].strip()]:
        raise failed(f"{' and '.join(blank)} is set, but blank; unset it or give it a value")
    try:
        known = NodeTokens.from_env(environ)
    except FarhandError as error:
        raise failed(f"{error}; the gateway does not start with it") from None
    if any(len(token) < MIN_TOKEN_LENGTH for token in known.secrets):
        raise warning(f"a token has fewer than {MIN_TOKEN_LENGTH} characters and can be guessed")
    return f"{', '.join(given)} set" if given else "none in the environment"


@check("plug-ins")
def _plugins() -> str:
    """Check that the plug-ins of installed packages can be loaded."""
    plugins, broken = Plugins(), []
    for entry in installed_plugins():
        try:
            plugins.load(entry.group, entry.name)
        except FarhandError as error:
            broken.append(str(error))
    if broken:
        raise warning("; ".join(broken))
    return "; ".join(described(entry) for entry in installed_plugins())


@check("channels")
def _channels(settings: config.Config) -> str:
    """Check what people whom the owner has not named can reach through channels."""
    open_channels = {
        name: str(table.get("tools") or ("none" if table.get("policy") == "open" else "all"))
        for name, table in settings.channels.items()
        if table.get("policy") == "open" or "*" in (table.get("allow") or ())
    }
    if not open_channels:
        return "none is open to people you have not named"

    def with_tools(*kinds: str) -> str:
        return ", ".join(f"[channels.{name}] tools = {kind!r}" for name, kind in open_channels.items() if kind in kinds)

    if found := with_tools("write", "all"):
        raise failed(f"anyone who writes can use tools on your machines: {found}")
    if found := with_tools("read"):
        raise warning(f"anyone who writes can have your files read, including the memory: {found}")
    names = ", ".join(open_channels)
    if settings.sessions.dm_scope == "per-peer":
        raise warning(
            f"{names}: open, and dm_scope = 'per-peer' gives people with the same id on two channels one session; "
            "use 'per-channel-peer'"
        )
    return f"{names}: open; people you have not named get their own sessions and no tools"


# -- the running gateway ----------------------------------------------------------------------------------


def _gateway(client: Client) -> tuple[str | None, str | None, Check]:
    """Return the gateway's address if there is one, its version if it answers, and the check."""
    url = version = None

    @check("gateway")
    def ask() -> str:
        nonlocal url, version
        try:
            url = client.find().url
            health = client.get("/v1/health").value
            status, frozen = health["status"], health.get("frozen")
            version = str(health["version"])
        except (KeyError, TypeError):
            raise failed(f"{url} is not a gateway: unexpected answer") from None
        if status != "ok":
            raise failed(f"{url} reports {status}; see its log")
        if frozen:
            raise warning(f"{url} is frozen: nothing runs until `farhand thaw`")
        return f"{url} answers"

    found = ask()
    return url, version, found


@check("version")
def _version(version: str) -> str:
    if version != __version__:
        raise failed(f"the gateway is {version}, this command {__version__}; restart the gateway")
    return version


@check("nodes")
def _nodes(client: Client) -> str:
    nodes = client.get("/v1/nodes").value["nodes"]
    online = [node["node_id"] for node in nodes if node["online"]]
    if not online:
        known = f"none of {len(nodes)} is connected" if nodes else "none registered"
        raise warning(f"{known}; add one with `farhand node pair`")
    refused = [
        f"{node['node_id']} ({', '.join(node['refused_capabilities'])})"
        for node in nodes
        if node.get("refused_capabilities")
    ]
    if refused:
        names = ", ".join(refused[:5])
        raise warning(f"refused capabilities that are bound to other nodes: {names}; SA_NODE_CAPS allows them")
    return f"{len(online)} of {len(nodes)} connected: {', '.join(online[:5])}{', …' if len(online) > 5 else ''}"


@check("restart")
def _applied(client: Client) -> str:
    try:
        waiting = client.get("/v1/health").value.get("restart_needed", [])
    except ClientError as error:
        raise warning(f"unknown: {error}") from None
    if waiting:
        raise warning(f"restart the gateway to apply what was changed in {config.FILE}: {', '.join(waiting)}")
    return "not needed: all settings are in force"


@check("model")
def _model(settings: config.Config, client: Client | None, environ: Mapping[str, str]) -> str:
    """Ask the model a short question: the gateway's, if one runs."""
    if client is None:
        if not (settings.agent.model or environ.get("FARHAND_MODEL")):
            raise warning("none is set up, so the agent cannot answer: `farhand setup`")
        result = asyncio.run(ask_once(settings, environ))
    else:
        try:
            answer = client.post("/v1/models/check", {}, seconds=PROBE_SECONDS).value
            result = msgspec.convert(answer, ProbeResult)
        except (ClientError, msgspec.ValidationError) as error:
            raise warning(f"the gateway cannot be asked: {error}") from None
        if not result.ok and not result.model:
            raise warning("none is set up, so the agent cannot answer: `farhand setup`")
    if not result.ok:
        raise failed(f"{result.model}: {result.error}; `farhand setup` changes it")
    return f"{result.model} answered within {result.seconds:g} s"


@check("strangers")
def _strangers(url: str, certificate: str | None = None) -> str:
    """Check that requests without a token are refused."""
    try:
        context = tls_context(certificate) if url.startswith("https") else None
        with urllib.request.urlopen(f"{url}/v1/health", timeout=10, context=context):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            return "refused: every request needs a token"
        raise warning(f"{url} answers requests without a token with status {error.code}") from None
    except (OSError, ValueError, ClientError) as error:
        raise warning(f"cannot send {url} a request without a token: {error}") from None
    raise failed(f"{url} requires no token (--open): any program on this machine can use its shell")


@check("exposure")
def _exposure(settings: config.Config | None, url: str | None, hosts: list[str] | None) -> str:
    """Check that tokens and results do not cross a network unencrypted."""
    parts = urlsplit(url or "")
    configured = settings.gateway if settings is not None else None
    reached = [parts.hostname or "", *(hosts or [])] if url else []
    if configured is not None:
        reached.append(configured.host)
    names = ", ".join(sorted({host for host in reached if host and not is_loopback(host)}))
    encrypted = parts.scheme == "https" if url else bool(configured and configured.tls_cert)
    if not names:
        return "reachable from this machine only"
    if not encrypted:
        raise failed(f"listens on {names} without TLS: tokens travel unencrypted; see --tls-cert")
    return f"listens on {names}, with TLS"


def _listening_hosts(url: str) -> list[str]:
    """Return the wildcard addresses on which this machine listens at the gateway's port, as far as known.

    A gateway on all addresses announces itself as 127.0.0.1, so its address alone does not show this.
    """
    port = urlsplit(url).port
    hosts = []
    for name, all_zero in (("tcp", "0.0.0.0"), ("tcp6", "::")):  # noqa: S104
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            address, _, number = fields[1].partition(":")
            if fields[3] == "0A" and int(number, 16) == port and not address.strip("0"):
                hosts.append(all_zero)
    return hosts
