"""Find the programs that this one runs outside of any sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable


def find_program(name: str, changeable: Iterable[str] = ()) -> str | None:
    """Return the path of a program on `PATH`; None if there is none outside of the `changeable` folders.

    A virtual environment in a lent folder is often on `PATH`: confined commands could put a program there, which would
    then run unconfined. The same holds for relative entries.
    """
    lent = [os.path.realpath(folder) for folder in changeable]
    for entry in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which(name, path=entry) if os.path.isabs(entry) else None  # noqa: PTH117
        if found is not None and not any(_within(folder, path) for folder in lent for path in (entry, found)):
            return found
    return None


def _within(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, os.path.realpath(path)]) == folder
