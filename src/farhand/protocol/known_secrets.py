"""Secrets this process knows, taken out of whatever leaves it: by their value, wherever they turn up.

It is a net, not a wall: whoever may run commands can write a secret backwards. What it catches is the second door: an
error text, a file that was read, a command's output, the journal. What it looks for is a secret as it is, escaped for
an address, as a JSON string, as one inside of JSON inside of JSON (four deep), the lines of a secret that has several,
and what HTTP makes of a password in an address. A secret that is compressed, encrypted or in base64 passes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus

from farhand.protocol.masking import MASK, names_a_secret

# A shorter secret is found in innocent texts, and guessed anyway.
SHORTEST: Final = 8
# The same for a single line of a secret that has several, as keys do.
SHORTEST_LINE: Final = 16
# Fewer bytes of a secret, at the end of a text that is cut there, tell nothing and are found in innocent ones.
SHORTEST_PART: Final = 4
# How deep in JSON inside of JSON a secret is found.
NESTED: Final = 4
# Tokens and keys of Farhand's own making: known by their looks, since only their hashes are kept.
_OWN: Final = re.compile(rb"fh[onck]_[\w-]{43}(?![\w-])")
_OWN_BEGUN: Final = re.compile(rb"f(?:h(?:[onck](?:_[\w-]{0,43})?)?)?\Z")
# More than half of one, whose first letters were cut off.
_OWN_ENDED: Final = re.compile(rb"[\w-]{24,46}(?![\w-])")
_IN_URL: Final = re.compile(r"://([^\s/:@]*):([^\s/@]+)@")
_ESCAPED: Final = re.compile(r"\\u([0-9a-f]{4})")
# Which some programs escape in JSON as well.
_MARKUP: Final = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}
_MASK: Final = MASK.encode()


class KnownSecrets:
    """Values to hide; more can be added at any time."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._needles: tuple[bytes, ...] = ()
        # Those of Farhand's own making that are known by more than their looks.
        self._own: set[bytes] = set()
        # How they begin: the spellings of one secret mostly begin alike, so there are fewer to look for.
        self._stems: tuple[bytes, ...] = ()
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
                self._own.add(text.encode())
                continue  # known by its looks
            lines = [line.strip() for line in text.splitlines()] if "\n" in text else []
            for part in (text, *(line for line in lines if _tells(line))):
                found.update(spelling.encode(errors="surrogateescape") for spelling in _spellings(part))
        # The longest first: one may be a part of another.
        self._needles = tuple(sorted(found, key=lambda needle: (-len(needle), needle)))
        self.longest = max([self.longest, *map(len, self._needles)])
        self._stems = tuple(sorted({needle[:SHORTEST] for needle in self._needles}))

    def add_settings(self, settings: Any, *, secret: bool = False) -> None:
        """Every text beneath a name that says it is secret, and every password in an address."""
        if isinstance(settings, Mapping):
            for name, value in settings.items():
                self.add_settings(value, secret=secret or names_a_secret(str(name)))
        elif isinstance(settings, list | tuple):
            for value in settings:
                self.add_settings(value, secret=secret)
        elif isinstance(settings, str):
            for user, password in _IN_URL.findall(settings):
                self.add(password, base64.b64encode(f"{user}:{password}".encode(errors="surrogateescape")).decode())
            if secret:
                self.add(settings)

    def hide(self, data: bytes) -> bytes:
        """The same without the secrets: `***` stands in the place of each."""
        if self._may_have(data):
            for needle in self._needles:
                if needle in data:
                    data = data.replace(needle, _MASK)
        if b"fh" in data:
            data = _OWN.sub(_MASK, data)
        return data

    def _may_have(self, data: bytes) -> bool:
        # One look for each: one expression for all of them takes four times as long, however many there are (measured).
        for stem in self._stems:  # noqa: SIM110  (a generator costs more than the search)
            if stem in data:
                return True
        return False

    def hide_text(self, text: str) -> str:
        data = text.encode(errors="surrogatepass")
        hidden = self.hide(data)
        return text if hidden is data or hidden == data else hidden.decode(errors="surrogatepass")

    def hide_piece(self, text: str, *, before: bool = False, after: bool = False) -> str:
        """As `hide_text`, for a part of a longer text: where that goes on before or after it, no part of a secret that
        was cut in two is shown either."""
        data = self.hide(text.encode(errors="surrogatepass"))
        if after and (size := self.begun(data)) >= SHORTEST_PART:
            data = data[:-size] + _MASK
        if before and (size := self.ended(data)) >= SHORTEST_PART:
            data = _MASK + data[size:]
        return data.decode(errors="surrogatepass")

    def cut(self, text: str, longest: int) -> str:
        """The first `longest` characters, or a little less, without secrets and without the beginning of one."""
        if len(text) <= longest:
            return self.hide_text(text)
        # What was hidden is shorter or longer than it was: so the place of the cut is found in what is shown.
        return self.hide_piece(self.hide_text(text)[:longest], after=True)[:longest]

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

    def ended(self, data: bytes) -> int:
        """How many of the first bytes may be the end of a secret that began in the piece before."""
        longest = 0
        for needle in (*self._needles, *self._own):
            for size in range(min(len(needle) - 1, len(data)), longest, -1):
                if data.startswith(needle[-size:]):
                    longest = size
                    break
        own = _OWN_ENDED.match(data)
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


def _spellings(text: str) -> set[str]:
    """Each way in which an answer may carry it."""
    in_json = json.dumps(text)[1:-1]
    written = {
        text,
        in_json.replace("/", "\\/"),
        _ESCAPED.sub(lambda found: "\\u" + found[1].upper(), in_json),
        json.dumps(text, ensure_ascii=False)[1:-1].translate(_MARKUP),
    }
    for _ in range(NESTED):
        written |= {json.dumps(one, ensure_ascii=only)[1:-1] for one in written for only in (True, False)}
    in_url = {quoted(text.encode(errors="surrogateescape")) for quoted in (quote, quote_plus)}
    return written | in_url | {quote(text.encode(errors="surrogateescape"), safe="")}


def _tells(line: str) -> bool:
    """Whether a line of a secret is one by itself: of a key it is; its first line, or a sentence, is not."""
    return len(line) >= SHORTEST_LINE and not line.startswith("-----") and len(line.split()) == 1
