"""`farhand memory`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess

NOTES = "# Home\n\nThe wifi password is hunter2.\n\n# Work\n\nDeploy with \x1b[31mmake ship.\n"


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    home = tmp_path_factory.mktemp("memory") / "home"
    with GatewayProcess(home, env={"FARHAND_MEMORY_EMBEDDING_MODEL": "none"}):
        for agent, text in (("main", NOTES), ("helper", "The zebra is striped.\n")):
            (home / "agents" / agent).mkdir(parents=True, exist_ok=True)
            (home / "agents" / agent / "MEMORY.md").write_text(text)
        yield Command(home)


def test_status_tells_what_is_indexed(remembering: Command, tmp_path: Path) -> None:
    for arguments in ((), ("status",), ("reindex",)):
        out = remembering("memory", *arguments).out
        assert "agents/main      1       2" in out
        assert "index: keyword" in out
    assert remembering("memory", "--json").json()["chunks"] == 2
    assert remembering("memory", "status", "--agent", "helper", "--json").json()["chunks"] == 1


def test_search_shows_passages_and_fails_when_there_are_none(remembering: Command) -> None:
    done = remembering("memory", "search", "wifi", "password")
    assert done.out.startswith("MEMORY.md:1-3 (score: 0.")
    assert "hunter2" in done.out
    assert done.err == "index: keyword\n"
    done = remembering("memory", "search", "zebra")
    assert (done.status, done.out) == (1, "")
    assert remembering("memory", "search", "--agent", "helper", "zebra").status == 0
    done = remembering("memory", "search", "--json", "xylophone")
    assert (done.status, done.json()["results"]) == (1, [])
    assert remembering("memory", "search", "--json", "-n", "1", "wifi").json()["results"][0]["start_line"] == 1


def test_file_content_cannot_control_the_terminal(remembering: Command) -> None:
    assert "\x1b" not in remembering("memory", "search", "ship").out
    assert "\x1b" not in remembering("memory", "get", "MEMORY.md").out


def test_get_prints_lines(remembering: Command) -> None:
    assert remembering("memory", "get", "MEMORY.md", "--from", "3", "--lines", "1").out == (
        "The wifi password is hunter2.\n"
    )
    assert remembering("memory", "get", "MEMORY.md:1-1").out == "# Home\n"
    done = remembering("memory", "get", "../token")
    assert (done.status, "is not a memory file" in done.err) == (1, True)
    assert remembering("memory", "get", "memory/x.md", "--json").json()["error"]["code"] == "not_found"
    assert remembering("memory", "get", "MEMORY.md", "--from", "0").status == 2
