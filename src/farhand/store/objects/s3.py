"""Store objects in S3-compatible storage, with obstore.

A key is an object of the bucket, below the prefix of the URL. An upload of unknown length is a multipart upload, which
is completed by `commit` and aborted otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from farhand.protocol.errors import Cancelled, Failed, NotFound
from farhand.store.objects.base import (
    CHUNK,
    PAGE,
    Conflict,
    Listing,
    ObjectInfo,
    check_key,
    check_prefix,
    content_type_of,
)

PART: Final = 8 * CHUNK
PARTS_AT_ONCE: Final = 2
# The number of pieces that a writer buffers.
WAITING: Final = 4


class S3Objects:
    """One bucket. Raises ValueError for an invalid URL."""

    def __init__(
        self, url: str, *, endpoint: str = "", region: str = "", access_key_id: str = "", secret_access_key: str = ""
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise ValueError(f"url: {url!r} is not s3://bucket or s3://bucket/prefix")
        settings: dict[str, Any] = {
            "endpoint": endpoint,
            "region": region or ("us-east-1" if endpoint else ""),
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
        }
        self._store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={"allow_http": endpoint.startswith("http://")},
            **{name: value for name, value in settings.items() if value},
        )

    async def head(self, key: str) -> ObjectInfo | None:
        try:
            return (await self._ask(check_key(key), {"head": True}))[0]
        except NotFound:
            return None

    async def get(self, key: str) -> tuple[ObjectInfo, bytes]:
        info, result = await self._ask(check_key(key), {})
        with s3_errors(key):
            return info, bytes(await result.bytes_async())

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        content_type: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        check_key(key)
        kind = content_type or content_type_of(key)
        mode: Any = "create" if if_absent else "overwrite"
        if if_match is not None:
            mode = {"e_tag": f'"{if_match}"'}
        with s3_errors(key):
            result = await obstore.put_async(
                self._store, key, data, attributes={"Content-Type": kind}, mode=mode, use_multipart=False
            )
        return await self.known(key, len(data), result, kind)

    async def delete(self, key: str, *, if_match: str | None = None) -> bool:
        info = await self.head(key)
        if info is None:
            return False
        if if_match is not None and info.etag != if_match:
            raise Conflict(f"the object {key!r} was changed in the meantime; it was not removed")
        with s3_errors(key):
            await obstore.delete_async(self._store, key)
        return True

    async def list(
        self, prefix: str, *, delimiter: bool = False, after: str | None = None, limit: int = PAGE
    ) -> Listing:
        check_prefix(prefix)
        with s3_errors(prefix):
            if delimiter:
                return await self._level(prefix, after or "", limit)
            stream = obstore.list(self._store, prefix, offset=after, chunk_size=limit + 1)
            async for page in stream:
                infos = [_listed(meta) for meta in page]
                after = infos[limit - 1].key if len(infos) > limit else None
                markers = await self._markers(infos[:limit])
                return Listing([info for info in infos[:limit] if info.key not in markers], after=after)
        return Listing([])

    async def _markers(self, infos: Sequence[ObjectInfo]) -> set[str]:
        """List a page, with folder markers of other programs: objects `a/`, which the library returns as `a`."""
        empty = [info.key for info in infos if not info.size]
        heads = await asyncio.gather(*(self.head(key) for key in empty))
        return {key for key, info in zip(empty, heads, strict=True) if info is None}

    async def _level(self, prefix: str, after: str, limit: int) -> Listing:
        result = await obstore.list_with_delimiter_async(self._store, prefix)
        found: dict[str, ObjectInfo | None] = {f"{inner.rstrip('/')}/": None for inner in result["common_prefixes"]}
        # Leave out the marker of the folder itself, which the library returns without its last slash.
        found |= {meta["path"]: _listed(meta) for meta in result["objects"] if meta["path"].startswith(prefix)}
        names = sorted(name for name in found if name > after)
        page = names[:limit]
        return Listing(
            [info for name in page if (info := found[name]) is not None],
            [name for name in page if found[name] is None],
            page[-1] if len(names) > limit else None,
        )

    async def open_read(self, key: str, offset: int = 0) -> S3Reader:
        info = await self.head(key)
        if info is None:
            raise NotFound(f"there is no object {key!r}")
        if offset >= info.size:
            return S3Reader(info, None)
        options = {"range": {"offset": offset}, "if_match": f'"{info.etag}"'} if offset else {}
        info, result = await self._ask(key, options)
        return S3Reader(info, result.stream(min_chunk_size=CHUNK).__aiter__())

    async def open_write(
        self, key: str, content_type: str | None = None, *, held: bool = False
    ) -> S3Writer | HeldWriter:
        check_key(key)
        if held:
            return HeldWriter(self, key, content_type)
        return S3Writer(self, self._store, key, content_type or content_type_of(key))

    async def close(self) -> None:
        """Close the store; connections are managed by the library."""

    async def _ask(self, key: str, options: dict[str, Any]) -> tuple[ObjectInfo, Any]:
        with s3_errors(key):
            result = await obstore.get_async(self._store, key, options=options)  # type: ignore[arg-type]
        listed = _listed(result.meta)
        kind = str(result.attributes.get("Content-Type", content_type_of(key)))
        return ObjectInfo(key, listed.size, listed.modified_at, listed.etag, kind), result

    async def known(self, key: str, size: int, result: Any, content_type: str) -> ObjectInfo:
        """Return the metadata of what was just written; the time is that of the storage."""
        info = await self.head(key)
        modified_at = info.modified_at if info is not None else 0
        return ObjectInfo(key, size, modified_at, _plain(result["e_tag"]), content_type)


class S3Reader:
    """A streamed response of the storage."""

    def __init__(self, info: ObjectInfo, pieces: AsyncIterator[Any] | None) -> None:
        self.info = info
        self._pieces = pieces

    async def read(self) -> bytes:
        if self._pieces is None:
            return b""
        with s3_errors(self.info.key):
            async for piece in self._pieces:
                return bytes(piece)
        return b""

    async def close(self) -> None:
        self._pieces = None


class S3Writer:
    """An upload through a short queue, so that slow storage slows down its writer."""

    def __init__(self, objects: S3Objects, store: S3Store, key: str, content_type: str) -> None:
        self._objects = objects
        self._key = key
        self._content_type = content_type
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING)
        self._size = 0
        self._over = False
        self._aborted = False
        self._upload: asyncio.Task[Any] = asyncio.get_running_loop().create_task(self._send(store))

    async def _send(self, store: S3Store) -> Any:
        return await obstore.put_async(
            store,
            self._key,
            self._pieces(),
            attributes={"Content-Type": self._content_type},
            chunk_size=PART,
            max_concurrency=PARTS_AT_ONCE,
        )

    async def _pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._queue.get()) is not None:
            yield piece
        if self._aborted:
            raise Cancelled("the upload was aborted")  # the library then aborts the multipart upload

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            await self._put(bytes(data[start : start + CHUNK]))
        self._size += len(data)

    async def commit(self) -> ObjectInfo:
        assert not self._over, "an object is committed once"
        self._over = True
        await self._put(None)
        with s3_errors(self._key):
            result = await self._upload
        return await self._objects.known(self._key, self._size, result, self._content_type)

    async def abort(self) -> None:
        if self._over:
            return
        self._over = self._aborted = True
        with contextlib.suppress(Failed):
            await self._put(None)
        with contextlib.suppress(Cancelled, BaseError, OSError):
            await self._upload

    async def _put(self, piece: bytes | None) -> None:
        """Queue a piece. Raises Failed if the upload has ended."""
        placed = asyncio.ensure_future(self._queue.put(piece))
        await asyncio.wait({placed, self._upload}, return_when=asyncio.FIRST_COMPLETED)
        if not placed.done():
            placed.cancel()
            with s3_errors(self._key):
                self._upload.result()
            raise Failed(f"the upload of {self._key!r} ended early")


class HeldWriter:
    """An object that is kept in a temporary file until it is uploaded."""

    def __init__(self, objects: S3Objects, key: str, content_type: str | None) -> None:
        self._objects = objects
        self._key = key
        self._content_type = content_type
        with s3_errors(key):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        with s3_errors(self._key):
            await asyncio.to_thread(self._file.write, data)

    async def commit(self) -> ObjectInfo:
        writer = await self._objects.open_write(self._key, self._content_type)
        try:
            with s3_errors(self._key):
                await asyncio.to_thread(self._file.seek, 0)
                while piece := await asyncio.to_thread(self._file.read, CHUNK):
                    await writer.write(piece)
            return await writer.commit()
        finally:
            await writer.abort()
            await self.abort()

    async def abort(self) -> None:
        with contextlib.suppress(OSError):  # the file is discarded, so unwritten data does not matter
            self._file.close()


@contextlib.contextmanager
def s3_errors(key: str) -> Iterator[None]:
    """Translate errors of the storage into those of the contract."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"there is no object {key!r}") from None
    except AlreadyExistsError:
        raise Conflict(f"the object {key!r} already exists; nothing was written") from None
    except PreconditionError:
        raise Conflict(f"the object {key!r} was changed in the meantime; nothing was written") from None
    except (BaseError, OSError) as error:
        raise Failed(f"the object store failed on {key!r}: {str(error).splitlines()[0][:300]}") from None


def _listed(meta: Any) -> ObjectInfo:
    modified_at = int(meta["last_modified"].timestamp() * 1000)
    return ObjectInfo(meta["path"], meta["size"], modified_at, _plain(meta["e_tag"]))


def _plain(etag: str | None) -> str:
    return (etag or "").strip('"')
