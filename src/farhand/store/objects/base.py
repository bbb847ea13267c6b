"""The contract of the object store: bytes under keys, such as `agents/main/SOUL.md` and `skills/deploy/SKILL.md`.

Two engines keep it: a folder of plain files (`folder_objects`) and S3-compatible storage (`s3_objects`). One suite,
`tests/contract/test_objects.py`, runs on both. There are no folders in this contract, only keys with a common prefix.
"""

from __future__ import annotations

import mimetypes
import unicodedata
from typing import Final, Protocol

import msgspec

from farhand.protocol.errors import Failed, InvalidArgs

AGENTS: Final = "agents"
SKILLS: Final = "skills"
# What a key begins with. Nothing else is an object, so no key leads to what lies beside them.
SPACES: Final = (AGENTS, SKILLS)

PAGE: Final = 1000
CHUNK: Final = 1024 * 1024
MAX_KEY_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
# A name with this beginning and end is a file that is being written.
RESERVED: Final = (".farhand-", ".tmp")


class Conflict(Failed):
    """A condition of a write or removal does not hold: somebody else was there first. Nothing was changed."""


class InTheWay(Failed):
    """A folder has the object's name, or a file that of one of its folders. Nothing was changed."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """What is known of an object without reading it."""

    key: str
    size: int
    # Milliseconds since 1970.
    modified_at: int
    # Names this content of the key; another content has another.
    etag: str
    # None in listings.
    content_type: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """A page of keys, in the order of their bytes; some S3 servers have an order of their own, which pages keep too."""

    objects: list[ObjectInfo]
    # With a delimiter: what lies deeper, cut after the next `/`.
    prefixes: list[str] = []
    # Ask again with this for the next page; None on the last.
    after: str | None = None


class ObjectReader(Protocol):
    """One object being read; a replacement in the meantime does not mix into it. Whoever opened it closes it."""

    info: ObjectInfo

    async def read(self) -> bytes:
        """The next piece, of any size up to some MiB; empty at the end."""

    async def close(self) -> None: ...


class ObjectWriter(Protocol):
    """An object being written: nobody sees it before `commit`, and after `abort` nobody ever does.

    Whoever opened it calls one of the two; `abort` after either of them does nothing.
    """

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take in a piece; returns when it needs no more memory than a few pieces."""

    async def commit(self) -> ObjectInfo:
        """Put the whole in place, in one step, on disk."""

    async def abort(self) -> None: ...


class Objects(Protocol):
    """Every method raises InvalidArgs for a key that is none, NotAllowed where a key may not lead, Failed otherwise."""

    async def head(self, key: str) -> ObjectInfo | None:
        """None when there is no such object."""

    async def get(self, key: str) -> tuple[ObjectInfo, bytes]:
        """The whole object. Raises NotFound."""

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        content_type: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """Create or replace an object in one step; without a content type, the key's extension tells it.

        Raises Conflict when it must be absent and is not, or must have an etag and has not.
        """

    async def delete(self, key: str, *, if_match: str | None = None) -> bool:
        """False when there was no such object. Raises Conflict when it must have an etag and has not, as far as a look
        just before its removal tells."""

    async def list(
        self, prefix: str, *, delimiter: bool = False, after: str | None = None, limit: int = PAGE
    ) -> Listing:
        """A page of at most `limit` keys and prefixes beneath `prefix`, which ends with `/`; there may be none."""

    async def open_read(self, key: str, offset: int = 0) -> ObjectReader:
        """Raises NotFound."""

    async def open_write(self, key: str, content_type: str | None = None, *, held: bool = False) -> ObjectWriter:
        """`held`: it is one of many that stay open for a while, and takes no memory meanwhile."""

    async def close(self) -> None: ...


def check_key(key: str) -> str:
    """Return `key`, or raise InvalidArgs saying why it cannot name an object."""
    parts = key.split("/")
    if parts[0] not in SPACES or len(parts) < (3 if parts[0] == AGENTS else 2):
        raise InvalidArgs(f"{key[:200]!r} is not the key of an object: agents/{{id}}/… or skills/…")
    for part in parts:
        if part in ("", ".", ".."):
            raise InvalidArgs(f"{key[:200]!r} is not the key of an object: a part of it is {part!r}")
        if part.startswith(RESERVED[0]) and part.endswith(RESERVED[1]):
            raise InvalidArgs(f"{key[:200]!r} is not the key of an object: {part!r} is a name for files being written")
        if len(_encoded(part)) > MAX_NAME_BYTES:
            raise InvalidArgs(f"a name in {key[:100]!r}… is longer than {MAX_NAME_BYTES} bytes; shorten it")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidArgs(f"the key {key[:100]!r}… is longer than {MAX_KEY_BYTES} bytes; shorten it")
    if not is_nameable(key):
        raise InvalidArgs(f"{key[:200]!r} is not the key of an object: it contains a control character")
    return key


def is_nameable(text: str) -> bool:
    """Whether a name may be so: any text in one line, its joiners (👩‍🚀) and rare spaces included."""
    return text.isprintable() or not any(unicodedata.category(character) in _UNNAMEABLE for character in text)


def check_prefix(prefix: str) -> str:
    """Return `prefix`, or raise InvalidArgs when no key can begin with it."""
    parts = prefix.split("/")
    if parts[0] not in SPACES or parts[-1] or len(parts) < 2 or {"", ".", ".."} & set(parts[:-1]) or "\0" in prefix:
        raise InvalidArgs(f"{prefix[:200]!r} is not the beginning of a key: agents/…/ or skills/…/")
    return prefix


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgs(f"a key must be valid Unicode, this one is not at character {error.start}") from None


def content_type_of(key: str) -> str:
    """What a key's extension says, the same on every machine; text of any other kind is `text/plain`."""
    name = key.rpartition("/")[2]
    extension = "." + name.rpartition(".")[2].lower() if "." in name else ""
    if extension in TEXT_TYPES:
        return TEXT_TYPES[extension]
    guessed, encoding = _EXTENSIONS.guess_type(f"x{extension}")
    if encoding is not None:
        return f"application/{encoding}"
    return PLAIN if guessed is None or guessed.startswith("text/") else guessed


# Control characters, halves of characters, and breaks of lines.
_UNNAMEABLE: Final = ("Cc", "Cs", "Zl", "Zp")
PLAIN: Final = "text/plain"
TEXT_TYPES: Final = {
    ".md": "text/markdown",
    ".json": "application/json",
    ".yaml": "text/yaml",
    ".yml": "text/yaml",
}
_EXTENSIONS: Final = mimetypes.MimeTypes()
