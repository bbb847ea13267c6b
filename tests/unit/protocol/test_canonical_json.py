"""One text for all JSON that means the same, and never one for two meanings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.canonical_json import MAX_CANONICAL_BYTES, canonical

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def turned(value: Any) -> Any:
    """The same with its names in the opposite order."""
    if isinstance(value, dict):
        return {name: turned(value[name]) for name in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


@given(values)
def test_blanks_escapes_and_the_order_of_names_do_not_matter(value: Any) -> None:
    plain = canonical(json.dumps(value).encode())
    assert plain == canonical(json.dumps(turned(value), indent=3, ensure_ascii=False).encode())
    assert json.loads(plain) == value and canonical(plain) == plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"[1,2]", b"[2,1]"),
        (b"1", b"1.0"),
        (b"1", b'"1"'),
        (b"12345678901234567890123", b"12345678901234567890124"),
        (b"0.1", b"0.1000000000000000055511151231257827"),
        (b"1e400", b"1e401"),
        (b'{"a":1,"a":2}', b'{"a":2}'),
        (b'{"a":1,"a":2}', b'{"a":2,"a":1}'),
        (b'"\\ud83d"', b'"\\ud83e"'),
        (b"{}", b"[]"),
        (b"null", b""),
    ],
)
def test_what_may_mean_something_else_stays_apart(one: bytes, other: bytes) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nope",
        b"[NaN]",
        b'{"a": 1, "a": 2}',
        b'"\\ud83d" ',
        b"\xff",
        b"[" * 100_000,
        b" " * MAX_CANONICAL_BYTES + b"1",
    ],
)
def test_in_doubt_it_stays_as_it_came(raw: bytes) -> None:
    assert canonical(raw) == raw


def test_raw_is_taken_as_well() -> None:
    assert canonical(msgspec.Raw(b'{"b": [1, 2.50], "a": "\\u00e9"}')) == '{"a":"é","b":[1,2.50]}'.encode()
