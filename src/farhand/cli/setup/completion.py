"""`completion`: what a shell needs to complete commands, options, and names of nodes and tools."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from farhand.cli.json_output import json_option
from farhand.cli.output import show

SHELLS: Final = {
    "bash": "add to ~/.bashrc:  source <(farhand completion bash)",
    "zsh": "add to ~/.zshrc:  source <(farhand completion zsh)",
    "fish": "farhand completion fish > ~/.config/fish/completions/farhand.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@json_option(expose_value=False)
def completion(shell: str) -> None:
    """Print the completion script of a shell. Names of nodes and tools come from the running gateway.

    \b
    Examples:
      source <(farhand completion bash)
      source <(farhand completion zsh)
      farhand completion fish > ~/.config/fish/completions/farhand.fish
    """
    made = get_completion_class(shell)
    assert made is not None, "click knows these shells"
    script = made(click.Group("farhand"), {}, "farhand", "_FARHAND_COMPLETE").source()
    show({"shell": shell, "script": script, "use": SHELLS[shell]}, lambda _: print(script))
