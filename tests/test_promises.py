"""The page of promises names tests that exist."""

from __future__ import annotations

import re

from tests.support.harness import ROOT


def test_every_promise_has_its_line_and_every_test_it_names_is_there() -> None:
    page = (ROOT / "docs" / "reference" / "promises.md").read_text()
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
    faults = {f"faults/{path.name}" for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert not [path for path in faults if path not in page], "every fault test stands for a promise"


def test_nothing_waits_in_a_queue_without_end() -> None:
    """A slow reader is waited for, or learns that it missed something; it never uses up the memory."""
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    assert not [path.name for path, source in sources.items() if re.search(r"asyncio\.Queue\(\)", source)]


def test_tools_open_files_through_descriptors_alone() -> None:
    """A path that was checked is not opened by its name again: tools have no other way than `Files` and `Root`."""
    names = re.compile(r"(?<![\w.])open\(|os\.open\(|read_text\(|read_bytes\(|write_text\(")
    found = {
        path.name: names.findall(path.read_text())
        for path in (ROOT / "src" / "farhand" / "tools").glob("*.py")
        if names.search(path.read_text())
    }
    assert found == {}


def test_every_siege_is_marked_and_counts() -> None:
    """`make siege` runs what is marked; a siege that does not say how often it was tried proves little."""
    for path in (ROOT / "tests" / "faults").glob("test_*.py"):
        source = path.read_text()
        assert "pytest.mark.siege" in source, path.name
        assert "tried" in source and "held" in source, path.name
