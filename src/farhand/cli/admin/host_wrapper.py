"""`host-wrapper`: what the host's `authorized_keys` puts in front of a sandbox's key."""

from __future__ import annotations

import os
import sys

import click

from farhand import config
from farhand.cli.json_output import without_effect
from farhand.machine.home import home_folder
from farhand.machine.sandbox.host_commands import run_host_command
from farhand.protocol.errors import NotAllowed

REFUSED = 126


@click.command()
@click.option("--allow", multiple=True, help="Allowed command, or its first words. Repeatable.  [the settings' list]")
@click.option("--home", type=click.Path(file_okay=False), help="Where the settings are.  [~/.farhand]")
@without_effect
def host_wrapper(allow: tuple[str, ...], home: str | None) -> int:
    """Run the command that came over SSH, if it is allowed, and nothing else.

    Takes one command without a shell from SSH_ORIGINAL_COMMAND; `cd FOLDER &&` may stand before it. What is not
    allowed ends with status 126. Without --allow, the list is `host_commands` of `[sandbox]` in the settings.

    \b
    A line of authorized_keys:
      command="farhand host-wrapper --allow git --allow 'systemctl status'",restrict ssh-ed25519 AAAA...
    """
    text = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    try:
        allowed = allow or tuple(config.load(home_folder(home)).sandbox.host_commands)
        return run_host_command(text, allowed)
    except NotAllowed as error:
        print(error.message.encode(errors="backslashreplace").decode(), file=sys.stderr)
        return REFUSED
