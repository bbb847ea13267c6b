"""Attempts to write files that steer an agent by transfers, with a token that may not make the agent act."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.calls.test_principal import token
from tests.support.harness import GatewayProcess, NodeProcess

DESTINATIONS = [
    "/", ".", "./", "//", "pack/..", "agents/main", "SOUL.md", "soul.md", "skills", "Skills", "skills/", "./skills/x",
    "\u017fkills", "s\u212aills", "skills\\x", " SOUL.md ", "%53OUL.md", "HEARTBEAT.md", "memory/../SOUL.md",
]  # fmt: skip
SOURCES = ["pack", "pack/", "pack/SOUL.md", "pack/soul.md", "pack/skills"]


@pytest.fixture(scope="module")
def hands(
    shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeProcess, str]]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        pack = node.workspace / "pack"
        (pack / "skills" / "evil").mkdir(parents=True)
        (pack / "skills" / "evil" / "SKILL.md").write_text("---\nname: evil\ndescription: x\n---\n")
        for name in ("SOUL.md", "soul.md", "harmless.txt"):
            (pack / name).write_text("evil")
        yield node, token(shared_gateway, "tools.write")[1]


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_no_transfer_steers_the_agent(hands: tuple[NodeProcess, str], destination: str) -> None:
    node, secret = hands
    for source in SOURCES:
        body = {"source": f"hands:{source}", "destination": f"gsv:{destination}"}
        node.gateway.request("POST", "/v1/transfers", body, token=secret)
        assert steering(node.gateway.home / "agents" / "main") == [], source


def steering(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    known = ("soul.md", "heartbeat.md", "skills/")
    return [name for name in names if name.casefold().startswith(known)]
