"""The documentation: links lead somewhere, files that it names exist, commands and options are real."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from farhand.cli.main import COMMANDS
from tests.support.harness import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    found = [ROOT / "docs" / "index.md"]
    while found:
        page = found.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\((?!https?:)([^)\s#]+)", prose(page))
        found += [(page.parent / link).resolve() for link in links]
    assert sorted(str(page) for page in {*(ROOT / "docs").rglob("*.md")} - seen) == []


NAMING = [page for page in PAGES if "decisions" not in page.parts and page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", NAMING, ids=names_of(NAMING))
def test_files_that_a_page_names_exist(page: Path) -> None:
    sources = [
        f"/{path.relative_to(ROOT)}" for top in ("src", "tests", "examples") for path in (ROOT / top).rglob("*.py")
    ]
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", prose(page))
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in sources)}
    assert missing - {"mynode.py", "notes.py"} == set()


def test_names_on_the_architecture_page_exist() -> None:
    """`Class.member` must be in one file; any other identifier anywhere in the code or its configuration."""
    code = [path.read_text() for top in ("src", "tests") for path in (ROOT / top).rglob("*.py")]
    known = set(re.findall(r"\w+", " ".join([*code, (ROOT / "pyproject.toml").read_text()])))
    named = re.findall(r"`@?(_?[A-Za-z]\w*)(?:\.(\w+))?(?:\(.*?\))?`", prose(ROOT / "docs/explanation/architecture.md"))
    missing = [name for name, member in named if member in ("", "py", "toml") and name not in known]
    for owner, member in [(owner, member) for owner, member in named if owner[0].isupper() and member]:
        if not any(re.search(rf"^class {owner}\b", text, re.M) and re.search(rf"\b{member}\b", text) for text in code):
            missing.append(f"{owner}.{member}")
    assert missing == []


def commands_of(page: Path) -> list[str]:
    """The `farhand` commands in the console blocks of a page, without what follows a pipe or a comment."""
    blocks = "\n".join(text for kind, text in FENCED.findall(page.read_text()) if kind in {"console", "sh"})
    lines = re.sub(r"\\\n\s*", " ", blocks).splitlines()
    found = []
    for line in lines:
        match = re.search(r"(?:^|\$ |\| |&& |bin/)(?:\w+=\S+ )*farhand ((?!ready)\S.*)", line)
        if match:
            found.append(re.split(r"\s#\s| \| | && ", match[1])[0])
    return found


CALLS = [(page, command) for page in PAGES for command in commands_of(page)]


@pytest.mark.parametrize(("page", "command"), CALLS, ids=[f"{page.stem}: {command}" for page, command in CALLS])
def test_commands_and_their_options_exist(page: Path, command: str) -> None:
    words = shlex.split(command.replace("…", "x"))
    module, _, name = COMMANDS[words[0]][0].partition(":")
    found: click.Command = getattr(importlib.import_module(f"farhand.cli.{module}"), name)
    rest = words[1 : words.index("--")] if "--" in words else words[1:]
    while isinstance(found, click.Group) and rest and (inner := found.get_command(click.Context(found), rest[0])):
        found, rest = inner, rest[1:]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = {word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
    assert options <= known | {"-h", "--help"}
