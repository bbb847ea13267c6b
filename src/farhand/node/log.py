"""The log of a node program: JSON lines in rotating files, without secrets."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from farhand import __version__
from farhand.protocol.redaction import KnownSecrets, mask_text

FILE: Final = "node.log"
MAX_BYTES: Final = 10 * 1024 * 1024
EARLIER_FILES: Final = 4
MOST_LINES: Final = 5000
MOST_ANSWER_BYTES: Final = 8 * 1024 * 1024
MOST_MESSAGE: Final = 8000
_BLOCK: Final = 64 * 1024

# Logs every call, to the file only.
calls = logging.getLogger(__name__)


@contextlib.contextmanager
def logging_to_file(folder: Path, node_id: str, workspace: Path, secrets: KnownSecrets | None = None) -> Iterator[None]:
    """Write everything this program logs to files in `folder`, from `node.start` to `shutdown`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    handler = _TurningFile(folder / FILE, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_JsonLines(node_id, str(workspace), secrets or KnownSecrets()))
    handler.setLevel(logging.INFO)
    program = logging.getLogger("farhand")
    program.addHandler(handler)
    calls.addHandler(handler)
    calls.propagate = False
    calls.setLevel(logging.INFO)
    calls.info("farhand %s started", __version__, extra={"event": "node.start", "fields": {"pid": os.getpid()}})
    try:
        yield
    finally:
        calls.info("node program stopped", extra={"event": "shutdown"})
        program.removeHandler(handler)
        calls.removeHandler(handler)
        handler.close()


class _TurningFile(logging.FileHandler):
    """A rotating file that only its owner can read.

    `RotatingFileHandler` formats each line twice, and its module takes half a megabyte.
    """

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.stream is None or self.stream.tell() < MAX_BYTES:
            return
        self.stream.close()
        self.stream = None  # the next line opens a new one
        try:
            for number in range(EARLIER_FILES, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    Path(self._file(number - 1)).replace(self._file(number))
        except OSError:
            self.handleError(record)

    def _file(self, number: int) -> str:
        return f"{self.baseFilename}.{number}" if number else self.baseFilename


class _JsonLines(logging.Formatter):
    def __init__(self, node_id: str, workspace: str, secrets: KnownSecrets) -> None:
        super().__init__()
        self._secrets = secrets
        self._always = {"component": "node", "nodeId": node_id, "workspace": workspace}

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "ts": moment.replace("+00:00", "Z"),
            "level": {"WARNING": "WARN", "CRITICAL": "ERROR"}.get(record.levelname, record.levelname),
            "event": getattr(record, "event", record.name.removeprefix("farhand.")),
            **self._always,
            "message": self._text(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self._text(self.formatException(record.exc_info))
        return self._secrets.redact(msgspec.json.encode(line)).decode()

    @staticmethod
    def _text(text: str) -> str:
        shown = text.encode(errors="backslashreplace").decode()
        return mask_text(shown[:MOST_MESSAGE])


def last_lines(folder: Path, count: int) -> tuple[list[str], bool]:
    """Return the newest `count` lines of all files, oldest first, and whether there are more."""
    found: list[bytes] = []
    room = MOST_ANSWER_BYTES
    for name in (FILE, *(f"{FILE}.{number}" for number in range(1, EARLIER_FILES + 1))):
        try:
            file = (folder / name).open("rb")
        except FileNotFoundError:
            continue  # just rotated, and nothing was written since
        with file:
            for line in _backwards(file):
                room -= len(line)
                if len(found) == count or room < 0:
                    return _in_order(found), True
                found.append(line)
    return _in_order(found), False


def _in_order(lines: list[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in reversed(lines)]


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file from the last to the first."""
    position = file.seek(0, os.SEEK_END)
    rest = b""
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        file.seek(position)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from (line for line in reversed(lines) if line)
    if rest:
        yield rest
