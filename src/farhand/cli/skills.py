"""`skills`: what an agent knows how to do, and why it cannot just now."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.screen import Column, plain, remark, show_answer, show_json, show_table

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
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--agent", help="Add it for this agent alone.  [default: for all]")
@client_command
def add(folder: Path, agent: str | None, client: Client, as_json: bool) -> None:
    """Add the skill in DIR: a folder with a SKILL.md. Its name is the folder's; files of an older one are replaced."""
    name = folder.resolve().name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if folder / SKILL not in files:
        raise ClientError("not_a_skill", f"{folder} has no {SKILL}")
    if len(files) > MOST_FILES:
        raise ClientError("too_large", f"{folder} has {len(files)} files; a skill has at most {MOST_FILES}")
    base = f"/v1/workspace/{quote(agent, safe='')}/skills/" if agent else "/v1/skills/"
    # The SKILL.md comes last: an agent that sees the skill finds all of it.
    for path in sorted(files, key=lambda path: path == folder / SKILL):
        inner = path.relative_to(folder).as_posix()
        client.request("PUT", f"{base}{quote(f'{name}/{inner}')}", path.read_bytes())
    if as_json:
        show_json({"name": name, "agent": agent, "files": len(files)})
    else:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        print(f"added {plain(name)} ({count}) for {plain(agent) if agent else 'every agent'}")


@skills.command()
@click.argument("name")
@client_command
def remove(name: str, client: Client, as_json: bool) -> None:
    """Remove a global skill, with all its files."""
    answer = client.request("DELETE", f"/v1/skills/{quote(name, safe='')}")
    if as_json:
        show_answer(answer)
    else:
        print(f"removed {plain(name)}")
