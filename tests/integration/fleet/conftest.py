from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment
from tests.support.harness import GatewayProcess, NodeProcess

Fleet = list[GatewayProcess]


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str]
) -> Iterator[Fleet]:
    """Two gateways that share everything, for all tests of a module that stop neither."""
    folder = tmp_path_factory.mktemp("fleet")
    env = fleet_environment(postgres.new_database(), nats, bucket, folder.name)
    with GatewayProcess(folder / "one", env=env) as one, GatewayProcess(folder / "two", env=env) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def hands_of_one(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node named `hands` that is connected to the first gateway."""
    with NodeProcess(fleet[0], tmp_path_factory.mktemp("hands"), "hands") as node:
        fleet[1].wait_for_node("hands")
        yield node
