"""`skills`: list, add and remove the skills of agents."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from farhand.cli.client import Client, ClientError
from farhand.cli.commands import client_group
from farhand.cli.copy.local_files import (
    Kind,
    LocalEntry,
    list_folder,
    open_file,
    report_skipped,
    resolve,
    tool_errors,
    upload_of,
)
from farhand.cli.output import Column, show, show_list
from farhand.protocol.errors import InvalidArgs
from farhand.store.objects.base import SKILLS, check_key

SKILL = "SKILL.md"
MAX_FILES = 1000
COLUMNS = [
    Column("SKILL", "name"),
    Column("OF", "source"),
    Column("STATE", lambda skill: "ok" if skill["eligible"] else "; ".join(skill["reasons"])),
    Column("DESCRIPTION", "description", flexible=True),
]


@client_group
@click.option("--agent", default="main", show_default=True, help="Agent whose skills are listed.")
def skills(agent: str, client: Client) -> None:
    """List the skills an agent can use; add and remove skills.

    \b
    Examples:
      farhand skills
      farhand skills add ./summarize
      farhand skills add ./deploy --agent helper
    """
    empty = "no skills yet; add a folder that has a SKILL.md with `farhand skills add DIR`"
    show_list(client.get("/v1/skills", agent=agent), "skills", COLUMNS, empty)


@skills.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--agent", help="Add it for this agent only.  [default: for all]")
def add(folder: str, agent: str | None, client: Client) -> None:
    """Add the skill in DIR, a folder with a SKILL.md. The skill gets the folder's name and replaces an older one."""
    top = resolve(folder)
    files = _files(top)
    _check(top, files)
    base = f"/v1/workspace/{quote(agent, safe='')}/skills/" if agent else "/v1/skills/"
    new = {file.inner for file in files}
    old = [inner for inner in _stored_files(client, top.name, agent) if inner not in new]
    # A file cannot be replaced by a folder of the same name, nor a folder by a file.
    in_the_way = [
        inner for inner in old if any(one.startswith(f"{inner}/") or inner.startswith(f"{one}/") for one in new)
    ]
    _remove(client, base, top.name, in_the_way)
    # SKILL.md comes last: an agent that sees the skill finds all its files.
    for file in sorted(files, key=lambda file: file.inner == SKILL):
        with open_file(file.path) as (content, status):
            upload = upload_of(content, status, file.path)
            client.request("PUT", f"{base}{quote(f'{top.name}/{file.inner}')}", upload)
    _remove(client, base, top.name, [inner for inner in old if inner not in in_the_way])
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    document = {"name": top.name, "agent": agent, "files": len(files), "removed": old}
    show(document, f"added {top.name} ({count}) for {agent or 'every agent'}")


def _files(top: Path) -> list[LocalEntry]:
    """Return the files of a skill, following links within it. Raises ClientError for a link that points outside."""
    files = []
    for entry in list_folder(top):
        real = resolve(str(entry.path))
        if entry.kind is Kind.FILE or (entry.kind is Kind.LINK and real.is_file()):
            files.append(LocalEntry(entry.inner, real, Kind.FILE))
        elif entry.kind is not Kind.EMPTY_FOLDER:
            report_skipped(entry.inner, entry.kind)
    return files


def _check(top: Path, files: list[LocalEntry]) -> None:
    """Raise ClientError if the folder is not a valid skill."""
    if SKILL not in {file.inner for file in files}:
        raise ClientError("not_a_skill", f"{top} has no {SKILL}")
    if len(files) > MAX_FILES:
        raise ClientError("too_large", f"{top} has {len(files)} files; a skill may have at most {MAX_FILES}")
    _check_name(top.name)
    for file in files:
        with tool_errors():
            check_key(f"{SKILLS}/{top.name}/{file.inner}")
    with open_file(top / SKILL) as (content, _):
        data = content.read()
    try:
        readable = "\0" not in data.decode()
    except UnicodeDecodeError:
        readable = False
    if not readable:
        raise ClientError("not_a_skill", f"{top / SKILL} is not UTF-8 text")


def _check_name(name: str) -> None:
    try:
        check_key(f"{SKILLS}/{name}")
    except InvalidArgs:
        usable = False
    else:
        usable = "/" not in name
    if not usable:
        raise ClientError("invalid_args", f"{name!r} is not the name of a skill; `farhand skills` lists them")


def _stored_files(client: Client, name: str, agent: str | None) -> list[str]:
    try:
        return list(client.get("/v1/skills/{}", name, agent=agent).value["files"])
    except ClientError as error:
        if error.code != "not_found":
            raise
        return []


def _remove(client: Client, base: str, name: str, files: list[str]) -> None:
    for inner in files:
        try:
            client.request("DELETE", f"{base}{quote(f'{name}/{inner}')}")
        except ClientError as error:
            if error.code != "not_found":  # removed by someone else in the meantime
                raise


@skills.command()
@click.argument("name")
def remove(name: str, client: Client) -> None:
    """Remove a global skill, with all its files."""
    _check_name(name)
    show(client.delete("/v1/skills/{}", name), f"removed {name}")
