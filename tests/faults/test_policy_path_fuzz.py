"""Random paths: the policy and the file tools of a machine read the same file from them.

The file tools are the oracle. Whatever path they open, a rule that denies the file's folder must fit the call, and a
rule that allows another folder must not.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farhand.gateway.calls.policy import Policy, PolicySettings
from farhand.gateway.calls.policy_subject import Subject
from farhand.machine.files.files import Files
from farhand.protocol.errors import ToolError

pytestmark = pytest.mark.siege

CASES = 100_000 if os.environ.get("FARHAND_SIEGE") == "long" else 200
PARTS = (
    "",
    ".",
    "..",
    "..",
    "a",
    "b",
    "deep",
    "note",
    "proc",
    "self",
    "thread-self",
    "cwd",
    "root",
    "fd",
    "task",
    "dev",
)
STARTS = (
    "",
    "/",
    "//",
    "{top}/",
    "/proc/self/cwd/",
    "/proc/self/root/",
    "/proc/self/fd/",
    "/dev/fd/",
    "/proc/{pid}/cwd/",
)


counted: Counter[str] = Counter()


@pytest.fixture(scope="module")
def top() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        real = os.path.realpath(folder)
        for name in ("a/b/deep", "a/deep", "b", "proc/self/cwd"):
            Path(real, name).mkdir(parents=True)
        for name in ("a/b/note", "a/b/deep/note", "b/note", "note", "proc/self/cwd/note"):
            Path(real, name).write_text("x")
        yield real
    print(f"paths in policy and file tools: {counted['tried']} tried, {counted['held']} held")


def decided(decision: str, pattern: str, subject: Subject) -> str:
    rules: list[dict[str, Any]] = [{"decision": decision, "args": {"path": pattern}}]
    default = "deny" if decision == "allow" else "allow"
    return Policy(msgspec.convert({"default": default, "rules": rules}, PolicySettings)).judge(subject).decision


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(start=st.sampled_from(STARTS), parts=st.lists(st.sampled_from(PARTS), max_size=9), ends=st.booleans())
def test_the_policy_and_the_file_tools_resolve_a_path_to_the_same_file(
    top: str, start: str, parts: list[str], ends: bool
) -> None:
    path = start.format(top=top, pid=os.getpid()) + "/".join([*parts, "note"] if ends else parts)
    if not path:
        return
    workspace = f"{top}/a/b"
    subject = Subject(
        names=("hands__read", "read"), route="node", node_id="hands", args={"path": path}, workspace=workspace
    )
    try:
        real = Files(workspace).place(path).real
    except (ToolError, OSError):
        return
    if real.startswith("/proc/"):  # the ids of processes are links, which only the node knows
        return
    counted["tried"] += 1
    assert decided("deny", real, subject) == "deny", (path, real)
    for folder in (top, workspace, f"{top}/a", f"{top}/b"):
        if decided("allow", f"{folder}/*", subject) == "allow":
            assert real.startswith(f"{folder}/"), (path, real, folder)
    counted["held"] += 1
