"""A skill is a real, read-only folder for the agent's file and shell tools, whichever engine keeps its objects."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess
from tests.support.model_server import text

SKILL = """---
name: {name}
description: Converts tables. Use when a user hands over a spreadsheet.
license: MIT
allowed-tools: [read, exec]
metadata: {{"openclaw": {{"emoji": "x"}}}}
---
# Tables

Run `{{baseDir}}/scripts/convert.py IN OUT`. The formats are in [formats](references/formats.md).
"""


def make_skill(folder: Path, name: str) -> Path:
    """A skill as they are published: instructions, scripts that can be run, references, assets."""
    top = folder / name
    for inner in ("scripts/lib", "references", "assets"):
        (top / inner).mkdir(parents=True)
    (top / "SKILL.md").write_text(SKILL.format(name=name))
    script = top / "scripts" / "convert.py"
    script.write_text(
        "#!/usr/bin/env python3\nimport sys, pathlib\nprint('converted', pathlib.Path(sys.argv[1]).name)\n"
    )
    script.chmod(0o755)
    (top / "scripts" / "lib" / "common.sh").write_text("greet() { echo sourced; }\n")
    (top / "references" / "formats.md").write_text("# Formats\nSee {baseDir}/assets. The needle is here.\n")
    (top / "assets" / "logo.bin").write_bytes(bytes(range(256)))
    (top / "LICENSE.txt").write_text("MIT\n")
    return top


def farhand(gateway: GatewayProcess, *words: str) -> None:
    done = run_process(
        [*FARHAND, *words, "--url", gateway.url],
        env={"FARHAND_TOKEN": gateway.token, "PATH": "/usr/bin:/bin", "HOME": str(gateway.home)},
    )
    assert done.returncode == 0, done.stderr


class Hands:
    """The agent's tools, called one by one."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.gateway = house.gateway

    def ok(self, tool: str, **arguments: Any) -> str:
        answer = self.gateway.invoke(tool, arguments)
        assert answer["ok"], answer
        return str(answer["result"]["content"])

    def fails(self, tool: str, **arguments: Any) -> Any:
        answer = self.gateway.invoke(tool, arguments)
        assert not answer["ok"], answer
        return answer["error"]

    def listed(self, name: str, agent: str = "main") -> str:
        """The path of a skill's file, as the prompt of a session tells it."""
        session = self.house.session(text("ok"))
        key = session.key if agent == "main" else f"agent:{agent}:{session.key}"
        body = {"message": f"[{session.key}] hello", "wait_seconds": 20}
        answer = self.gateway.request("POST", f"/v1/sessions/{key}/messages", body)
        assert answer.status == 200, answer
        prompt = str(session.asked()[0].messages[0]["content"])
        found = re.search(rf"^- {re.escape(name)}: .* \((.*SKILL\.md)\)$", prompt, re.MULTILINE)
        assert found is not None, prompt
        return found[1]


def check_readable(hands: Hands, path: str) -> None:
    base = path.removesuffix("/SKILL.md")
    assert "# Tables" in hands.ok("read", path=path)
    assert "The needle" in hands.ok("read", path=f"{base}/references/formats.md")
    assert "convert.py (file" in hands.ok("ls", path=f"{base}/scripts")
    assert "references/formats.md:2:" in hands.ok("grep", pattern="needle", path=base)
    assert "scripts/convert.py" in hands.ok("glob", pattern="**/*.py", path=base)
    absolute = re.search(r"Run `(.*)/scripts/convert\.py", hands.ok("read", path=path))
    assert absolute is not None and Path(absolute[1]).is_absolute(), path
    assert f"See {absolute[1]}/assets" in hands.ok("read", path=f"{base}/references/formats.md")
    assert "converted a.xlsx" in hands.ok("exec", command=f"{absolute[1]}/scripts/convert.py /x/a.xlsx")
    assert "sourced" in hands.ok("exec", command=". ./lib/common.sh; greet", workdir=f"{base}/scripts")


def check_read_only(hands: Hands, path: str) -> None:
    base = path.removesuffix("/SKILL.md")
    for tool, arguments in (
        ("write", {"path": path, "content": "x"}),
        ("write", {"path": f"{base}/new/file.md", "content": "x"}),
        ("edit", {"path": path, "old_text": "# Tables", "new_text": "# Chairs"}),
        ("apply_patch", {"patch": f"*** Begin Patch\n*** Delete File: {base}/LICENSE.txt\n*** End Patch"}),
        ("apply_patch", {"patch": f"*** Begin Patch\n*** Add File: {base}/more.md\n+x\n*** End Patch"}),
    ):
        error = hands.fails(tool, **arguments)
        assert error["kind"] == "not_allowed" and "read-only" in error["message"], (tool, error)
    assert "# Tables" in hands.ok("read", path=path)


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hands]:
    folder = tmp_path_factory.mktemp("skills")
    (folder / "home").mkdir()
    (folder / "home" / "farhand.toml").write_text("[agents.helper]\n")
    for house in open_house(folder / "home"):
        yield Hands(house)


def test_a_skill_for_all_agents(hands: Hands, tmp_path: Path) -> None:
    farhand(hands.gateway, "skills", "add", str(make_skill(tmp_path, "tables")))
    check_readable(hands, "skills/tables/SKILL.md")
    path = hands.listed("tables")
    check_readable(hands, path)
    check_read_only(hands, path)
    check_readable(hands, hands.listed("tables", "helper"))


def test_a_changed_skill_is_read_as_it_is_now_and_a_removed_one_is_gone(hands: Hands, tmp_path: Path) -> None:
    top = make_skill(tmp_path, "moving")
    farhand(hands.gateway, "skills", "add", str(top))
    path = hands.listed("moving")
    base = path.removesuffix("/SKILL.md")
    (top / "references" / "formats.md").unlink()
    (top / "SKILL.md").write_text(SKILL.format(name="moving").replace("# Tables", "# Chairs"))
    farhand(hands.gateway, "skills", "add", str(top))
    assert "# Chairs" in hands.ok("read", path=path)
    hands.fails("read", path=f"{base}/references/formats.md")
    farhand(hands.gateway, "skills", "remove", "moving")
    hands.fails("read", path=path)


def test_an_agent_s_own_skill(hands: Hands, tmp_path: Path) -> None:
    top = make_skill(tmp_path, "private")
    for agent in ("main", "helper"):
        farhand(hands.gateway, "skills", "add", str(top), "--agent", agent)
        if agent == "main":  # its workspace is where the tools work
            (hands.gateway.home / "agents/main/skills/private/scripts/convert.py").chmod(0o755)
        check_readable(hands, hands.listed("private", agent))


def test_an_agent_s_files_lie_over_those_of_all(hands: Hands, tmp_path: Path) -> None:
    farhand(hands.gateway, "skills", "add", str(make_skill(tmp_path, "mixed")))
    own = hands.gateway.home / "agents" / "main" / "skills" / "mixed"
    own.mkdir(parents=True)
    (own / "SKILL.md").write_text(SKILL.format(name="mixed").replace("# Tables", "# My Tables"))
    path = hands.listed("mixed")
    assert "# My Tables" in hands.ok("read", path=path)
    assert "The needle" in hands.ok("read", path=path.replace("SKILL.md", "references/formats.md"))


def test_a_skill_that_models_may_not_invoke_is_not_listed(hands: Hands, tmp_path: Path) -> None:
    top = make_skill(tmp_path, "by-hand")
    skill = (top / "SKILL.md").read_text().replace("license: MIT", "disable-model-invocation: true")
    (top / "SKILL.md").write_text(skill)
    farhand(hands.gateway, "skills", "add", str(top))
    assert any(one["name"] == "by-hand" for one in hands.gateway.get("/v1/skills")["skills"])
    session = hands.house.session(text("ok"))
    session.send()
    assert "- by-hand" not in str(session.asked()[0].messages[0]["content"])


def test_other_folders_of_the_home_stay_closed(hands: Hands) -> None:
    home = hands.gateway.home
    for path in (home / "token", home / "skill-files" / ".." / "token", home / "skills", home / "farhand.db"):
        assert hands.fails("read", path=str(path))["kind"] == "not_allowed", path


def test_the_skills_of_a_workspace_elsewhere(tmp_path: Path) -> None:
    workspace = tmp_path / "project"
    make_skill(workspace / "skills", "here")
    (workspace / "skills" / "leak").mkdir()
    (workspace / "skills" / "leak" / "SKILL.md").symlink_to(tmp_path / "home" / "token")
    for house in open_house(tmp_path / "home", arguments=("--workspace", str(workspace))):
        hands = Hands(house)
        path = hands.listed("here")
        check_readable(hands, path)
        farhand(hands.gateway, "skills", "add", str(make_skill(tmp_path, "all")))
        check_readable(hands, hands.listed("all"))
        farhand(hands.gateway, "skills", "add", str(make_skill(tmp_path, "mine")), "--agent", "main")
        check_readable(hands, hands.listed("mine"))
        states = {one["name"]: one for one in hands.gateway.get("/v1/skills")["skills"]}
        assert states["here"]["eligible"] and not states["leak"]["eligible"]


def test_skills_kept_in_s3(tmp_path: Path, bucket: tuple[str, str]) -> None:
    place, endpoint = bucket
    environment = {
        "FARHAND_OBJECTS_URL": f"{place}/skill-folders",
        "FARHAND_OBJECTS_ENDPOINT": endpoint,
        "FARHAND_OBJECTS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "FARHAND_OBJECTS_SECRET_ACCESS_KEY": "hunter2hunter2",
    }
    for house in open_house(tmp_path / "home", **environment):
        hands = Hands(house)
        for options in ((), ("--agent", "main")):
            top = make_skill(tmp_path / f"source{len(options)}", f"stored{len(options)}")
            farhand(hands.gateway, "skills", "add", str(top), *options)
            path = hands.listed(top.name)
            check_readable(hands, path)
            check_read_only(hands, path)
        Path(path).chmod(0o644)
        Path(path).write_text("changed behind its back")
        assert "# Tables" in hands.ok("read", path=hands.listed(top.name))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_skills_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "farhand.toml").write_text("[sandbox]\nenabled = true\n")
    for house in open_house(tmp_path / "home"):
        hands = Hands(house)
        farhand(hands.gateway, "skills", "add", str(make_skill(tmp_path, "tables")))
        path = hands.listed("tables")
        check_readable(hands, path)
        said = hands.ok("exec", command=f"echo x >> {path}; rm -rf {Path(path).parent}")
        assert "Read-only file system" in said, said
        assert "# Tables" in hands.ok("read", path=path)
