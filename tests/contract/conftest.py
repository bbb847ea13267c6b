"""The store is tested as the owner uses it, who may change every file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farhand.machine.files import steering_files as steering


@pytest.fixture(autouse=True)
def _steering_is_allowed() -> Iterator[None]:
    before = steering.allowed.set(True)
    yield
    steering.allowed.reset(before)
