"""`host-wrapper`: the forced command of a sandbox's key in the host's `authorized_keys`."""

from __future__ import annotations

import os
import sys

import click

from farhand import config
from farhand.cli.json_output import json_option
from farhand.machine.home import home_folder
from farhand.machine.sandbox.host_commands import run_host_command
from farhand.protocol.errors import NotAllowed

REFUSED = 126


@click.command()
@click.option("--allow", multiple=True, help="Allowed command, or its first words. Repeatable.  [from the settings]")
@click.option("--home", type=click.Path(file_okay=False), help="Folder of the settings.  [~/.farhand]")
@json_option("Ignored: standard output belongs to the command that runs.", expose_value=False)
def host_wrapper(allow: tuple[str, ...], home: str | None) -> int:
    """Run the command received over SSH if it is allowed, and nothing else.

    Runs the single command in SSH_ORIGINAL_COMMAND without a shell; `cd FOLDER &&` may precede it. A command that is
    not allowed exits with status 126. Without --allow, the list is `host_commands` of `[sandbox]` in the settings.

    \b
    A line of authorized_keys:
      command="farhand host-wrapper --allow git",restrict ssh-ed25519 AAAA...
    """
    text = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    try:
        allowed = allow or tuple(config.load(home_folder(home)).sandbox.host_commands)
        return run_host_command(text, allowed)
    except NotAllowed as error:
        print(error.message.encode(errors="backslashreplace").decode(), file=sys.stderr)
        return REFUSED
