"""Secrets this process knows, taken out of whatever leaves it: by their value, wherever they turn up.

It is a net, not a wall: whoever may run commands can write a secret backwards. What it catches is the second door: an
error text, a file that was read, a command's output, the journal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from farhand.protocol.masking import MASK, names_a_secret

SHORTEST: Final = 8
"""A shorter secret is found in innocent texts, and guessed anyway."""
MANY: Final = 4
"""Beyond so many, one look for all of them is quicker than one for each."""
_OWN: Final = re.compile(rb"fh[onck]_[\w-]{43}(?![\w-])")
"""Tokens and keys of Farhand's own making: known by their looks, since only their hashes are kept."""
_OWN_BEGUN: Final = re.compile(rb"f(?:h(?:[onck](?:_[\w-]{0,43})?)?)?\Z")
_IN_URL: Final = re.compile(r"://[^\s/:@]*:([^\s/@]+)@")
_MASK: Final = MASK.encode()


class KnownSecrets:
    """Values to hide; more can be added at any time."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._needles: tuple[bytes, ...] = ()
        self._any: re.Pattern[bytes] | None = None
        self.longest = len("fho_") + 43
        self.add(*values)

    def add(self, *values: str) -> None:
        """Hide these from now on, in each spelling in which an answer may carry them."""
        found = set(self._needles)
        for value in values:
            text = value.strip()
            if len(text) < SHORTEST or text.isdecimal():  # a number may stand for itself, and is one in JSON
                continue
            if text.isascii() and _OWN.fullmatch(text.encode()):
                continue  # known by its looks
            spellings = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], quote(text, safe=""))
            found.update(spelling.encode(errors="surrogateescape") for spelling in spellings)
        # The longest first: one may be a part of another.
        self._needles = tuple(sorted(found, key=lambda needle: (-len(needle), needle)))
        self.longest = max([self.longest, *map(len, self._needles)])
        self._any = re.compile(b"|".join(map(re.escape, self._needles))) if len(self._needles) > MANY else None

    def add_settings(self, settings: Any, *, secret: bool = False) -> None:
        """Every text beneath a name that says it is secret, and every password in an address."""
        if isinstance(settings, Mapping):
            for name, value in settings.items():
                self.add_settings(value, secret=secret or names_a_secret(str(name)))
        elif isinstance(settings, list | tuple):
            for value in settings:
                self.add_settings(value, secret=secret)
        elif isinstance(settings, str):
            self.add(*_IN_URL.findall(settings), *((settings,) if secret else ()))

    def hide(self, data: bytes) -> bytes:
        """The same without the secrets: `***` stands in the place of each."""
        if self._any is None or self._any.search(data) is not None:
            for needle in self._needles:
                if needle in data:
                    data = data.replace(needle, _MASK)
        if b"fh" in data:
            data = _OWN.sub(_MASK, data)
        return data

    def hide_text(self, text: str) -> str:
        data = text.encode(errors="surrogatepass")
        hidden = self.hide(data)
        return text if hidden is data or hidden == data else hidden.decode(errors="surrogatepass")

    def cover(self, data: bytes) -> bytes:
        """As `hide`, but nothing moves: a star for each byte, for streams whose readers count bytes."""
        for needle in self._needles:
            if needle in data:
                data = data.replace(needle, b"*" * len(needle))
        return _OWN.sub(lambda found: b"*" * len(found[0]), data) if b"fh" in data else data

    def begun(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a secret that goes on in the next piece."""
        longest = 0
        for needle in self._needles:
            for size in range(min(len(needle) - 1, len(data)), longest, -1):
                if data.endswith(needle[:size]):
                    longest = size
                    break
        own = _OWN_BEGUN.search(data, max(0, len(data) - 48))
        return longest if own is None else max(longest, len(own[0]))


class Veil:
    """Hides secrets in a text that comes in pieces, also where one is cut in two."""

    def __init__(self, secrets: KnownSecrets) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be shown now; what could be the beginning of a secret is held back."""
        data = self._secrets.hide(self._held + piece)
        kept = len(data) - self._secrets.begun(data)
        self._held = data[kept:]
        return data[:kept]

    def end(self) -> bytes:
        """The rest: it turned out to be no secret."""
        held, self._held = self._held, b""
        return self._secrets.hide(held)

    def feed_text(self, piece: str) -> str:
        # Whole characters go in, and no needle begins in the middle of one: whole characters come out.
        return self.feed(piece.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def end_text(self) -> str:
        return self.end().decode(errors="surrogatepass")
