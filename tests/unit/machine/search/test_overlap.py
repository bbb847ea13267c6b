"""Patterns that may match the same path, compared with a slow search for such a path."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.machine.search.overlap import loose_glob, overlap, regex_glob, route_glob
from farhand.machine.search.patterns import BadPattern, combined, parse

LETTERS = "a/"
TEXTS = ["".join(text) for length in range(7) for text in itertools.product(LETTERS, repeat=length)]
GLOBS = st.text("a/*?", max_size=4)


@given(GLOBS, GLOBS)
def test_globs_overlap_if_some_text_matches_both(one: str, other: str) -> None:
    # Four characters each: if any text matches both, one of at most six characters does.
    expected = any(fnmatchcase(text, one) and fnmatchcase(text, other) for text in TEXTS)
    if expected:
        assert overlap(one, other) and overlap(other, one)
    elif len(one) + len(other) <= 6:
        assert not overlap(one, other) and not overlap(other, one)


@given(st.text("ab/*?{},[]!", max_size=8))
def test_what_a_search_finds_is_in_its_glob(pattern: str) -> None:
    try:
        routes = parse(pattern)
    except BadPattern:
        return
    for route in routes:
        names = [part.expression for part in route.parts]
        if None in names:
            continue
        expression = combined(["/".join(name or "" for name in names)])
        for text in TEXTS:
            if expression.fullmatch(text):
                assert overlap(route_glob(route), text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "path"), [("a/**/b", "a/b"), ("a/**/b", "a/x/y/b"), ("**", "x"), ("**/b", "b"), ("a/**", "a/b/c")]
)
def test_any_number_of_folders_may_be_none(pattern: str, path: str) -> None:
    assert any(overlap(route_glob(route), path) for route in parse(pattern))


@given(st.text("ab/.^$*+?|()\\\\", max_size=6))
def test_what_an_expression_matches_is_in_its_glob(expression: str) -> None:
    try:
        compiled = re.compile(expression)
    except re.error:
        return
    for text in ("", "a", "b", "/", "ab", "a/b", "/a", "/a/b", "aab", "a.b", "/ab/a"):
        if compiled.search(text):
            assert overlap(regex_glob(expression), text), (expression, text)


def test_classes_stand_for_any_character() -> None:
    assert overlap(loose_glob("/[abc]x"), "/bx")
    assert overlap(loose_glob("/[!a]x"), "/ax"), "in doubt, yes"


def test_long_patterns_are_compared_quickly_or_taken_to_overlap() -> None:
    assert overlap("*a" * 2000, "*b" * 900 + "c") is True
    assert overlap("*a" * 20_000, "*b" * 20_000) is True
    assert overlap("a" * 5000, "b*" * 50) is False
