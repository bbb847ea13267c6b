"""Split texts: no part is too long, nothing is lost, and code blocks stay well-formed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farhand.gateway.messaging.splitting import split, units


@given(st.text(alphabet="ab \n😀é`~", max_size=600), st.integers(40, 200))
def test_every_piece_fits(text: str, longest: int) -> None:
    for piece in split(text, longest):
        assert units(piece) <= longest


@given(st.text(alphabet="ab \n😀é", max_size=600), st.integers(40, 200))
def test_nothing_but_blanks_is_left_out(text: str, longest: int) -> None:
    assert "".join("".join(split(text, longest)).split()) == "".join(text.split())


def test_a_short_text_stays_as_it_is() -> None:
    assert split("  two\nlines ", 100) == ("  two\nlines ",)


def test_a_text_is_cut_between_paragraphs_then_lines_then_words() -> None:
    assert split("a" * 60 + "\n\n" + "b" * 60, 100) == ("a" * 60, "b" * 60)
    assert split("a" * 60 + "\n" + "b" * 60, 100) == ("a" * 60, "b" * 60)
    assert split("a" * 60 + " " + "b" * 60, 100) == ("a" * 60, "b" * 60)
    assert split("a" * 150, 100) == ("a" * 92, "a" * 58)


def test_a_code_block_is_closed_and_opened_again() -> None:
    first, second = split("```py\n" + "x = 1\n" * 15 + "```", 80)
    assert first.startswith("```py\n") and first.endswith("\n```")
    assert second.startswith("```py\n") and second.endswith("```")
    assert (first + second).count("x = 1") == 15
