"""`mcp install`: write the gateway into the configuration of an MCP client, with a token of its own."""

from __future__ import annotations

import difflib
import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from farhand.cli.client import Client, ClientError, reason_of
from farhand.cli.commands import client_options
from farhand.cli.json_output import wants_json
from farhand.cli.output import plain, remark, show_json

NAME: Final = "farhand"
HIDDEN: Final = "(a token of its own)"

Entry = dict[str, Any]


@dataclass(frozen=True)
class ClientProgram:
    """Where a client keeps its servers, and how it writes one with a URL."""

    title: str
    # The file for the user, and the one for a project, relative to the home and to the project.
    user_file: Callable[[Path], Path]
    project_file: str | None
    # The table of the servers.
    key: str
    entry: Callable[[str, str], Entry]
    toml: bool = False


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _vscode(home: Path) -> Path:
    if sys.platform == "darwin":
        return home / "Library/Application Support/Code/User/mcp.json"
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "Code/User/mcp.json"


def _codex(home: Path) -> Path:
    return Path(os.environ.get("CODEX_HOME") or home / ".codex") / "config.toml"


CLIENTS: Final = {
    "claude-code": ClientProgram(
        "Claude Code",
        lambda home: home / ".claude.json",
        ".mcp.json",
        "mcpServers",
        lambda url, token: {"type": "http", "url": url, "headers": _bearer(token)},
    ),
    "cursor": ClientProgram(
        "Cursor",
        lambda home: home / ".cursor/mcp.json",
        ".cursor/mcp.json",
        "mcpServers",
        lambda url, token: {"url": url, "headers": _bearer(token)},
    ),
    "vscode": ClientProgram(
        "VS Code",
        _vscode,
        ".vscode/mcp.json",
        "servers",
        lambda url, token: {"type": "http", "url": url, "headers": _bearer(token)},
    ),
    "codex": ClientProgram(
        "Codex",
        _codex,
        None,
        "mcp_servers",
        lambda url, token: {"url": url, "http_headers": _bearer(token)},
        toml=True,
    ),
    "gemini": ClientProgram(
        "Gemini CLI",
        lambda home: home / ".gemini/settings.json",
        ".gemini/settings.json",
        "mcpServers",
        lambda url, token: {"httpUrl": url, "headers": _bearer(token)},
    ),
}


@click.command()
@click.argument("program", metavar="CLIENT")
@click.option("--project", type=click.Path(file_okay=False, path_type=Path), help="Write the file of this project.")
@click.option("--name", default=NAME, show_default=True, help="The name of the entry.")
@click.option("--tool", "tools", multiple=True, metavar="PATTERN", help="Only these tools, such as 'laptop__*'.")
@click.option("--node-only", "nodes", multiple=True, metavar="ID", help="Only the tools of this node. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@client_options
def install(client: Client, program: str, project: Path | None, name: str, dry_run: bool, **limits: Any) -> None:
    """Add the gateway to an MCP client: claude-code, cursor, vscode, codex or gemini.

    Creates a token for the client and writes it into the client's configuration file; everything else in the file
    stays. An earlier entry is replaced and its token is revoked.

    \b
    Examples:
      farhand mcp install claude-code
      farhand mcp install vscode --project . --tool 'laptop__*'
      farhand mcp install codex --dry-run
    """
    chosen = CLIENTS.get(program)
    if chosen is None:
        near = difflib.get_close_matches(program, CLIENTS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(CLIENTS)}"
        raise click.UsageError(f"There is no client {program!r}; {hint}")
    if project is not None and chosen.project_file is None:
        raise click.UsageError(f"{chosen.title} has no configuration file for a project.")
    path = chosen.user_file(Path.home()) if project is None else project / str(chosen.project_file)
    url = f"{client.find().url}/mcp"
    before = _read(path)
    document = _document(chosen, path, before)
    if dry_run:
        _show(chosen, path, name, chosen.entry(url, HIDDEN), dry_run=True)
        return
    label = f"mcp install {program} {path}"
    wanted = {"label": label, **{key: list(value) for key, value in limits.items() if value}}
    made = client.post("/v1/tokens", wanted).value
    try:
        _put(document, chosen.key, name, chosen.entry(url, made["token"]))
        _write(path, _text(chosen, document), before)
    except BaseException:
        client.delete("/v1/tokens/{}", made["id"])
        raise
    for entry in client.get("/v1/tokens").value["tokens"]:
        if entry["label"] == label and entry["id"] != made["id"] and entry["revoked_at"] is None:
            client.delete("/v1/tokens/{}", entry["id"])
    _show(chosen, path, name, chosen.entry(url, HIDDEN), token_id=made["id"])


def _show(
    chosen: ClientProgram, path: Path, name: str, entry: Entry, *, dry_run: bool = False, token_id: str | None = None
) -> None:
    if wants_json():
        show_json(
            {"client": chosen.title, "file": str(path), "name": name, "entry": entry, "written": not dry_run}
            | ({"token_id": token_id} if token_id else {})
        )
        return
    document: Any = _document(chosen, path, None)
    _put(document, chosen.key, name, entry)
    print(plain(f"{'would write' if dry_run else 'written'}: {path}"))
    print(_text(chosen, document).rstrip())
    if not dry_run:
        remark(f"\nRestart {chosen.title}. `farhand token revoke {token_id}` revokes its access.")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError("unreadable_file", f"cannot read {path}: {reason_of(error)}") from None


def _document(chosen: ClientProgram, path: Path, text: str | None) -> Any:
    """Return the content of a configuration file; an empty one for None. Raises ClientError if it cannot be kept."""
    import tomlkit  # noqa: PLC0415
    from tomlkit.exceptions import ParseError  # noqa: PLC0415

    if chosen.toml:
        try:
            return tomlkit.parse(text or "")
        except ParseError as error:
            raise ClientError("invalid_file", f"{path} is not valid TOML: {error}; nothing was written") from None
    try:
        document = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        raise ClientError(
            "invalid_file",
            f"{path} is not plain JSON: {error}; nothing was written. Add the entry by hand: see --dry-run",
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get(chosen.key, {}), dict):
        raise ClientError("invalid_file", f"{path}: {chosen.key!r} is not an object; nothing was written")
    return document


def _put(document: Any, key: str, name: str, entry: Entry) -> None:
    """Set one entry of the table of servers."""
    if key not in document:
        document[key] = {}
    document[key][name] = entry


def _text(chosen: ClientProgram, document: Any) -> str:
    if chosen.toml:
        import tomlkit  # noqa: PLC0415

        return tomlkit.dumps(document)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _write(path: Path, text: str, before: str | None) -> None:
    """Replace a file whose content is still `before`; the new one is private, since it holds a token."""
    if _read(path) != before:
        raise ClientError("conflict", f"{path} was changed meanwhile; nothing was written")
    target = path.resolve() if path.is_symlink() else path
    beside = target.with_name(f"{target.name}.farhand-new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) & 0o700 if target.exists() else 0o600
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        beside.chmod(mode)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ClientError("unwritable_file", f"cannot write {path}: {reason_of(error)}") from None
