"""`Table`: what is stored of a struct comes back as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import pytest

from farhand.store.ports import Tx
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.rows import Table

T = TypeVar("T")


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    seq: int = 0
    name: str
    colour: Colour = Colour.RED
    body: msgspec.Raw
    note: msgspec.Raw | None = None
    tags: tuple[str, ...] = ()
    late: bool = False
    why: Literal["a", "b"] = "a"


CREATE = """
    CREATE TABLE things (seq INTEGER PRIMARY KEY, name TEXT UNIQUE, colour TEXT, body BLOB, note BLOB, tags BLOB,
        late INTEGER, why TEXT)"""


def written(folder: Path, operation: Callable[[Tx], T]) -> T:
    async def whole() -> T:
        store = SqliteStore.open(folder / "farhand.db")
        try:
            return await store.write(operation)
        finally:
            await store.close()

    return asyncio.run(whole())


@pytest.mark.parametrize("separator", [" ", "\n", None])
@pytest.mark.parametrize("tags", [(), ("one",), ("one", "two")])
def test_a_row_comes_back_as_it_was(tmp_path: Path, separator: str | None, tags: tuple[str, ...]) -> None:
    table = Table("things", Thing, numbered=True, separator=separator)
    thing = Thing(name="x", colour=Colour.BLUE, body=msgspec.Raw(b"{}"), tags=tags, late=True, why="b")

    def write(tx: Tx) -> Thing | None:
        tx.execute(CREATE)
        table.add(tx, thing)
        return table.find(tx, "name = ?", "x")

    found = written(tmp_path, write)
    assert found is not None and found.seq == 1
    assert bytes(found.body) == b"{}" and found.note is None
    assert (found.colour, found.tags, found.late, found.why) == (Colour.BLUE, tags, True, "b")


def test_a_row_with_the_same_key_is_replaced_except_for_what_is_kept(tmp_path: Path) -> None:
    table = Table("things", Thing, numbered=True)
    first = Thing(name="x", body=msgspec.Raw(b"1"), why="a")
    second = Thing(name="x", body=msgspec.Raw(b"2"), note=msgspec.Raw(b"3"), why="b")

    def write(tx: Tx) -> list[Thing]:
        tx.execute(CREATE)
        table.add(tx, first)
        table.add(tx, second, table.replace("name", keep=("why",)))
        table.add(tx, first, "ON CONFLICT DO NOTHING")
        return table.all(tx, "ORDER BY seq LIMIT ?", 9)

    (found,) = written(tmp_path, write)
    assert (bytes(found.body), found.why) == (b"2", "a") and bytes(found.note or b"") == b"3"
