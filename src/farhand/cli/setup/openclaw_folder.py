"""Reads the state folder of OpenClaw: what can be imported, and what cannot. Nothing outside the folder is read."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from farhand.cli.client import ClientError

MAIN: Final = "main"
SETTINGS: Final = "openclaw.json"
MAX_FILE: Final = 10 * 1024 * 1024
MAX_FILES: Final = 5000
MAX_SETTINGS: Final = 1024 * 1024
# Where the archived sessions and the settings of channels are put in the workspace.
ARCHIVE: Final = "openclaw"
LEFT_OUT: Final = {".git", "node_modules", "__pycache__", ".venv", ".DS_Store"}
# Files that usually contain credentials.
SECRET_FILE: Final = re.compile(
    r"(^|/)(\.env(\..*)?|.*\.(pem|key|p12|pfx)|id_(rsa|ed25519|ecdsa)|\.netrc|\.npmrc|\.ssh|auth-profiles\.json"
    r"|credentials(\..*)?|secrets?(\..*)?)($|/)",
    re.IGNORECASE,
)
SECRET_KEY: Final = re.compile(r"token|secret|password|api_?key|credential|private", re.IGNORECASE)
AGENT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class SourceFile:
    """A file to import: where it is, and its path in the workspace of an agent, or of a skill for all agents."""

    kind: str
    source: Path
    agent: str | None
    path: str


@dataclass
class OpenClawFolder:
    """What an OpenClaw folder contains. `jobs` are bodies of `POST /v1/cron`."""

    files: list[SourceFile] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    # Tables for farhand.toml, without credentials.
    channels: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Credentials that were found and not imported, with what to do.
    secrets: list[str] = field(default_factory=list)
    # Everything else that was left out, with the reason.
    skipped: list[str] = field(default_factory=list)


def read_folder(top: Path) -> OpenClawFolder:
    """Return what can be imported from `top`. Raises ClientError if it is not a folder of OpenClaw."""
    if not (top / SETTINGS).is_file() and not (top / "workspace").is_dir():
        raise ClientError("not_found", f"{top} is not a folder of OpenClaw: it has neither {SETTINGS} nor workspace/")
    folder = OpenClawFolder()
    settings = _settings(top, folder)
    for entry in sorted(top.iterdir()):
        if entry.name == "workspace" or entry.name.startswith("workspace-"):
            _workspace(entry, entry.name.removeprefix("workspace").removeprefix("-") or MAIN, folder)
    for name, source in _walk(top / "skills", folder):
        if "/" in name:
            folder.files.append(SourceFile("skill", source, None, name))
    _sessions(top, folder)
    _jobs(top, folder)
    _channels(settings, folder)
    for name in ("credentials", ".env", "identity"):
        if os.path.lexists(top / name):
            folder.secrets.append(f"{name}: not read; use `farhand secret set NAME` for what calls need")
    if len(folder.files) > MAX_FILES:
        raise ClientError("too_large", f"{top} has {len(folder.files)} files; at most {MAX_FILES} are imported")
    return folder


def read_file(source: Path) -> bytes:
    """Return the content of a regular file; a link is not followed. Raises OSError."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{source} is not a regular file")
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OSError(f"{source} is larger than {MAX_FILE // 1024 // 1024} MiB")
    return data


def _walk(top: Path, folder: OpenClawFolder) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below `top` with their relative paths; note what is left out."""
    if top.is_symlink():
        folder.skipped.append(f"{top.name}: a link")
        return
    for where, folders, names in os.walk(top, followlinks=False):
        kept = []
        for name in sorted(folders):
            inner = str(PurePosixPath(Path(where, name).relative_to(top)))
            if Path(where, name).is_symlink():
                folder.skipped.append(f"{top.name}/{inner}: a link")
            elif SECRET_FILE.search(inner):
                folder.secrets.append(f"{top.name}/{inner}: may contain credentials; copy it yourself if it does not")
            elif name not in LEFT_OUT:
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            source = Path(where, name)
            inner = str(PurePosixPath(source.relative_to(top)))
            if reason := _unfit(source, name):
                folder.skipped.append(f"{top.name}/{inner}: {reason}")
            elif SECRET_FILE.search(inner):
                folder.secrets.append(f"{top.name}/{inner}: may contain credentials; copy it yourself if it does not")
            elif name not in LEFT_OUT:
                yield inner, source


def _unfit(source: Path, name: str) -> str:
    """Return why a file is left out, or nothing."""
    status = source.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_size > MAX_FILE:
        return f"larger than {MAX_FILE // 1024 // 1024} MiB"
    if "\\" in name or any(ord(character) < 32 for character in name) or name != name.encode(errors="replace").decode():
        return "not a usable name"
    return ""


def _workspace(entry: Path, agent: str, folder: OpenClawFolder) -> None:
    if AGENT_ID.fullmatch(agent) is None:
        folder.skipped.append(f"{entry.name}: {agent!r} is not a usable id of an agent")
        return
    for name, source in _walk(entry, folder):
        kind = "memory" if name == "MEMORY.md" or name.startswith("memory/") else "workspace"
        folder.files.append(SourceFile("skill" if name.startswith("skills/") else kind, source, agent, name))


def _sessions(top: Path, folder: OpenClawFolder) -> None:
    agents = top / "agents"
    for agent in sorted(agents.iterdir()) if agents.is_dir() and not agents.is_symlink() else ():
        if agent.is_symlink() or not agent.is_dir():
            folder.skipped.append(f"agents/{agent.name}: not a folder")
            continue
        if (agent / "agent" / "auth-profiles.json").exists():
            folder.secrets.append(f"agents/{agent.name}/agent/auth-profiles.json: not read; run `farhand setup`")
        for name, source in _walk(agent / "sessions", folder):
            if name.endswith(".jsonl"):
                folder.files.append(SourceFile("session", source, MAIN, f"{ARCHIVE}/sessions/{agent.name}/{name}"))


def _settings(top: Path, folder: OpenClawFolder) -> dict[str, Any]:
    """Return the settings, or nothing if they cannot be read."""
    path = top / SETTINGS
    if not os.path.lexists(path):
        return {}
    try:
        # JSON5 without its comments is read as YAML: names without quotes and trailing commas are valid there too.
        if path.lstat().st_size > MAX_SETTINGS:
            raise ValueError(f"larger than {MAX_SETTINGS // 1024} KiB")
        value = yaml.load(_without_comments(read_file(path).decode()), _Loader)  # noqa: S506 - a safe loader
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:200]
        folder.skipped.append(f"{SETTINGS}: cannot be read ({reason}); channels are not imported")
        return {}
    return value if isinstance(value, dict) else {}


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which JSON5 does not have: a few lines of them can describe more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


def _without_comments(text: str) -> str:
    # Each alternative takes the rest of the text if its end is missing, so no part is read twice.
    strings_and_comments = r""""(?:\\.|[^"\\])*(?:"|\Z)|'(?:\\.|[^'\\])*(?:'|\Z)|//[^\n]*|/\*.*?(?:\*/|\Z)"""
    kept = re.sub(strings_and_comments, lambda found: "" if found[0][0] == "/" else found[0], text, flags=re.DOTALL)
    return kept.replace("\t", "  ")


def _channels(settings: dict[str, Any], folder: OpenClawFolder) -> None:
    channels = settings.get("channels")
    for name, given in channels.items() if isinstance(channels, dict) else ():
        if not isinstance(name, str) or not isinstance(given, dict) or AGENT_ID.fullmatch(name) is None:
            continue
        table: dict[str, Any] = {}
        policy = given.get("dmPolicy")
        if isinstance(policy, str) and policy in {"open", "allowlist", "pairing"}:
            table["policy"] = policy
        allowed = given.get("allowFrom")
        if isinstance(allowed, list):
            table["allow"] = [str(one) for one in allowed if _names_a_person(one)]
        folder.channels[name] = table
        for key in given:
            if SECRET_KEY.search(str(key)):
                folder.secrets.append(f"{SETTINGS}: channels.{name}.{key}: set it in [channels.{name}] of farhand.toml")


def _names_a_person(value: Any) -> bool:
    return (isinstance(value, str) and value != "*") or (isinstance(value, int) and value.bit_length() <= 64)


def _jobs(top: Path, folder: OpenClawFolder) -> None:
    path = top / "cron" / "jobs.json"
    if not os.path.lexists(path) or (top / "cron").is_symlink():
        return
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        folder.skipped.append(f"cron/jobs.json: cannot be read ({str(error)[:200]})")
        return
    jobs = value.get("jobs") if isinstance(value, dict) else value
    for number, job in enumerate(jobs if isinstance(jobs, list) else [], 1):
        made = _job(job) if isinstance(job, dict) else None
        if made is None:
            folder.skipped.append(f"cron/jobs.json: job {number} has a schedule or a payload that is not known")
        else:
            folder.jobs.append(made)


def _job(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the body that creates a job, or None if it cannot be expressed."""
    given, payload = job.get("schedule"), job.get("payload")
    if not isinstance(given, dict) or not isinstance(payload, dict):
        return None
    schedule: dict[str, Any]
    if given.get("kind") == "cron" and isinstance(given.get("expr"), str):
        schedule = {"kind": "cron", "expr": given["expr"]}
        if isinstance(given.get("tz"), str):
            schedule["tz"] = given["tz"]
    elif given.get("kind") == "every" and isinstance(given.get("everyMs"), int):
        schedule = {"kind": "every", "everyMs": given["everyMs"]}
    elif given.get("kind") == "at" and isinstance(given.get("at"), str):
        schedule = {"kind": "at", "at": given["at"]}
    elif given.get("kind") == "at" and isinstance(given.get("atMs"), int):
        schedule = {"kind": "at", "atMs": given["atMs"]}
    else:
        return None
    text = payload.get("message") or payload.get("text")
    if not isinstance(text, str) or not text.strip():
        return None
    spec: dict[str, Any] = {"mode": "systemEvent", "text": text}
    if payload.get("kind") == "agentTurn":
        spec = {"mode": "task", "message": text, "deliver": False}
    name = job.get("name") or job.get("id")
    return {
        "name": str(name)[:100],
        "enabled": job.get("enabled") is not False,
        "schedule": schedule,
        "spec": spec,
    }
