"""`backup`, `restore` and `migrate`: the home folder in one file, and in a shared database."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import click
import msgspec

from farhand import __version__, config
from farhand.app.gateway import only_one
from farhand.app.migrate import SQLITE, move
from farhand.cli.json_output import json_option
from farhand.cli.output import local_time, plain, show
from farhand.machine.home import home_folder, make_home
from farhand.store.sqlite.archive import REPLACED_FOLDER, pack
from farhand.store.sqlite.archive import restore as restore_archive

HOME = click.option("--home", type=click.Path(file_okay=False), help="Home folder.  [FARHAND_HOME, ~/.farhand]")


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@HOME
@json_option(expose_value=False)
def backup(file: Path | None, home: str | None) -> None:
    """Pack settings, keys, agents' files and the store into FILE, whether or not the gateway runs.

    The copy of the store is consistent, and every file is read back and checked. FILE contains secrets and is readable
    only by you; keep it private. A workspace outside the home, or in S3, is not included.

    \b
    Examples:
      farhand backup
      farhand backup /mnt/disk/farhand.tar.gz --json
    """
    folder = home_folder(home)
    target = (file or Path(time.strftime("farhand-backup-%Y%m%d-%H%M%S.tar.gz"))).absolute()
    packed = pack(folder, target, __version__)
    skipped = f"skipped, as they are not regular files: {plain(', '.join(packed.skipped[:10]))}"
    text = f"{packed.path}  {packed.size} bytes, {packed.files} files, checked"
    show(msgspec.to_builtins(packed), text, skipped if packed.skipped else "")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@HOME
@json_option(expose_value=False)
def restore(file: Path, home: str | None) -> None:
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
    made = f" as of {local_time(manifest.created_at)}" if manifest.version else ""
    show(
        {"home": str(folder), "files": len(manifest.files), "created_at": manifest.created_at},
        f"restored {folder}{made}: {len(manifest.files)} files",
        f"replaced files are in {plain(str(folder / REPLACED_FOLDER))}",
    )


@click.command()
@click.option("--to", required=True, help=f"postgresql://… of an empty database; or {SQLITE}: back into the home.")
@click.option("--objects", "bucket", help="s3://BUCKET/PREFIX: copy agents' files and skills there too.")
@HOME
@json_option(expose_value=False)
def migrate(to: str, bucket: str | None, home: str | None) -> None:
    """Copy the store of this home into a database that several gateways can share, or back. The gateway must not run.

    The journal of the copy is verified before it counts. The original is left as it is.

    \b
    Examples:
      farhand migrate --to postgresql://farhand@db/farhand --objects s3://bucket
      farhand migrate --to sqlite
    """
    folder = home_folder(home)
    make_home(folder)
    with only_one(folder):
        moved = asyncio.run(move(folder, config.load(folder), to, bucket))
    text = f"copied {sum(moved.rows.values())} rows and {moved.objects} objects; the journal is verified"
    back = "remove [store] url and [bus] url from the settings, then start the gateway"
    there = "now set [store] url, [bus] url and [objects] url, and start the gateways: see docs/how-to/run-a-fleet.md"
    show(msgspec.to_builtins(moved), text, back if to == SQLITE else there)
