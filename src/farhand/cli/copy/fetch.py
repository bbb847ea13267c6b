"""Copies a file or folder from a node or the workspace to this machine, file by file, each of them whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from farhand.cli.client import Client, ClientError
from farhand.cli.copy.far_end import content_path, manifest
from farhand.cli.copy.local_files import Kind, here, replacing, say_left_out, worded
from farhand.cli.copy.progress import Progress
from farhand.machine.files.files import file_errors
from farhand.protocol.names import source_name


def fetch(
    client: Client, source: str, path: str, destination: str, agent: str | None, show: Progress
) -> dict[str, Any]:
    """Copy `source`, which is `path` on a node or in the workspace. Raises ClientError.

    A folder receives the copy under the last part of `path`, never under a name that the node chooses.
    """
    found = manifest(client, source, agent)
    local = here(destination)
    if destination.endswith("/") or local.is_dir():
        local = here(str(local / _own_name(path)))
    if found["folder"]:
        done = _fetch_folder(client, source, agent, local, found, show)
        return {"source": source, "destination": destination, "bytesTransferred": done, "files": found["files"]}
    size = _fetch_file(client, source, agent, local, show, 0, found["size"], found)
    return {"source": source, "destination": destination, "bytesTransferred": size}


def _own_name(path: str) -> str:
    if not (name := source_name(path)):
        raise ClientError("failed", f"the source path {path!r} does not end in a name; name the destination itself")
    return name


def _fetch_folder(
    client: Client, source: str, agent: str | None, local: Path, found: dict[str, Any], show: Progress
) -> int:
    _check_kind(local, "folder")
    for entry in found["entries"]:
        _check(local, entry)
    private = bool(found.get("private"))
    _make_folder(local, private)
    done = 0
    for entry in found["entries"]:
        target = local / entry["path"]
        alone = private or bool(entry.get("private"))
        if entry["kind"] == "folder":
            _make_folder(target, alone)
        elif entry["kind"] == "file":
            inner = f"{source.rstrip('/')}/{entry['path']}"
            modes = {"executable": entry["executable"], "private": alone}
            done += _fetch_file(client, inner, agent, target, show, done, found["size"], modes)
        else:
            say_left_out(entry["path"], Kind.LINK)
    return done


def _check(local: Path, entry: dict[str, Any]) -> None:
    """Raises ClientError for an entry that has no place here: it climbs, or something of another kind is there."""
    path = str(entry["path"])
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ClientError("failed", f"the source holds {path!r}, which is no path to write to")
    if entry["kind"] != "link":
        _check_kind(local / path, entry["kind"])


def _check_kind(target: Path, kind: str) -> None:
    if not os.path.lexists(target):
        return
    with worded(), file_errors("write", str(target)):
        mode = target.lstat().st_mode
        if not (stat.S_ISDIR(mode) if kind == "folder" else stat.S_ISREG(mode)):
            raise OSError(errno.EEXIST, f"it is to be a {kind}, and something else is there")


def _make_folder(path: Path, private: bool) -> None:
    with worded(), file_errors("create the folder", str(path)):
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)


def _fetch_file(
    client: Client,
    source: str,
    agent: str | None,
    local: Path,
    show: Progress,
    before: int,
    total: int,
    modes: dict[str, Any],
) -> int:
    done = 0
    executable, private = bool(modes.get("executable")), bool(modes.get("private"))
    with (
        client.download(content_path(source=source, agent=agent)) as pieces,
        replacing(local, executable=executable, private=private) as file,
    ):
        for piece in pieces:
            file.write(piece)
            done += len(piece)
            show(before + done, total)
    return done
