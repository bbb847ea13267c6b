"""`skills`: what an agent knows how to do, and why it cannot just now."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.copy.local_files import Found, Kind, beneath, here, opened, say_left_out, upload_of, worded
from farhand.cli.output import Column, plain, remark, show_answer, show_json, show_table
from farhand.protocol.errors import InvalidArgs
from farhand.store.objects.base import SKILLS, check_key

SKILL = "SKILL.md"
MOST_FILES = 1000


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--agent", default="main", show_default=True, help="Whose skills.")
@client_command
def skills(agent: str, client: Client, as_json: bool) -> None:
    """List the skills an agent can see; add one.

    \b
    Examples:
      farhand skills
      farhand skills add ./summarize
      farhand skills add ./deploy --agent helper
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get(f"/v1/skills?{urlencode({'agent': agent})}")
    if as_json:
        show_answer(answer)
    elif not answer.value["skills"]:
        remark("no skills yet. `farhand skills add DIR` adds a folder with a SKILL.md.")
    else:
        columns = [Column("SKILL"), Column("OF"), Column("STATE"), Column("DESCRIPTION", flexible=True)]
        show_table(columns, [_row(skill) for skill in answer.value["skills"]])


def _row(skill: dict[str, Any]) -> list[str]:
    state = "ok" if skill["eligible"] else "; ".join(skill["reasons"])
    return [skill["name"], skill["source"], state, skill["description"]]


@skills.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--agent", help="Add it for this agent alone.  [default: for all]")
@client_command
def add(folder: str, agent: str | None, client: Client, as_json: bool) -> None:
    """Add the skill in DIR: a folder with a SKILL.md. Its name is the folder's; an older one becomes what DIR is."""
    top = here(folder)
    files = _files(top)
    _check(top, files)
    base = f"/v1/workspace/{quote(agent, safe='')}/skills/" if agent else "/v1/skills/"
    new = {file.inner for file in files}
    old = [inner for inner in _listed(client, top.name, agent) if inner not in new]
    in_the_way = [inner for inner in old if any(_clash(inner, file.inner) for file in files)]
    _remove(client, base, top.name, in_the_way)
    # The SKILL.md comes last: an agent that sees the skill finds all of it.
    for file in sorted(files, key=lambda file: file.inner == SKILL):
        with opened(file.path) as (content, status):
            upload = upload_of(content, status, file.path, lambda _done, _total: None, 0, status.st_size)
            client.request("PUT", f"{base}{quote(f'{top.name}/{file.inner}')}", upload)
    _remove(client, base, top.name, [inner for inner in old if inner not in in_the_way])
    if as_json:
        show_json({"name": top.name, "agent": agent, "files": len(files), "removed": old})
    else:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        print(f"added {plain(top.name)} ({count}) for {plain(agent) if agent else 'every agent'}")


def _files(top: Path) -> list[Found]:
    """The files of a skill; a link to a file in it is that file. Raises ClientError for a link that leads out."""
    files = []
    for found in beneath(top):
        real = here(str(found.path))
        if found.kind is Kind.FILE or (found.kind is Kind.LINK and real.is_file()):
            files.append(Found(found.inner, real, Kind.FILE))
        elif found.kind is not Kind.HOLLOW:
            say_left_out(found.inner, found.kind)
    return files


def _check(top: Path, files: list[Found]) -> None:
    """Raises ClientError for what is no skill."""
    if SKILL not in {file.inner for file in files}:
        raise ClientError("not_a_skill", f"{top} has no {SKILL}")
    if len(files) > MOST_FILES:
        raise ClientError("too_large", f"{top} has {len(files)} files; a skill has at most {MOST_FILES}")
    _check_name(top.name)
    for file in files:
        with worded():
            check_key(f"{SKILLS}/{top.name}/{file.inner}")
    with opened(top / SKILL) as (content, _):
        text = content.read()
    try:
        readable = "\0" not in text.decode()
    except UnicodeDecodeError:
        readable = False
    if not readable:
        raise ClientError("not_a_skill", f"{top / SKILL} is not a text in UTF-8")


def _check_name(name: str) -> None:
    try:
        check_key(f"{SKILLS}/{name}")
    except InvalidArgs:
        usable = False
    else:
        usable = "/" not in name
    if not usable:
        raise ClientError("invalid_args", f"{name!r} is not the name of a skill; `farhand skills` lists them")


def _listed(client: Client, name: str, agent: str | None) -> list[str]:
    """The files an older skill of this name has."""
    query = f"?{urlencode({'agent': agent})}" if agent else ""
    try:
        return list(client.get(f"/v1/skills/{quote(name, safe='')}{query}").value["files"])
    except ClientError as error:
        if error.code != "not_found":
            raise
        return []


def _clash(old: str, new: str) -> bool:
    """Whether one of them would be a folder of the other."""
    return old.startswith(f"{new}/") or new.startswith(f"{old}/")


def _remove(client: Client, base: str, name: str, files: list[str]) -> None:
    for inner in files:
        try:
            client.request("DELETE", f"{base}{quote(f'{name}/{inner}')}")
        except ClientError as error:
            if error.code != "not_found":  # somebody else was there first
                raise


@skills.command()
@click.argument("name")
@client_command
def remove(name: str, client: Client, as_json: bool) -> None:
    """Remove a global skill, with all its files."""
    _check_name(name)
    answer = client.request("DELETE", f"/v1/skills/{quote(name, safe='')}")
    if as_json:
        show_answer(answer)
    else:
        print(f"removed {plain(name)}")
