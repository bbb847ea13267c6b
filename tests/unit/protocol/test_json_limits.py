"""What a plain peer can read; the original's parser was asked for each of these."""

from __future__ import annotations

import pytest

from farhand.protocol.json_limits import plain_peer_error

OUT_OF_RANGE = "a number in it is out of range"
TOO_DEEP = "it is nested deeper than 126 levels"


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "1e308",
        "1e-999",
        "1" * 309,
        "0." + "1" * 400,
        "1" * 210 + "e98",
        '"1e999"',
        f'"{"1" * 400}"',
        f'"{"[" * 500}"',
        "[" * 126 + "]" * 126,
        '{"a":' * 126 + "1" + "}" * 126,
        f"[{','.join(['{}'] * 1000)}]",
    ],
)
def test_what_it_reads(text: str) -> None:
    assert plain_peer_error(text.encode()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1e999", OUT_OF_RANGE),
        ("-1.8e308", OUT_OF_RANGE),
        ("1E+0000400", OUT_OF_RANGE),
        ("9" * 309, OUT_OF_RANGE),
        ("1" * 290 + "e20", OUT_OF_RANGE),
        (f'{{"a":[1,{{"b":-{"9" * 400}}}]}}', OUT_OF_RANGE),
        ("[" * 126 + "1e999" + "]" * 126, OUT_OF_RANGE),
        ("[" * 127 + "]" * 127, TOO_DEEP),
        ('{"a":' * 127 + "1" + "}" * 127, TOO_DEEP),
        ("[" * 100_000 + "]" * 100_000, TOO_DEEP),
    ],
)
def test_what_it_does_not_read(text: str, reason: str) -> None:
    assert plain_peer_error(text.encode()) == reason
