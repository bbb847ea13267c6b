"""Store objects as plain files: `agents/main/SOUL.md` is `<home>/agents/main/SOUL.md`, which the owner may edit.

A file is written beside its place and renamed. A link is followed if it stays within its agent's folder or within the
skills; others are refused. Listings show only folders that contain an object at any depth.

A content type that differs from that of the extension is stored in `<home>/object-types/`, one small file per object,
and applies to the content it was given with. Writes in pieces are listed in `<home>/object-writes/` while they are
open, so that the leftovers of a killed gateway are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from farhand.machine.files.confined_root import ConfinedRoot, closing_descriptor
from farhand.machine.files.direct_writes import DirectWriter
from farhand.machine.files.files import Files, file_errors
from farhand.machine.files.private_files import replace_private
from farhand.machine.files.steering_files import SteeringFiles
from farhand.machine.files.undo_log import UndoLog
from farhand.protocol.errors import Failed, NotAllowed, NotFound, ToolError
from farhand.store.objects.base import (
    AGENTS,
    CHUNK,
    MAX_KEY_BYTES,
    PAGE,
    RESERVED,
    Conflict,
    InTheWay,
    Listing,
    ObjectInfo,
    check_key,
    check_prefix,
    content_type_of,
    is_nameable,
)

TYPES_FOLDER = "object-types"
WRITES_FOLDER = "object-writes"


class Typed(msgspec.Struct, frozen=True):
    """An explicit content type, and the content it was given for."""

    key: str
    etag: str
    content_type: str


class _Child(NamedTuple):
    name: str
    # None for a folder.
    status: os.stat_result | None


class FolderObjects:
    """The object store in one home folder, used by one process at a time."""

    def __init__(self, home: Path, undo_log: UndoLog | None = None) -> None:
        """Create the store; `undo_log` keeps the content that calls replace."""
        self._home = Path(os.path.realpath(home))
        self._undo_log = undo_log
        self._trees: dict[str, Files] = {}
        self._types = self._read_types()
        # Held while empty folders are removed, so that none is removed in which a file is being created.
        self.shaping = threading.Lock()
        self._clear_writes()

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._head, check_key(key))

    async def get(self, key: str) -> tuple[ObjectInfo, bytes]:
        return await asyncio.to_thread(self._get, check_key(key))

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        content_type: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        def write() -> ObjectInfo:
            writer = FolderWriter(self, check_key(key), content_type, if_absent=if_absent, if_match=if_match)
            try:
                writer.write_now(data)
                return writer.commit_now()
            finally:
                writer.abort_now()

        return await asyncio.to_thread(write)

    async def delete(self, key: str, *, if_match: str | None = None) -> bool:
        return await asyncio.to_thread(self._delete, check_key(key), if_match)

    async def list(
        self, prefix: str, *, delimiter: bool = False, after: str | None = None, limit: int = PAGE
    ) -> Listing:
        return await asyncio.to_thread(self._list, check_prefix(prefix), delimiter, after, limit)

    async def open_read(self, key: str, offset: int = 0) -> FolderReader:
        info, file = await asyncio.to_thread(self._open, check_key(key), offset)
        return FolderReader(info, file)

    async def open_write(
        self,
        key: str,
        content_type: str | None = None,
        *,
        held: bool = False,  # noqa: ARG002 - what is written is on disk anyway
    ) -> FolderWriter:
        return await asyncio.to_thread(FolderWriter, self, check_key(key), content_type, noted=True)

    async def close(self) -> None:
        """Close the store, which holds nothing open."""

    # -- in a thread ------------------------------------------------------------------------------------

    def tree(self, key: str, *, make: bool = False) -> tuple[Files, str]:
        """Return the files that contain a key, and its path in them. Raises NotFound if nothing was stored there."""
        parts = key.split("/")
        depth = 2 if parts[0] == AGENTS else 1
        name = "/".join(parts[:depth])
        folder = self._home / name
        if make:
            with file_errors("create", name):
                (self._home / parts[0]).mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(exist_ok=True)
        # Links below this folder are checked against it, so it must not be a link itself.
        if os.path.realpath(folder) != str(folder):
            raise NotAllowed(f"{folder} is a link, or beneath one; objects are kept in a real folder")
        if not folder.is_dir():
            raise NotFound(f"there is no object {key!r}")
        files = self._trees.get(name)
        if files is None:
            files = self._trees[name] = Files(
                folder, roots=[ConfinedRoot(folder)], undo_log=self._undo_log, steering=SteeringFiles(self._home)
            )
        return files, "/".join(parts[depth:])

    def files_of(self, path: str) -> Files:
        """Return the files that contain an object, for restoring an old content. Raises NotFound."""
        return self.tree(os.path.relpath(path, self._home))[0]

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            files, path = self.tree(key)
            status = files.status(path)
        except NotFound:
            return None
        return self._info(key, status) if stat.S_ISREG(status.st_mode) else None

    def _open(self, key: str, offset: int = 0) -> tuple[ObjectInfo, BinaryIO]:
        if self._head(key) is None:
            raise NotFound(f"there is no object {key!r}")
        files, path = self.tree(key)
        file = files.open(path)
        file.seek(offset)
        return self._info(key, os.fstat(file.fileno())), file

    def _get(self, key: str) -> tuple[ObjectInfo, bytes]:
        info, file = self._open(key)
        with file:
            return info, file.read()

    def _delete(self, key: str, if_match: str | None) -> bool:
        with self.shaping:
            try:
                files, path = self.tree(key)
                status = files.status(path)
                if stat.S_ISDIR(status.st_mode):
                    return False
                if if_match is not None and _etag(status) != if_match:
                    raise Conflict(f"the object {key!r} was changed in the meantime; it was not removed")
                files.remove(path)
            except NotFound:
                return False
            self._forget_type(key)
            prune(files, path)
        return True

    # -- open writes ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def noting(self, path: str) -> Iterator[None]:
        """Remove a file at the next start if this process ends within the block."""
        note = self._home / WRITES_FOLDER / Path(path).name
        note.parent.mkdir(mode=0o700, exist_ok=True)
        note.symlink_to(path)
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def _clear_writes(self) -> None:
        """Remove the unfinished writes of an earlier process."""
        for note in (self._home / WRITES_FOLDER).glob(f"{RESERVED[0]}*{RESERVED[1]}"):
            with contextlib.suppress(OSError, ToolError):
                path = note.readlink().parent / note.name
                files, relative = self.tree(os.path.relpath(path, self._home))
                files.remove(relative)
                prune(files, relative)
            note.unlink(missing_ok=True)

    # -- listing ----------------------------------------------------------------------------------------

    def _list(self, prefix: str, delimiter: bool, after: str | None, limit: int) -> Listing:
        page = list(itertools.islice(self._walk(prefix[:-1], delimiter, after or ""), limit + 1))
        more = len(page) > limit
        objects = [_object_info(key, status) for key, status in page[:limit] if status is not None]
        prefixes = [key for key, status in page[:limit] if status is None]
        return Listing(objects, prefixes, page[limit - 1][0] if more else None)

    def _walk(self, folder: str, delimiter: bool, after: str) -> Iterator[tuple[str, os.stat_result | None]]:
        """Yield keys with their status and, with a delimiter, prefixes without, in order, after `after`."""
        for child in self._children(folder):
            key = f"{folder}/{child.name}"
            if len(key.encode()) > MAX_KEY_BYTES:
                continue  # no object has such a key, here or deeper
            if child.status is not None:
                if key > after:
                    yield key, child.status
            elif not delimiter:
                if f"{key}/" > after or after.startswith(f"{key}/"):
                    yield from self._walk(key, False, after)
            elif f"{key}/" > after and next(self._walk(key, False, ""), None) is not None:
                yield f"{key}/", None

    def _children(self, folder: str) -> Sequence[_Child]:
        """Return the entries of a folder in the order of the keys below it."""
        children = []
        try:
            if folder == AGENTS:
                files, path = Files(self._home, roots=[ConfinedRoot(self._home)]), AGENTS
            else:
                files, path = self.tree(f"{folder}/")
            descriptor = files.open_folder(files.place(path.rstrip("/") or "."))
        except (NotFound, OSError):
            return []
        with closing_descriptor(descriptor), os.scandir(descriptor) as entries:
            for entry in entries:
                child = _child(files, path, entry)
                if child is not None and (child.status is None or folder != AGENTS):
                    children.append(child)
        return sorted(children, key=lambda child: child.name if child.status else f"{child.name}/")

    # -- metadata ---------------------------------------------------------------------

    def _info(self, key: str, status: os.stat_result) -> ObjectInfo:
        typed = self._types.get(key)
        known = typed is not None and typed.etag == _etag(status)
        return _object_info(key, status, typed.content_type if typed and known else content_type_of(key))

    def _read_types(self) -> dict[str, Typed]:
        types = {}
        for path in (self._home / TYPES_FOLDER).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # losing a content type loses no content
                typed = msgspec.json.decode(path.read_bytes(), type=Typed)
                types[typed.key] = typed
        return types

    def keep_type(self, key: str, etag: str, content_type: str | None) -> None:
        """Store a content type before its content: if that fails, the type applies to no content."""
        if content_type is None or content_type == content_type_of(key):
            return
        typed = self._types[key] = Typed(key, etag, content_type)
        path = self._type_path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_private(path, msgspec.json.encode(typed))

    def _forget_type(self, key: str) -> None:
        if self._types.pop(key, None) is not None:
            self._type_path(key).unlink(missing_ok=True)

    def _type_path(self, key: str) -> Path:
        return self._home / TYPES_FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


class FolderReader:
    """A file being read, unaffected by a replacement."""

    def __init__(self, info: ObjectInfo, file: BinaryIO) -> None:
        self.info = info
        self._file = file
        self._using = threading.Lock()

    async def read(self) -> bytes:
        return await asyncio.to_thread(self._read)

    def _read(self) -> bytes:
        with self._using:
            return self._file.read(CHUNK)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._using:
            self._file.close()


class FolderWriter:
    """A file being written beside its place. Methods that end in `_now` run in a thread."""

    def __init__(
        self,
        objects: FolderObjects,
        key: str,
        content_type: str | None = None,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        noted: bool = False,
    ) -> None:
        """Create the writer; `noted`: it is written in pieces, see `FolderObjects.noting`."""
        self._objects = objects
        self._key = key
        self._content_type = content_type
        self._using = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._open = True
        new_etag = self._new_etag = [""]  # `judge` must not hold the writer, or a dropped one stays alive

        def judge(old: os.stat_result | None) -> None:
            if if_absent and old is not None:
                raise Conflict(f"the object {key!r} already exists; nothing was written")
            if if_match is not None and (old is None or _etag(old) != if_match):
                raise Conflict(f"the object {key!r} was changed in the meantime; nothing was written")
            # Not earlier: if the write is refused, the present content keeps its type.
            objects.keep_type(key, new_etag[0], content_type)

        with objects.shaping:
            self._files, self._path = objects.tree(key, make=True)
            beside = f"{RESERVED[0]}{secrets.token_hex(8)}{RESERVED[1]}"
            try:
                if noted:
                    folder = Path(self._files.place(self._path).real).parent
                    with file_errors("write", key):
                        self._stack.enter_context(objects.noting(f"{folder}/{beside}"))
                self._file, _ = self._stack.enter_context(self._files.replacing(self._path, judge=judge, beside=beside))
                self._out = DirectWriter(self._file.fileno())
            except ToolError as error:
                self._stack.close()
                in_the_way = isinstance(error.__cause__, IsADirectoryError | NotADirectoryError)
                if in_the_way and isinstance(error, Failed):
                    raise InTheWay(error.message) from None
                raise

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        await asyncio.to_thread(self.write_now, data)

    async def commit(self) -> ObjectInfo:
        return await asyncio.to_thread(self.commit_now)

    async def abort(self) -> None:
        await asyncio.to_thread(self.abort_now)

    def write_now(self, data: bytes | bytearray | memoryview) -> None:
        with self._using, file_errors("write", self._key):
            self._file.write(data)
            self._out.wrote(len(data))

    def commit_now(self) -> ObjectInfo:
        with self._using, file_errors("write", self._key):
            assert self._open, "an object is committed once"
            self._file.flush()
            # The clock of the kernel is too coarse to distinguish two quick writes.
            now = time.time_ns()
            os.utime(self._file.fileno(), ns=(now, now))
            status = os.fstat(self._file.fileno())
            self._new_etag[0] = _etag(status)
            self._open = False
            self._stack.close()
        return _object_info(self._key, status, self._content_type or content_type_of(self._key))

    def abort_now(self) -> None:
        with self._using:
            if self._open:
                self._open = False
                with contextlib.suppress(ToolError):  # the disk may be full; the rest is not needed
                    self._stack.__exit__(_Aborted, _Aborted(), None)
                with self._objects.shaping:
                    prune(self._files, self._path)


class _Aborted(Exception):
    """Removes the unfinished file."""


def prune(files: Files, path: str) -> None:
    """Remove the empty folders above a removed file."""
    parts = path.split("/")[:-1]
    while parts:
        *above, name = parts
        try:
            with closing_descriptor(files.open_folder(files.place("/".join(above) or "."))) as folder:
                os.rmdir(name, dir_fd=folder)
        except OSError:
            return
        parts = above


def _child(files: Files, path: str, entry: os.DirEntry[str]) -> _Child | None:
    """Return an entry of a folder, unless it can neither be nor contain an object."""
    name = entry.name
    if not is_nameable(name) or (name.startswith(RESERVED[0]) and name.endswith(RESERVED[1])):
        return None
    try:
        if entry.is_dir(follow_symlinks=False):
            return _Child(name, None)
        linked = entry.is_symlink()
        status = files.status(f"{path}/{name}".lstrip("/")) if linked else entry.stat(follow_symlinks=False)
    except (OSError, NotFound, NotAllowed):
        return None
    return _Child(name, status) if stat.S_ISREG(status.st_mode) else None


def _object_info(key: str, status: os.stat_result, content_type: str | None = None) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, status.st_mtime_ns // 1_000_000, _etag(status), content_type)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"
