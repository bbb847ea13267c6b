"""`migrate`: move a home into a fleet, and back."""

from __future__ import annotations

import asyncio

import click
import msgspec

from farhand import config
from farhand.app.gateway import only_one
from farhand.app.migrate import SQLITE, move
from farhand.cli.json_output import json_option
from farhand.cli.output import plain, remark, show_json
from farhand.machine.home import home_folder, make_home


@click.command()
@click.option("--to", required=True, help=f"postgresql://… of an empty database; or {SQLITE}: back into the home.")
@click.option("--objects", "bucket", help="s3://BUCKET/PREFIX: copy agents' files and skills there too.")
@click.option("--home", type=click.Path(file_okay=False), help="Home folder.  [FARHAND_HOME, ~/.farhand]")
@json_option()
def migrate(to: str, bucket: str | None, home: str | None, as_json: bool) -> None:
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
    if as_json:
        show_json(msgspec.to_builtins(moved))
        return
    print(plain(f"copied {sum(moved.rows.values())} rows and {moved.objects} objects; the journal is verified"))
    if to == SQLITE:
        remark("remove [store] url and [bus] url from the settings, then start the gateway")
    else:
        remark(
            "now set [store] url, [bus] url and [objects] url, and start the gateways: see docs/how-to/run-a-fleet.md"
        )
