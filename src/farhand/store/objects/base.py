"""Define the contract of the object store: bytes under keys, such as `agents/main/SOUL.md`.

Two engines implement it: a folder of plain files (`folder.py`) and S3-compatible storage (`s3.py`). One suite,
`tests/contract/test_objects.py`, runs against both. There are no folders, only keys with a common prefix.
"""

from __future__ import annotations

import mimetypes
import unicodedata
from collections.abc import AsyncIterator
from typing import Final, Protocol

import msgspec

from farhand.protocol.errors import Failed, InvalidArgs

AGENTS: Final = "agents"
SKILLS: Final = "skills"
# Every key begins with one of these, so that no key leads to other files of the home.
SPACES: Final = (AGENTS, SKILLS)

PAGE: Final = 1000
CHUNK: Final = 1024 * 1024
MAX_KEY_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
# The prefix and suffix of a file that is being written.
RESERVED: Final = (".farhand-", ".tmp")


class Conflict(Failed):
    """A condition of a write or removal does not hold; nothing was changed."""


class InTheWay(Failed):
    """A folder has the object's name, or a file has the name of one of its folders; nothing was changed."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """The metadata of an object."""

    key: str
    size: int
    # Milliseconds since 1970.
    modified_at: int
    # Changes with the content.
    etag: str
    # None in listings.
    content_type: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """A page of keys in byte order; some S3 servers have another order, which is consistent across pages."""

    objects: list[ObjectInfo]
    # With a delimiter: the prefixes of deeper keys, up to the next `/`.
    prefixes: list[str] = []
    # The token of the next page; None on the last.
    after: str | None = None


class ObjectReader(Protocol):
    """An object being read, unaffected by a replacement in the meantime. The caller closes it."""

    info: ObjectInfo

    async def read(self) -> bytes:
        """Return the next piece, of at most some MiB; empty at the end."""

    async def close(self) -> None: ...


class ObjectWriter(Protocol):
    """An object being written; it becomes visible with `commit`.

    The caller calls `commit` or `abort`; `abort` after either has no effect.
    """

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write a piece; waits while several pieces are buffered."""

    async def commit(self) -> ObjectInfo:
        """Make the object visible and durable, atomically."""

    async def abort(self) -> None: ...


class Objects(Protocol):
    """Every method raises InvalidArgs for an invalid key, NotAllowed for a forbidden target, and Failed otherwise."""

    async def head(self, key: str) -> ObjectInfo | None:
        """Return the metadata of an object; None if there is no such object."""

    async def get(self, key: str) -> tuple[ObjectInfo, bytes]:
        """Return the whole object. Raises NotFound."""

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        content_type: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """Create or replace an object atomically; the default content type is that of the key's extension.

        Raises Conflict if it exists and must not, or does not have the required etag.
        """

    async def delete(self, key: str, *, if_match: str | None = None) -> bool:
        """Remove an object; return False if there was none.

        Raises Conflict if it does not have the required etag, which is checked just before the removal.
        """

    async def list(
        self, prefix: str, *, delimiter: bool = False, after: str | None = None, limit: int = PAGE
    ) -> Listing:
        """Return at most `limit` keys and prefixes below `prefix`, which ends with `/`; possibly none."""

    async def open_read(self, key: str, offset: int = 0) -> ObjectReader:
        """Open an object for reading. Raises NotFound."""

    async def open_write(self, key: str, content_type: str | None = None, *, held: bool = False) -> ObjectWriter:
        """Open an object for writing. `held`: it may stay open for a while, so it must not take memory meanwhile."""

    async def close(self) -> None: ...


async def pages(objects: Objects, prefix: str, *, delimiter: bool = False) -> AsyncIterator[Listing]:
    """Yield everything below a prefix, page by page."""
    after: str | None = None
    while True:
        page = await objects.list(prefix, delimiter=delimiter, after=after)
        yield page
        after = page.after
        if after is None:
            return


def check_key(key: str) -> str:
    """Return `key`. Raises InvalidArgs with the reason if it is not valid."""
    parts = key.split("/")
    if parts[0] not in SPACES or len(parts) < (3 if parts[0] == AGENTS else 2):
        raise InvalidArgs(f"{key[:200]!r} is not a valid object key: agents/{{id}}/… or skills/…")
    for part in parts:
        if part in ("", ".", ".."):
            raise InvalidArgs(f"{key[:200]!r} is not a valid object key: a part of it is {part!r}")
        if part.startswith(RESERVED[0]) and part.endswith(RESERVED[1]):
            raise InvalidArgs(f"{key[:200]!r} is not a valid object key: {part!r} is a name for files being written")
        if len(_encoded(part)) > MAX_NAME_BYTES:
            raise InvalidArgs(f"a name in {key[:100]!r}… is longer than {MAX_NAME_BYTES} bytes; shorten it")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidArgs(f"the key {key[:100]!r}… is longer than {MAX_KEY_BYTES} bytes; shorten it")
    if not is_nameable(key):
        raise InvalidArgs(f"{key[:200]!r} is not a valid object key: it contains a control character")
    return key


def is_nameable(text: str) -> bool:
    """Return whether a name is valid: any text in one line, joiners (👩‍🚀) and unusual spaces included."""
    return text.isprintable() or not any(unicodedata.category(character) in _UNNAMEABLE for character in text)


def check_prefix(prefix: str) -> str:
    """Return `prefix`. Raises InvalidArgs if no key can begin with it."""
    parts = prefix.split("/")
    if parts[0] not in SPACES or parts[-1] or len(parts) < 2 or {"", ".", ".."} & set(parts[:-1]) or "\0" in prefix:
        raise InvalidArgs(f"{prefix[:200]!r} is not a valid key prefix: agents/…/ or skills/…/")
    return prefix


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgs(f"a key must be valid Unicode, this one is not at character {error.start}") from None


def content_type_of(key: str) -> str:
    """Return the content type of a key's extension, the same on every machine; other text is `text/plain`."""
    name = key.rpartition("/")[2]
    extension = "." + name.rpartition(".")[2].lower() if "." in name else ""
    if extension in TEXT_TYPES:
        return TEXT_TYPES[extension]
    guessed, encoding = _EXTENSIONS.guess_type(f"x{extension}")
    if encoding is not None:
        return f"application/{encoding}"
    return PLAIN if guessed is None or guessed.startswith("text/") else guessed


# Control characters, surrogates, and line breaks.
_UNNAMEABLE: Final = ("Cc", "Cs", "Zl", "Zp")
PLAIN: Final = "text/plain"
TEXT_TYPES: Final = {
    ".md": "text/markdown",
    ".json": "application/json",
    ".yaml": "text/yaml",
    ".yml": "text/yaml",
}
_EXTENSIONS: Final = mimetypes.MimeTypes()
