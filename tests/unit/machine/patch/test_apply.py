"""Patches: each scenario is a folder with `input`, `patch.txt`, and `expected` or `error.txt`."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.transaction import FileChange, change_files
from farhand.machine.patch.apply import apply_patch, fit
from farhand.machine.patch.parse import Hunk
from farhand.protocol.errors import Failed, NotAllowed, ToolError

SCENARIOS = Path(__file__).parent / "patch_scenarios"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_of(folder: Path) -> Files:
    return Files(folder, roots=[ConfinedRoot(folder)], upward=False)


@pytest.mark.parametrize("name", sorted(path.name for path in SCENARIOS.iterdir() if path.is_dir()))
def test_scenario(name: str, tmp_path: Path) -> None:
    scenario, work = SCENARIOS / name, tmp_path / "work"
    shutil.copytree(scenario / "input", work)
    patch = (scenario / "patch.txt").read_bytes().decode()
    if (scenario / "error.txt").exists():
        with pytest.raises(ToolError) as raised:
            apply_patch(files_of(work), patch)
        assert (scenario / "error.txt").read_text().strip() in raised.value.message
        assert contents(work) == contents(scenario / "input")
    else:
        apply_patch(files_of(work), patch)
        assert contents(work) == contents(scenario / "expected")


def test_the_report_names_each_file_and_the_line_of_each_hunk(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("x\n")
    patch = (
        "*** Begin Patch\n*** Update File: a.txt\n@@\n-one\n+ONE\n@@\n-three\n+THREE\n"
        "*** Add File: c.txt\n+c\n*** Delete File: b.txt\n*** End Patch"
    )
    assert apply_patch(files_of(tmp_path), patch).splitlines() == [
        "applied 2 hunk(s) to a.txt",
        "hunk 1 applied at line 1",
        "hunk 2 applied at line 3",
        "added c.txt (1 lines)",
        "deleted b.txt",
    ]


def test_modes_are_kept_also_by_a_move(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo one\n")
    script.chmod(0o750)
    hunk = "@@\n-echo one\n+echo two\n*** End Patch"
    apply_patch(files_of(tmp_path), f"*** Begin Patch\n*** Update File: run.sh\n*** Move to: bin/go.sh\n{hunk}")
    assert stat.S_IMODE((tmp_path / "bin/go.sh").stat().st_mode) == 0o750
    assert not script.exists()


def test_a_link_leads_an_update_to_its_file_and_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("one\n")
    (tmp_path / "link.txt").symlink_to("real.txt")
    apply_patch(files_of(tmp_path), "*** Begin Patch\n*** Update File: link.txt\n@@\n-one\n+two\n*** End Patch")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "two\n"
    with pytest.raises(Failed, match="is a link"):
        apply_patch(files_of(tmp_path), "*** Begin Patch\n*** Delete File: link.txt\n*** End Patch")


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "secret.txt").write_text("one\n")
    (work / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(NotAllowed):
        apply_patch(files_of(work), "*** Begin Patch\n*** Update File: link.txt\n@@\n-one\n+two\n*** End Patch")
    assert (tmp_path / "secret.txt").read_text() == "one\n"


def test_a_step_that_fails_takes_back_the_earlier_ones(tmp_path: Path) -> None:
    """The second file cannot take its place, since a folder got there first; the first is as it was."""
    (tmp_path / "a.txt").write_text("one\n")

    files = files_of(tmp_path)
    (tmp_path / "blocked").mkdir()
    with pytest.raises(ToolError):
        change_files(files, [FileChange("a.txt", b"one\n", b"ONE\n"), FileChange("blocked", None, b"x")])
    assert contents(tmp_path) == {"a.txt": b"one\n"}


def test_a_file_that_changed_meanwhile_stops_the_whole_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("somebody else's\n")
    with pytest.raises(Failed, match="changed by someone else"):
        change_files(files_of(tmp_path), [FileChange("a.txt", b"one\n", b"ONE\n"), FileChange("b.txt", b"two\n", None)])
    assert contents(tmp_path) == {"a.txt": b"one\n", "b.txt": b"somebody else's\n"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {place} 2>/dev/null") != 0:
        pytest.skip("nothing can be mounted here")
    try:
        (place / "a.txt").write_text("one\n")
        big = "+" + "x" * 400_000
        patch = f"*** Begin Patch\n*** Update File: a.txt\n@@\n-one\n+ONE\n*** Add File: big.txt\n{big}\n*** End Patch"
        with pytest.raises(Failed, match="disk is full"):
            apply_patch(files_of(place), patch)
        assert contents(place) == {"a.txt": b"one\n"}
    finally:
        os.system(f"umount -l {place}")


LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8), min_size=1, max_size=20)


@given(lines=LINES, new=LINES, data=st.data())
def test_a_hunk_of_the_whole_file_turns_it_into_the_new_one(
    lines: list[str], new: list[str], data: st.DataObject
) -> None:
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    hunk = Hunk(1, (*(("-", line) for line in lines), *(("+", line) for line in new)))
    text = "".join(line + end for line in lines)
    assert fit(text, [hunk], "f")[0] == "".join(line + end for line in new)
