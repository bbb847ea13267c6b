"""Whether two patterns may match the same path.

Patterns are compared as loose globs: texts in which `*` stands for any text, slashes included, and `?` for any
character. Every pattern has a loose glob that matches at least what the pattern does, so the answer errs towards yes.
"""

from __future__ import annotations

import re
from typing import Final

from farhand.machine.search.patterns import PatternRoute

# Product of the lengths of two globs; longer ones are taken to overlap.
MOST_COMPARED: Final = 4_000_000
_CLASS: Final = re.compile(r"\[[^]]*\]")
_STARS: Final = re.compile(r"\*+")
_SPECIAL: Final = re.compile(r"[*?\[]")
# The literal beginning of an anchored regular expression: plain characters and escaped punctuation.
_PREFIX: Final = re.compile(r"\^((?:[\w/ ,:@~%=-]|\.|\\[^\w\s])*)([*+?{]?)")


def literal_glob(text: str) -> str:
    """Return a glob that matches a text, which may contain the special characters of globs."""
    return _SPECIAL.sub("?", text)


def loose_glob(glob: str) -> str:
    """Return the loose form of a glob as `fnmatch` reads it."""
    return _CLASS.sub("?", glob)


def regex_glob(expression: str) -> str:
    """Return a glob that matches every text in which a regular expression is found."""
    found = _PREFIX.match(expression)
    if found is None or "|" in expression:
        return "*"
    text, quantifier = found.groups()
    characters = re.findall(r"\\.|.", text)
    if quantifier:
        del characters[-1:]
    return "".join("?" if one == "." else literal_glob(one[-1]) for one in characters) + "*"


def route_glob(route: PatternRoute) -> str:
    """Return a glob that matches every path, from where the pattern starts, that an alternative of a pattern does."""
    text = ""
    for number, part in enumerate(route.parts):
        if part.expression is None:
            text += "*"  # any number of folders, with their slashes
        else:
            text += part.loose + ("/" if number + 1 < len(route.parts) else "")
    return text


def overlap(one: str, other: str) -> bool:
    """Return whether some text matches two loose globs; True if they are too long to compare."""
    one, other = _STARS.sub("*", one), _STARS.sub("*", other)
    if len(one) * len(other) > MOST_COMPARED:
        return True
    stars = sum(1 << at for at, character in enumerate(other) if character == "*")
    every = (1 << len(other)) - 1
    accepting: dict[str, int] = {}
    for at, character in enumerate(other):
        accepting[character] = accepting.get(character, 0) | 1 << at
    open_ended = stars | accepting.get("?", 0)
    # Bit n is set while some text for the first characters of `one` matches the first n of `other`.
    reached = _past_stars(1, stars)
    for character in one:
        if character == "*":
            reached = (every << 1 | 1) & ~((reached & -reached) - 1)
        else:
            fits = every if character == "?" else open_ended | accepting.get(character, 0)
            reached = _past_stars((reached & stars) | (reached & fits) << 1, stars)
        if not reached:
            return False
    return bool(reached >> len(other) & 1)


def _past_stars(reached: int, stars: int) -> int:
    """A star may stand for nothing; there are never two in a row."""
    return reached | (reached & stars) << 1
