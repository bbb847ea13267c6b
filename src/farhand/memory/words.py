"""Text normalisation for the keyword index, and the words of a query.

SQLite's tokenizer splits at spaces, which Chinese, Japanese and Thai do not use. Runs of such characters are rewritten
as overlapping pairs plus the last single character, so that every character begins one token: several characters are
found by their pairs, a single one by token prefix.
"""

from __future__ import annotations

import re
import unicodedata

import msgspec

TOKENIZER = ("porter", "unicode61", "remove_diacritics", "2", "categories", "L* M* N* Co")
MOST_QUERY = 4000
MOST_TERMS = 48

_FILLER_WORDS = (
    "a about am an and any are as at be been but by can could did do does for from had has have how i if in is it its "
    "me my of on or our shall should so that the their them there these they this to us was we were what when where "
    "which who whom whose why will with would you your"
)
# English function words; those of other languages are recognised by their frequency.
_FILLERS = frozenset(_FILLER_WORDS.split())

_UNSPACED = re.compile(
    "["
    "\u0e01-\u0e4e\u0e81-\u0ece\u1000-\u109f\u1780-\u17d3"  # Thai, Lao, Burmese, Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uac00-\ud7af"  # Korean uses spaces, but attaches particles to words
    "\U00020000-\U0003ffff"
    "]+"
)


class Term(msgspec.Struct, frozen=True):
    """A word to search for; `prefix`: a token need only start with it."""

    text: str
    prefix: bool = False


def folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def indexed(text: str) -> str:
    """Return the text for the tokenizer."""
    text = text.replace("\0", " ")
    if text.isascii():
        return text.lower()
    return _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} {run[0][-1]} ", folded(text))


def query_terms(query: str) -> list[Term]:
    """Return the significant words of a text, each once; none for a text without letters and digits."""
    text = folded(query[:MOST_QUERY])
    found: dict[Term, None] = {}
    position = 0
    for run in _UNSPACED.finditer(text):
        found.update(dict.fromkeys(map(Term, _spaced(text[position : run.start()]))))
        if len(run[0]) == 1:
            found[Term(run[0], prefix=True)] = None
        else:
            found.update(dict.fromkeys(map(Term, _pairs(run[0]))))
        position = run.end()
    found.update(dict.fromkeys(map(Term, _spaced(text[position:]))))
    telling = [term for term in found if term.text not in _FILLERS]
    return (telling or list(found))[:MOST_TERMS]


def _pairs(run: str) -> list[str]:
    return [run[place : place + 2] for place in range(len(run) - 1)]


def _spaced(text: str) -> list[str]:
    kept = "".join(character if _in_words(character) else " " for character in text)
    return kept.split()


def _in_words(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "LMN" or category == "Co"
