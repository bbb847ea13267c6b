"""`backup` and `restore`: the home folder in one file."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from farhand import __version__
from farhand.app.gateway import only_one
from farhand.cli.json_output import json_option
from farhand.cli.output import local_time, plain, remark, show_json
from farhand.machine.home import home_folder, make_home
from farhand.store.sqlite.archive import REPLACED_FOLDER, pack
from farhand.store.sqlite.archive import restore as restore_archive

HOME = click.option("--home", type=click.Path(file_okay=False), help="Home folder.  [FARHAND_HOME, ~/.farhand]")


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@HOME
@json_option()
def backup(file: Path | None, home: str | None, as_json: bool) -> None:
    """Pack settings, keys, agents' files and the store into FILE, whether or not the gateway runs.

    The copy of the store is consistent, and every file is read back and checked. FILE contains secrets and is readable
    only by you; keep it so. A workspace outside the home, or in S3, is not included.

    \b
    Examples:
      farhand backup
      farhand backup /mnt/disk/farhand.tar.gz --json
    """
    folder = home_folder(home)
    target = (file or Path(time.strftime("farhand-backup-%Y%m%d-%H%M%S.tar.gz"))).absolute()
    packed = pack(folder, target, __version__)
    if as_json:
        show_json(msgspec.to_builtins(packed))
        return
    print(plain(f"{packed.path}  {packed.size} bytes, {packed.files} files, checked"))
    if packed.skipped:
        remark(f"skipped, as they are not regular files: {plain(', '.join(packed.skipped[:10]))}")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@HOME
@json_option()
def restore(file: Path, home: str | None, as_json: bool) -> None:
    """Restore a file from `farhand backup`, or a copy from <home>/backups. The gateway must not be running.

    FILE is checked before anything changes. Replaced files are kept in <home>/replaced. Calls and runs that were open
    in the backup end as unknown: they may have continued after it was made.

    \b
    Examples:
      farhand restore farhand-backup-20261116-024200.tar.gz
      farhand restore ~/.farhand/backups/farhand-20261116T020000000000Z.db
    """
    folder = home_folder(home)
    make_home(folder)
    with only_one(folder):
        manifest = restore_archive(file.absolute(), folder)
    if as_json:
        show_json({"home": str(folder), "files": len(manifest.files), "created_at": manifest.created_at})
        return
    made = f" as of {local_time(manifest.created_at)}" if manifest.version else ""
    print(plain(f"restored {folder}{made}: {len(manifest.files)} files"))
    remark(f"replaced files are in {plain(str(folder / REPLACED_FOLDER))}")
