"""MkDocs hooks: the navigation, pages from outside docs/, and the generated parts of the reference.

A page asks for a generated part with a comment: `<!-- generated: commands -->` or `<!-- generated: http -->`. On a code
host, which shows the Markdown itself, such a page says where to find the content instead.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import commands_page
import http_page

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/farhand/farhand/blob/main/"
# Pages from outside docs/, and where the site has them.
PROJECT = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "examples/README.md": "project/examples.md",
}
# Sections: title, folder, the pages that come first. The others follow by title, those of `decisions` by number.
SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "Tutorial",
        "tutorial",
        [
            "getting-started.md",
            "second-machine.md",
            "first-agent.md",
            "first-schedule.md",
            "first-approval.md",
            "first-plug-in.md",
        ],
    ),
    ("How-to", "how-to", ["install.md", "lend-a-machine.md"]),
    ("Reference", "reference", ["commands.md", "cli.md", "settings.md", "http-api.md", "http-routes.md"]),
    ("Explanation", "explanation", ["architecture.md", "security-model.md", "comparison.md", "calls.md"]),
    ("Decisions", "decisions", ["README.md"]),
]
# Pages that have an entry of their own, or are in another section than their folder's.
ELSEWHERE = {"reference/promises.md": "Explanation", "how-to/migrate-from-openclaw.md": ""}
GENERATED = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end -->", re.DOTALL)
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2\s*$", re.MULTILINE | re.DOTALL)


def title_of(page: Path) -> str:
    return page.read_text().partition("\n")[0].lstrip("# ").replace("`", "")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the folders: a page that is added needs no second entry."""
    docs = Path(config.docs_dir)
    navigation: list[Any] = [{"Home": "index.md"}]
    for section, folder, first in SECTIONS:
        pages = [page for page in (docs / folder).glob("*.md") if f"{folder}/{page.name}" not in ELSEWHERE]
        pages += [docs / name for name, home in ELSEWHERE.items() if home == section and (docs / name).exists()]

        def place(page: Path, first: list[str] = first, folder: str = folder) -> tuple[int, str]:
            return (
                first.index(page.name) if page.name in first else len(first),
                page.name if folder == "decisions" else title_of(page).lower(),
            )

        entries = [{title_of(page): str(page.relative_to(docs))} for page in sorted(pages, key=place)]
        navigation.append({section: entries})
    for title, name in (
        ("Troubleshooting", "troubleshooting.md"),
        ("From OpenClaw", "how-to/migrate-from-openclaw.md"),
    ):
        if (docs / name).exists():
            navigation.append({title: name})
    existing = {source: page for source, page in PROJECT.items() if (ROOT / source).exists()}
    navigation.append({"Project": [{title_of(ROOT / source): page} for source, page in existing.items()]})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PROJECT.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    source = {name: path for path, name in PROJECT.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    text = GENERATED.sub(lambda match: generated(match[1], config), markdown)
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    text = LINK.sub(
        lambda match: f"{match[1]}{moved(source, page.file.src_uri, match[2])}{match[3]}", FENCE.sub(keep, text)
    )
    return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], text)


def moved(source: str, page: str, link: str) -> str:
    """Return where a link in the file `source` leads from the page `page`: in the site, or in the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (ROOT / target).exists():
        return link  # strict mode reports it
    if target.startswith("docs/"):
        found = target.removeprefix("docs/")
    elif target == "README.md":
        found = "index.md"
    elif target in PROJECT:
        found = PROJECT[target]
    else:
        return REPOSITORY + target
    if (ROOT / target).is_dir():
        return f"{REPOSITORY}{target}"
    return posixpath.relpath(found, posixpath.dirname(page) or ".")


def generated(name: str, config: MkDocsConfig) -> str:
    if name == "commands":
        return commands_page.markdown()
    if name == "http":
        return http_page.markdown(http_page.description(Path(config.site_dir)))
    raise ValueError(f"no generated part {name!r}: commands or http")
