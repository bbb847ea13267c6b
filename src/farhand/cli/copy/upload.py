"""Copies a file or folder of this machine to a node or the workspace.

A folder goes file by file. Whatever can be known to fail is found out before the first byte is sent; what fails later
is told together with what is in place and what is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from farhand.cli.client import Client, ClientError, ConnectionLost
from farhand.cli.copy.far_end import content_path, manifest
from farhand.cli.copy.local_files import Found, Kind, beneath, here, is_folder, opened, say_left_out, upload_of, worded
from farhand.cli.copy.progress import Progress
from farhand.cli.output import plain
from farhand.gateway.workspace.workspace import clean
from farhand.protocol.names import MAIN_AGENT
from farhand.store.objects.base import AGENTS, check_key

WORKSPACE = "gsv:"
# How many files a message names; a program gets them all.
NAMED = 20


def put(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    """Raises ClientError."""
    local = here(source)
    if is_folder(source):
        return {"source": source, "destination": destination, **_Folder(client, local, agent, show).put(destination)}
    with opened(local) as (_, status):
        size = status.st_size
    file = Found(Path(source).name, local, Kind.FILE, size)
    return {**_put_file(client, file, destination, agent, show, 0, size, private=False), "source": source}


def _put_file(
    client: Client,
    found: Found,
    destination: str,
    agent: str | None,
    show: Progress,
    before: int,
    total: int,
    *,
    private: bool,
) -> dict[str, Any]:
    """`private`: for its owner alone there, whatever its own mode says."""
    with opened(found.path) as (file, status):
        name = PurePosixPath(found.inner).name
        executable = "1" if status.st_mode & 0o100 else None
        alone = "1" if private or not status.st_mode & 0o077 else None
        path = content_path(destination=destination, name=name, executable=executable, private=alone, agent=agent)
        upload = upload_of(file, status, found.path, show, before, total)
        return dict(client.request("PUT", path, upload, seconds=None).value)


@dataclass(frozen=True)
class _Folder:
    client: Client
    local: Path
    agent: str | None
    show: Progress

    def put(self, destination: str) -> dict[str, Any]:
        files = self._files()
        base = self._base(destination)
        self._check(files, base)
        total = sum(file.size for file in files)
        private = not self.local.stat().st_mode & 0o077
        done = 0
        for number, file in enumerate(files):
            try:
                to = f"{base}/{file.inner}"
                answer = _put_file(self.client, file, to, self.agent, self.show, done, total, private=private)
            except ClientError as error:
                raise _half(error, files, number) from None
            except KeyboardInterrupt:
                raise _half(ClientError("interrupted", "interrupted"), files, number) from None
            done += answer["bytesTransferred"]
        return {"bytesTransferred": done, "files": len(files)}

    def _files(self) -> list[Found]:
        """All files beneath; what is none and holds none is left out, and that is said."""
        found = beneath(self.local)
        files = [each for each in found if each.kind is Kind.FILE]
        if not files:
            raise ClientError("not_found", f"the folder {self.local} has no files")
        for each in found:
            if each.kind is not Kind.FILE:
                say_left_out(each.inner, each.kind)
        return files

    def _base(self, destination: str) -> str:
        """What the folder will be called there: its own name, within a folder that exists or ends with a slash."""
        if not destination.endswith("/"):
            there = self._look(destination)
            if there is None:
                return destination
            if not there["folder"]:
                raise ClientError("failed", f"{destination} is a file, and {self.local} is a folder")
        return f"{destination.rstrip('/')}/{self.local.name}"

    def _look(self, endpoint: str) -> dict[str, Any] | None:
        try:
            return manifest(self.client, endpoint, self.agent)
        except ClientError as error:
            if error.code == "failed":
                return {"folder": True, "entries": []}  # it is there, and holds what cannot be listed
            if error.code == "not_found":
                return None
            raise

    def _check(self, files: list[Found], base: str) -> None:
        """Raises ClientError for what would fail in the middle."""
        if base.startswith(WORKSPACE):
            self._check_names(files, base.removeprefix(WORKSPACE))
        for file in files:
            with opened(file.path):
                pass
        there = self._look(base)
        if there is not None:
            _check_kinds(files, base, there)

    def _check_names(self, files: list[Found], base: str) -> None:
        from farhand.gateway.transfers.workspace_endpoint import MOST_OBJECTS  # noqa: PLC0415 (much of the gateway comes with it)

        if len(files) > MOST_OBJECTS:
            raise ClientError(
                "failed",
                f"a transfer into the workspace has at most {MOST_OBJECTS} files, this one has {len(files)}; "
                "nothing was copied",
            )
        for file in files:
            with worded():
                check_key(f"{AGENTS}/{self.agent or MAIN_AGENT}/{clean(f'{base}/{file.inner}')}")


def _check_kinds(files: list[Found], base: str, there: dict[str, Any]) -> None:
    if not there["folder"]:
        raise ClientError("failed", f"{base} is a file there, and is to be a folder; nothing was copied")
    kinds = {entry["path"]: entry["kind"] for entry in there["entries"]}
    for file in files:
        if kinds.get(file.inner) == "folder":
            raise ClientError("failed", f"{base}/{file.inner} is a folder there, and a file here; nothing was copied")
        for parent in PurePosixPath(file.inner).parents:
            if kinds.get(str(parent)) == "file":
                raise ClientError("failed", f"{base}/{parent} is a file there, and a folder here; nothing was copied")


def _half(error: ClientError, files: list[Found], failed: int) -> ClientError:
    """The error, with what became of every file."""
    names = [file.inner for file in files]
    unsure = isinstance(error, ConnectionLost) or error.code == "interrupted"
    placed, lost = names[:failed], names[failed + 1 if unsure else failed :]
    said = [f"{names[failed]}: {error}", f"in place: {_named(placed)}"]
    if unsure:
        said.append(f"perhaps: {_named([names[failed]])}")
    said.append(f"not copied: {_named(lost)}")
    details = {"in_place": placed, "perhaps": [names[failed]] if unsure else [], "not_copied": lost}
    return ClientError(error.code, "; ".join(said), details)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (", ".join(map(plain, names[:NAMED])) + more) or "nothing"
