from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.harness import GatewayProcess, NodeProcess


@pytest.fixture(scope="module")
def hands(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node named `hands` for all tests of a module that do not stop it."""
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tiny file system: `mounted("size=64k")` tells where."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount-{len(places)}"
        place.mkdir()
        if shutil.which("mount") is None or os.geteuid() != 0:
            pytest.skip("mounting a file system takes root and the program mount")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=False, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)
