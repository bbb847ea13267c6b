"""File name patterns: `*`, `?`, `[a-z]`, `{one,two}`, and `**` for any depth of folders.

`*` does not match `/` but matches names with a leading dot; case matters; `\\` escapes the next character.

The expressions do not backtrack over `*`: matching takes at most (length of the name) times (length of the pattern)
steps. Python's `re` holds the interpreter lock while it matches, so exponential backtracking would block the whole
process, even in a thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import msgspec

_MOST_ALTERNATIVES = 1000
_LONGEST_PATTERN = 4096  # characters; the longest path of Linux
_LONGEST_EXPANSION = 32_768  # total characters of all alternatives
_MOST_PARTS = 64  # names and `**` between slashes
_STAR = ".*"
_LAZY_STAR = ".*?"


class BadPattern(Exception):
    """An invalid pattern; the message says why."""


class PatternPart(msgspec.Struct, frozen=True):
    """A part between two slashes: `expression` for a name, None for `**`."""

    expression: str | None
    literal: str | None = None  # the name, if only one name matches
    loose: str = "*"  # a glob of `*`, `?` and plain characters that matches at least the same names


class PatternRoute(msgspec.Struct, frozen=True):
    """One alternative of a pattern, with braces expanded."""

    absolute: bool
    parts: tuple[PatternPart, ...]
    folders: bool  # a trailing slash matches folders instead of files


def parse(pattern: str) -> list[PatternRoute]:
    """Return the alternatives of a pattern. Raises BadPattern."""
    if len(pattern) > _LONGEST_PATTERN:
        raise BadPattern(f"it has {len(pattern)} characters; at most {_LONGEST_PATTERN} are allowed")
    return [_route(alternative) for alternative in _alternatives(pattern)]


def name_expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern for file names. Raises BadPattern, also if it contains a slash."""
    routes = parse(pattern)
    if any(route.absolute or route.folders or len(route.parts) != 1 for route in routes):
        raise BadPattern("it is compared with file names only and cannot contain '/'")
    return combined([route.parts[0].expression or ".*" for route in routes])


def combined(expressions: list[str]) -> re.Pattern[str]:
    """Return one expression for names that match any of these; use it with `fullmatch`."""
    try:
        return re.compile("|".join(f"(?:{expression})" for expression in expressions), re.DOTALL)
    except re.error as error:
        raise BadPattern(str(error)) from None


def _route(pattern: str) -> PatternRoute:
    texts = [text for text in pattern.split("/") if text not in ("", ".")]
    if not texts:
        raise BadPattern("it names no file")
    # Several `**` in a row are equivalent to one.
    parts = [_part(text) for before, text in itertools.pairwise(["", *texts]) if not text == before == "**"]
    if len(parts) > _MOST_PARTS:
        raise BadPattern(f"it has {len(parts)} parts between slashes; at most {_MOST_PARTS} are allowed")
    folders = pattern.endswith("/")
    if parts[-1].expression is None and not folders:
        parts.append(_part("*"))
    return PatternRoute(pattern.startswith("/"), tuple(parts), folders)


def _part(text: str) -> PatternPart:
    if text == "**":
        return PatternPart(None)
    if "**" in text.replace("\\*", ""):
        raise BadPattern("'**' must stand alone between slashes, as in 'src/**/*.py'")
    pieces = list(_pieces(text))
    loose = "".join(_loose(piece, plain) for piece, plain in pieces)
    if all(plain for _, plain in pieces):
        literal = "".join(piece for piece, _ in pieces)
        return PatternPart(re.escape(literal), literal, loose)
    chunks = [""]
    for piece, plain in pieces:
        if piece == _STAR and not plain:
            chunks.append("")
        else:
            chunks[-1] += re.escape(piece) if plain else piece
    return PatternPart(_without_backtracking(chunks), None, loose)


def _loose(piece: str, plain: bool) -> str:
    if plain:
        return "?" if piece in ("*", "?", "[") else piece
    return "*" if piece == _STAR else "?"


def _without_backtracking(chunks: list[str]) -> str:
    """Return an expression for chunks of fixed length separated by `*`.

    For every star but the last, the first position where the following chunk matches is as good as any other, so an
    atomic group need not try another. `fnmatch.translate` does the same.
    """
    first, *others = chunks
    if not others:
        return first
    between = "".join(f"(?>{_LAZY_STAR}{chunk})" for chunk in others[:-1] if chunk)
    return f"{first}{between}{_STAR}{others[-1]}"


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield characters (plain) and expressions."""
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "*":
            yield _STAR, False
        elif character == "?":
            yield ".", False
        elif character == "[":
            end = _class_end(text, at)
            yield _class(text[at:end]), False
            at = end + 1
        elif character == "\\":
            yield text[at : at + 1], True
            at += 1
        else:
            yield character, True


def _class_end(text: str, at: int) -> int:
    """Return the position of the `]` that closes the class before `at`; a leading `]` is a member."""
    first = at + (text[at : at + 1] in ("!", "^"))
    end = text.find("]", first + 1)
    if end < 0:
        raise BadPattern("'[' is never closed; write '\\[' for the character itself")
    return end


def _class(members: str) -> str:
    negated = members[0] in "!^"
    if negated:
        members = members[1:]
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", members)
    try:
        re.compile(f"[{escaped}]")
    except re.error as error:
        raise BadPattern(f"'[{members}]': {error.msg}") from None
    return f"[{'^' if negated else ''}{escaped}]"


def _alternatives(pattern: str) -> list[str]:
    """Expand braces, outermost first."""
    done: list[str] = []
    waiting = [pattern]
    size = 0
    while waiting:
        text = waiting.pop()
        group = _first_group(text)
        if group is None:
            done.append(text)
            size += len(text)
        else:
            start, commas, end = group
            edges = [start, *commas, end]
            waiting.extend(
                text[:start] + text[left + 1 : right] + text[end + 1 :] for left, right in itertools.pairwise(edges)
            )
        if len(done) + len(waiting) > _MOST_ALTERNATIVES:
            raise BadPattern(f"its braces stand for more than {_MOST_ALTERNATIVES} patterns")
        if size > _LONGEST_EXPANSION:
            raise BadPattern(f"its braces stand for patterns of more than {_LONGEST_EXPANSION} characters in all")
    return done


def _first_group(text: str) -> tuple[int, list[int], int] | None:
    """Return the position of the first brace, its commas, and its end."""
    commas: list[int] = []
    start, depth, at = -1, 0, 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
            if at == len(text):
                raise BadPattern("it ends with '\\'")
        elif character == "[":
            at = _class_end(text, at + 1)
        elif character == "{":
            start = at if depth == 0 else start
            depth += 1
        elif character == "}":
            depth -= 1
            if depth < 0:
                raise BadPattern("'}' closes nothing; write '\\}' for the character itself")
            if depth == 0:
                return start, commas, at
        elif character == "," and depth == 1:
            commas.append(at)
        at += 1
    if depth:
        raise BadPattern("'{' is never closed; write '\\{' for the character itself")
    return None
