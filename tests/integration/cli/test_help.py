"""Help and tables fit a terminal of 80 columns; unknown commands and options suggest the closest."""

from __future__ import annotations

import click
import pytest

from farhand.cli.main import farhand
from tests.integration.cli.conftest import Command
from tests.integration.cli.test_json import tree
from tests.support.harness import GatewayProcess

WIDTH = 80


def test_help_fits() -> None:
    too_long = {}
    for path, command in tree(farhand):
        context = click.Context(command, info_name=" ".join(("farhand", *path)), terminal_width=WIDTH)
        if lines := [line for line in command.get_help(context).splitlines() if len(line) > WIDTH]:
            too_long[path] = lines
    assert too_long == {}


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [(["chta"], "chat"), (["calls", "shwo"], "show"), (["calls", "--jsno"], "--json")],
)
def test_a_typo_suggests_the_closest(command: Command, arguments: list[str], suggestion: str) -> None:
    done = command(*arguments)
    assert done.status == 2 and "did you mean" in done.err.lower() and suggestion in done.err


def test_cron_log_and_message_tables_fit(shared_gateway: GatewayProcess) -> None:
    command = Command(shared_gateway.home, NO_COLOR="1")
    command("cron", "add", "a job with a rather long name", "0 9 * * MON-FRI", "Remind me of something.")
    command(
        "message", "send", "a message that is long enough to need two lines " * 3, "--channel", "console", "--to", "me"
    )
    for arguments in (["cron"], ["log"], ["message", "list"], ["tools"], ["nodes"], ["token", "list"]):
        shown = command.on_terminal(*arguments, columns=WIDTH)
        assert shown and all(len(line) <= WIDTH for line in shown.splitlines()), shown
    [row] = [line for line in command.on_terminal("cron", columns=WIDTH).splitlines() if " new " in line]
    assert "…" not in row.split()[0] and ":00" in row, "a short id, and the next run on the same line"
