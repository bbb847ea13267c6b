"""Patterns and parsers take time in proportion to their input.

None of these has a limit on time of its own: with an expression that backtracks, each would take hours at least.
"""

from __future__ import annotations

import email.message
import time

import msgspec
import pytest

from farhand.agent.tool_search import _searched
from farhand.api.server.http import json_fault
from farhand.channels import email as mail_channel
from farhand.gateway.calls.policy import Policy, PolicyRule, PolicySettings
from farhand.gateway.calls.policy_subject import Subject
from farhand.gateway.nodes.cards import NodeCard
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.schedule.heartbeat import nothing_in
from farhand.gateway.workspace.skill_file import read_head
from farhand.llm.messages import ToolUse
from farhand.machine.patch.parse import parse
from farhand.memory.chunks import chunks
from farhand.protocol import secret_handles
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.redaction import KnownSecrets, mask_settings, mask_text

MANY = 1_000_000


def test_headings_of_memory_files() -> None:
    assert chunks("# a" + " " * MANY + "x\n\ntext\n")
    assert chunks("# One #\n\ntext\n\n## Two\n\nmore")[-1].headings == "One"


def test_masked_log_lines() -> None:
    assert mask_text("a." * MANY) == "a." * MANY
    assert mask_settings({"x": "a." * MANY}) == {"x": "a." * MANY}
    assert mask_text("see postgres://me:secret@db") == "see postgres://me:***@db"


def test_commands_with_secrets() -> None:
    many = MANY // 4
    for piece in ("'" + "a" * many + "'", " <<a" * many + "\n", "<" * many + "\n", "cat <<a\n" + "x" * many):
        secret_handles._ShellState().read(f": {piece}")
        with pytest.raises(InvalidArgs, match="at most"):
            secret_handles.shell_command(f": {piece} {{{{secret:KEY}}}}", {"KEY": "value"})
        assert secret_handles.shell_command(f": {piece}", {}) == (f": {piece}", {})


def test_heartbeat_files() -> None:
    assert not nothing_in(" " * MANY + "x" + " " * MANY)
    assert nothing_in("  # \n\n - [ ] \n" + " " * MANY)


def test_headings_of_patches() -> None:
    blank = " " * MANY
    (section,) = parse(f"*** Begin Patch\n*** Update File: x\n@@{blank}x\n-a\n+b\n*** End Patch\n")
    assert section.path == "x"


def test_mails() -> None:
    mail = email.message.EmailMessage()
    mail["Authentication-Results"] = "here; " + "(" * MANY
    assert not mail_channel._vouched(mail, "here")
    for piece in ("<", "<!--", "<a ", "<![", "</", "&"):
        mail_channel._plain(piece * (MANY // 8))


def test_heads_of_skills() -> None:
    for piece in ("[1,", "{a: ", "- ", "? ", "a: ["):
        read_head("a: " + piece * 4000)


def test_policy_rules_over_many_values() -> None:
    rule = PolicyRule(decision="allow", args={"*": "*a*a*a*"})
    stop = PolicyRule(decision="deny", args={"*": "*a*a*a*"})
    subject = Subject(names=("x",), route="node", args={"x": ["b"] * MANY})
    assert Policy(PolicySettings(default="ask", rules=[rule])).judge(subject).decision == "ask"
    assert Policy(PolicySettings(default="ask", rules=[stop])).judge(subject).decision == "deny"
    long = Subject(names=("x",), route="node", args={"x": "ab" * MANY})
    assert Policy(PolicySettings(default="ask", rules=[PolicyRule(decision="deny", args={"x": "*c*d*e"})])).judge(long)


PATH_RULES = [
    *(PolicyRule(decision="deny", args={"path": f"/etc/x{number}/*"}) for number in range(20)),
    PolicyRule(decision="allow", args={"path": "/work/*"}),
    PolicyRule(decision="ask", args={"*": "*/.ssh/*q*z"}),
]


@pytest.mark.parametrize("tool", ["Read", "Grep", "Glob"])
@pytest.mark.parametrize("path", ["/a", "/.", "/..", "/proc/self/cwd", "a", "*", ":", "\u0130"])
def test_policy_rules_over_long_paths(tool: str, path: str) -> None:
    """S: one path of a megabyte held the gateway up for a second for each rule about paths."""
    args = {"path": path * (16 * MANY // len(path)), "pattern": "{a,b,c,d,e,f,g,h,i,j}" * 3}
    subject = Subject(names=(tool.casefold(),), route="node", args=args, workspace="/work", folds=True)
    began = time.process_time()
    assert Policy(PolicySettings(rules=PATH_RULES), "/work", "/agents").judge(subject).decision == "deny"
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pattern", ["{a,b,c,d,e,f,g,h,i,j}" * 3, "*/" * 63 + "*", "*?" * 2000, "[a-z]" * 800])
@pytest.mark.parametrize("folder", ["/a" * 2000, "/proc/self/cwd" * 250, "/work"])
def test_policy_rules_over_long_searches(folder: str, pattern: str) -> None:
    for tool, args in (
        ("glob", {"path": folder, "pattern": pattern}),
        ("grep", {"path": folder, "pattern": "x", "include": pattern}),
    ):
        subject = Subject(names=(tool,), route="node", args=args, workspace="/work")
        began = time.process_time()
        Policy(PolicySettings(rules=PATH_RULES), "/work", "/agents").judge(subject)
        assert time.process_time() - began < 5


def test_secrets_in_long_texts() -> None:
    secrets = KnownSecrets()
    for piece in (b"fh", b"fho_", b"://a:", b"\\u00"):
        assert len(secrets.redact(piece * MANY)) >= MANY


def test_json_with_too_many_values_is_refused_and_long_texts_are_not() -> None:
    for many in (b"[" + b"[]," * MANY + b"1]", b'["",' + b'"",' * MANY + b'""]', b"{" + b'"a":1,' * MANY + b'"a":1}'):
        with pytest.raises(msgspec.DecodeError, match="more than 100000 values"):
            check_value_count(many)
    for text in ("a,b\n" * MANY, '["' * MANY, "\\" * 200_001 + ",", '\\",' * MANY, "é[" * MANY):
        check_value_count(msgspec.json.encode({"content": text, "more": [1, 2, "x"]}))


def test_the_fault_in_a_long_body() -> None:
    body = b'{"a":"' + b"\\n" * (5 * MANY)
    assert json_fault(body, msgspec.DecodeError("Input data was truncated")) == "Input data was truncated"


def test_names_of_unknown_nodes() -> None:
    """S: each of them was compared with every known node, letter by letter."""
    registry = NodeRegistry([(NodeCard(f"node-{number}", "", "", ""), 0, 0) for number in range(200)])
    began = time.process_time()
    assert "there is no node" in registry.unknown("\u0130" * MANY)
    assert time.process_time() - began < 5


def test_words_of_a_tool_search() -> None:
    specs = [ToolSpec(f"node-{number}__Read") for number in range(200)]
    began = time.process_time()
    query = msgspec.json.encode({"query": "no__Read " * (MANY // 8)}).decode()
    assert _searched(ToolUse("1", "tool_search", query), specs).is_error
    assert time.process_time() - began < 5
