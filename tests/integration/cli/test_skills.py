"""`farhand skills` against a real gateway; one test for each promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A skill that is not added yet; each test has one of its own name."""
    folder = tmp_path / f"skill-{tmp_path.name}"
    folder.mkdir()
    (folder / "SKILL.md").write_text("---\ndescription: Does things.\n---\n")
    return folder


def stored(gateway: GatewayProcess, folder: Path, agent: str | None = None) -> dict[str, str]:
    """The files of a skill, as they lie in the gateway."""
    home = gateway.home / "agents" / agent if agent else gateway.home
    top = home / "skills" / folder.name
    return {path.relative_to(top).as_posix(): path.read_text() for path in top.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["/etc/passwd", "../beside"])
def test_a_link_that_leads_out_of_a_skill_is_refused(
    command: Command, shared_gateway: GatewayProcess, folder: Path, target: str
) -> None:
    (folder.parent / "beside").write_text("secret")
    (folder / "out").symlink_to(target)
    outcome = command("skills", "add", str(folder))
    assert outcome.status == 1 and "'out', which points outside it" in outcome.err, outcome
    assert stored(shared_gateway, folder) == {}


def test_a_link_to_a_file_of_the_skill_is_that_file(
    command: Command, shared_gateway: GatewayProcess, folder: Path
) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "a").write_text("a")
    (folder / "link").symlink_to("in/a")
    assert command("skills", "add", str(folder)).status == 0
    assert stored(shared_gateway, folder)["link"] == "a"


@pytest.mark.parametrize("agent", [None, "helper"])
def test_a_skill_that_is_added_again_becomes_what_the_folder_is(
    command: Command, shared_gateway: GatewayProcess, folder: Path, agent: str | None
) -> None:
    options = ("--agent", agent) if agent else ()
    (folder / "old.md").write_text("old")
    (folder / "turns").write_text("a file")
    assert command("skills", "add", str(folder), *options).status == 0
    (folder / "old.md").unlink()
    (folder / "turns").unlink()
    (folder / "turns").mkdir()
    (folder / "turns" / "inside").write_text("in a folder")
    (folder / "SKILL.md").write_text("second")
    outcome = command("skills", "add", str(folder), *options, "--json")
    assert outcome.status == 0 and outcome.json()["removed"] == ["old.md", "turns"], outcome
    assert stored(shared_gateway, folder, agent) == {"SKILL.md": "second", "turns/inside": "in a folder"}


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bin", b"# A\x00B"])
def test_a_skill_file_that_is_not_text_is_refused(
    command: Command, shared_gateway: GatewayProcess, folder: Path, content: bytes
) -> None:
    (folder / "SKILL.md").write_bytes(content)
    outcome = command("skills", "add", str(folder))
    assert outcome.status == 1 and "SKILL.md is not UTF-8 text" in outcome.err, outcome
    assert stored(shared_gateway, folder) == {}


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b"])
def test_a_name_that_no_skill_has_is_not_removed(command: Command, name: str) -> None:
    outcome = command("skills", "remove", name)
    assert outcome.status == 1 and f"{name!r} is not the name of a skill" in outcome.err, outcome


def test_a_file_of_a_skill_is_removed_by_itself(command: Command, shared_gateway: GatewayProcess, folder: Path) -> None:
    (folder / "more.md").write_text("more")
    assert command("skills", "add", str(folder)).status == 0
    path = f"/v1/skills/{folder.name}"
    assert shared_gateway.get(path) == {"name": folder.name, "files": ["SKILL.md", "more.md"], "count": 2}
    assert shared_gateway.request("DELETE", f"{path}/more.md").status == 200
    assert shared_gateway.request("DELETE", f"{path}/more.md").status == 404
    assert shared_gateway.get(path)["files"] == ["SKILL.md"]
    assert shared_gateway.request("DELETE", f"{path}/").status == 400
    assert shared_gateway.request("GET", "/v1/skills/none").status == 404
