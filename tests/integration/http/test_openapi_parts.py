"""The faults that generators of clients found in the description of the HTTP interface, each by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harness import GatewayProcess


@pytest.fixture(scope="module")
def described(shared_gateway: GatewayProcess) -> Any:
    return shared_gateway.get("/v1/openapi.json", token=None)


def parts(part: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a description, and where it is."""
    if isinstance(part, dict):
        yield place, part
        for name, one in part.items():
            yield from parts(one, f"{place}/{name}")
    elif isinstance(part, list):
        for number, one in enumerate(part):
            yield from parts(one, f"{place}/{number}")


def test_every_array_says_of_what(described: Any) -> None:
    """I8: one that did not removed chat completions from generated clients."""
    arrays = [(place, one) for place, one in parts(described) if one.get("type") == "array"]
    assert arrays
    assert [place for place, one in arrays if "items" not in one and "prefixItems" not in one] == []


def test_every_media_type_has_a_schema(described: Any) -> None:
    bare = [
        f"{method} {path} {place} {name}"
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        for place, one in parts(operation)
        for name, media in (one.get("content") or {}).items()
        if isinstance(media, dict) and "/" in name and "schema" not in media
    ]
    assert bare == []


def test_no_two_schemas_have_one_title(described: Any) -> None:
    titles = Counter(one.get("title", name) for name, one in described["components"]["schemas"].items())
    assert [title for title, count in titles.items() if count > 1] == []
