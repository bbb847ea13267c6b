"""Only the engine's own package knows the engine."""

from __future__ import annotations

import re
from pathlib import Path

import farhand

SOURCE = Path(farhand.__file__).parent
# The memory index is a database of its own.
ALLOWED = ("store/sqlite/", "memory/index.py")


def test_no_module_outside_its_package_uses_the_engine() -> None:
    found = [
        name
        for path in SOURCE.rglob("*.py")
        if not (name := path.relative_to(SOURCE).as_posix()).startswith(ALLOWED)
        and re.search(r"^\s*(import|from) apsw\b|\bapsw\.\w", path.read_text(), re.M)
    ]
    assert found == []
