"""WordPiece tokenisation for BERT models: words of a fixed vocabulary, longer ones in pieces.

The vocabulary in this folder is that of BERT base, uncased, published by Google under the Apache licence 2.0.
"""

from __future__ import annotations

import functools
import unicodedata
from importlib import resources

UNKNOWN, START, END = "[UNK]", "[CLS]", "[SEP]"
LONGEST_WORD = 100


@functools.cache
def vocabulary() -> dict[str, int]:
    text = resources.files("farhand.memory").joinpath("bert-uncased-vocab.txt").read_text(encoding="utf-8")
    return {word: number for number, word in enumerate(text.removesuffix("\n").split("\n"))}


def token_ids(text: str, most: int) -> list[int]:
    """Return at most `most` token ids, including the start and end tokens."""
    known = vocabulary()
    numbers = [known[START]]
    for word in _words(text):
        numbers.extend(_pieces(word, known))
        if len(numbers) >= most - 1:
            break
    return [*numbers[: most - 1], known[END]]


def _words(text: str) -> list[str]:
    plain = []
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            plain.append(" ")
        elif character == "\ufffd" or category[0] == "C":
            continue
        elif _is_ideograph(character):
            plain.append(f" {character} ")
        else:
            plain.append(character)
    spread = []
    for character in unicodedata.normalize("NFD", "".join(plain).lower()):
        if unicodedata.category(character) == "Mn":
            continue
        spread.append(f" {character} " if _is_punctuation(character) else character)
    return "".join(spread).split()


def _pieces(word: str, known: dict[str, int]) -> list[int]:
    if len(word) > LONGEST_WORD:
        return [known[UNKNOWN]]
    numbers: list[int] = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            number = known.get(("##" if start else "") + word[start:end])
            if number is not None:
                break
        else:
            return [known[UNKNOWN]]
        numbers.append(number)
        start = end
    return numbers


def _is_punctuation(character: str) -> bool:
    # All ASCII punctuation counts, including what Unicode classifies as symbols.
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character)[0] == "P"


def _is_ideograph(character: str) -> bool:
    code = ord(character)
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x2CEAF
        or 0x2F800 <= code <= 0x2FA1F
    )
