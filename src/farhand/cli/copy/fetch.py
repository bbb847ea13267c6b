"""Copy a file or folder from a node or the workspace to this machine, file by file, each complete or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from farhand.cli.client import Client, ClientError
from farhand.cli.copy.endpoints import Progress, content_path, manifest
from farhand.cli.copy.local_files import Kind, replacing, report_skipped, resolve, tool_errors
from farhand.machine.files.files import file_errors
from farhand.protocol.names import source_name


def fetch(
    client: Client, source: str, path: str, destination: str, agent: str | None, show: Progress
) -> dict[str, Any]:
    """Copy `source`, which is `path` on a node or in the workspace, and return the summary. Raises ClientError.

    A folder receives the copy under the last part of `path`, never under a name that the node chooses.
    """
    found = manifest(client, source, agent)
    local = resolve(destination)
    if destination.endswith("/") or local.is_dir():
        if not (name := source_name(path)):
            raise ClientError("failed", f"the source path {path!r} does not end in a name; give a full destination")
        local = resolve(str(local / name))
    done = 0

    def fetch_file(endpoint: str, target: Path, *, executable: bool, private: bool) -> None:
        nonlocal done
        with (
            client.download(content_path(source=endpoint, agent=agent)) as pieces,
            replacing(target, executable=executable, private=private) as file,
        ):
            for piece in pieces:
                file.write(piece)
                done += len(piece)
                show(done, found["size"])

    private = bool(found.get("private"))
    if not found["folder"]:
        fetch_file(source, local, executable=bool(found.get("executable")), private=private)
        return {"source": source, "destination": destination, "bytesTransferred": done}
    _check_kind(local, "folder")
    for entry in found["entries"]:
        _check(local, entry)
    _make_folder(local, private)
    for entry in found["entries"]:
        target = local / entry["path"]
        entry_private = private or bool(entry.get("private"))
        if entry["kind"] == "folder":
            _make_folder(target, entry_private)
        elif entry["kind"] == "file":
            endpoint = f"{source.rstrip('/')}/{entry['path']}"
            fetch_file(endpoint, target, executable=bool(entry["executable"]), private=entry_private)
        else:
            report_skipped(entry["path"], Kind.LINK)
    return {"source": source, "destination": destination, "bytesTransferred": done, "files": found["files"]}


def _check(local: Path, entry: dict[str, Any]) -> None:
    """Raise ClientError for an entry that would leave the folder or replace something of another kind."""
    path = str(entry["path"])
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ClientError("failed", f"the source contains {path!r}, which is not a valid path")
    if entry["kind"] != "link":
        _check_kind(local / path, entry["kind"])


def _check_kind(target: Path, kind: str) -> None:
    if not os.path.lexists(target):
        return
    with tool_errors(), file_errors("write", str(target)):
        mode = target.lstat().st_mode
        if not (stat.S_ISDIR(mode) if kind == "folder" else stat.S_ISREG(mode)):
            raise OSError(errno.EEXIST, f"expected a {kind}, but it is something else")


def _make_folder(path: Path, private: bool) -> None:
    with tool_errors(), file_errors("create the folder", str(path)):
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
