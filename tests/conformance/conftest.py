from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import GatewayProcess, NodeProcess


@pytest.fixture(scope="module")
def hands(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node named `hands` for all tests of a module that do not stop it."""
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node
