"""What the gateway gives to a machine that is being added: a script, and Farhand itself in the same version."""

from __future__ import annotations

import asyncio
import shlex
from importlib import resources
from pathlib import Path
from typing import Final

from farhand.packaging.builds import BUNDLE, WHEEL, platform, write_bundle, write_wheel
from farhand.protocol.join_codes import JoinCode

FOLDER: Final = "installers"
FILES: Final = {BUNDLE: write_bundle, WHEEL: write_wheel}


class Installers:
    """Builds the files when they are first asked for; they are kept until the gateway starts again."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER
        self._building = asyncio.Lock()
        self._built: set[str] = set()

    async def file(self, name: str) -> Path | None:
        """Return a file that can be installed; None if there is none with this name. Raises BuildError."""
        build = FILES.get(name)
        if build is None:
            return None
        path = self._folder / name
        async with self._building:
            if name not in self._built:
                # What is installed here may have changed since an earlier start.
                self._folder.mkdir(mode=0o700, exist_ok=True)
                await asyncio.to_thread(build, path)
                self._built.add(name)
        return path


def install_script(code: JoinCode, public_key_pin: str | None) -> str:
    """Return the script that installs Farhand from its gateway and joins, for `sh`."""
    fetch = f"curl -fsSk --pinnedpubkey sha256//{public_key_pin}" if public_key_pin else "curl -fsS"
    values = {
        "CODE": str(code),
        "SOURCE": f"{code.url}/join/{code.secret}",
        "FETCH": fetch,
        "BUNDLE": BUNDLE,
        "WHEEL": WHEEL,
        "PLATFORM": platform(),
    }
    head = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return f"#!/bin/sh\n{head}{resources.files('farhand.packaging').joinpath('install.sh').read_text()}"


def install_command(code: JoinCode, public_key_pin: str | None) -> str:
    """Return the line to paste on the other machine."""
    pinned = f"k --pinnedpubkey sha256//{public_key_pin}" if public_key_pin else ""
    return f"curl -fsS{pinned} {code.url}/join/{code.secret} | sh"
