from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import GatewayProcess


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway of the test's own, with `SA_NODE_TOKEN` set and no node."""
    with GatewayProcess(tmp_path / "home") as process:
        yield process


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for all tests of a module that do not stop it."""
    with GatewayProcess(tmp_path_factory.mktemp("gateway") / "home") as process:
        yield process
