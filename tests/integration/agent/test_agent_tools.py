"""The agent's file and runtime tools, as the agent tools reference promises them, over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, wait_until
from tests.unit.machine.test_patch_kills import HALF_WAY, PATCH, make, patch, tree

SEED_PARAMETERS = {
    "read": ({"path", "offset", "limit"}, {"path"}),
    "write": ({"path", "content"}, {"path", "content"}),
    "edit": ({"path", "old_text", "new_text"}, {"path", "old_text", "new_text"}),
    "apply_patch": ({"patch"}, {"patch"}),
    "grep": ({"pattern", "path", "include"}, {"pattern"}),
    "glob": ({"pattern", "path"}, {"pattern"}),
    "ls": ({"path"}, {"path"}),
    "exec": ({"command", "workdir", "env", "background", "timeout"}, {"command"}),
    "process": ({"action", "process_id", "input", "signal"}, {"action", "process_id"}),
}


class Hands:
    """The tools of one gateway, and the folder they work in."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.folder = gateway.home / "agents" / "main"

    def ok(self, tool: str, **args: Any) -> str:
        answer = self.gateway.invoke(tool, args)
        assert answer["ok"], answer
        assert answer["route"]["kind"] == "local"
        assert set(answer["result"]) == {"content"}
        return str(answer["result"]["content"])

    def fails(self, tool: str, kind: str, **args: Any) -> str:
        answer = self.gateway.invoke(tool, args)
        assert not answer["ok"], answer
        assert answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])

    def put(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@pytest.fixture
def agent(shared_gateway: GatewayProcess) -> Hands:
    hands = Hands(shared_gateway)
    for entry in hands.folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return hands


def test_the_tools_are_listed_under_plain_names_with_the_parameters_of_the_seed(agent: Hands) -> None:
    offers = {offer["name"]: offer for offer in agent.gateway.get("/v1/tools")["tools"]}
    for name, (parameters, required) in SEED_PARAMETERS.items():
        schema = offers[name]["parameters"]
        assert schema["type"] == "object"
        beyond_the_seed = {"trial"} if name == "exec" else set()
        assert set(schema["properties"]) == parameters | beyond_the_seed, name
        assert set(schema["required"]) == required, name
        assert offers[name]["description"]


# -- read -------------------------------------------------------------------------------------------------------


def test_read_numbers_lines_from_one(agent: Hands) -> None:
    agent.put("a.txt", "one\ntwo\nthree\n")
    assert agent.ok("read", path="a.txt") == "     1\tone\n     2\ttwo\n     3\tthree\n"


def test_read_offset_counts_from_zero_and_limit_counts_lines(agent: Hands) -> None:
    agent.put("a.txt", "".join(f"line {number}\n" for number in range(1, 11)))
    assert agent.ok("read", path="a.txt", offset=5, limit=2) == "     6\tline 6\n     7\tline 7\n"
    assert agent.ok("read", path="a.txt", offset=50) == ""
    assert agent.ok("read", path="a.txt", limit=0) == ""


def follow(agent: Hands, path: str, **more: Any) -> tuple[str, int]:
    """The whole file, read page by page as the notices say, and the number of pages."""
    text, pages = "", 0
    at = {"offset": 0, "skip_bytes": 0}
    while True:
        page = agent.ok("read", path=path, **at, **more)
        pages += 1
        body, notice, rest = page.partition("[read output truncated at")
        found = {name: int(number) for name, number in re.findall(r"(offset|skip_bytes)=(\d+)", rest)}
        if "skip_bytes" in found:
            body = body.removesuffix("\n")  # that one belongs to the notice: the line goes on
        text += "".join(line.partition("\t")[2] for line in re.findall(r".*?\n|.+\Z", body, re.DOTALL))
        if not notice:
            return text, pages
        assert found, page[-200:]
        after = {"skip_bytes": 0, **found}
        assert tuple(after.values()) != tuple(at.values())
        at = after


def test_read_pages_of_50_kb_and_following_the_notice_reproduces_the_file(agent: Hands) -> None:
    content = "".join(f"{number} {'größe ' * (number % 9)}\n" for number in range(6000))
    agent.put("big.txt", content)
    text, pages = follow(agent, "big.txt")
    assert text == content
    assert pages > 3


def test_read_with_a_limit_gives_up_to_512_kb(agent: Hands) -> None:
    content = "".join(f"{number} {'x' * 90}\n" for number in range(12000))
    agent.put("big.txt", content)
    page = agent.ok("read", path="big.txt", limit=100_000)
    assert 500 * 1024 < len(page.encode()) <= 512 * 1024
    assert "[read output truncated at 512KB]" in page
    assert follow(agent, "big.txt", limit=100_000)[0] == content


def test_read_of_a_line_longer_than_a_page_gives_the_whole_line(agent: Hands) -> None:
    agent.put("wide.txt", "x" * 200_000 + "\nshort\n")
    assert agent.ok("read", path="wide.txt").startswith("     1\t" + "x" * 200_000 + "\n")
    agent.put("wider.txt", "x" * 2_000_000 + "\nshort\n")
    page = agent.ok("read", path="wider.txt")
    assert 500 * 1024 < len(page) <= 512 * 1024
    assert "inside of line 1" in page and "offset=0 skip_bytes=" in page


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"one\r\ntwo\r\n\r\nfour\r\n", id="windows lines"),
        pytest.param(b"".join(b"%d windows\r\n" % number for number in range(9000)), id="pages of windows lines"),
        pytest.param(b"mixed\r\nlines\nand\rold ones\r\r\n", id="mixed lines"),
        pytest.param(b"one\ntwo", id="no line end at the end"),
        pytest.param(b"x" * 40_000 + b"\n" + b"y" * 40_000, id="pages without a line end"),
        pytest.param(b"one\r", id="half a windows line end"),
        pytest.param(b"\n\n\n\r\n\n", id="empty lines"),
        pytest.param(b"\n" * 20_000, id="pages of empty lines"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xef\xbb\xbfmarked\n", id="byte order mark"),
        pytest.param("\x0b\x0c\x85\u2028\u2029\t \n".encode() * 9, id="other separators"),
        pytest.param(b"  12\tnumbered\n[read it]\n", id="lines like ours"),
        pytest.param(("ü" * 60_000 + "\n").encode() * 3, id="long lines"),
        pytest.param(("x" + "€" * 700_000 + "\r\nend").encode(), id="a line longer than any page"),
        pytest.param(("€🎉é" * 200_000).encode(), id="characters cut at the border"),
    ],
)
def test_the_pages_of_read_are_the_file_byte_for_byte(agent: Hands, content: bytes) -> None:
    agent.put("file", content)
    assert follow(agent, "file")[0].encode() == content
    assert follow(agent, "file", limit=100_000)[0].encode() == content


def test_a_page_is_never_larger_than_it_may_be(agent: Hands) -> None:
    agent.put("file", ("€" * 5_000 + "\n") * 100)
    page = agent.ok("read", path="file")
    assert 35 * 1024 < len(page.encode()) <= 50 * 1024
    assert len(agent.ok("read", path="file", limit=1000).encode()) <= 512 * 1024


def test_read_cannot_skip_more_than_a_line_has(agent: Hands) -> None:
    agent.put("file", "short\nlonger line\n")
    assert agent.ok("read", path="file", offset=1, skip_bytes=7) == "     2\tline\n"
    assert "cannot be skipped" in agent.fails("read", "invalid_args", path="file", skip_bytes=7)
    assert "cannot be skipped" in agent.fails("read", "invalid_args", path="file", offset=2, skip_bytes=1)


@pytest.mark.parametrize("content", [b"a\0b\n", b"text\n\xff\xfe\n", b"caf\xe9\n", b"\x7fELF\x02\x01\x01\0"])
def test_binary_data_is_refused(agent: Hands, content: bytes) -> None:
    agent.put("file", content)
    assert "binary file" in agent.fails("read", "failed", path="file")


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("missing.txt", "not_found", "No such file"),
        ("folder", "failed", "directory"),
        ("", "invalid_args", "read parameter path is required"),
        ("../../token", "not_allowed", "'..'"),
        ("/etc/passwd", "not_allowed", "protected folder"),
        ("etc-link", "not_allowed", "protected folder"),
        ("token-link", "not_allowed", ""),
        ("pipe", "failed", "named pipe"),
        ("binary", "failed", "binary file"),
    ],
)
def test_read_refuses(agent: Hands, path: str, kind: str, text: str) -> None:
    (agent.folder / "folder").mkdir()
    (agent.folder / "etc-link").symlink_to("/etc/passwd")
    (agent.folder / "token-link").symlink_to(agent.gateway.home / "token")
    os.mkfifo(agent.folder / "pipe")
    agent.put("binary", b"\x7fELF\0\0")
    assert text in agent.fails("read", kind, path=path)


@pytest.mark.parametrize(
    ("tool", "args", "text"),
    [
        ("read", {}, "read parameter path is required"),
        ("read", {"path": 3}, "'path'"),
        ("read", {"path": "a", "offset": -1}, "'offset'"),
        ("write", {"path": "a"}, "write parameter content is required"),
        ("write", {"content": "a"}, "write parameter path is required"),
        ("edit", {"path": "a", "old_text": "", "new_text": "b"}, "edit parameter old_text is required"),
        ("apply_patch", {}, "apply_patch parameter patch is required"),
        ("grep", {}, "grep parameter pattern is required"),
        ("glob", {}, "glob parameter pattern is required"),
        ("ls", {}, "ls parameter path is required"),
        ("exec", {}, "exec parameter command is required"),
        ("exec", {"command": " "}, "exec parameter command is required"),
        ("exec", {"command": "true", "timeout": "soon"}, "'timeout'"),
        ("process", {"process_id": "x"}, "process parameter action is required"),
        ("process", {"action": "poll"}, "process parameter process_id is required"),
        ("process", {"action": "dance", "process_id": "x"}, "must be one of status, input, signal, poll"),
    ],
)
def test_missing_and_mistyped_parameters_are_named(agent: Hands, tool: str, args: dict[str, Any], text: str) -> None:
    assert text in agent.fails(tool, "invalid_args", **args)


# -- write and edit ---------------------------------------------------------------------------------------------


def test_write_makes_folders_counts_bytes_and_overwrites_entirely(agent: Hands) -> None:
    assert agent.ok("write", path="deep/er/a.txt", content="größe") == "wrote 7 bytes to deep/er/a.txt"
    assert agent.ok("write", path="deep/er/a.txt", content="x") == "wrote 1 bytes to deep/er/a.txt"
    assert (agent.folder / "deep/er/a.txt").read_text() == "x"
    assert agent.ok("write", path="empty.txt", content="") == "wrote 0 bytes to empty.txt"


def test_write_without_create_dirs_names_the_missing_parent(agent: Hands) -> None:
    assert 'parent directory "' in agent.fails("write", "not_found", path="no/a.txt", content="x", create_dirs=False)
    assert not (agent.folder / "no").exists()


def test_write_goes_nowhere_else(agent: Hands, tmp_path: Path) -> None:
    (agent.folder / "out").symlink_to(tmp_path)
    for path in ("out/a.txt", str(tmp_path / "a.txt"), "../a.txt", "/etc/farhand-test", str(agent.gateway.home / "x")):
        agent.fails("write", "not_allowed", path=path, content="x")
    assert not list(tmp_path.iterdir())


def test_edit_replaces_the_one_place_and_keeps_the_rest(agent: Hands) -> None:
    agent.put("a.txt", b"one\r\ntwo\nthree")
    said = agent.ok("edit", path="a.txt", old_text="two\nth", new_text="2\nth")
    assert said == "--- a.txt\n+++ a.txt\n@@ replaced 1 occurrence(s) @@\n-two\\nth\n+2\\nth"
    assert (agent.folder / "a.txt").read_bytes() == b"one\r\n2\nthree"


def test_edit_refuses_what_is_not_there_or_not_unique(agent: Hands) -> None:
    agent.put("a.txt", "x y x")
    assert agent.fails("edit", "failed", path="a.txt", old_text="z", new_text="1") == 'old_text not found in "a.txt"'
    text = agent.fails("edit", "failed", path="a.txt", old_text="x", new_text="1")
    assert text == 'old_text must be unique in "a.txt" (found 2 matches)'
    assert (agent.folder / "a.txt").read_text() == "x y x"
    agent.ok("edit", path="a.txt", old_text="x", new_text="1", replace_all=True)
    assert (agent.folder / "a.txt").read_text() == "1 y 1"


def test_edit_of_several_lines_takes_a_file_with_windows_lines(agent: Hands) -> None:
    agent.put("a.txt", b"one\r\ntwo\r\nthree\r\n")
    agent.ok("edit", path="a.txt", old_text="one\ntwo", new_text="1\n2")
    assert (agent.folder / "a.txt").read_bytes() == b"1\r\n2\r\nthree\r\n"


# -- apply_patch ------------------------------------------------------------------------------------------------


def test_apply_patch_adds_updates_and_deletes(agent: Hands) -> None:
    agent.put("existing.go", "package main\nunchanged\nold line\n")
    agent.put("remove.go", "x\n")
    agent.ok(
        "apply_patch",
        patch="*** Begin Patch\n*** Add File: path/to/new.go\n+package main\n+...\n\n"
        "*** Update File: existing.go\n@@ package main @@\n unchanged\n-old line\n+new line\n\n"
        "*** Delete File: remove.go\n*** End Patch",
    )
    assert (agent.folder / "path/to/new.go").read_text() == "package main\n...\n"
    assert (agent.folder / "existing.go").read_text() == "package main\nunchanged\nnew line\n"
    assert not (agent.folder / "remove.go").exists()


def test_apply_patch_is_all_or_nothing(agent: Hands) -> None:
    agent.put("a.txt", "one\n")
    text = agent.fails(
        "apply_patch",
        "failed",
        patch="*** Begin Patch\n*** Add File: new.txt\n+x\n*** Update File: a.txt\n@@\n-two\n+2\n*** End Patch",
    )
    assert "a.txt: hunk 1 failed" in text
    assert sorted(path.name for path in agent.folder.iterdir()) == ["a.txt"]


def test_a_patch_that_a_kill_broke_off_is_undone_at_the_next_start(tmp_path: Path) -> None:
    """Where exactly a kill may fall is tested in tests/unit/machine/test_patch_kills.py."""
    with GatewayProcess(tmp_path) as gateway:
        gateway.kill()
        folder = gateway.home / "agents" / "main"
        make(folder)
        before = tree(folder)
        assert patch(folder, gateway.home / "changes", HALF_WAY).returncode == -9
        assert tree(folder) != before and list((gateway.home / "changes").iterdir())
        gateway.start()
        assert tree(folder) == before
        assert gateway.invoke("apply_patch", {"patch": PATCH})["ok"]
        assert (folder / "e.txt").read_text() == "FIVE\n" and not list((gateway.home / "changes").iterdir())


def test_apply_patch_keeps_to_the_rule_of_paths(agent: Hands, tmp_path: Path) -> None:
    for path in ("../x", str(tmp_path / "x"), "/usr/x"):
        agent.fails("apply_patch", "not_allowed", patch=f"*** Begin Patch\n*** Add File: {path}\n+x\n*** End Patch")
    assert not (tmp_path / "x").exists()


# -- grep, glob, ls ---------------------------------------------------------------------------------------------


def test_grep_gives_paths_line_numbers_and_lines(agent: Hands) -> None:
    agent.put("a.go", "package main\nfunc One() {}\n")
    agent.put("sub/b.go", "func Two() {}\n")
    agent.put("c.md", "func in prose\n")
    assert agent.ok("grep", pattern=r"func \w+\(", include="*.go") == "a.go:2:func One() {}\nsub/b.go:1:func Two() {}"
    assert agent.ok("grep", pattern="func", path="sub") == "sub/b.go:1:func Two() {}"
    assert agent.ok("grep", pattern="func", include="**/b.*") == "sub/b.go:1:func Two() {}"
    assert agent.ok("grep", pattern="func", exclude="*.go") == "c.md:1:func in prose"
    assert agent.ok("grep", pattern="nowhere") == ""


def test_grep_skips_binary_and_ignored_files_and_shows_context(agent: Hands) -> None:
    agent.put("bin", b"needle\0\n")
    agent.put(".gitignore", "ignored/\n")
    agent.put("ignored/a.txt", "needle\n")
    agent.put("a.txt", "one\ntwo needle\nthree\n")
    assert agent.ok("grep", pattern="needle") == "a.txt:2:two needle"
    assert agent.ok("grep", pattern="needle", context_lines=1) == "a.txt:1:one\na.txt:2:two needle\na.txt:3:three"


def test_grep_shows_each_line_once_whatever_the_context(agent: Hands) -> None:
    agent.put("a.txt", "\n".join("needle" if number in (3, 4, 9, 20) else str(number) for number in range(1, 31)))
    found = agent.ok("grep", pattern="needle", context_lines=2).splitlines()
    assert [int(line.split(":")[1]) for line in found] == [*range(1, 12), *range(18, 23)]
    agent.put("a.txt", "x" * 50_000 + "\nneedle\r\n" + "y" * 50_000)
    found = agent.ok("grep", pattern="needle", context_lines=100).splitlines()
    assert [line[:9] for line in found] == ["a.txt:1:x", "a.txt:2:n", "a.txt:3:y"] and len(found[0]) < 2000


def test_grep_with_context_reads_a_file_once_and_has_a_bound(agent: Hands) -> None:
    agent.put("big.txt", "match this line please\n" * 100_000)
    began = time.monotonic()
    found = agent.ok("grep", pattern="match", max_results=10_000, context_lines=100)
    assert len(found) < 600_000
    agent.put("big.txt", ("match" + "x" * 2000 + "\n") * 10_000)
    found = agent.ok("grep", pattern="match", max_results=10_000, context_lines=100)
    assert len(found) < 600_000 and "truncated at 500000 characters" in found.splitlines()[-1]
    assert time.monotonic() - began < 30


def test_grep_says_when_there_is_more(agent: Hands) -> None:
    agent.put("a.txt", "needle\n" * 150)
    lines = agent.ok("grep", pattern="needle").splitlines()
    assert len(lines) == 101 and "truncated at 100 matches" in lines[-1]


def test_grep_refuses_bad_expressions_and_paths(agent: Hands) -> None:
    assert "invalid regular expression" in agent.fails("grep", "invalid_args", pattern="(")
    agent.fails("grep", "not_found", pattern="x", path="nowhere")
    agent.fails("grep", "not_allowed", pattern="root", path="/etc")


def test_glob_gives_sorted_paths(agent: Hands) -> None:
    for name in ("b.go", "a.go", "sub/c.go", "sub/d.md"):
        agent.put(name, "")
    assert agent.ok("glob", pattern="**/*.go") == "a.go\nb.go\nsub/c.go"
    assert agent.ok("glob", pattern="*.md", path="sub") == "sub/d.md"
    assert agent.ok("glob", pattern="*.rs") == ""
    for pattern in ("../*", "/etc/*"):
        agent.fails("glob", "not_allowed", pattern=pattern)


def test_ls_gives_types_and_sizes(agent: Hands) -> None:
    agent.put("a.txt", "12345")
    agent.put("dir/b.txt", "1")
    agent.put(".hidden", "")
    (agent.folder / "link").symlink_to("a.txt")
    lines = agent.ok("ls", path=".").splitlines()
    assert lines[0] == "a.txt (file, 5)"
    assert re.fullmatch(r"dir \(dir, \d+\)", lines[1])
    assert lines[2].startswith("link (symlink, ")
    assert len(lines) == 3
    assert ".hidden (file, 0)" in agent.ok("ls", path=".", show_hidden=True)
    assert "│   └── b.txt (file, 1)" in agent.ok("ls", path=".", depth=2)
    assert agent.fails("ls", "invalid_args", path=".", depth=6) == "ls depth must be between 1 and 5"
    agent.fails("ls", "not_found", path="nowhere")
    agent.fails("ls", "not_allowed", path="/proc")


# -- exec -------------------------------------------------------------------------------------------------------


def test_exec_gives_exit_code_and_both_outputs_and_a_failure_is_not_an_error(agent: Hands) -> None:
    assert agent.ok("exec", command="echo out; echo err >&2") == "exit code: 0\nout\nerr\n"
    assert agent.ok("exec", command="exit 3") == "exit code: 3"
    assert agent.ok("exec", command="kill -9 $$") == "exit code: -1"


def test_exec_runs_in_the_workspace_or_workdir_with_env_and_without_input(agent: Hands) -> None:
    (agent.folder / "sub").mkdir()
    assert agent.ok("exec", command="pwd") == f"exit code: 0\n{agent.folder}\n"
    assert agent.ok("exec", command="pwd", workdir="sub") == f"exit code: 0\n{agent.folder}/sub\n"
    assert agent.ok("exec", command="pwd", working_dir="sub").endswith("/sub\n")
    assert agent.ok("exec", command='echo "$WHO"', env={"WHO": "you & me"}) == "exit code: 0\nyou & me\n"
    assert agent.ok("exec", command="cat") == "exit code: 0"
    assert agent.ok("exec", command="cat", input="given") == "exit code: 0\ngiven"
    agent.fails("exec", "not_allowed", command="true", workdir="/etc")
    agent.fails("exec", "not_found", command="true", workdir="nowhere")


def test_exec_does_not_hand_out_the_gateways_secrets(agent: Hands) -> None:
    assert "shared-node-token" not in agent.ok("exec", command="env")


def test_exec_output_of_100k_characters_keeps_its_head(agent: Hands) -> None:
    content = agent.ok("exec", command="echo first; head -c 300000 /dev/zero | tr '\\0' x; echo last")
    assert len(content) == 100_000
    assert content.startswith("exit code: 0\nfirst\n") and content.endswith("\n[output truncated]")
    exact = agent.ok("exec", command="head -c 99987 /dev/zero | tr '\\0' x")
    assert len(exact) == 100_000 and exact.endswith("x")


@pytest.mark.parametrize(("asked", "used"), [(1, 10), (0, 10), (-5, 10), (9999, 1800)])
def test_exec_clamps_the_timeout_and_says_so(agent: Hands, asked: int, used: int) -> None:
    content = agent.ok("exec", command="echo hello", timeout=asked)
    assert content == f"exit code: 0\nhello\n\n[timeout {asked} s is outside 10-1800 s; {used} s was used]"
    assert "[timeout" not in agent.ok("exec", command="true", timeout=10)


def test_exec_times_out_and_ends_the_whole_tree(agent: Hands) -> None:
    content = agent.ok("exec", command="echo begun; sleep 987654 & sleep 987654", timeout=10)
    assert content.startswith("exit code: -1; timeout\nbegun")
    assert not processes("sleep 987654")


def test_a_cancelled_exec_ends_its_tree_and_says_what_it_ended(agent: Hands) -> None:
    call = agent.gateway.invoke("exec", {"command": "touch begun; sleep 876543"}, background=True)["request_id"]
    wait_until((agent.folder / "begun").exists)
    wait_until(lambda: processes("sleep 876543"))
    agent.gateway.request("DELETE", f"/v1/calls/{call}")
    record = wait_until(lambda: ended(agent.gateway, call))
    assert record["state"] == "cancelled" and "sleep" in record["error"]["message"], record
    assert not processes("sleep 876543")


# -- process ----------------------------------------------------------------------------------------------------


def started(agent: Hands, command: str, **more: Any) -> str:
    found = re.fullmatch(
        r"started background process (\S+)", agent.ok("exec", command=command, background=True, **more)
    )
    assert found
    return found[1]


def test_a_background_process_is_polled_fed_and_looked_at(agent: Hands) -> None:
    name = started(agent, "echo ready; read line; echo got $line; exit 4")
    wait_until(lambda: agent.ok("process", action="poll", process_id=name) == "ready\n")
    status = agent.ok("process", action="status", process_id=name).splitlines()
    assert status[:3] == ["state: running", "running: true", "exit code: 0"]
    assert re.fullmatch(r"runtime: \d+\.\d+s", status[3])
    assert agent.ok("process", action="input", process_id=name, input="this\n") == f"sent input to process {name}"
    wait_until(lambda: "state: completed" in agent.ok("process", action="status", process_id=name))
    assert "exit code: 4" in agent.ok("process", action="status", process_id=name)
    assert agent.ok("process", action="poll", process_id=name) == "ready\ngot this\n"
    assert agent.ok("process", action="poll", process_id=name) == "ready\ngot this\n"
    for act in ({"action": "input", "input": "x"}, {"action": "signal", "signal": "SIGTERM"}):
        assert agent.fails("process", "failed", process_id=name, **act) == f"process {name} already completed"


def test_signals_reach_the_whole_group(agent: Hands) -> None:
    name = started(agent, "sleep 765432 & sleep 765432")
    assert agent.ok("process", action="signal", process_id=name, signal="sigterm") == f"sent SIGTERM to process {name}"
    wait_until(lambda: "state: completed" in agent.ok("process", action="status", process_id=name))
    assert "exit code: -1" in agent.ok("process", action="status", process_id=name)
    wait_until(lambda: not processes("sleep 765432"))
    name = started(agent, "trap '' TERM INT; sleep 765431")
    agent.ok("process", action="signal", process_id=name, signal="SIGKILL")
    wait_until(lambda: not processes("sleep 765431"))


def test_process_takes_the_other_names_of_its_parameters(agent: Hands) -> None:
    name = started(agent, "read line; echo $line $$; sleep 100")
    agent.ok("process", action="input", pid=name, data="there\n")
    content = wait_until(lambda: agent.ok("process", action="poll", pid=name))
    pid = int(content.split()[1])
    assert "running: true" in agent.ok("process", action="status", pid=pid)
    agent.ok("process", action="signal", pid=pid, signal="KILL")


def test_background_output_is_limited_to_its_last_10k_characters(agent: Hands) -> None:
    name = started(agent, "head -c 50000 /dev/zero | tr '\\0' x; echo last")
    wait_until(lambda: "state: completed" in agent.ok("process", action="status", process_id=name))
    content = agent.ok("process", action="poll", process_id=name)
    assert len(content) == 10_000
    assert content.startswith("[output truncated]\n") and content.endswith("xlast\n")


def test_unknown_processes_and_signals_are_refused(agent: Hands) -> None:
    assert agent.fails("process", "not_found", action="poll", process_id="nobody") == "process nobody not found"
    agent.fails("process", "not_found", action="status", pid=999999)
    agent.fails("process", "not_found", action="status", process_id="../../token")
    name = started(agent, "sleep 100")
    text = agent.fails("process", "invalid_args", action="signal", process_id=name, signal="SIGWINCH")
    assert text.startswith("process signal must be SIGTERM, SIGINT, or SIGKILL")
    assert "is required for signal" in agent.fails("process", "invalid_args", action="signal", process_id=name)
    assert "is required for input" in agent.fails("process", "invalid_args", action="input", process_id=name)
    agent.ok("process", action="signal", process_id=name, signal="SIGKILL")


def test_a_command_survives_a_killed_gateway_and_is_found_again(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        agent = Hands(gateway)
        name = started(agent, "echo before; while [ ! -e go ]; do sleep 0.05; done; echo after")
        answer = gateway.invoke(
            "exec", {"command": "while [ ! -e go ]; do sleep 0.05; done; echo done"}, background=True
        )
        gateway.kill()
        (agent.folder / "go").touch()
        gateway.start()
        wait_until(lambda: agent.ok("process", action="poll", process_id=name) == "before\nafter\n")
        call = wait_until(lambda: ended(gateway, answer["request_id"]))
        assert call["result"] == {"content": "exit code: 0\ndone\n"}


def test_a_gateway_that_stops_leaves_a_command_running_and_takes_it_up_again(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        agent = Hands(gateway)
        command = "touch begun; while [ ! -e go ]; do sleep 0.05; done; echo done"
        answer = gateway.invoke("exec", {"command": command}, background=True)
        wait_until((agent.folder / "begun").exists)
        gateway.stop()
        (agent.folder / "go").touch()
        gateway.start()
        call = wait_until(lambda: ended(gateway, answer["request_id"]))
        assert call["result"] == {"content": "exit code: 0\ndone\n"}


def test_workspace_and_roots_decide_where_the_tools_work(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    other.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "farhand.toml").write_text(f'[tools]\nroots = ["{other}"]\n')
    with GatewayProcess(tmp_path / "home", "--workspace", str(work)) as gateway:
        agent = Hands(gateway)
        agent.ok("write", path="a.txt", content="x")
        agent.ok("write", path=str(other / "b.txt"), content="y")
        assert (work / "a.txt").read_text() == "x"
        assert (other / "b.txt").read_text() == "y"
        agent.fails("read", "not_allowed", path=str(tmp_path / "home" / "token"))


def ended(gateway: GatewayProcess, call_id: str) -> Any:
    call = gateway.get(f"/v1/calls/{call_id}")
    return call if call["ended_at"] else None


def processes(command: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line == command]


def test_output_of_a_local_command_can_be_read_while_it_runs(agent: Hands) -> None:
    go = agent.folder / "go-on"
    call = agent.gateway.request(
        "POST",
        "/v1/tools/invoke",
        {
            "tool": "exec",
            "args": {"command": f"echo first; until [ -e {go} ]; do sleep 0.05; done; echo second"},
            "background": True,
        },
    ).json()
    path = f"/v1/calls/{call['request_id']}/output"
    wait_until(lambda: agent.gateway.request("GET", f"{path}?wait=0").body == b"first\n", what="the first line")
    (job,) = [job for job in agent.gateway.get("/v1/jobs")["jobs"] if job["call_id"] == call["request_id"]]
    assert (job["node_id"], job["running"]) == ("gsv", True)
    go.touch()
    assert agent.gateway.request("GET", f"{path}?offset=6").body == b"second\n"
    assert agent.gateway.request("GET", f"/v1/nodes/gsv/jobs/{job['job_id']}/output?wait=0").body == b"first\nsecond\n"


def test_a_call_that_runs_no_command_has_no_output(agent: Hands) -> None:
    agent.put("plain.txt", "x")
    call = agent.gateway.invoke("read", {"path": "plain.txt"})
    assert agent.gateway.request("GET", f"/v1/calls/{call['request_id']}/output").status == 404
