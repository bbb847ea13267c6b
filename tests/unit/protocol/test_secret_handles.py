"""A handle in a shell command arrives as one intact value, wherever the command puts it."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.errors import InvalidArgs
from farhand.protocol.secret_handles import names_in, shell_command, substituted

NASTY = "a b'c\"d$HOME`id`\\n;*?[x]\n\ttwo  lines|&<>(){}#~!"


def output(command: str, value: str, shell: str = "/bin/sh") -> str:
    rewritten, variables = shell_command(command, {"X": value})
    assert value not in rewritten or len(value) < 8
    done = subprocess.run([shell, "-c", rewritten], env={**os.environ, **variables}, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        ('printf "[%s]" {{secret:X}}', "[", "]"),
        ('printf "[%s]" "{{secret:X}}"', "[", "]"),
        ("printf '[%s]' '{{secret:X}}'", "[", "]"),
        ('printf "[%s]" "Bearer {{secret:X}} end"', "[Bearer ", " end]"),
        ("printf '[%s]' 'Bearer {{secret:X}} end'", "[Bearer ", " end]"),
        ('printf "[%s]" a{{secret:X}}b', "[a", "b]"),
        ('printf "[%s]" \\"{{secret:X}}', '["', "]"),
        ("printf '%s' \"it's {{secret:X}}\"", "it's ", ""),
        ("V={{secret:X}}; printf '%s' \"$V\"", "", ""),
        ("cat <<EOF\n<{{secret:X}}>\nEOF\n", "<", ">\n"),
        ("cat <<-EOF\n\t<{{secret:X}}>\n\tEOF\n", "<", ">\n"),
        ("cat <<EOF; printf '%s' z\n{{secret:X}}\nEOF\n", "", "\nz"),
        ("printf 1 # it's a comment\nprintf %s '{{secret:X}}'", "1", ""),
    ],
)
def test_the_value_is_intact(shell: str, command: str, before: str, after: str) -> None:
    assert output(command, NASTY, shell) == before + NASTY + after


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=40))
def test_any_value_is_intact(value: str) -> None:
    assert output("printf %s {{secret:X}}\"{{secret:X}}\"'{{secret:X}}'", value) == value * 3


def test_a_document_that_expands_nothing_is_refused() -> None:
    for command in (
        "cat <<'EOF'\n{{secret:X}}\nEOF",
        'cat <<"EOF"\n{{secret:X}}\nEOF',
        "cat <<\\EOF\n{{secret:X}}\nEOF",
    ):
        with pytest.raises(InvalidArgs):
            shell_command(command, {"X": "value"})


def test_a_handle_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidArgs):
        shell_command("echo {{secret:Y}}", {"X": "value"})
    with pytest.raises(InvalidArgs):
        substituted({"a": ["{{secret:Y}}"]}, {"X": "value"})


def test_names_are_found_anywhere_and_checked() -> None:
    assert names_in({"a": "x {{secret:ONE}} {{secret:two_2}}", "b": [{"c": "{{secret:ONE}}"}]}) == {"ONE", "two_2"}
    assert names_in({"a": "{{secret}} {secret:ONE}"}) == frozenset()
    for wrong in ("{{secret:}}", "{{secret:a b}}", "{{secret:1a}}", "{{secret:a-b}}"):
        with pytest.raises(InvalidArgs):
            names_in({"a": wrong})


def test_a_value_that_looks_like_a_handle_is_not_replaced_again() -> None:
    assert substituted("{{secret:X}}", {"X": "{{secret:Y}}", "Y": "no"}) == "{{secret:Y}}"


def test_many_handles_do_not_become_a_huge_text() -> None:
    many = {"content": ["{{secret:KEY}}" * 1000] * 100}
    with pytest.raises(InvalidArgs, match="together"):
        substituted(many, {"KEY": "x" * 65_536})
    assert substituted({"content": "{{secret:KEY}}" * 16}, {"KEY": "x" * 65_536}) == {"content": "x" * 65_536 * 16}
