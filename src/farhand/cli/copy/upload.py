"""Copy a local file or folder to a node or the workspace.

A folder is copied file by file. Everything that can be checked is checked before the first byte is sent; a later
error lists which files were copied and which were not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from farhand.cli.client import Client, ClientError, ConnectionLost
from farhand.cli.copy.endpoints import Progress, content_path, manifest
from farhand.cli.copy.local_files import (
    Kind,
    LocalEntry,
    is_folder,
    list_folder,
    open_file,
    report_skipped,
    resolve,
    tool_errors,
    upload_of,
)
from farhand.cli.output import plain
from farhand.gateway.workspace.workspace import clean
from farhand.protocol.names import MAIN_AGENT
from farhand.store.objects.base import AGENTS, check_key

WORKSPACE = "gsv:"
# How many files an error message names; with --json all of them.
MAX_NAMED = 20


def upload(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    """Copy `source` from this machine and return the summary. Raises ClientError."""
    local = resolve(source)
    uploader = _Uploader(client, local, agent, show)
    if is_folder(source):
        return {"source": source, "destination": destination, **uploader.send_folder(destination)}
    with open_file(local) as (_, status):
        uploader.total = status.st_size
    file = LocalEntry(Path(source).name, local, Kind.FILE, uploader.total)
    return {**uploader.send_file(file, destination, private=False), "source": source}


@dataclass
class _Uploader:
    client: Client
    local: Path
    agent: str | None
    show: Progress
    total: int = 0
    done: int = 0

    def send_file(self, entry: LocalEntry, destination: str, *, private: bool) -> dict[str, Any]:
        """Send one file; `private` makes it accessible to its owner only, whatever its mode."""
        with open_file(entry.path) as (file, status):
            path = content_path(
                destination=destination,
                name=PurePosixPath(entry.inner).name,
                executable="1" if status.st_mode & 0o100 else None,
                private="1" if private or not status.st_mode & 0o077 else None,
                agent=self.agent,
            )
            before = self.done
            body = upload_of(file, status, entry.path, lambda sent: self.show(before + sent, self.total))
            answer = dict(self.client.request("PUT", path, body, seconds=None).value)
        self.done += answer["bytesTransferred"]
        return answer

    def send_folder(self, destination: str) -> dict[str, Any]:
        files = self._files()
        base = self._base(destination)
        self._check(files, base)
        self.total = sum(file.size for file in files)
        private = not self.local.stat().st_mode & 0o077
        for number, file in enumerate(files):
            try:
                self.send_file(file, f"{base}/{file.inner}", private=private)
            except ClientError as error:
                raise _partial(error, files, number) from None
            except KeyboardInterrupt:
                raise _partial(ClientError("interrupted", "interrupted"), files, number) from None
        return {"bytesTransferred": self.done, "files": len(files)}

    def _files(self) -> list[LocalEntry]:
        """Return the files of the folder, reporting the entries that are skipped."""
        entries = list_folder(self.local)
        files = [entry for entry in entries if entry.kind is Kind.FILE]
        if not files:
            raise ClientError("not_found", f"the folder {self.local} has no files")
        for entry in entries:
            if entry.kind is not Kind.FILE:
                report_skipped(entry.inner, entry.kind)
        return files

    def _base(self, destination: str) -> str:
        """Return the remote path of the folder: inside `destination` if that exists or ends with a slash."""
        if not destination.endswith("/"):
            there = self._manifest(destination)
            if there is None:
                return destination
            if not there["folder"]:
                raise ClientError("failed", f"cannot copy the folder {self.local} to {destination}: that is a file")
        return f"{destination.rstrip('/')}/{self.local.name}"

    def _manifest(self, endpoint: str) -> dict[str, Any] | None:
        try:
            return manifest(self.client, endpoint, self.agent)
        except ClientError as error:
            if error.code == "failed":
                return {"folder": True, "entries": []}  # it exists, but contains something that cannot be listed
            if error.code == "not_found":
                return None
            raise

    def _check(self, files: list[LocalEntry], base: str) -> None:
        """Raise ClientError for everything that would fail in the middle."""
        if base.startswith(WORKSPACE):
            self._check_keys(files, base.removeprefix(WORKSPACE))
        for file in files:
            with open_file(file.path):
                pass
        there = self._manifest(base)
        if there is None:
            return
        if not there["folder"]:
            raise ClientError("failed", f"{base} is a file, not a folder; nothing was copied")
        kinds = {entry["path"]: entry["kind"] for entry in there["entries"]}
        for file in files:
            if kinds.get(file.inner) == "folder":
                raise ClientError(
                    "failed", f"{base}/{file.inner} is a folder, and the source is a file; nothing was copied"
                )
            for parent in PurePosixPath(file.inner).parents:
                if kinds.get(str(parent)) == "file":
                    raise ClientError(
                        "failed", f"{base}/{parent} is a file, and the source is a folder; nothing was copied"
                    )

    def _check_keys(self, files: list[LocalEntry], base: str) -> None:
        from farhand.gateway.transfers.workspace_endpoint import MOST_OBJECTS  # noqa: PLC0415 (loads much of the gateway)

        if len(files) > MOST_OBJECTS:
            raise ClientError(
                "failed",
                f"cannot copy {len(files)} files into the workspace: the limit is {MOST_OBJECTS}; nothing was copied",
            )
        for file in files:
            with tool_errors():
                check_key(f"{AGENTS}/{self.agent or MAIN_AGENT}/{clean(f'{base}/{file.inner}')}")


def _partial(error: ClientError, files: list[LocalEntry], failed: int) -> ClientError:
    """Return the error with the state of every file."""
    names = [file.inner for file in files]
    unsure = isinstance(error, ConnectionLost) or error.code == "interrupted"
    details = {
        "in_place": names[:failed],
        "perhaps": [names[failed]] if unsure else [],
        "not_copied": names[failed + 1 if unsure else failed :],
    }
    parts = [f"{names[failed]}: {error}", f"copied: {_join(details['in_place'])}"]
    if unsure:
        parts.append(f"perhaps copied: {_join(details['perhaps'])}")
    parts.append(f"not copied: {_join(details['not_copied'])}")
    return ClientError(error.code, "; ".join(parts), details)


def _join(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (", ".join(map(plain, names[:MAX_NAMED])) + more) or "nothing"
