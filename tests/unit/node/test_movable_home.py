"""A node does not lend a folder in which a command could move the node's own home."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.node.confinement import _refuse_movable_home
from farhand.protocol.errors import FarhandError


def test_a_home_deep_within_a_lent_folder_is_refused(tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    (lent / "me" / "home").mkdir(parents=True)
    with pytest.raises(FarhandError, match="choose a home elsewhere with --home"):
        _refuse_movable_home([str(lent)], lent / "me" / "home")
    (tmp_path / "link").symlink_to(lent / "me")
    with pytest.raises(FarhandError):
        _refuse_movable_home([str(tmp_path / "other"), str(lent)], tmp_path / "link" / "home")


def test_other_places_are_accepted(tmp_path: Path) -> None:
    for home in ("lent/home", "lent-2/me/home", "home"):
        (tmp_path / home).mkdir(parents=True)
        _refuse_movable_home([str(tmp_path / "lent")], tmp_path / home)
