"""Only the engine's own package knows the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import farhand

SOURCE = Path(farhand.__file__).parent
# The memory index is a database of its own.
ALLOWED = {
    "apsw": ("store/sqlite/", "memory/index.py"),
    "psycopg": ("store/postgres/",),
    "nats": ("store/bus/nats.py",),
}


@pytest.mark.parametrize("library", ALLOWED)
def test_no_module_outside_its_package_uses_the_engine(library: str) -> None:
    found = [
        name
        for path in SOURCE.rglob("*.py")
        if not (name := path.relative_to(SOURCE).as_posix()).startswith(ALLOWED[library])
        and re.search(rf"^\s*(import|from) {library}\b|\b{library}\.\w+\(", path.read_text(), re.M)
    ]
    assert found == []


# What SQLite understands and PostgreSQL does not, or differently.
ONE_ENGINE = re.compile(
    r"INSERT OR |json_each|json_extract|\bIS \?|\bx''|LIMIT -1|PRAGMA|(?<!\.)strftime|\bmax\(\?|\browid\b"
)


def test_the_statements_of_the_tables_are_for_every_engine() -> None:
    found = {
        path.name: words
        for folder in ("tables", "history", "journal")
        for path in (SOURCE / "store" / folder).rglob("*.py")
        if (words := ONE_ENGINE.findall(path.read_text()))
    }
    assert found == {}
