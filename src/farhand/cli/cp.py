"""`farhand cp`: copy a file or folder between nodes, the workspace and this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, ClientError, Upload, client_command
from farhand.cli.screen import plain_lines, remark, show_json

PIECE = 1 << 20
POLL_SECONDS = (0.02, 0.5)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--agent", metavar="ID", help="Whose workspace `gsv:` is.  [default: main]")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@client_command
def cp(source: str, destination: str, agent: str | None, quiet: bool, client: Client, as_json: bool) -> int:
    """Copy a file or folder; every file arrives whole, or not at all.

    SRC and DST are NODE:PATH, gsv:PATH for the agent's workspace, or a path on this machine. A path that is relative
    starts at the node's workspace. Into a folder that exists, or a DST that ends with /, it goes under its own name.

    \b
    Examples:
      farhand cp laptop:/var/log/syslog server:/backup/
      farhand cp ./report.pdf gsv:notes/
      farhand cp server:project ./project
    """
    known = [node["node_id"] for node in client.get("/v1/nodes").value["nodes"]]
    far = [_is_far(endpoint, known) for endpoint in (source, destination)]
    if not any(far):
        raise click.UsageError(f"neither {source!r} nor {destination!r} is on a node; `farhand nodes` lists them.")
    with progress(quiet or as_json) as show:
        if all(far):
            answer = _between(client, source, destination, agent, show)
        elif far[1]:
            answer = _put(client, Path(source), source, destination, agent, show)
        else:
            answer = _fetch(client, source, destination, agent, show)
    if as_json:
        show_json(answer)
    else:
        remark(f"{answer['bytesTransferred']} bytes copied to {plain_lines(destination)}")
    return 0


def _is_far(endpoint: str, known: list[str]) -> bool:
    if endpoint.startswith(("./", "../", "/", "~")) or ":" not in endpoint:
        return False
    if any(endpoint.startswith(f"{node_id}:") for node_id in (*known, "gsv")):
        return True
    return not Path(endpoint).exists()  # most likely a node that is not known; the gateway says so


# -- from node to node --------------------------------------------------------------------------------------


def _between(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    body = {"source": source, "destination": destination, "agent_id": agent, "background": True}
    begun = client.request("POST", "/v1/transfers", body, headers={"Idempotency-Key": secrets.token_hex(16)})
    path = f"/v1/transfers/{begun.value['id']}"
    pause = POLL_SECONDS[0]
    try:
        while (record := client.get(path).value)["state"] == "running":
            show(record["bytesTransferred"], record["bytes_total"])
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS[1])
    except KeyboardInterrupt:
        ended = client.request("DELETE", path).value
        raise ClientError("interrupted", f"interrupted; the transfer is {ended['state']}") from None
    if record["state"] != "ok":
        raise ClientError(record["error"]["kind"], record["error"]["message"])
    show(record["bytesTransferred"], record["bytes_total"])
    return dict(record)


# -- from and to this machine -------------------------------------------------------------------------------


def _put(
    client: Client, local: Path, source: str, destination: str, agent: str | None, show: Progress
) -> dict[str, Any]:
    if not local.is_dir():
        return {**_put_file(client, local, destination, agent, show, 0, None), "source": source}
    files = _files(local)
    total = sum(path.stat().st_size for path in files)
    if not files:
        raise ClientError("not_found", f"the folder {local} has no files")
    base = destination
    if destination.endswith("/") or _is_folder(client, destination, agent):
        base = f"{destination.rstrip('/')}/{local.resolve().name}"
    done = 0
    for path in files:
        inner = path.relative_to(local).as_posix()
        done += _put_file(client, path, f"{base}/{inner}", agent, show, done, total)["bytesTransferred"]
    return {"source": source, "destination": destination, "bytesTransferred": done, "files": len(files)}


def _files(folder: Path) -> list[Path]:
    """All files beneath; what is none and holds none is left out, and that is said."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.append(path)
        elif path.is_symlink():
            _left_out(path.relative_to(folder).as_posix(), "a link")
        elif not path.is_dir():
            _left_out(path.relative_to(folder).as_posix(), "not a file")
        elif not any(path.iterdir()):
            _left_out(path.relative_to(folder).as_posix(), "an empty folder")
    return files


def _left_out(path: str, what: str) -> None:
    remark(f"left out: {plain_lines(path)} is {what}")


def _is_folder(client: Client, endpoint: str, agent: str | None) -> bool:
    try:
        return bool(client.get(f"/v1/transfers/manifest?{_query(source=endpoint, agent=agent)}").value["folder"])
    except ClientError as error:
        if error.code == "failed":
            return True  # it is there, and holds what cannot be listed
        if error.code == "not_found":
            return False
        raise


def _put_file(
    client: Client, local: Path, destination: str, agent: str | None, show: Progress, before: int, total: int | None
) -> dict[str, Any]:
    try:
        file = local.open("rb")
    except OSError as error:
        code = "not_found" if isinstance(error, FileNotFoundError) else "failed"
        raise ClientError(code, f"{local} cannot be read: {error.strerror}") from None
    with file:
        status = os.fstat(file.fileno())
        size = status.st_size
        executable = "1" if status.st_mode & 0o100 else None

        def pieces() -> Iterator[bytes]:
            done = 0
            while done < size and (piece := file.read(min(PIECE, size - done))):
                yield piece
                done += len(piece)
                show(before + done, size if total is None else total)

        query = _query(destination=destination, name=local.name, executable=executable, agent=agent)
        answer = client.request("PUT", f"/v1/transfers/content?{query}", Upload(size, pieces()), seconds=None)
    return dict(answer.value)


def _fetch(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    found = client.get(f"/v1/transfers/manifest?{_query(source=source, agent=agent)}").value
    name = str(found["name"])
    local = Path(destination).expanduser()
    if destination.endswith("/") or local.is_dir():
        if "/" in name or name in ("", ".", ".."):
            raise ClientError("failed", f"the source is called {name!r}; name the destination itself")
        local /= name
    if not found["folder"]:
        size = _fetch_file(client, source, agent, local, show, 0, None)
        return {"source": source, "destination": destination, "bytesTransferred": size}
    done = 0
    local.mkdir(parents=True, exist_ok=True)
    for entry in found["entries"]:
        parts = entry["path"].split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ClientError("failed", f"the source holds {entry['path']!r}, which is no path to write to")
        target = local.joinpath(*parts)
        if entry["kind"] == "folder":
            target.mkdir(exist_ok=True)
        elif entry["kind"] == "file":
            inner = f"{source.rstrip('/')}/{entry['path']}"
            done += _fetch_file(client, inner, agent, target, show, done, found["size"])
            if entry["executable"]:
                target.chmod(target.stat().st_mode | 0o100)
        else:
            _left_out(entry["path"], "a link")
    return {"source": source, "destination": destination, "bytesTransferred": done, "files": found["files"]}


def _fetch_file(
    client: Client, source: str, agent: str | None, local: Path, show: Progress, before: int, total: int | None
) -> int:
    """Written beside and renamed: the file is there whole, or as it was."""
    beside = local.with_name(f".farhand-{secrets.token_hex(8)}.part")
    done = 0
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with (
            client.download(f"/v1/transfers/content?{_query(source=source, agent=agent)}") as pieces,
            beside.open("xb") as file,
        ):
            for piece in pieces:
                file.write(piece)
                done += len(piece)
                show(before + done, total)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(local)
    except OSError as error:
        raise ClientError("failed", f"{local} cannot be written: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
    return done


def _query(**values: str | None) -> str:
    return urlencode({name: value for name, value in values.items() if value is not None}, quote_via=quote)


# -- the bar ------------------------------------------------------------------------------------------------

Progress = Callable[[int, int | None], None]


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A function that shows how far it has come, on a terminal; elsewhere nothing is shown."""
    if quiet:
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
