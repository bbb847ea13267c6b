"""An object store in memory. `farhand.store.objects.base` has the contract and the checks of keys."""

from __future__ import annotations

import hashlib
import time

from farhand.protocol.errors import NotFound
from farhand.store.objects.base import (
    PAGE,
    Conflict,
    Listing,
    ObjectInfo,
    check_key,
    check_prefix,
    content_type_of,
)


class MemoryObjects:
    def __init__(self, url: str, **settings: str) -> None:
        """`settings` are the other keys of `[objects]`. Raises ValueError for those that cannot be used."""
        if url != "memory://":
            raise ValueError(f"url: {url!r} is not memory://")
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}

    async def head(self, key: str) -> ObjectInfo | None:
        found = self._objects.get(check_key(key))
        return None if found is None else found[0]

    async def get(self, key: str) -> tuple[ObjectInfo, bytes]:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFound(f"there is no object {key!r}") from None

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        content_type: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        self._check(check_key(key), if_match, if_absent=if_absent)
        kind = content_type or content_type_of(key)
        etag = hashlib.sha256(data).hexdigest()
        info = ObjectInfo(key, len(data), int(time.time() * 1000), etag, kind)
        self._objects[key] = (info, bytes(data))
        return info

    async def delete(self, key: str, *, if_match: str | None = None) -> bool:
        self._check(check_key(key), if_match)
        return self._objects.pop(key, None) is not None

    def _check(self, key: str, if_match: str | None, *, if_absent: bool = False) -> None:
        found = self._objects.get(key)
        if (if_absent and found is not None) or (if_match is not None and (found is None or found[0].etag != if_match)):
            raise Conflict(f"the object {key!r} is not as expected; nothing was changed")

    async def list(
        self, prefix: str, *, delimiter: bool = False, after: str | None = None, limit: int = PAGE
    ) -> Listing:
        check_prefix(prefix)
        names: dict[str, ObjectInfo | None] = {}
        for key in sorted(self._objects, key=str.encode):
            if key.startswith(prefix):
                head, slash, _ = key.removeprefix(prefix).partition("/")
                folder = f"{prefix}{head}/" if delimiter and slash else None
                names[folder or key] = None if folder else self._objects[key][0]
        page = [(name, info) for name, info in names.items() if after is None or name > after]
        shown = page[:limit]
        return Listing(
            [info for _, info in shown if info is not None],
            [name for name, info in shown if info is None],
            shown[-1][0] if len(page) > limit else None,
        )

    async def open_read(self, key: str, offset: int = 0) -> MemoryReader:
        info, data = await self.get(key)
        return MemoryReader(info, data[offset:])

    async def open_write(self, key: str, content_type: str | None = None, *, held: bool = False) -> MemoryWriter:
        return MemoryWriter(self, check_key(key), content_type)

    async def close(self) -> None:
        return None


class MemoryReader:
    def __init__(self, info: ObjectInfo, data: bytes) -> None:
        self.info = info
        self._data = data

    async def read(self) -> bytes:
        data, self._data = self._data, b""
        return data

    async def close(self) -> None:
        self._data = b""


class MemoryWriter:
    def __init__(self, objects: MemoryObjects, key: str, content_type: str | None) -> None:
        self._objects = objects
        self._key = key
        self._content_type = content_type
        self._data = bytearray()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    async def commit(self) -> ObjectInfo:
        return await self._objects.put(self._key, bytes(self._data), content_type=self._content_type)

    async def abort(self) -> None:
        self._data.clear()
