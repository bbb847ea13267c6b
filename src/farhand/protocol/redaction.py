"""Remove secrets from what leaves the process.

Two mechanisms: `mask_text` and `mask_settings` recognise secrets by their pattern or by the name of the setting;
`KnownSecrets` removes the values this process knows, wherever they appear; `StreamRedactor` and `OffsetRedactor` do so
in streams.

Every exit of the gateway uses it, and nothing else does: answers of the HTTP server (`api/server/guard.py`), messages
to people (`gateway/messaging/outbox.py`), what models and embedders are given (`gateway/sessions`, `memory`), output of
commands (`gateway/nodes/output.py`) and the log. A text that is cut before it reaches an exit is redacted where it is
cut, since a part of a secret is not recognised later.

Known values are found as they are, URL-quoted, as a JSON string, as JSON inside JSON (four levels), in a diff and line
by line where a secret has several lines, and as the HTTP Basic form of a password in a URL. A secret that was
compressed, encrypted or encoded in another way passes. This limits accidental disclosure; a caller who may run commands
can still re-encode a secret on purpose.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus

MASK: Final = "***"
# How Farhand's own secrets begin, which the patterns below recognise: OAuth access tokens, tokens of clients, keys
# and tokens of nodes, the owner's token, OAuth refresh tokens and the secrets of OAuth clients.
OWN_PREFIXES: Final = frozenset({"fha", "fhc", "fhk", "fhn", "fho", "fhr", "fhs"})

_IN_TEXT: Final = re.compile(
    r"""
    ( (?:token|code)=
    | (?:token|api_?key|secret|password|passwd|authorization)["']\s*[:=]\s*["']
    | (?:api_?key|secret|password|passwd)=["']?
    | \bbearer[.\s]
    | \bauthorization:\s*basic\s
    | \bfh[acknors]_ | \bsk- | \bgh[pousr]_ | \bgithub_pat_ | \bxox[abprs]- | \bglpat- )
    [\w.~%+/=-]+
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Does not match the scheme: that would search from every dot of a long name to its end.
_IN_URL: Final = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(@)", re.IGNORECASE)
_IN_SETTING: Final = re.compile(
    r"""
    ( :// ) [^\s/:@?#]+ (?=@)                                                      # user of a URL
    | ( [?&][\w.-]*(?:key|sig|signature|code|auth|pass|token|secret)= ) [^\s&#]+   # query parameter
    | ( ://hooks\.slack\.com/\w+/ | /api/webhooks/ ) \S+                           # webhook address
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:tokens?|secrets?|passwords?|passwd|passphrase|(?:api|access|private|secret|signing|encryption|auth|subscription|account|shared|master)_?keys?"
    r"|apikeys?|credentials?|authorization|cookies?|dsn|webhook_url)$|^key$"
)
# The handle of a secret, and the scheme before it in a header.
_HANDLE: Final = re.compile(r"\{\{secret:\w{1,64}\}\}")
_ONLY_HANDLE: Final = re.compile(r"([A-Za-z]{1,16} )?(\{\{secret:\w{1,64}\}\})+")
_CAMEL_CASE: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def mask_text(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by `***`; its label stays."""
    return _IN_URL.sub(rf"\1{MASK}\2", _IN_TEXT.sub(rf"\1{MASK}", text))


def mask_settings(value: Any, *, secret: bool = False) -> Any:
    """Return a copy of settings without secrets: under a name that denotes one, and in texts that look like one.

    Numbers, booleans, empty strings and handles such as `{{secret:NAME}}` stay.
    """
    if isinstance(value, Mapping):
        # Headers usually carry credentials, whatever their names.
        return {
            name: mask_settings(inner, secret=secret or is_secret_name(str(name)) or snake_case(str(name)) == "headers")
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_settings(inner, secret=secret) for inner in value]
    if isinstance(value, str):
        if secret and value:
            return value if _ONLY_HANDLE.fullmatch(value) else MASK
        return _IN_SETTING.sub(lambda found: f"{next(filter(None, found.groups()))}{MASK}", mask_text(value))
    return value


def is_secret_name(name: str) -> bool:
    """True for `token`, `apiKeys`, `bot_token`, `SMTP_PASSWORD`; false for `context_tokens_used`, `session_key`."""
    return _SECRET_NAME.search(snake_case(name)) is not None


def is_own_secret(variable: str) -> bool:
    """Return whether an environment variable carries a secret of Farhand, which no command may inherit."""
    return variable.startswith("FARHAND_") and is_secret_name(variable)


def snake_case(name: str) -> str:
    return _CAMEL_CASE.sub("_", name).replace("-", "_").lower()


# Shorter secrets occur in ordinary text, and can be guessed anyway.
MIN_SECRET_CHARS: Final = 8
# The same for a single line of a secret with several lines, such as a PEM key.
MIN_LINE_CHARS: Final = 16
# Fewer bytes of a secret at the edge of a truncated text reveal nothing and occur in ordinary text.
MIN_PARTIAL_BYTES: Final = 4
# Levels of JSON inside JSON in which a secret is found.
MAX_JSON_NESTING: Final = 4
# Farhand's own tokens and keys are recognised by their pattern, since only their hashes are stored.
_OWN: Final = re.compile(rb"fh[acknors]_[\w-]{43}(?![\w-])")
_OWN_PREFIX: Final = re.compile(rb"f(?:h(?:[acknors](?:_[\w-]{0,43})?)?)?\Z")
# More than half of one, without its first characters.
_OWN_SUFFIX: Final = re.compile(rb"[\w-]{24,46}(?![\w-])")
_URL_PASSWORD: Final = re.compile(r"://([^\s/:@]*):([^\s/@]+)@")
_JSON_ESCAPE: Final = re.compile(r"\\u([0-9a-f]{4})")
# Some programs also escape these in JSON.
_MARKUP: Final = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}
_MASK: Final = MASK.encode()


def can_be_masked(value: str) -> bool:
    """Return whether a secret is removed from output: not a short one, nor a number, which is valid JSON by itself."""
    text = value.strip()
    return len(text) >= MIN_SECRET_CHARS and not text.isdecimal()


class KnownSecrets:
    """Secret values to remove from output; more can be added at any time."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._needles: tuple[bytes, ...] = ()
        # Farhand's own tokens whose value is known, for `leading_partial`.
        self._own: set[bytes] = set()
        # The distinct beginnings of the needles: there are fewer of them to search for.
        self._stems: tuple[bytes, ...] = ()
        self.longest = len("fho_") + 43
        self.add(*values)

    def add(self, *values: str) -> None:
        """Redact these values from now on, in every encoding that output may use."""
        found = set(self._needles)
        for value in values:
            text = value.strip()
            if not can_be_masked(value):
                continue
            if _HANDLE.search(text):  # the name of a secret, in a setting, is not one
                continue
            if text.isascii() and _OWN.fullmatch(text.encode()):
                self._own.add(text.encode())
                continue  # matched by pattern
            for part in (text, *_parts(text.splitlines())):
                found.update(encoded.encode(errors="surrogateescape") for encoded in _encodings(part))
        # The longest first: one may be a part of another.
        self._needles = tuple(sorted(found, key=lambda needle: (-len(needle), needle)))
        self.longest = max([self.longest, *map(len, self._needles)])
        self._stems = tuple(sorted({needle[:MIN_SECRET_CHARS] for needle in self._needles}))
        self._beginnings = _Beginnings(self._needles)
        self._ends = _Beginnings(needle[::-1] for needle in (*self._needles, *self._own))

    def add_settings(self, settings: Any, *, secret: bool = False) -> None:
        """Add every string under a name that denotes a secret, and every password in a URL."""
        if isinstance(settings, Mapping):
            for name, value in settings.items():
                self.add_settings(value, secret=secret or is_secret_name(str(name)))
        elif isinstance(settings, list | tuple):
            for value in settings:
                self.add_settings(value, secret=secret)
        elif isinstance(settings, str):
            for user, password in _URL_PASSWORD.findall(settings):
                self.add(password, base64.b64encode(f"{user}:{password}".encode(errors="surrogateescape")).decode())
            if secret:
                self.add(settings)

    def redact(self, data: bytes) -> bytes:
        """Return the data with each secret replaced by `***`."""
        for needle in self._possible(data):
            data = data.replace(needle, _MASK)
        return _OWN.sub(_MASK, data) if b"fh" in data else data

    def _possible(self, data: bytes) -> list[bytes]:
        """Return the needles that may be in the data, the longest first."""
        # One search per stem is four times as fast as one regular expression for all of them.
        present = {stem for stem in self._stems if stem in data}
        return [needle for needle in self._needles if needle[:MIN_SECRET_CHARS] in present] if present else []

    def redact_text(self, text: str) -> str:
        data = text.encode(errors="surrogatepass")
        redacted = self.redact(data)
        return text if redacted == data else redacted.decode(errors="surrogatepass")

    def redact_excerpt(self, text: str, *, before: bool = False, after: bool = False) -> str:
        """Redact a part of a longer text.

        Where the text continues `before` or `after` the excerpt, a secret that was cut in two is removed as well.
        """
        data = self.redact(text.encode(errors="surrogatepass"))
        if after and (size := self.trailing_partial(data)) >= MIN_PARTIAL_BYTES:
            data = data[:-size] + _MASK
        if before and (size := self.leading_partial(data)) >= MIN_PARTIAL_BYTES:
            data = _MASK + data[size:]
        return data.decode(errors="surrogatepass")

    def truncate(self, text: str, longest: int) -> str:
        """Return at most the first `longest` characters, without secrets and without the beginning of one."""
        redacted = self.redact_text(text)
        # Redaction changes the length, so the position of the cut refers to the redacted text.
        return redacted if len(text) <= longest else self.redact_excerpt(redacted[:longest], after=True)[:longest]

    def overwrite(self, data: bytes) -> bytes:
        """Replace each byte of a secret by a star, which keeps the offsets of a stream valid."""
        for needle in self._possible(data):
            data = data.replace(needle, b"*" * len(needle))
        return _OWN.sub(lambda found: b"*" * len(found[0]), data) if b"fh" in data else data

    def trailing_partial(self, data: bytes) -> int:
        """Return how many of the last bytes may be the beginning of a secret."""
        longest = self._beginnings.at_end_of(data)
        own = _OWN_PREFIX.search(data, max(0, len(data) - 48))
        return longest if own is None else max(longest, len(own[0]))

    def leading_partial(self, data: bytes) -> int:
        """Return how many of the first bytes may be the end of a secret."""
        longest = self._ends.at_end_of(data[: self._ends.longest][::-1])
        own = _OWN_SUFFIX.match(data)
        return longest if own is None else max(longest, len(own[0]))


class _Beginnings:
    """Finds the beginning of a needle at the end of data, however many needles there are."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        self.longest = 0
        self._short: set[bytes] = set()
        # By their first bytes: each needle, and its beginning, which is compared first.
        self._by_stem: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for needle in needles:
            self.longest = max(self.longest, len(needle))
            self._short.update(needle[:size] for size in range(1, min(MIN_SECRET_CHARS, len(needle))))
            self._by_stem.setdefault(needle[:MIN_SECRET_CHARS], []).append((needle, needle[:64]))

    def at_end_of(self, data: bytes) -> int:
        """Return the length of the longest beginning of a needle, but not a whole one, that ends the data."""
        if not self._short:
            return 0
        find, stem, end = self._by_stem.get, MIN_SECRET_CHARS, len(data)
        for start in range(max(0, end - self.longest + 1), end - stem + 1):
            for needle, head in find(data[start : start + stem], ()):
                size = end - start
                if len(needle) > size and data.startswith(head[:size], start) and data.endswith(needle[:size]):
                    return size
        return next((size for size in range(min(stem - 1, end), 0, -1) if data[-size:] in self._short), 0)


class StreamRedactor:
    """Redacts a stream that arrives in pieces, including secrets that are split between two pieces."""

    def __init__(self, secrets: KnownSecrets) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return what can be shown now; bytes that may begin a secret are held back."""
        data = self._secrets.redact(self._held + piece)
        shown = len(data) - self._secrets.trailing_partial(data)
        self._held = data[shown:]
        return data[:shown]

    def finish(self) -> bytes:
        """Return the bytes that were held back."""
        held, self._held = self._held, b""
        return self._secrets.redact(held)

    def feed_text(self, piece: str) -> str:
        # No needle begins in the middle of a character, so whole characters come out.
        return self.feed(piece.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def finish_text(self) -> str:
        return self.finish().decode(errors="surrogatepass")


class OffsetRedactor:
    """Masks secrets in a stream whose readers count bytes, such as the output of a command.

    Each byte of a secret becomes an asterisk, so that offsets stay valid. Reading begins before the wanted `offset`, so
    that a secret cannot be read in two halves. A negative offset is relative to the end.
    """

    def __init__(self, secrets: KnownSecrets, offset: int) -> None:
        self._secrets = secrets
        self._position = offset if offset < 0 else max(0, offset - secrets.longest + 1)
        # What was read from `_position` on and may be the beginning of a secret.
        self._held = b""
        # What is before this offset was shown, or was not asked for.
        self._shown = offset

    @property
    def next_offset(self) -> int:
        """Return where to read on."""
        return self._position + len(self._held)

    @property
    def holding(self) -> bool:
        """Return whether bytes are held back, since they may be the beginning of a secret."""
        return self._shown < self.next_offset

    def feed(self, offset: int, data: bytes, *, flush: bool) -> tuple[int, bytes]:
        """Take the data at an offset; return what can be shown and its offset. `flush`: hold nothing back.

        A few bytes are not held back: they reveal nothing, and the echo of a key in a terminal must not wait because a
        secret begins with it. When the rest of the secret follows, it is masked.
        """
        if offset != self.next_offset:  # the beginning, or a gap: what follows may be the end of a secret
            rest = self._secrets.leading_partial(data) if offset else 0
            data = b"*" * rest + data[rest:]
            self._position, self._held, self._shown = offset, b"", max(offset, self._shown)
        data = self._held + data
        partial = self._secrets.trailing_partial(data)
        end = len(data) if flush or partial < MIN_PARTIAL_BYTES else len(data) - partial
        first = self._shown
        text = self._secrets.overwrite(data)[max(0, first - self._position) : end]
        self._shown = max(first, self._position + end)
        self._position, self._held = self._position + len(data) - partial, data[len(data) - partial :]
        return first, text


def _encodings(text: str) -> set[str]:
    """Return each form in which output may carry a secret."""
    in_json = json.dumps(text)[1:-1]
    written = {
        text,
        in_json.replace("/", "\\/"),
        _JSON_ESCAPE.sub(lambda found: "\\u" + found[1].upper(), in_json),
        json.dumps(text, ensure_ascii=False)[1:-1].translate(_MARKUP),
    }
    for _ in range(MAX_JSON_NESTING):
        written |= {json.dumps(one, ensure_ascii=only)[1:-1] for one in written for only in (True, False)}
    raw = text.encode(errors="surrogateescape")
    return written | {quote(raw), quote_plus(raw), quote(raw, safe="")}


def _parts(lines: list[str]) -> Iterator[str]:
    """Yield other forms in which a secret of several lines appears: in a diff, and each line by itself."""
    if len(lines) > 1:
        yield from (f"\n{mark}".join(lines) for mark in "+- ")
        yield from (line.strip() for line in lines if _is_secret_line(line.strip()))


def _is_secret_line(line: str) -> bool:
    """Return whether a single line of a secret is secret: a line of a key is; its header or a sentence is not."""
    return len(line) >= MIN_LINE_CHARS and not line.startswith("-----") and len(line.split()) == 1
