"""The gatekeeper of host commands: one allowed command in words, or nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.machine.sandbox.host_commands import allowed, read_command
from farhand.protocol.errors import NotAllowed
from tests.support.fork_server import FARHAND, run_process


@pytest.mark.parametrize(
    ("text", "folder", "words"),
    [
        ("git status", None, ["git", "status"]),
        ("  git   log  -1 ", None, ["git", "log", "-1"]),
        (
            "git commit -m 'one; two $(three) `four`\nfive'",
            None,
            ["git", "commit", "-m", "one; two $(three) `four`\nfive"],
        ),
        ('git commit -m "a & b | c"', None, ["git", "commit", "-m", "a & b | c"]),
        (r"git show a\;b", None, ["git", "show", "a;b"]),
        ("cd /srv/a && git status", "/srv/a", ["git", "status"]),
        ("cd '/srv/a && b' && git status", "/srv/a && b", ["git", "status"]),
        ("git log HEAD~1 --format=%h#", None, ["git", "log", "HEAD~1", "--format=%h#"]),
    ],
)
def test_one_command_is_read_as_a_shell_would(text: str, folder: str | None, words: list[str]) -> None:
    assert read_command(text) == (folder, words)


ATTACKS = [
    "",
    " ",
    "git status; id",
    "git status;id",
    "git status && id",
    "git status || id",
    "git status | sh",
    "git status & id",
    "git status\nid",
    "git status\rid",
    "git status \\\nid",
    "git $(id)",
    "git `id`",
    'git "$(id)"',
    'git "`id`"',
    "git $HOME",
    "git ${IFS}id",
    "git > /tmp/x",
    "git < /etc/passwd",
    "git <(id)",
    "(git status)",
    "git 'unclosed",
    'git "unclosed',
    "git *",
    "git ~/x",
    "git status # comment",
    "git\0id",
    "cd /tmp",
    "cd /tmp; git status",
    "cd /tmp && git status && id",
    "cd relative && git status",
    "cd $(id) && git status",
    "cd /tmp /etc && git status",
    "'' status",
    'git "\\$HOME"',
    'git "\\`id"',
]


@pytest.mark.parametrize("text", ATTACKS)
def test_whatever_only_a_shell_could_do_is_refused(text: str) -> None:
    with pytest.raises(NotAllowed):
        read_command(text)


def test_the_list_is_of_first_words() -> None:
    assert allowed(["git", "status"], ["git"])
    assert allowed(["systemctl", "status", "x"], ["git", "systemctl status"])
    for words in (["systemctl", "stop", "x"], ["gitx"], ["/usr/bin/git"], ["./git"], ["GIT"], ["systemctl"]):
        assert not allowed(words, ["git", "systemctl status", ""])


@given(
    words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=5)
)
def test_quoted_words_arrive_as_they_are(words: list[str]) -> None:
    import shlex

    assert read_command(shlex.join(["git", *words])) == (None, ["git", *words])


@given(text=st.text(st.sampled_from("git'\"\\ ;&|$()`\n<>*ab/"), max_size=30))
def test_what_is_accepted_means_the_same_to_a_real_shell(text: str) -> None:
    """`sh` gives the same words to a program that prints them, and does nothing else."""
    try:
        folder, words = read_command(f"show {text}")
    except NotAllowed:
        return
    script = 'show() { printf "%s\\0" "$@"; }\n' + f"show {text}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=10)
    assert folder is None
    assert (done.stdout.split(b"\0")[:-1] or [b""] * 0) == [word.encode() for word in words[1:]] or (
        words[1:] == [] and done.stdout == b"\0"
    )


def wrapper(command: str | None, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    environment.pop("SSH_ORIGINAL_COMMAND", None)
    if command is not None:
        environment["SSH_ORIGINAL_COMMAND"] = command
    return run_process([*FARHAND, "host-wrapper", *arguments], env=environment)


def test_the_wrapper_runs_what_is_allowed_and_tells_its_status(tmp_path: Path) -> None:
    done = wrapper(f"cd {tmp_path} && pwd", "--allow", "pwd")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
    assert wrapper("false", "--allow", "false").returncode == 1
    done = wrapper("id", "--allow", "pwd")
    assert (done.returncode, done.stdout, done.stderr) == (126, "", 'host command "id" is not allowed\n')
    assert wrapper(None, "--allow", "pwd").returncode == 126
    assert wrapper("pwd; id", "--allow", "pwd").stdout == ""


def test_the_wrapper_takes_its_list_from_the_settings(tmp_path: Path) -> None:
    (tmp_path / "farhand.toml").write_text('[sandbox]\nhost_commands = ["pwd"]\n')
    assert wrapper("pwd", "--home", str(tmp_path)).returncode == 0
    assert wrapper("id", "--home", str(tmp_path)).returncode == 126
    (tmp_path / "farhand.toml").unlink()
    assert wrapper("pwd", "--home", str(tmp_path)).returncode == 126


def test_a_program_of_the_same_name_elsewhere_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "pwd").write_text("#!/bin/sh\necho stolen\n")
    (tmp_path / "pwd").chmod(0o755)
    done = wrapper("pwd", "--allow", "pwd", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "stolen" not in done.stdout and done.returncode == 0
