"""A node does not lend a folder with its own state, or in which a command could replace its home."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.node.confinement import refuse_reachable_home
from farhand.protocol.errors import FarhandError


def refused(roots: list[Path], home: Path, *, commands: bool = True) -> bool:
    for folder in (home, *roots):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        refuse_reachable_home([str(root) for root in roots], home, commands=commands)
    except FarhandError as error:
        assert "choose a home elsewhere with --home" in str(error)
        return True
    return False


def test_a_home_deep_within_a_lent_folder_is_refused(tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    assert refused([lent], lent / "me" / "home")
    (tmp_path / "link").symlink_to(lent / "me")
    assert refused([tmp_path / "other", lent], tmp_path / "link" / "home")


@pytest.mark.parametrize("target", ["/elsewhere", "../elsewhere", "/through/home"])
def test_a_link_within_a_lent_folder_does_not_lead_to_the_home(tmp_path: Path, target: str) -> None:
    """A command could replace the link by a home with other limits."""
    lent = tmp_path / "lent"
    for folder in (lent, tmp_path / "elsewhere"):
        folder.mkdir()
    (tmp_path / "through").symlink_to(tmp_path)
    (tmp_path / "home").symlink_to(tmp_path / "elsewhere")
    (lent / "link").symlink_to(target if target.startswith("..") else f"{tmp_path}{target}")
    assert refused([lent], lent / "link")
    assert refused([lent], lent / "link" / "inner")
    (tmp_path / "outer").symlink_to(lent / "link")
    assert refused([lent], tmp_path / "outer" / "inner")


@pytest.mark.parametrize("commands", [True, False])
@pytest.mark.parametrize("root", [".", "nodes", "nodes/me-1", "undo", "link"])
def test_the_state_of_a_node_is_not_lent(tmp_path: Path, root: str, commands: bool) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(home / "nodes" / "me-1")
    (home / "nodes" / "me-1").mkdir(parents=True)
    assert refused([home / root], home, commands=commands)


@pytest.mark.parametrize("home", ["lent/home", "lent-2/me/home", "home"])
def test_other_places_are_accepted(tmp_path: Path, home: str) -> None:
    assert not refused([tmp_path / "lent"], tmp_path / home)
    assert not refused([tmp_path / home / "workspace"], tmp_path / home)
