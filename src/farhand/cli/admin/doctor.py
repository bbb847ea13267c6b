"""`doctor`: is everything in order here?"""

from __future__ import annotations

import importlib.util
import os
import shutil
import ssl
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import click

from farhand import __version__, config
from farhand.app.sandbox import sandbox_of
from farhand.cli.client import TOKEN_FILE, Client, ClientError, client_command, is_loopback
from farhand.cli.output import ago, on_terminal, paint, plain, show_json, wrap
from farhand.gateway.access.credentials import NodeTokens
from farhand.protocol.errors import FarhandError
from farhand.store.history.pruning import usage
from farhand.store.history.seal_coverage import checkpoint
from farhand.store.journal.seal import KEY_FILE
from farhand.store.sqlite.audit import quick_look, reading
from farhand.store.sqlite.snapshots import BACKUPS_FOLDER, DAMAGED_FOLDER, STORE_FILE, Snapshots
from farhand.store.sqlite.store import SAFE_SQLITE, sqlite_version

PYTHON: Final = (3, 11)
# Older ones can corrupt a write-ahead log that is reset while another connection reads it.
SHORT: Final = 16
FREE_FAIL: Final = 100 * 1000 * 1000
FREE_WARN: Final = 1000 * 1000 * 1000

Verdict = Literal["ok", "warning", "failed"]
MARKS: Final[dict[Verdict, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "red"),
}


@dataclass(frozen=True)
class Check:
    name: str
    status: Verdict
    message: str


@click.command()
@client_command
def doctor(client: Client, as_json: bool) -> int:
    """Check this installation, its home folder and the running gateway.

    The status is 1 when a check failed; warnings alone leave it at 0.

    \b
    Examples:
      farhand doctor
      farhand doctor --json
    """
    checks = list(examine(client, os.environ))
    failed = sum(check.status == "failed" for check in checks)
    if as_json:
        show_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
        return 1 if failed else 0
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, colour = MARKS[check.status]
        sign = _sign(mark, check.status)
        message = wrap(plain(check.message), " " * (len(sign) + width + 3)).lstrip()
        print(f"{paint(sign, colour)} {check.name.ljust(width)}  {message}")
    warned = sum(check.status == "warning" for check in checks)
    if failed or warned:
        print(f"\n{failed} failed, {warned} to look at, {len(checks) - failed - warned} fine")
    elif on_terminal():
        print(f"\nall {len(checks)} fine")
    return 1 if failed else 0


def _sign(mark: str, verdict: Verdict) -> str:
    try:
        mark.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return verdict.ljust(7)
    return mark


def examine(client: Client, environ: Mapping[str, str]) -> Iterator[Check]:
    """All checks, the local ones first. None of them changes anything."""
    yield _python()
    yield _sqlite()
    yield from _fast_parts()
    home = client.home
    yield _home(home)
    yield _token(home / TOKEN_FILE)
    yield from _secret_files(home)
    settings, check = _settings(home, environ)
    yield check
    if settings is not None:
        yield from _sandbox(settings, home)
        if settings.channels:
            yield _channels(settings)
    yield _store(home)
    yield _journal(home)
    yield _history(home, settings)
    yield _disk(home)
    yield _node_token(environ)
    url, version, check = _gateway(client)
    yield check
    if version is not None:
        yield _version(version)
        yield _nodes(client)
    if version is not None and url is not None:
        yield _asks_for_tokens(url)
    yield _exposure(settings, url, None if url is None else _listening_hosts(url))


# -- what is installed ------------------------------------------------------------------------------------


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON:
        return Check("Python", "failed", f"{version}; Farhand needs 3.11 or newer")
    return Check("Python", "ok", version)


def _sqlite() -> Check:
    version, needed = (".".join(map(str, numbers)) for numbers in (sqlite_version(), SAFE_SQLITE))
    if sqlite_version() < SAFE_SQLITE:
        return Check(
            "SQLite", "failed", f"{version}, which can damage its log; {needed} or newer comes with current apsw"
        )
    return Check("SQLite", "ok", f"{version} (apsw)")


def _fast_parts() -> Iterator[Check]:
    if sys.platform == "win32":
        return
    for name, verdict in (("uvloop", "warning"), ("httptools", "failed")):
        if importlib.util.find_spec(name) is not None:
            yield Check(name, "ok", "installed")
        elif verdict == "warning":
            yield Check(name, "warning", "not installed; the gateway works, more slowly")
        else:
            yield Check(name, "failed", "not installed; the gateway does not start without it")


# -- the home folder --------------------------------------------------------------------------------------


def _home(home: Path) -> Check:
    try:
        status = home.stat()
    except FileNotFoundError:
        return Check("home", "failed", f"{home} does not exist; `farhand up` makes it")
    except OSError as error:
        return Check("home", "failed", f"{home} cannot be looked at: {error.strerror}")
    if not stat.S_ISDIR(status.st_mode):
        return Check("home", "failed", f"{home} is not a folder")
    return _closed("home", home, status, 0o700)


def _token(path: Path) -> Check:
    try:
        status = path.stat()
        blank = not path.read_text().strip()
    except FileNotFoundError:
        return Check("owner token", "failed", f"{path} does not exist; `farhand up` makes it")
    except (OSError, UnicodeDecodeError) as error:
        return Check("owner token", "failed", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
    if blank:
        return Check("owner token", "failed", f"{path} is blank; remove it, and `farhand up` makes a new one")
    return _closed("owner token", path, status, 0o600)


def _secret_files(home: Path) -> Iterator[Check]:
    """What else nobody but its owner is to read, where it is there."""
    for path in (home / "node-token.json", home / config.FILE, *sorted(home.glob("nodes/*/key.json"))):
        try:
            check = _closed(path.name, path, path.stat(), 0o600 if path.suffix == ".json" else 0o644)
        except OSError:
            continue
        if check.status != "ok":
            yield check


def _closed(name: str, path: Path, status: os.stat_result, mode: int) -> Check:
    actual = stat.S_IMODE(status.st_mode)
    if actual & ~mode:
        return Check(name, "failed", f"{path} has mode {actual:04o}, others may look in; run chmod {mode:o} {path}")
    if status.st_uid != os.geteuid():
        return Check(name, "warning", f"{path} belongs to another user (uid {status.st_uid})")
    return Check(name, "ok", f"{path} ({actual:04o})")


def _settings(home: Path, environ: Mapping[str, str]) -> tuple[config.Config | None, Check]:
    try:
        settings = config.load(home, environ)
    except FarhandError as error:
        return None, Check("settings", "failed", str(error))
    path = home / config.FILE
    return settings, Check("settings", "ok", str(path) if path.exists() else "none, so the defaults hold")


def _sandbox(settings: config.Config, home: Path) -> Iterator[Check]:
    """Whether this machine gives the sandbox that the settings ask for, and the host lets itself be reached."""
    if not settings.sandbox.enabled:
        yield Check("sandbox", "ok", "off; commands of the agent, and of nodes of this home, run as the gateway's user")
        return
    workspace = home / "agents" / "main"
    try:
        sandbox, host = sandbox_of(settings.sandbox, workspace if workspace.is_dir() else home, home)
        assert sandbox is not None
        sandbox.check()
    except FarhandError as error:
        reason = str(error).removesuffix("; the command did not run")
        yield Check("sandbox", "failed", f"{reason}; `exec`, and Bash of nodes of this home, are refused until then")
        return
    yield Check("sandbox", "ok", f"works; network: {settings.sandbox.network}")
    if host is not None:
        try:
            host.words()
        except FarhandError as error:
            yield Check("host commands", "failed", str(error).removesuffix("; the command did not run"))
        else:
            yield Check("host commands", "ok", f"{', '.join(sorted(host.names))} over SSH to {host.host}:{host.port}")


def _store(home: Path) -> Check:
    """Whether there is something to look at, and something to fall back on. The gateway itself checks the bytes."""
    damaged = sorted(str(path) for path in (home / DAMAGED_FOLDER).glob("*"))
    if damaged:
        return Check(
            "store",
            "warning",
            f"a damaged store was set aside in {damaged[-1]}; what was written after the last copy is in there alone. "
            "Remove the folder once you have looked",
        )
    newest = next(iter(Snapshots(home / BACKUPS_FOLDER)), None)
    if newest is None:
        return Check("store", "ok", "no copies yet; a running gateway makes them by itself")
    return Check("store", "ok", f"last copied {ago(newest.taken_at)}")


def _journal(home: Path) -> Check:
    """The journal's end, which is quickly looked at; `farhand audit verify` looks at all of it."""
    store = home / STORE_FILE
    if not store.exists():
        return Check("journal", "ok", "none yet")
    try:
        status = (home / KEY_FILE).stat()
        head, fault = quick_look(home, store)
    except FileNotFoundError:
        return Check("journal", "warning", f"{home / KEY_FILE} is missing: without it nothing written can be checked")
    except (OSError, FarhandError) as error:
        return Check("journal", "warning", str(error))
    if stat.S_IMODE(status.st_mode) & 0o077:
        return _closed("journal", home / KEY_FILE, status, 0o600)
    if fault is not None:
        return Check("journal", "failed", f"{fault}; `farhand audit verify` shows all")
    return Check("journal", "ok", f"ends where it should, at event {head.id}; `farhand audit verify` checks all of it")


MIB = 1024 * 1024


def _history(home: Path, settings: config.Config | None) -> Check:
    """What the journal and the record of calls take, beside their limits."""
    store = home / STORE_FILE
    if not store.exists():
        return Check("history", "ok", "none yet")
    try:
        with reading(store) as connection:
            used, cut = usage(connection), checkpoint(connection)
    except FarhandError as error:
        return Check("history", "warning", str(error))
    limits = config.RetentionSection() if settings is None else settings.retention
    size = f" of {limits.history_mb} MB" if limits.history_mb else ", no limit on size"
    age = f"kept {limits.history_days:g} days" if limits.history_days else "no limit on age"
    text = f"{used.total / MIB:.1f} MB{size}, {age}: {used.calls} calls, {used.events} events"
    if cut is not None:
        text += f"; what happened before {ago(cut.until)} was pruned"
    over = limits.history_mb and used.total > 1.2 * limits.history_mb * MIB
    return Check("history", "warning" if over else "ok", text)


def _disk(home: Path) -> Check:
    place = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("disk", "warning", f"{place} cannot be measured: {error.strerror}")
    amount = f"{free / 1e9:.1f} GB free" if free >= 1e9 else f"{free / 1e6:.0f} MB free"
    if free < FREE_FAIL:
        return Check("disk", "failed", f"only {amount} at {place}; calls cannot be written down without room")
    if free < FREE_WARN:
        return Check("disk", "warning", f"only {amount} at {place}")
    return Check("disk", "ok", f"{amount} at {place}")


def _node_token(environ: Mapping[str, str]) -> Check:
    blank = [name for name in ("SA_NODE_TOKEN", "SA_NODE_TOKENS") if name in environ and not environ[name].strip()]
    if blank:
        return Check("node tokens", "failed", f"{' and '.join(blank)} is set, but blank; unset it or give it a value")
    try:
        known = NodeTokens.from_env(environ)
    except FarhandError as error:
        return Check("node tokens", "failed", f"{error}; the gateway does not start with it")
    named = [name for name in ("SA_NODE_TOKEN", "SA_NODE_TOKENS") if name in environ]
    if any(len(token) < SHORT for token in known.secrets):
        return Check("node tokens", "warning", f"a token has fewer than {SHORT} characters, and can be guessed")
    return Check("node tokens", "ok", f"{', '.join(named)} set" if named else "none in the environment")


# -- the running gateway ----------------------------------------------------------------------------------


def _gateway(client: Client) -> tuple[str | None, str | None, Check]:
    """Its address if there is one, its version if it answers us."""
    url = None
    try:
        url = client.find().url
        health = client.get("/v1/health").value
        version = str(health["version"])
        if health["status"] != "ok":
            return url, version, Check("gateway", "failed", f"{url} says: {health['status']}; its log tells why")
        if health.get("frozen"):
            return url, version, Check("gateway", "warning", f"{url} is frozen: nothing runs until `farhand thaw`")
    except ClientError as error:
        return url, None, Check("gateway", "failed", str(error))
    except (KeyError, TypeError):
        return url, None, Check("gateway", "failed", f"{url} answers, but not as a gateway")
    return url, version, Check("gateway", "ok", f"{url} answers")


def _version(version: str) -> Check:
    if version != __version__:
        return Check("version", "failed", f"the gateway is {version}, this command {__version__}; restart the gateway")
    return Check("version", "ok", version)


def _channels(settings: config.Config) -> Check:
    """What people whom the owner has not named can reach through channels."""
    scope = settings.sessions.dm_scope
    open_ones = [
        (name, str(table.get("tools") or ("none" if table.get("policy") == "open" else "all")))
        for name, table in settings.channels.items()
        if table.get("policy") == "open" or "*" in (table.get("allow") or ())
    ]
    if not open_ones:
        return Check("channels", "ok", "none is open to people you have not named")
    names = ", ".join(name for name, _ in open_ones)
    if lent := [f"[channels.{name}] tools = {tools!r}" for name, tools in open_ones if tools in ("write", "all")]:
        return Check("channels", "failed", f"anybody who writes has tools on your machines: {', '.join(lent)}")
    if lent := [f"[channels.{name}] tools = {tools!r}" for name, tools in open_ones if tools == "read"]:
        return Check(
            "channels", "warning", f"anybody who writes can have your files read, memory included: {', '.join(lent)}"
        )
    if scope == "per-peer":
        return Check(
            "channels",
            "warning",
            f"{names}: open, and dm_scope = 'per-peer' gives people with the same id on two channels one session; "
            "use 'per-channel-peer'",
        )
    return Check("channels", "ok", f"{names}: open; people you have not named have sessions of their own and no tools")


def _nodes(client: Client) -> Check:
    try:
        entries: list[dict[str, Any]] = client.get("/v1/nodes").value["nodes"]
    except ClientError as error:
        return Check("nodes", "failed", str(error))
    online = [node["node_id"] for node in entries if node["online"]]
    if not online:
        known = f"none of {len(entries)} is connected" if entries else "none has joined"
        return Check("nodes", "warning", f"{known}; `farhand token create --node NAME` lets one join")
    refused = [
        f"{node['node_id']} ({', '.join(node['refused_capabilities'])})"
        for node in entries
        if node.get("refused_capabilities")
    ]
    if refused:
        return Check(
            "nodes",
            "warning",
            f"announce capabilities that are bound to other nodes: {', '.join(refused[:5])}; SA_NODE_CAPS allows them",
        )
    shown = ", ".join(online[:5]) + (", …" if len(online) > 5 else "")
    return Check("nodes", "ok", f"{len(online)} of {len(entries)} connected: {shown}")


def _asks_for_tokens(url: str) -> Check:
    """Whether a stranger is turned away."""
    request = urllib.request.Request(f"{url}/v1/health")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10, context=_trust(url)):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            return Check("strangers", "ok", "turned away: every request needs a token")
        return Check("strangers", "warning", f"{url} answers a stranger with {error.code}")
    except (OSError, ValueError) as error:
        return Check("strangers", "warning", f"{url} could not be asked as a stranger: {error}")
    return Check("strangers", "failed", f"{url} asks nobody for a token (--open): any program here can use its shell")


def _trust(url: str) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=os.environ.get("FARHAND_CA_FILE")) if url.startswith("https") else None


def _exposure(settings: config.Config | None, url: str | None, hosts: list[str] | None) -> Check:
    """Whether tokens and results can cross a network in the clear."""
    parts = urlsplit(url or "")
    configured = settings.gateway if settings is not None else None
    reached = [parts.hostname or "", *(hosts or [])] if url else []
    if configured is not None:
        reached.append(configured.host)
    open_to = sorted({host for host in reached if host and not is_loopback(host)})
    encrypted = parts.scheme == "https" if url else bool(configured and configured.tls_cert)
    if not open_to:
        return Check("exposure", "ok", "reachable from this machine only")
    names = ", ".join(open_to)
    if not encrypted:
        return Check(
            "exposure", "failed", f"listens on {names} without TLS: tokens travel in the clear; see --tls-cert"
        )
    return Check("exposure", "ok", f"listens on {names}, with TLS")


def _listening_hosts(url: str) -> list[str]:
    """The addresses on which this machine listens at the gateway's port, as far as the system tells.

    A gateway on all addresses is announced as 127.0.0.1, so its address alone does not show it.
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
