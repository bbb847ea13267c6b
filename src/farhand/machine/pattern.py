"""Patterns of file names: `*`, `?`, `[a-z]`, `{one,two}`, and `**` for any depth of folders.

`*` does not cross `/` and does match names that begin with a dot; case counts; `\\` takes the next character as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import msgspec

_MOST_ALTERNATIVES = 1000


class BadPattern(Exception):
    """A pattern that means nothing; the text says why."""


class Part(msgspec.Struct, frozen=True):
    """What stands between two slashes: `expression` for a name, None for `**`."""

    expression: str | None
    literal: str | None = None  # the name itself, where only one name fits


class Route(msgspec.Struct, frozen=True):
    """One alternative of a pattern, its braces resolved."""

    absolute: bool
    parts: tuple[Part, ...]
    folders: bool  # a trailing slash asks for folders, not files


def parse(pattern: str) -> list[Route]:
    """The alternatives of a pattern. Raises BadPattern."""
    return [_route(alternative) for alternative in _alternatives(pattern)]


def name_expression(pattern: str) -> re.Pattern[str]:
    """A pattern for file names alone. Raises BadPattern, also for one with a slash."""
    routes = parse(pattern)
    if any(route.absolute or route.folders or len(route.parts) != 1 for route in routes):
        raise BadPattern("it is compared with file names only and cannot contain '/'")
    return combined([route.parts[0].expression or ".*" for route in routes])


def combined(expressions: list[str]) -> re.Pattern[str]:
    """One expression for names that fit any of these; use it with `fullmatch`."""
    try:
        return re.compile("|".join(f"(?:{expression})" for expression in expressions), re.DOTALL)
    except re.error as error:
        raise BadPattern(str(error)) from None


def _route(pattern: str) -> Route:
    texts = [text for text in pattern.split("/") if text not in ("", ".")]
    if not texts:
        raise BadPattern("it names no file")
    parts = [_part(text) for text in texts]
    folders = pattern.endswith("/")
    if parts[-1].expression is None and not folders:
        parts.append(_part("*"))
    return Route(pattern.startswith("/"), tuple(parts), folders)


def _part(text: str) -> Part:
    if text == "**":
        return Part(None)
    if "**" in text.replace("\\*", ""):
        raise BadPattern("'**' must stand alone between slashes, as in 'src/**/*.py'")
    pieces = list(_pieces(text))
    if all(plain for _, plain in pieces):
        literal = "".join(piece for piece, _ in pieces)
        return Part(re.escape(literal), literal)
    return Part("".join(re.escape(piece) if plain else piece for piece, plain in pieces))


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Characters (plain) and the expressions for what is not one."""
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "*":
            yield ".*", False
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
    """Where the `]` is that closes the class begun before `at`; one that stands first is a member."""
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
    """Resolve braces, outermost first."""
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        text = waiting.pop()
        group = _first_group(text)
        if group is None:
            done.append(text)
        else:
            start, commas, end = group
            edges = [start, *commas, end]
            waiting.extend(
                text[:start] + text[left + 1 : right] + text[end + 1 :] for left, right in itertools.pairwise(edges)
            )
        if len(done) + len(waiting) > _MOST_ALTERNATIVES:
            raise BadPattern(f"its braces stand for more than {_MOST_ALTERNATIVES} patterns")
    return done


def _first_group(text: str) -> tuple[int, list[int], int] | None:
    """Where the first brace opens, its own commas, and where it closes."""
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
