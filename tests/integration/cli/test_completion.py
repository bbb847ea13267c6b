"""Shell completion: commands, options, and the names of nodes, tools and parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess


@pytest.fixture(scope="module")
def command(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("laptop"), "laptop"):
        yield Command(shared_gateway.home)


def completed(command: Command, line: str) -> set[str]:
    words = line.split(" ")
    asking = command.with_env(_FARHAND_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    return {one.partition(",")[2] for one in asking().out.split()}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("farhand cal", {"call", "calls"}),
        ("farhand call laptop__B", {"laptop__Bash"}),
        ("farhand call laptop__Read pa", {"path="}),
        ("farhand logs la", {"laptop"}),
        ("farhand run la", {"laptop"}),
        ("farhand shell la", {"laptop"}),
        ("farhand kill la", {"laptop"}),
        ("farhand node pair --rea", {"--read-only"}),
        ("farhand service inst", {"install"}),
        ("farhand completion z", {"zsh"}),
    ],
)
def test_what_a_shell_offers(command: Command, line: str, found: set[str]) -> None:
    assert completed(command, line) == found


def test_without_a_gateway_nothing_is_offered_and_nothing_is_printed(command: Command) -> None:
    alone = command.with_env(FARHAND_URL="http://127.0.0.1:1")
    assert completed(alone, "farhand call la") == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(command: Command, shell: str) -> None:
    made = command("completion", shell)
    assert made.status == 0 and f"_FARHAND_COMPLETE={shell}_complete" in made.out
