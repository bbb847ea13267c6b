"""Backup of a whole home in one file (settings, keys, agents' files, a snapshot of the stores), and restoring it.

The state of a running machine is left out: running commands, logs, accepted calls of a node, older copies.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from farhand.machine.files.private_files import create_private, open_private
from farhand.store.journal.seal import HEAD_FILE
from farhand.store.ports import StoreError
from farhand.store.sqlite.snapshots import (
    BACKUPS_FOLDER,
    DAMAGED_FOLDER,
    RECOVERING_FILE,
    RESTORING_FILE,
    REVOKED_FILE,
    STORE_FILE,
    copy_store,
    put_in_place,
    set_aside,
    settle_file,
    settle_restored,
    sync_folder,
)
from farhand.store.sqlite.store import damage_in

MANIFEST = "farhand-backup.json"
REPLACED_FOLDER = "replaced"
LEFT_OUT = frozenset(
    {"lock", "gateway.json", "gateway.json.new", "jobs", "logs", "nodes", "node-token.json", HEAD_FILE}
    | {RESTORING_FILE, RECOVERING_FILE}
    | {"freeze.json", "freeze.json.new"}  # a backup neither lifts a freeze nor brings one back
    | {BACKUPS_FOLDER, DAMAGED_FOLDER, REPLACED_FOLDER}
    | {"skill-files"}  # copies of what is in skills
    | {"undo", "changes"}  # of changes that this machine made to its files
)
BESIDE_STORES = ("-wal", "-shm", "-journal")
_SQLITE = b"SQLite format 3\0"


class ArchiveError(StoreError):
    """An archive cannot be written, or is damaged; nothing was changed."""


class ArchiveEntry(msgspec.Struct, frozen=True):
    """A packed file."""

    size: int
    mode: int
    digest: str


class ArchiveManifest(msgspec.Struct, frozen=True):
    """The last member. An archive that does not end with it, or does not match it, is not restored."""

    version: str
    created_at: int
    files: dict[str, ArchiveEntry]


class Packed(msgspec.Struct, frozen=True):
    path: str
    size: int
    files: int
    created_at: int
    # Neither files nor folders, unreadable, or with a name that is not UTF-8.
    skipped: list[str]


def pack(home: Path, target: Path, version: str) -> Packed:
    """Pack a home, which may be in use, into a new file that only its owner can read, and verify it.

    Raises ArchiveError, and leaves no file then.
    """
    if not (home / STORE_FILE).exists():
        raise ArchiveError(f"there is nothing to back up in {home}: it has no {STORE_FILE}")
    if target.exists():
        raise ArchiveError(f"{target} exists; name another file, or remove it")
    part = target.with_name(f".{target.name}.part")
    created_at = time.time_ns() // 1_000_000
    skipped: list[str] = []
    files: dict[str, ArchiveEntry] = {}
    try:
        # In a folder of several users, what is there may belong to another.
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(descriptor, "wb") as output,
            tarfile.open(fileobj=output, mode="w:gz", compresslevel=3, format=tarfile.PAX_FORMAT) as archive,
            tempfile.TemporaryDirectory(prefix=".backup-", dir=target.parent) as folder,
        ):
            for name in _names(home, skipped):
                if _is_store(name):
                    copy = Path(folder) / "copy.db"
                    copy_store(home / name, copy)
                    files[name] = _add(archive, copy, name)
                    copy.unlink()
                    continue
                try:
                    files[name] = _add(archive, home / name, name)
                except FileNotFoundError:  # removed since it was listed
                    continue
            manifest = msgspec.json.encode(ArchiveManifest(version, created_at, files))
            member = tarfile.TarInfo(MANIFEST)
            member.size, member.mode = len(manifest), 0o600
            archive.addfile(member, io.BytesIO(manifest))
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=target.parent) as folder:
            _unpack(part, Path(folder))
        settle_file(part, target)
    except (OSError, tarfile.TarError) as error:
        raise ArchiveError(f"the backup {target} could not be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return Packed(str(target), target.stat().st_size, len(files), created_at, skipped)


def restore(file: Path, home: Path) -> ArchiveManifest:
    """Restore a home from a backup; replaced files are moved to `<home>/replaced/`. Raises ArchiveError.

    `file` is an archive of `pack` or a copy in `<home>/backups`. Everything is unpacked and checked before the home is
    changed. No gateway may be running on the home.
    """
    now = time.time_ns() // 1_000_000
    try:
        with file.open("rb") as opened:
            single = opened.read(len(_SQLITE)) == _SQLITE
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=home) as folder:
            staged = Path(folder)
            if single:
                manifest = _single(file, staged, now)
            else:
                manifest = _unpack(file, staged)
                if STORE_FILE not in manifest.files:
                    raise ArchiveError(f"{file} has no {STORE_FILE}, so it is not a backup of a home")
            create_private(home / RESTORING_FILE)
            sync_folder(home)
            _swap(staged, home, manifest)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"{file} could not be restored: {error}") from None
    settle_restored(home, now)
    for name in (RESTORING_FILE, RECOVERING_FILE):
        (home / name).unlink(missing_ok=True)
    return manifest


def _single(file: Path, staged: Path, now: int) -> ArchiveManifest:
    damage = damage_in(file)
    if damage is not None:
        raise ArchiveError(f"{file} is damaged: {damage}; nothing was changed")
    put_in_place(file, staged / STORE_FILE)
    return ArchiveManifest("", now, {STORE_FILE: ArchiveEntry(file.stat().st_size, 0o600, "")})


def _swap(staged: Path, home: Path, manifest: ArchiveManifest) -> None:
    """Move each staged file to its place, the store last."""
    aside = set_aside(home, REPLACED_FOLDER)
    for name in sorted(manifest.files, key=lambda name: name == STORE_FILE):
        target = home / name
        if name == REVOKED_FILE and target.exists():
            continue  # what was revoked since stays revoked
        # Commands of an agent can put a link where the backup has a folder; what is behind it is left alone.
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            if os.path.lexists(home / parent) and not stat.S_ISDIR((home / parent).lstat().st_mode):
                _keep(home, parent, aside)
        if os.path.lexists(target):
            _keep(home, PurePosixPath(name), aside)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        settle_file(staged / name, target)
    sync_folder(aside)


def _keep(home: Path, name: PurePosixPath, aside: Path) -> None:
    """Move what is to be replaced aside."""
    kept = aside / name
    while kept.exists() or kept.is_symlink():
        kept = kept.with_name(f"{kept.name}-again")
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / name).replace(kept)


def _is_store(name: str) -> bool:
    """Whether a file of a home is one of the gateway's stores; those of agents are not opened as databases."""
    return name.endswith(".db") and "/" not in name


def _names(home: Path, skipped: list[str]) -> Iterator[str]:
    """Yield the files to pack, the stores last, so that files the journal refers to are in the archive."""
    stores = []

    def unreadable(error: OSError) -> None:
        skipped.append(_shown(str(error.filename)))

    for folder, folders, names in os.walk(home, onerror=unreadable):
        top = Path(folder) == home
        folders[:] = sorted(name for name in folders if not (top and (name in LEFT_OUT or name.startswith("."))))
        for name in sorted(names):
            path = Path(folder) / name
            shown = path.relative_to(home).as_posix()
            if top and (name in LEFT_OUT or name.startswith(".") or name.endswith(BESIDE_STORES)):
                continue
            if shown != _shown(shown):  # it is not UTF-8, so the manifest cannot name it
                skipped.append(_shown(shown))
            elif _is_store(shown):
                stores.append(shown)
            elif stat.S_ISREG(path.lstat().st_mode):
                yield shown
            else:
                skipped.append(shown)
        links = [f"{path}/" for name in folders if (path := Path(folder) / name).is_symlink()]
        skipped += [_shown(path) for path in links]
    yield from stores


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


class _Digested:
    """Reads a file up to the size it had when it was opened."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self.digest.update(piece)
        return piece


def _add(archive: tarfile.TarFile, path: Path, name: str) -> ArchiveEntry:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime
        source = _Digested(file)
        archive.addfile(member, source)
    return ArchiveEntry(status.st_size, member.mode, source.digest.hexdigest())


def _unpack(file: Path, folder: Path) -> ArchiveManifest:
    """Unpack and verify all files of an archive in `folder`. Raises ArchiveError."""
    found: dict[str, ArchiveEntry] = {}
    manifest: ArchiveManifest | None = None
    try:
        with gzip.open(file) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            for member in archive:
                if manifest is not None or not member.isreg() or not _inside(member.name) or member.name in found:
                    raise ArchiveError(
                        f"{file} contains {member.name[:200]!r}, which is not part of a backup; nothing was changed"
                    )
                source = archive.extractfile(member)
                assert source is not None, "a regular file has content"
                if member.name == MANIFEST:
                    manifest = msgspec.json.decode(source.read(64 * 1024 * 1024), type=ArchiveManifest)
                else:
                    found[member.name] = _write(source, folder / member.name, stat.S_IMODE(member.mode))
            while plain.read(1 << 20):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise ArchiveError(f"{file} cannot be read as a backup: {error}; nothing was changed") from None
    if manifest is None:
        raise ArchiveError(f"{file} ends too early; nothing was changed")
    if manifest.files != found:
        differs = sorted(name for name in {*found, *manifest.files} if found.get(name) != manifest.files.get(name))
        raise ArchiveError(f"{file} is damaged: {differs[0]!r} is not what was packed; nothing was changed")
    for name in found:
        if _is_store(name) and (damage := damage_in(folder / name)) is not None:
            raise ArchiveError(f"{name} in {file} is damaged: {damage}; nothing was changed")
    return manifest


def _inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return (
        bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name and parts[0] not in LEFT_OUT
    )


def _write(source: IO[bytes], target: Path, mode: int) -> ArchiveEntry:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open_private(target, "xb") as file:
        target.chmod(mode & 0o777)
        while piece := source.read(1 << 20):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
    return ArchiveEntry(size, mode, digest.hexdigest())
