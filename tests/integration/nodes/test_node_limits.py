"""What a machine's owner does not lend, whatever the gateway asks: `--root`, `--read-only`, `--deny-tool`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, wait_until


class Lent:
    """A node that lends two folders of a tree; beside them lies what is not lent."""

    def __init__(self, node: NodeProcess, one: Path, two: Path, outside: Path) -> None:
        self.node = node
        self.one = one
        self.two = two
        self.outside = outside


@pytest.fixture(scope="module")
def lent(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    tree = tmp_path_factory.mktemp("tree")
    one, two, outside = tree / "one", tree / "two", tree / "one-outside"
    for folder in (one, two, outside):
        folder.mkdir()
        (folder / "file.txt").write_text(f"needle in {folder.name}\n")
    (one / "link-out").symlink_to(outside / "file.txt")
    (one / "folder-out").symlink_to(outside)
    (one / "relative-out").symlink_to("../one-outside/file.txt")
    (one / "new-out").symlink_to(outside / "new.txt")
    (one / "link-in").symlink_to(two / "file.txt")
    options = ["--root", str(one), "--root", str(two)]
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("lent"), "lent", *options) as node:
        yield Lent(node, one, two, outside)


@pytest.fixture(scope="module")
def read_only(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("museum"), "museum", "--read-only") as node:
        (node.workspace / "file.txt").write_text("old\n")
        yield node


# -- --root --------------------------------------------------------------------------------------------------------


def test_inside_the_roots_everything_works(lent: Lent) -> None:
    node = lent.node
    for root in (lent.one, lent.two):
        assert node.ok("Read", {"path": f"{root}/file.txt"})["content"] == f"1\tneedle in {root.name}"
        node.ok("Write", {"path": f"{root}/made/here.txt", "content": "a"})
        node.ok("Edit", {"path": f"{root}/made/here.txt", "oldString": "a", "newString": "b"})
        assert node.ok("Glob", {"pattern": "made/*", "path": str(root)})["matches"] == [f"{root}/made/here.txt"]
        assert (root / "made/here.txt").read_text() == "b"


def test_relative_paths_begin_at_the_first_root(lent: Lent) -> None:
    assert lent.node.ok("Read", {"path": "file.txt"})["path"] == f"{lent.one}/file.txt"


@pytest.mark.parametrize("path", ["{outside}/file.txt", "../one-outside/file.txt", "/etc/passwd", "/", ".."])
@pytest.mark.parametrize(
    ("tool", "name", "args"),
    [
        ("Read", "path", {}),
        ("Write", "path", {"content": "x"}),
        ("Edit", "path", {"oldString": "needle", "newString": "x"}),
        ("Glob", "path", {"pattern": "*"}),
        ("Grep", "path", {"pattern": "needle"}),
    ],
)
def test_outside_the_roots_nothing_works(lent: Lent, tool: str, name: str, args: dict[str, Any], path: str) -> None:
    path = path.format(outside=lent.outside)
    message = lent.node.fails(tool, {name: path, **args}, "not_allowed")
    assert "outside the allowed folders" in message
    assert (lent.outside / "file.txt").read_text() == "needle in one-outside\n"


@pytest.mark.parametrize("link", ["link-out", "relative-out", "folder-out/file.txt"])
@pytest.mark.parametrize(
    ("tool", "args"),
    [("Read", {}), ("Write", {"content": "x"}), ("Edit", {"oldString": "needle", "newString": "x"})],
)
def test_a_link_that_leads_out_is_refused(lent: Lent, tool: str, args: dict[str, Any], link: str) -> None:
    lent.node.fails(tool, {"path": link, **args}, "not_allowed")
    assert (lent.outside / "file.txt").read_text() == "needle in one-outside\n"


def test_nothing_is_made_through_a_link_that_leads_out(lent: Lent) -> None:
    for path in ("new-out", "folder-out/new.txt", "folder-out/a/b.txt"):
        lent.node.fails("Write", {"path": path, "content": "x"}, "not_allowed")
    assert os.listdir(lent.outside) == ["file.txt"]


def test_a_link_from_root_to_root_is_followed(lent: Lent) -> None:
    assert lent.node.ok("Read", {"path": "link-in"})["content"] == "1\tneedle in two"


def test_glob_shows_nothing_outside(lent: Lent) -> None:
    for pattern in ("**/*.txt", "*-out", "*-out/*", "f*/**", "*-out/"):
        matches = lent.node.ok("Glob", {"pattern": pattern})["matches"]
        assert not [match for match in matches if "-out" in match], matches


@pytest.mark.parametrize("pattern", ["/etc/*", "../one-outside/*", "folder-out/*", "{made,folder-out}/*"])
def test_a_pattern_that_leads_out_is_refused(lent: Lent, pattern: str) -> None:
    lent.node.fails("Glob", {"pattern": pattern}, "not_allowed")


def test_grep_brings_nothing_out(lent: Lent) -> None:
    matches = lent.node.ok("Grep", {"pattern": "needle"})["matches"]
    assert {match["content"] for match in matches} == {"needle in one", "needle in two"}
    lent.node.fails("Grep", {"pattern": "needle", "path": "folder-out"}, "not_allowed")


def test_without_a_sandbox_the_shell_is_refused(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    options = ["--root", str(tmp_path), "--sandbox", "none"]
    with NodeProcess(shared_gateway, tmp_path / "node", "shell-less", *options) as node:
        message = node.fails("Bash", {"command": f"touch {tmp_path}/ran"}, "not_allowed")
        assert "--allow-tool Bash" in message and not (tmp_path / "ran").exists()
        node.fails("Process", {"action": "list"}, "not_allowed")


def test_the_owner_can_lend_the_shell_all_the_same(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    """And with it the tool that watches what it started; the file tools stay confined."""
    options = ["--root", str(tmp_path), "--allow-tool", "Bash"]
    with NodeProcess(shared_gateway, tmp_path / "node", "shelled", *options) as node:
        assert node.ok("Bash", {"command": "echo hi"})["output"] == "hi\n"
        session = node.ok("Bash", {"command": "sleep 1000", "background": True})["sessionId"]
        assert node.ok("Process", {"action": "poll", "sessionId": session})["running"] is True
        node.ok("Process", {"action": "kill", "sessionId": session})
        node.fails("Read", {"path": "/etc/passwd"}, "not_allowed")


# -- --read-only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("Write", {"path": "file.txt", "content": "new"}),
        ("Write", {"path": "other.txt", "content": "new"}),
        ("Edit", {"path": "file.txt", "oldString": "old", "newString": "new"}),
        ("Bash", {"command": "touch ran"}),
        ("Bash", {"command": "touch ran", "background": True}),
        ("Process", {"action": "write", "sessionId": "x"}),
        ("Process", {"action": "submit", "sessionId": "x"}),
        ("Process", {"action": "kill", "sessionId": "x"}),
    ],
)
def test_a_read_only_node_refuses_what_acts(read_only: NodeProcess, tool: str, args: dict[str, Any]) -> None:
    assert "read-only" in read_only.fails(tool, args, "not_allowed")
    assert os.listdir(read_only.workspace) == ["file.txt"]
    assert (read_only.workspace / "file.txt").read_text() == "old\n"


def test_a_read_only_node_shows(read_only: NodeProcess) -> None:
    assert read_only.ok("Read", {"path": "file.txt"})["content"] == "1\told"
    assert read_only.ok("Glob", {"pattern": "*"})["count"] == 1
    assert read_only.ok("Grep", {"pattern": "old"})["count"] == 1
    assert read_only.ok("Process", {"action": "list"})["sessions"] == []


def test_a_node_that_becomes_read_only_shows_its_sessions_and_does_not_touch_them(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "changing") as node:
        session = node.ok("Bash", {"command": "echo up; cat", "background": True})["sessionId"]
        node.stop()
        with NodeProcess(shared_gateway, tmp_path, "changing", "--read-only") as later:
            poll = {"action": "poll", "sessionId": session}
            wait_until(lambda: later.ok("Process", poll)["tail"] == "up\n", 15, "the output")
            assert later.ok("Process", {"action": "log", "sessionId": session})["log"] == "up"
            for action in ("write", "submit", "kill"):
                later.fails("Process", {"action": action, "sessionId": session, "data": "x"}, "not_allowed")
            assert later.ok("Process", poll) | {"running": True, "tail": "up\n"} == later.ok("Process", poll)


# -- --deny-tool, secrets ------------------------------------------------------------------------------------------


def test_a_denied_tool_is_not_lent_and_the_others_are(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    options = ["--deny-tool", "Grep", "--deny-tool", "Bash", "--allow-tool", "Bash"]
    with NodeProcess(shared_gateway, tmp_path, "choosy", *options) as node:
        (node.workspace / "a").write_text("needle")
        assert "Grep" in node.fails("Grep", {"pattern": "needle"}, "not_allowed")
        assert "Bash" in node.fails("Bash", {"command": "touch ran"}, "not_allowed")
        assert not (node.workspace / "ran").exists()
        assert node.ok("Read", {"path": "a"})["lines"] == 1


@pytest.mark.parametrize(
    ("options", "sends", "receives"),
    [
        (["--deny-tool", "Read"], False, True),
        (["--deny-tool", "Write"], True, False),
        (["--read-only"], True, False),
    ],
)
def test_a_transfer_asks_the_same_limits_as_the_tools(
    shared_gateway: GatewayProcess, tmp_path: Path, options: list[str], sends: bool, receives: bool
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "carrier", *options) as node:
        (node.workspace / "there.txt").write_text("there\n")
        shared_gateway.request("PUT", "/v1/workspace/main/here.txt", b"here\n")
        for source, destination, goes in (
            ("carrier:there.txt", "gsv:agents/main/came.txt", sends),
            ("gsv:agents/main/here.txt", "carrier:came.txt", receives),
        ):
            answer = shared_gateway.invoke("gsv__Transfer", {"source": source, "destination": destination})
            assert answer["ok"] is goes, answer
            if not goes:
                assert answer["error"]["kind"] == "not_allowed", answer
                assert options[0] in answer["error"]["message"]
        assert (node.workspace / "came.txt").exists() is receives


def test_a_node_without_a_shell_answers_no_question_about_commands(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "mute", "--deny-tool", "Bash"):
        listed = shared_gateway.get("/v1/jobs?node_id=mute")
        assert (listed["jobs"], listed["unanswered"]) == ([], [])
        refused = shared_gateway.request("POST", "/v1/nodes/mute/probe", {"bins": ["sh"]})
        assert refused.status == 403 and "--deny-tool Bash" in refused.json()["error"]["message"]


@pytest.mark.parametrize("option", ["--deny-tool", "--allow-tool"])
@pytest.mark.parametrize("name", ["Bsah", "bash", ""])
def test_a_limit_on_an_unknown_tool_is_an_error(tmp_path: Path, option: str, name: str) -> None:
    """A slip of the pen must not lend what its owner meant to keep."""
    command = [*FARHAND, "node", "--gateway", "http://127.0.0.1:9", "--home", str(tmp_path), option, name]
    done = run_process(command, env={**os.environ, "SA_NODE_TOKEN": SHARED_TOKEN})
    assert done.returncode != 0 and "Bash" in done.stderr and "Traceback" not in done.stderr


def test_a_root_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    command = [*FARHAND, "node", "--gateway", "http://127.0.0.1:9", "--home", str(tmp_path), "--root", str(missing)]
    done = run_process(command, env=os.environ)
    assert done.returncode != 0 and str(missing) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["token", "farhand.db"])
def test_the_file_tools_keep_off_the_gateways_secrets(
    shared_gateway: GatewayProcess, tmp_path: Path, name: str
) -> None:
    """Where a node shares its home with a gateway, as that of `farhand up` does."""
    home = shared_gateway.home
    with NodeProcess(shared_gateway, tmp_path, "beside", state=home) as node:
        node.fails("Read", {"path": f"{home}/{name}"}, "not_allowed")
        node.fails("Write", {"path": f"{home}/{name}", "content": "x"}, "not_allowed")
        (node.workspace / "link").symlink_to(home / name)
        node.fails("Read", {"path": "link"}, "not_allowed")
        node.fails("Glob", {"pattern": name, "path": str(home)}, "not_allowed")
        found = node.ok("Glob", {"pattern": f"**/{name}", "path": str(home.parent)})["matches"]
        assert [path for path in found if path.startswith(f"{home}/")] == []
        node.fails("Grep", {"pattern": shared_gateway.token, "path": str(home)}, "not_allowed")
        assert node.ok("Grep", {"pattern": shared_gateway.token, "path": str(home.parent)})["matches"] == []
