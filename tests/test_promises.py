"""The page of promises names tests that exist."""

from __future__ import annotations

import re

from tests.harness import ROOT


def test_every_promise_has_its_line_and_every_test_it_names_is_there() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    assert [f"| P{number} |" in page for number in range(1, 14)] == [True] * 13
    file, named = "", 0
    for path, test in re.findall(r"`([\w/…]+(?:\.py)?)(?:::(\w+))?`", page):
        if path.endswith(".py"):
            file = path
        elif path != "…":
            continue
        source = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in source, f"{file}::{test}"
        named += 1
    assert named > 25
