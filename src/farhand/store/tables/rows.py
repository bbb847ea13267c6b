"""Map rows of a table to a struct that has a field for each column, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

import msgspec

from farhand.store.ports import Tx

Row = TypeVar("Row", bound=msgspec.Struct)


class Table(Generic[Row]):
    """A table whose columns are the fields of a struct; their types say how values are stored.

    Enumerations are stored as their text, `Raw` as bytes, and tuples of texts as one text.
    """

    def __init__(self, name: str, row: type[Row], *, numbered: bool = False, separator: str | None = " ") -> None:
        """`numbered`: the store assigns the first column. `separator`: between the texts of a tuple; None: as JSON."""
        self._name = name
        self.columns: Final = row.__struct_fields__
        # The columns to insert.
        self.inserted: Final = self.columns[1:] if numbered else self.columns
        marks = ", ".join("?" * len(self.inserted))
        self.select: Final = f"SELECT {', '.join(self.columns)} FROM {name}"  # noqa: S608
        self.insert: Final = f"INSERT INTO {name} ({', '.join(self.inserted)}) VALUES ({marks})"  # noqa: S608
        self._row = row
        self._separator = separator
        decoders = {field.name: self._decoder(field.type) for field in msgspec.structs.fields(row)}
        self._decoders = [(name, decode) for name, decode in decoders.items() if decode is not None]

    def replace(self, *key: str, keep: Collection[str] = ()) -> str:
        """Return the end of an INSERT that replaces the row with the same key, except for the columns in `keep`."""
        others = (f"{name} = excluded.{name}" for name in self.inserted if name not in (*key, *keep))
        return f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {', '.join(others)}"

    def add(self, tx: Tx, row: Row, conflict: str = "") -> None:
        """Insert a row. `conflict`: the `ON CONFLICT` clause, if there is one."""
        tx.execute(f"{self.insert} {conflict}" if conflict else self.insert, self.values(row))

    def update(self, tx: Tx, row: Row, columns: Collection[str], where: str, *values: Any) -> bool:
        """Store some columns of a row where a condition holds; return whether one was changed."""
        changes = ", ".join(f"{name} = ?" for name in columns)
        stored = [self.stored(getattr(row, name)) for name in columns]
        tx.execute(f"UPDATE {self._name} SET {changes} WHERE {where}", (*stored, *values))  # noqa: S608
        return tx.changes() > 0

    def find(self, tx: Tx, where: str, *values: Any) -> Row | None:
        row = tx.execute(f"{self.select} WHERE {where}", values).fetchone()
        return None if row is None else self.read(row)

    def all(self, tx: Tx, rest: str, *values: Any) -> list[Row]:
        """Return the rows that the rest of the query (`WHERE`, `ORDER BY`, `LIMIT`) selects."""
        return [self.read(row) for row in tx.execute(f"{self.select} {rest}", values)]

    def read(self, row: tuple[Any, ...]) -> Row:
        values = dict(zip(self.columns, row, strict=True))
        for name, decode in self._decoders:
            if values[name] is not None:
                values[name] = decode(values[name])
        return self._row(**values)

    def values(self, row: Row) -> list[Any]:
        return [self.stored(getattr(row, name)) for name in self.inserted]

    def stored(self, value: Any) -> Any:
        if isinstance(value, msgspec.Raw):
            return bytes(value)
        if isinstance(value, tuple):
            return msgspec.json.encode(value) if self._separator is None else self._separator.join(value)
        return str(value) if isinstance(value, StrEnum) else value

    def _decoder(self, kind: Any) -> Callable[[Any], Any] | None:
        kinds: Collection[Any] = get_args(kind) if get_origin(kind) is not tuple and get_args(kind) else (kind,)
        for one in kinds:
            if get_origin(one) is tuple:
                return self._texts
            if isinstance(one, type) and (issubclass(one, StrEnum) or one in (msgspec.Raw, bool)):
                return one
        return None

    def _texts(self, stored: Any) -> tuple[str, ...]:
        if self._separator is None:
            return msgspec.json.decode(stored, type=tuple[str, ...])
        return tuple(stored.split(self._separator)) if stored else ()
