"""The first code of a bundle, as its `__main__.py`: unpacks it once, and runs Farhand from there.

What is unpacked is a virtual environment: commands that the node starts find the same packages, without variables
that would reach other programs. An old Python 3 gets an answer and no traceback.
"""

import json
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

MANIFEST = "bundle.json"
PYTHON = "python3"


def main() -> None:
    """Replace this process with Farhand."""
    with zipfile.ZipFile(sys.argv[0]) as archive:
        manifest = json.loads(archive.read(MANIFEST).decode())
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()}"
        if here != manifest["platform"]:
            sys.exit(
                f"farhand: this bundle is for {manifest['platform']}, and this is {here}; make one on such a machine "
                "with `farhand node bundle`, or install Farhand with pip"
            )
        place = data_folder() / f"bundle-{manifest['digest']}"
        if not place.is_dir():
            unpack(archive, place)
    check_owner(place)
    python = str(place / "bin" / PYTHON)
    # -P: the current folder may be a lent one, and no program in it is to be taken for Farhand.
    os.execv(python, [python, "-P", "-m", "farhand", *sys.argv[1:]])  # noqa: S606


def data_folder() -> Path:
    """Return where bundles are unpacked."""
    known = os.environ.get("XDG_DATA_HOME")
    return (Path(known) if known else Path.home() / ".local" / "share") / "farhand"


def unpack(archive: zipfile.ZipFile, place: Path) -> None:
    """Unpack everything beside its place, then put it there in one step."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix="unpacking-", dir=str(place.parent)))
    try:
        library = beside / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        programs = beside / "bin"
        library.mkdir(parents=True)
        programs.mkdir()
        for name in archive.namelist():
            if name.startswith("site-packages/"):
                archive.extract(name, str(library))
            elif name.startswith("bin/"):
                Path(archive.extract(name, str(beside))).chmod(0o700)
        own = Path(sys.executable).resolve()
        (programs / PYTHON).symlink_to(own)
        (programs / "python").symlink_to(PYTHON)
        (beside / "pyvenv.cfg").write_text(f"home = {own.parent}\ninclude-system-site-packages = false\n")
        program = programs / "farhand"
        # The path may contain blanks, which a `#!` line cannot.
        program.write_text(f'#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/{PYTHON}" -P -m farhand "$@"\n')
        program.chmod(0o700)
        beside.rename(place)
    except OSError:
        shutil.rmtree(str(beside), ignore_errors=True)
        if not place.is_dir():  # else another process was faster
            raise


def check_owner(place: Path) -> None:
    """Refuse a folder that another user could have filled."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        sys.exit(f"farhand: {place} belongs to another user or is writable by others; remove it")


if __name__ == "__main__":
    main()
