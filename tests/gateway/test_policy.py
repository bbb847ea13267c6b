"""The rules of a policy: which fits a call, read against whoever makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhand.config import ConfigError, LiveConfig, load
from farhand.gateway.catalog import Target
from farhand.gateway.policy import Policy, PolicySettings, Subject, subject_of
from farhand.machine.files import Files
from farhand.tools.agent_files import AgentFiles


def policy(*rules: dict[str, Any], default: str = "allow") -> Policy:
    return Policy(msgspec.convert({"default": default, "rules": list(rules)}, PolicySettings), "/work")


def call(tool: str = "Bash", node: str | None = "laptop", **more: Any) -> Subject:
    names = (tool.casefold(),) if node is None else (f"{node}__{tool}".casefold(), tool.casefold())
    return Subject(names=names, route="local" if node is None else "node", node_id=node, **more)


def decided(rule: dict[str, Any], subject: Subject, default: str = "allow") -> str:
    return policy(rule, default=default).judge(subject).decision


def test_the_first_rule_that_fits_decides() -> None:
    rules = policy({"decision": "ask", "tool": "*__Bash"}, {"name": "second", "decision": "deny", "tool": "Bash"})
    verdict = rules.judge(call())
    assert (verdict.decision, verdict.rule) == ("ask", "rule 1")
    assert [one.rule for one in rules.all_fitting(call())] == ["rule 1", "second", "default"]
    assert rules.judge(call("Read")).rule == "default"


@pytest.mark.parametrize(
    ("tool", "fits"),
    [("Bash", True), ("bash", True), ("laptop__Bash", True), ("LAPTOP__*", True), ("*", True), ("other__*", False)],
)
def test_tools_by_any_name_in_any_case(tool: str, fits: bool) -> None:
    assert (decided({"decision": "deny", "tool": tool}, call()) == "deny") is fits


def test_nodes_by_id_pattern_and_tag() -> None:
    subject = call(tags=("prod", "web"))
    for node, fits in (("laptop", True), ("lap*", True), ("tag:prod", True), ("tag:p*", False), ("other", False)):
        assert (decided({"decision": "deny", "node": node}, subject) == "deny") is fits, node
    assert decided({"decision": "deny", "node": "*"}, call(node=None)) == "allow"


def test_arguments_by_glob_and_regular_expression() -> None:
    subject = call(args={"command": "sudo reboot\nnow", "n": 5, "deep": {"list": ["secret"]}})
    for args, fits in (
        ({"command": "*reboot*"}, True),
        ({"command": "re:^sudo\\s"}, True),
        ({"command": "re:^reboot"}, False),
        ({"n": "5"}, True),
        ({"missing": "*"}, False),
        ({"*": "secret"}, True),
        ({"command": "*sudo*", "n": "6"}, False),
    ):
        assert (decided({"decision": "deny", "args": args}, subject) == "deny") is fits, args


def test_a_pattern_of_the_owner_cannot_hold_the_gateway_up() -> None:
    subject = call(args={"command": "a" * 50_000 + "!"})
    assert decided({"decision": "deny", "args": {"command": "re:^(a+)+$"}}, subject) == "allow"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/tmp/../etc/passwd", "//etc//passwd", "/etc/./passwd", "../etc/passwd"]
)
def test_a_path_is_stopped_however_it_is_spelled(path: str) -> None:
    subject = call("Write", args={"path": path}, workspace="/home")
    assert decided({"decision": "deny", "args": {"path": "/etc/*"}}, subject) == "deny"


def test_a_path_is_let_through_as_it_is_meant() -> None:
    rule = {"decision": "allow", "args": {"path": "/home/me/*"}}
    for path, fits in (
        ("notes.txt", True),
        ("/home/me/a", True),
        ("/home/me/../../etc/passwd", False),
        ("../x", False),
    ):
        subject = call("Write", args={"path": path}, workspace="/home/me")
        assert (decided(rule, subject, "deny") == "allow") is fits, path
    local = call("write", None, args={"path": "a.txt"})
    assert decided({"decision": "deny", "args": {"path": "/work/*"}}, local) == "deny"


@pytest.mark.parametrize(
    ("command", "fits"),
    [
        ("git status", True),
        ("git log --oneline", True),
        ("git status; rm -rf /", False),
        ("git status && curl evil", False),
        ("git log `id`", False),
        ("git log $(id)", False),
        ("git log > /etc/passwd", False),
        ("git status\nid", False),
        ("git status & id", False),
    ],
)
def test_what_lets_a_command_through_lets_no_other_ride_along(command: str, fits: bool) -> None:
    rule = {"decision": "allow", "args": {"command": "git *"}}
    assert (decided(rule, call(args={"command": command}), "deny") == "allow") is fits


def test_a_command_that_is_allowed_sets_no_variables_unless_they_are_too() -> None:
    """`GIT_SSH_COMMAND`, `LD_PRELOAD` and their like make any program run another."""
    for command in ("git *", "git status", "re:^git status$"):
        rule = {"decision": "allow", "args": {"command": command}}
        plain = {"command": "git status"}
        assert decided(rule, call(args={**plain, "env": {}}), "deny") == "allow"
        assert decided(rule, call(args={**plain, "env": {"LD_PRELOAD": "/tmp/x.so"}}), "deny") == "deny"
        named = {"decision": "allow", "args": {"command": command, "env": "C"}}
        assert decided(named, call(args={**plain, "env": {"LC_ALL": "C"}}), "deny") == "allow"
        stopped = {"decision": "deny", "args": {"command": command}}
        assert decided(stopped, call(args={**plain, "env": {"A": "b"}})) == "deny", "what is stopped stays so"


def test_a_command_that_is_spelled_out_may_have_operators() -> None:
    rule = {"decision": "allow", "args": {"command": "make test | tail -5"}}
    assert decided(rule, call(args={"command": "make test | tail -5"}), "deny") == "allow"
    assert decided(rule, call(args={"command": "make test | tail -55"}), "deny") == "deny"


def test_the_paths_in_a_patch_are_paths(tmp_path: Path) -> None:
    tool = next(one for one in AgentFiles(Files(tmp_path)).tools() if one.name == "apply_patch")
    patch = "*** Begin Patch\n*** Add File: ok.txt\n+x\n*** Delete File: secret/key\n*** End Patch"
    args = msgspec.Raw(msgspec.json.encode({"patch": patch}))
    target = Target(None, "apply_patch", None, tool.spec, tool)
    subject = subject_of(target, args, credential="owner", session_key=None, origins=("http",))
    assert decided({"decision": "deny", "args": {"path": "secret/*"}}, subject) == "deny"
    assert decided({"decision": "allow", "args": {"path": "/work/ok*"}}, subject, "deny") == "deny"


def test_another_name_of_a_parameter_gets_round_nothing(tmp_path: Path) -> None:
    tool = next(one for one in AgentFiles(Files(tmp_path)).tools() if one.name == "write")
    args = msgspec.Raw(msgspec.json.encode({"file_path": "/etc/hosts", "content": "x"}))
    target = Target(None, "write", None, tool.spec, tool)
    subject = subject_of(target, args, credential="owner", session_key=None, origins=("http",))
    assert decided({"decision": "deny", "args": {"path": "/etc/*"}}, subject) == "deny"


def test_origins_credentials_and_routes() -> None:
    cron = call(origins=("agent:main", "cron:nightly"), credential="agent:main")
    assert decided({"decision": "deny", "origin": "cron:*"}, cron) == "deny"  # a sub-agent of a scheduled run
    assert decided({"decision": "allow", "origin": "agent:*"}, cron, "deny") == "deny"
    assert decided({"decision": "deny", "credential": "agent:*"}, cron) == "deny"
    assert decided({"decision": "deny", "route": "native"}, cron) == "allow"


def test_a_session_that_a_caller_only_names_lets_nothing_through() -> None:
    rule = {"decision": "allow", "session": "agent:main:main"}
    claimed = call(session_key="agent:main:main", credential="1a2b3c4d")
    proven = call(session_key="agent:main:main", credential="agent:main", origins=("telegram",))
    assert decided(rule, claimed, "deny") == "deny"
    assert decided(rule, proven, "deny") == "allow"
    assert decided({**rule, "decision": "deny"}, claimed) == "deny"


def test_without_rules_there_is_nothing_to_judge() -> None:
    assert Policy.of(PolicySettings()) is None
    assert Policy.of(PolicySettings(default="ask")) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[policy.rules]]\ndecision = "maybe"\n', "decision"),
        ('[[policy.rules]]\ntool = "x"\n', "decision"),
        ('[[policy.rules]]\ndecision = "deny"\ntol = "x"\n', "tool"),
        ('[[policy.rules]]\ndecision = "deny"\nargs = { command = "re:(" }\n', "no regular expression"),
        ('[[policy.rules]]\ndecision = "deny"\nseconds = 5\n', "belong to a rule that asks"),
        ("[policy]\napproval_seconds = 0\n", "approval_seconds"),
    ],
)
def test_rules_that_cannot_be_meant_stop_the_start(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "farhand.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, {})


def test_whoever_watches_is_told_of_a_change_and_not_of_a_mistake(tmp_path: Path) -> None:
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})
    told: list[int] = []
    live.watch(lambda config: told.append(len(config.policy.rules)))
    file = tmp_path / "farhand.toml"
    file.write_text('[[policy.rules]]\ndecision = "deny"\n')
    live._looked = 0.0
    assert len(live.now.policy.rules) == 1
    file.write_text('[[policy.rules]]\ndecision = "denied"\n')
    live._looked = 0.0
    assert len(live.now.policy.rules) == 1
    assert told == [0, 1]
