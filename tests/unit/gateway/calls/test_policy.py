"""The rules of a policy: which one matches a call; ambiguity counts against the caller."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.config import Config, LiveConfig, SettingsError, load
from farhand.gateway.calls.catalog import Catalog, Target
from farhand.gateway.calls.policy import Policy, PolicySettings, _Pattern
from farhand.gateway.calls.policy_paths import Reached
from farhand.gateway.calls.policy_subject import Subject, subject_of
from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.machine.files.files import Files
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.store.tables.nodes import NodeCard
from farhand.tools.agent_files import AgentFileTools
from farhand.tools.tool import Tool


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
    assert [one.rule for one in rules.all_matching(call())] == ["rule 1", "second", "default"]
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
def test_a_rule_that_allows_a_command_allows_no_other_with_it(command: str, fits: bool) -> None:
    rule = {"decision": "allow", "args": {"command": "git *"}}
    assert (decided(rule, call(args={"command": command}), "deny") == "allow") is fits


def test_an_allowed_command_may_set_only_allowed_variables() -> None:
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


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("path", "SOUL.md"),
        ("path", "/SOUL.md"),
        ("path", "//SOUL.md"),
        ("path", "./SOUL.md"),
        ("path", " SOUL.md "),
        ("destination", "gsv:SOUL.md"),
        ("destination", "gsv:/SOUL.md"),
        ("destination", "gsv:.//SOUL.md"),
        ("destination", "gsv:agents/main/SOUL.md"),
    ],
)
def test_a_path_of_the_workspace_is_stopped_however_it_is_spelled(argument: str, path: str) -> None:
    pattern = "SOUL.md" if argument == "path" else "gsv:SOUL.md"
    rule = {"decision": "deny", "args": {argument: pattern}}
    subject = Subject(names=("gsv__x",), route="native", args={argument: path})
    assert decided(rule, subject) == "deny"
    allow = {"decision": "allow", "args": {argument: f"{pattern[:-7]}public/*"}}
    assert decided(allow, subject, default="deny") == "deny"
    for usual in (pattern, f"{pattern[:-7]}/SOUL.md"):
        allow = {"decision": "allow", "args": {argument: usual}}
        of_one_agent = "agents/main" in path
        assert decided(allow, subject, default="deny") == ("deny" if of_one_agent else "allow")


@pytest.mark.parametrize("path", ["box:/etc/passwd", "box://etc/passwd", "box:/./etc//passwd", "box:/x/../etc/passwd"])
def test_the_path_of_a_transfer_is_stopped_however_it_is_spelled(path: str) -> None:
    rule = {"decision": "deny", "args": {"source": "*:/etc/*"}}
    assert decided(rule, Subject(names=("gsv__transfer",), route="native", args={"source": path})) == "deny"
    long = {"source": path.replace("box:", "box:/" + "./" * 1_000_000)}
    assert decided(rule, Subject(names=("gsv__transfer",), route="native", args=long)) == "deny"


def test_a_rule_sees_where_the_links_of_this_machine_lead(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "secret").mkdir(parents=True)
    (work / "public").mkdir()
    (work / "way").symlink_to("secret")
    (work / "public" / "out").symlink_to(work / "secret")
    (tmp_path / "alias").symlink_to(work)

    def decision(rule: dict[str, Any], path: str, workspace: Path = work) -> str:
        settings = msgspec.convert({"default": "ask", "rules": [rule]}, PolicySettings)
        subject = Subject(names=("read",), route="local", args={"path": path})
        return Policy(settings, str(workspace)).judge(subject).decision

    deny = {"decision": "deny", "args": {"path": f"{work}/secret/*"}}
    for path in ("secret/x", "way/x", "./" * 3000 + "way/x", "public/out/x", f"/{work}/way/x", "./way//x"):
        assert decision(deny, path) == "deny", path
    assert decision(deny, "public/x") == "ask"
    allow = {"decision": "allow", "args": {"path": f"{work}/public/*"}}
    assert decision(allow, "public/x") == "allow"
    assert decision(allow, "public/out/x") == "ask"
    # A workspace behind a link keeps its spelling.
    behind = {"decision": "allow", "args": {"path": f"{tmp_path}/alias/public/*"}}
    assert decision(behind, "public/x", tmp_path / "alias") == "allow"
    for odd in ("/proc/1/root/etc/passwd", "a/" * 3000, "\0", "\ud800"):
        assert decision(deny, odd) == "ask"


def test_the_paths_in_a_patch_are_paths(tmp_path: Path) -> None:
    tool = next(one for one in AgentFileTools(Files(tmp_path)).tools() if one.name == "apply_patch")
    patch = "*** Begin Patch\n*** Add File: ok.txt\n+x\n*** Delete File: secret/key\n*** End Patch"
    args = msgspec.Raw(msgspec.json.encode({"patch": patch}))
    target = Target(None, "apply_patch", None, tool.spec, tool)
    subject = subject_of(target, args, credential="owner", session_key=None, origins=("http",))
    assert decided({"decision": "deny", "args": {"path": "secret/*"}}, subject) == "deny"
    assert decided({"decision": "allow", "args": {"path": "/work/ok*"}}, subject, "deny") == "deny"


def test_another_name_of_a_parameter_gets_round_nothing(tmp_path: Path) -> None:
    tool = next(one for one in AgentFileTools(Files(tmp_path)).tools() if one.name == "write")
    target = Target(None, "write", None, tool.spec, tool)
    for name in ("path", "file_path"):
        args = msgspec.Raw(msgspec.json.encode({name: "/etc/hosts", "content": "x"}))
        made = Catalog(NodeRegistry()).checked(target, ToolCall("1", "write", args))
        assert msgspec.json.decode(made.args) == {"path": "/etc/hosts", "content": "x"}
        subject = subject_of(target, made.args, credential="owner", session_key=None, origins=("http",))
        for written in ("path", "file_path"):  # a rule may use either name as well
            assert decided({"decision": "deny", "args": {written: "/etc/*"}}, subject) == "deny"
            assert decided({"decision": "allow", "args": {written: "/work/*"}}, subject, "deny") == "deny"


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
        ('[[policy.rules]]\ndecision = "deny"\nargs = { command = "re:(" }\n', "not a regular expression"),
        ('[[policy.rules]]\ndecision = "deny"\nseconds = 5\n', "belong to a rule that asks"),
        ("[policy]\napproval_seconds = 0\n", "approval_seconds"),
    ],
)
def test_rules_that_cannot_be_meant_stop_the_start(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "farhand.toml").write_text(text)
    with pytest.raises(SettingsError, match=said):
        load(tmp_path, {})


def test_a_derived_value_follows_a_change_and_not_a_mistake(tmp_path: Path) -> None:
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})
    made: list[int] = []

    def count(config: Config) -> int:
        made.append(len(config.policy.rules))
        return len(config.policy.rules)

    rules = live.derive(count)
    file = tmp_path / "farhand.toml"
    file.write_text('[[policy.rules]]\ndecision = "deny"\n')
    live._looked = 0.0
    assert rules() == rules() == 1
    file.write_text('[[policy.rules]]\ndecision = "denied"\n')
    live._looked = 0.0
    assert rules() == 1
    assert made == [0, 1]


def test_a_derived_value_stays_while_it_cannot_be_made(tmp_path: Path) -> None:
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})

    def make(config: Config) -> int:
        if config.policy.rules:
            raise SettingsError("not like this")
        return 7

    value = live.derive(make)
    (tmp_path / "farhand.toml").write_text('[[policy.rules]]\ndecision = "deny"\n')
    live._looked = 0.0
    assert value() == 7
    assert len(live.now.policy.rules) == 1


@pytest.mark.parametrize(
    "beside",
    [{"workdir": "/repo/evil"}, {"cwd": "/repo/evil"}, {"input": "rm -rf /\n"}, {"stdin": "x"}, {"shell": "x"}],
)
def test_an_allowed_command_is_not_allowed_with_more_than_the_rule_names(beside: dict[str, Any]) -> None:
    rule = {"decision": "allow", "args": {"command": "make test"}}
    assert decided(rule, call(args={"command": "make test"}), "deny") == "allow"
    assert decided(rule, call(args={"command": "make test", "timeout": 5, "background": True}), "deny") == "allow"
    assert decided(rule, call(args={"command": "make test", **beside}), "deny") == "deny"
    named = {"decision": "allow", "args": {"command": "make test", **dict.fromkeys(beside, "*")}}
    assert decided(named, call(args={"command": "make test", **beside}), "deny") == "allow"
    stops = {"decision": "deny", "args": {"command": "make test"}}
    assert decided(stops, call(args={"command": "make test", **beside})) == "deny"


@pytest.mark.parametrize(("route", "hint"), [("nodes", "'node'"), ("Local", "'local'")])
def test_an_unknown_route_is_an_error_of_the_settings(tmp_path: Path, route: str, hint: str) -> None:
    (tmp_path / "farhand.toml").write_text(f'[[policy.rules]]\nname = "r"\ndecision = "deny"\nroute = "{route}"\n')
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, {})
    assert f"r: unknown route {route!r}" in str(caught.value) and hint in str(caught.value)


def test_rules_that_stop_a_credential_hold_for_what_is_done_on_its_behalf() -> None:
    acting = call(credential="agent:main", askers=("a1", "issuer"))
    for decision in ("ask", "deny"):
        for name in ("a1", "issuer", "agent:main"):
            assert decided({"decision": decision, "credential": name}, acting) == decision
        assert decided({"decision": decision, "on_behalf_of": "a1"}, acting) == decision
    assert decided({"decision": "allow", "credential": "a1"}, acting, "deny") == "deny"
    assert decided({"decision": "allow", "credential": "agent:main"}, acting, "deny") == "allow"
    assert decided({"decision": "allow", "on_behalf_of": "a1"}, acting, "deny") == "deny", "all of them must fit"
    assert decided({"decision": "allow", "on_behalf_of": ["a1", "issuer"]}, acting, "deny") == "allow"
    assert decided({"decision": "deny", "on_behalf_of": "*"}, call(credential="a1")) == "allow", "a direct call"


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/root/etc/passwd",
        "/proc/1/root/etc/passwd",
        "/proc/thread-self/root/../etc/passwd",
        "/proc/self/task/12/root/etc/passwd",
        "/proc/self/root/proc/self/root/etc/passwd",
        "//proc//self/./root/etc/passwd",
        "/proc/self/cwd/../etc/passwd",
    ],
)
def test_a_path_through_a_process_is_the_path_it_leads_to(path: str) -> None:
    subject = call("Read", args={"path": path}, workspace="/home")
    assert decided({"decision": "deny", "args": {"path": "/etc/*"}}, subject) == "deny"
    assert decided({"decision": "allow", "args": {"path": "/proc/*"}}, subject, "deny") == "deny"


def test_a_relative_rule_fits_the_whole_path_too() -> None:
    rule = {"decision": "deny", "args": {"path": "secret/*"}}
    for path in ("secret/a", "./secret/a", "x/../secret/a", "/home/me/secret/a", "/home/me/../me/secret/a"):
        assert decided(rule, call("Read", args={"path": path}, workspace="/home/me")) == "deny", path
    assert decided(rule, call("Read", args={"path": "/etc/secret/a"}, workspace="/home/me")) == "allow"


def test_a_folder_that_is_left_out_is_the_workspace() -> None:
    rule = {"decision": "deny", "args": {"path": "/home/me*"}}
    left_out = {"left_out": frozenset({"path"}), "workspace": "/home/me"}
    for args in ({"pattern": "*"}, {"pattern": "*", "path": None}, {"pattern": "*", "path": ""}):
        assert decided(rule, call("Glob", args=args, **left_out)) == "deny", args
    allow = {"decision": "allow", "args": {"path": "/home/me*"}}
    assert decided(allow, call("Glob", args={"pattern": "/etc/*"}, **left_out), "deny") == "deny"


def test_a_path_is_stopped_in_any_case_if_case_does_not_matter() -> None:
    for pattern in ("/Users/me/.ssh/*", "re:^/Users/me/\\.ssh/"):
        rule = {"decision": "deny", "args": {"path": pattern}}
        subject = call("Read", args={"path": "/users/ME/.SSH/id"}, folds=True)
        assert decided(rule, subject) == "deny", pattern
        assert decided(rule, msgspec.structs.replace(subject, folds=False)) == "allow", pattern
        assert decided({**rule, "decision": "allow"}, subject, "deny") == "deny", pattern


def test_the_end_of_a_transfer_is_stopped_from_the_nodes_workspace_too() -> None:
    reached = (Reached("laptop", ("prod",), "/home/me"),)
    for source in ("laptop:.ssh/id", "laptop:x/../.ssh/id", "laptop:/home/me/.ssh/id", "laptop:/proc/self/cwd/.ssh/id"):
        subject = Subject(names=("gsv__transfer",), route="native", args={"source": source}, reached=reached)
        assert decided({"decision": "deny", "args": {"source": "laptop:/home/me/.ssh/*"}}, subject) == "deny", source
        assert decided({"decision": "deny", "args": {"source": "laptop:.ssh/*"}}, subject) == "deny", source
        assert decided({"decision": "deny", "node": "tag:prod"}, subject) == "deny"
        assert decided({"decision": "allow", "node": "laptop"}, subject, "deny") == "deny", "it does not run there"


def test_a_pattern_for_anything_lets_through_only_what_fits_it_altogether() -> None:
    rule = {"decision": "allow", "args": {"*": "git *"}}
    for args, fits in (
        ({"command": "git status"}, True),
        ({"command": "git status", "timeout": 5}, True),
        ({"command": "rm -rf /", "description": "git status"}, False),
        ({"command": "git status; rm -rf /"}, False),
        ({"command": "git status", "workdir": "/tmp"}, False),
        ({"command": "git status", "env": {"LD_PRELOAD": "git x"}}, False),
        ({}, False),
    ):
        assert (decided(rule, call(args=args), "deny") == "allow") is fits, args
    hidden = {"options": {"rm -rf /": True}}
    assert decided({"decision": "deny", "args": {"*": "*rm -rf*"}}, call("plug.in", args=hidden)) == "deny"


def test_a_regular_expression_that_allows_fits_the_whole_text() -> None:
    rule = {"decision": "allow", "args": {"command": "re:git (status|log)"}}
    for command, fits in (
        ("git status", True),
        ("git log", True),
        ("touch x git status", False),
        ("git log -p", False),
    ):
        assert (decided(rule, call(args={"command": command}), "deny") == "allow") is fits, command
        assert decided({**rule, "decision": "deny"}, call(args={"command": command})) == "deny", command


@pytest.mark.parametrize(
    "path", ["/proc/self/cwd/../etc/x", "/proc/7/root/home/me/x", "/dev/fd/3/x", "/dev/fd/../../home/me/x"]
)
def test_no_path_through_a_process_is_allowed(path: str) -> None:
    subject = call("Read", args={"path": path}, workspace="/home/me")
    for pattern in ("*", "/home/*", "/etc/*"):
        assert decided({"decision": "allow", "args": {"path": pattern}}, subject, "deny") == "deny", pattern


def test_a_path_is_stopped_as_text_and_through_a_process() -> None:
    subject = call("Read", args={"path": "/proc/self/cwd/../../../etc/x"}, workspace="/home/me/work/deep")
    for pattern in ("/etc/*", "/home/etc/x"):
        assert decided({"decision": "deny", "args": {"path": pattern}}, subject) == "deny", pattern


def test_names_within_an_argument_are_stopped() -> None:
    rule = {"decision": "deny", "args": {"env": "*LD_PRELOAD*"}}
    assert decided(rule, call("exec", args={"command": "true", "env": {"LD_PRELOAD": "/tmp/x.so"}})) == "deny"


@pytest.mark.parametrize(
    ("pattern", "stopped"),
    [
        ("/etc/host*", True),
        ("/e*/hostname", True),
        ("/**/passwd", True),
        ("{/etc/passwd,a}", True),
        ("../../etc/passwd", True),
        ("/[e]tc/x", True),
        ("/" + "?" * 4000, True),
        ("/usr/*", False),
        ("**/*.py", False),
        ("{etc,a}/x", False),
    ],
)
def test_a_search_that_leads_out_of_its_folder_is_stopped_by_rules_about_paths(pattern: str, stopped: bool) -> None:
    subject = call("Glob", args={"pattern": pattern, "path": "/home/me"}, workspace="/work")
    assert (decided({"decision": "deny", "args": {"path": "/etc/*"}}, subject) == "deny") is stopped
    outward = pattern.startswith(("/", "{/", ".."))
    allow = {"decision": "allow", "args": {"path": "/home/me"}}
    assert (decided(allow, subject, "deny") == "deny") is outward


def test_rules_about_paths_stop_the_ends_of_a_transfer() -> None:
    reached = (Reached("laptop", (), "/home/me"),)
    for ends, pattern, stopped in (
        ({"source": "laptop:/etc/passwd", "destination": "gsv:x"}, "/etc/*", True),
        ({"source": "laptop:.ssh/id", "destination": "gsv:x"}, "/home/me/.ssh/*", True),
        ({"source": "gsv:passwd", "destination": "laptop:/etc"}, "/etc/*", True),
        ({"source": "laptop:a", "destination": "gsv:SOUL.md"}, "SOUL.md", True),
        ({"source": "laptop:a", "destination": "gsv:b"}, "/etc/*", False),
    ):
        subject = Subject(names=("gsv__transfer",), route="native", args=ends, reached=reached)
        assert (decided({"decision": "deny", "args": {"path": pattern}}, subject) == "deny") is stopped, ends
        assert decided({"decision": "allow", "args": {"path": pattern}}, subject, "deny") == "deny", ends


def test_an_allowed_path_of_the_workspace_is_not_that_of_another_agent() -> None:
    rule = {"decision": "allow", "args": {"path": "notes/*"}}
    for path, fits in (("notes/x", True), ("agents/other/notes/x", False), ("agents/other/../main/notes/x", False)):
        subject = Subject(names=("gsv__writefile",), route="native", args={"path": path})
        assert (decided(rule, subject, "deny") == "allow") is fits, path


def test_rules_that_stop_a_token_stop_the_tokens_it_made() -> None:
    made = call(credential="child", makers=("maker",))
    assert decided({"decision": "deny", "credential": "maker"}, made) == "deny"
    assert decided({"decision": "allow", "credential": "maker"}, made, "deny") == "deny"
    assert decided({"decision": "deny", "on_behalf_of": "maker"}, made) == "allow", "a direct call"
    acting = call(credential="agent:main", askers=("child",), makers=("maker",))
    assert decided({"decision": "deny", "on_behalf_of": "maker"}, acting) == "deny"


SECRET = {"decision": "deny", "args": {"path": "/home/me/.ssh/*"}}


@pytest.mark.parametrize(
    ("tool", "args", "stopped"),
    [
        ("Grep", {"pattern": "x", "path": "/home/me/.ssh"}, True),
        ("Grep", {"pattern": "x", "path": "/home/me/.ssh/"}, True),
        ("Grep", {"pattern": "x", "path": "/home/me"}, True),
        ("Grep", {"pattern": "x", "path": "/"}, True),
        ("Grep", {"pattern": "x", "path": "/srv/../home/./me"}, True),
        ("Grep", {"pattern": "x", "path": "."}, True),
        ("Grep", {"pattern": "x"}, True),
        ("Grep", {"pattern": "x", "path": ""}, True),
        ("Grep", {"pattern": "x", "path": "/proc/self/root/home"}, True),
        ("Grep", {"pattern": "x", "path": "/home/me/src"}, False),
        ("Grep", {"pattern": "x", "path": "src"}, False),
        ("Grep", {"pattern": "x", "path": "/home/me/.sshx"}, False),
        ("Grep", {"pattern": "x", "path": "/srv"}, False),
        ("Glob", {"pattern": "**/*", "path": "/home/me"}, True),
        ("Glob", {"pattern": "*", "path": ".ssh"}, True),
        ("Glob", {"pattern": ".s?h/id"}, True),
        ("Glob", {"pattern": "**/id"}, True),
        ("Glob", {"pattern": "{a,.ssh/**}"}, True),
        ("Glob", {"pattern": "/home/**/me/.ssh/id"}, True),
        ("Glob", {"pattern": "src/**/*"}, False),
        ("Glob", {"pattern": "*.py", "path": "/srv"}, False),
        ("Read", {"path": "/home/me"}, False),
    ],
)
def test_a_rule_that_stops_files_stops_searches_that_may_reach_them(
    tool: str, args: dict[str, Any], stopped: bool
) -> None:
    left_out = frozenset() if args.get("path") else frozenset({"path"})
    for name, node in ((tool, "laptop"), (tool.casefold(), None)):
        subject = call(name, node, args=args, workspace="/home/me", left_out=left_out)
        assert (decided(SECRET, subject) == "deny") is stopped
        anywhere = {"decision": "ask", "args": {"*": "/home/me/.ssh/*"}}
        assert (decided(anywhere, subject) == "ask") is stopped


@pytest.mark.parametrize(
    ("pattern", "include", "stopped"),
    [
        ("*.pem", None, True),
        ("*.pem", "*.py", False),
        ("*.pem", "*.p*", True),
        ("*.pem", "*.{py,pem}", True),
        ("*.pem", "[k]ey.pem", True),
        ("*.pem", "*.pem ", True),
        ("*.pem", "   ", True),
        ("*.pem", "a/b", False),  # the tool refuses it
        ("secret/*", "*.py", True),
        ("re:\\.pem$", None, True),
        ("re:^/srv/", None, False),
        ("re:^/(srv|home)/", None, True),
        ("re:^/home/me/sr?c/secret", None, True),
        ("re:^/home/me/x", None, True),
        ("re:^/home/you", None, False),
    ],
)
def test_the_names_that_a_search_is_limited_to_count(pattern: str, include: str | None, stopped: bool) -> None:
    args = {"pattern": "x", "path": "/home/me", **({} if include is None else {"include": include})}
    subject = call("Grep", args=args, workspace="/home/me")
    assert (decided({"decision": "deny", "args": {"path": pattern}}, subject) == "deny") is stopped


@pytest.mark.parametrize(
    ("rule", "decision"),
    [
        ({"decision": "deny", "tool": "Bash"}, "deny"),
        ({"decision": "ask", "tool": ["laptop__Bash"]}, "ask"),
        ({"decision": "trial", "tool": "node_bash"}, "trial"),
        ({"decision": "deny", "tool": "*__Bash", "args": {"command": "*rm -rf*"}}, "deny"),
        ({"decision": "deny", "tool": "*__Bash", "args": {"command": "*sudo*"}}, "allow"),
        ({"decision": "deny", "tool": "other__Bash"}, "allow"),
        ({"decision": "allow", "tool": "Bash"}, "ask"),
    ],
)
def test_input_to_a_running_command_is_stopped_as_a_command(rule: dict[str, Any], decision: str) -> None:
    typed: dict[str, Any] = {"typed_into": ("laptop__bash", "bash", "node_bash"), "typed": "rm -rf x\n"}
    default = "ask" if rule["decision"] == "allow" else "allow"
    assert decided(rule, call("Process", args={"action": "submit"}, **typed), default) == decision
    assert decided(rule, call("Process", args={"action": "poll"}), default) == default
    first = {"decision": "allow", "tool": "Process"}
    assert policy(first, rule).judge(call("Process", **typed)).decision == "allow"


@pytest.mark.parametrize(
    "pattern", ["agents/other/*", "/agents/other/*", "/home/agents/other/*", "x.md", "*/other/x.md"]
)
def test_a_file_of_an_agent_has_all_of_its_names(pattern: str) -> None:
    rules = {"rules": [{"decision": "deny", "args": {"path": pattern}}]}
    made = Policy(msgspec.convert(rules, PolicySettings), "/home/agents/main", "/home/agents")
    for subject in (
        Subject(names=("gsv__readfile",), route="native", args={"path": "x.md"}, agent="other"),
        Subject(
            names=("gsv__readfile",), route="native", args={"path": "./x.md"}, agent="other", credential="agent:other"
        ),
        Subject(names=("gsv__transfer",), route="native", args={"source": "gsv:x.md"}, agent="other"),
        Subject(names=("gsv__transfer",), route="native", args={"source": "gsv:/"}, agent="other", recursive=True),
        Subject(names=("gsv__message",), route="native", files=("x.md",), agent="other"),
        Subject(names=("memory_get",), route="local", args={"path": "x.md"}, agent="other"),
        Subject(names=("memory_search",), route="local", args={"query": "q"}, reads=("x.md",), agent="other"),
    ):
        assert made.judge(subject).decision == "deny", subject
        if pattern != "x.md" and not subject.recursive and not subject.reads:
            assert made.judge(msgspec.structs.replace(subject, agent="main")).decision == "allow", subject


@pytest.mark.parametrize(
    ("agent", "credential", "decision"),
    [("main", "t", "allow"), ("other", "agent:other", "allow"), ("other", "t", "deny"), ("other", "owner", "deny")],
)
def test_an_allow_holds_for_no_agent_that_a_caller_names(agent: str, credential: str, decision: str) -> None:
    subject = Subject(
        names=("gsv__readfile",), route="native", args={"path": "notes/x"}, agent=agent, credential=credential
    )
    assert decided({"decision": "allow", "args": {"path": "notes/*"}}, subject, "deny") == decision
    named = {"decision": "allow", "args": {"path": ["notes/*", "agents/other/notes/*"]}}
    assert decided(named, subject, "deny") == "allow"


def test_a_search_on_a_machine_that_ignores_case_is_stopped_in_any() -> None:
    subject = call("Grep", args={"pattern": "x", "path": "/HOME/Me"}, folds=True)
    assert decided(SECRET, subject) == "deny"
    assert decided(SECRET, msgspec.structs.replace(subject, folds=False)) == "allow"


def test_a_folder_at_an_unknown_place_may_hold_anything() -> None:
    assert decided(SECRET, call("Grep", args={"pattern": "x", "path": "src"})) == "deny"


def test_a_rule_that_allows_a_folder_allows_its_search() -> None:
    rule = {"decision": "allow", "args": {"path": "/srv"}}
    for path, fits in (("/srv", True), ("/srv/", True), ("/srv/a", False), ("/", False), (".", False)):
        subject = call("Grep", args={"pattern": "x", "path": path}, workspace="/w")
        assert (decided(rule, subject, "deny") == "allow") is fits, path


def test_a_search_of_the_workspace_is_not_one_of_the_whole_machine() -> None:
    subject = call("Grep", args={"pattern": "x", "path": "."}, workspace="/home/me")
    for pattern in ("/etc/*", "/home/you/*", "re:^/etc/"):
        assert decided({"decision": "deny", "args": {"path": pattern}}, subject) == "allow", pattern


@pytest.mark.parametrize(
    ("ends", "key", "pattern", "stopped"),
    [
        (("laptop:/home/me", "gsv:x"), "path", "/home/me/.ssh/*", True),
        (("laptop:.", "gsv:x"), "path", ".ssh/*", True),
        (("laptop:/home/me", "gsv:x"), "source", "laptop:/home/me/.ssh/*", True),
        (("laptop:/home/me", "gsv:x"), "source", "laptop:.ssh/*", True),
        (("laptop:/srv", "gsv:x"), "path", "/home/me/.ssh/*", False),
        (("gsv:keys", "laptop:/home/me/.ssh"), "path", "/home/me/.ssh/*", True),
        (("gsv:.ssh", "laptop:/home/me"), "path", "/home/me/.ssh/*", True),
        (("gsv:.ssh", "laptop:/home/me"), "destination", "laptop:/home/me/.ssh/*", True),
        (("gsv:/", "laptop:/srv"), "path", "private/*", True),
        (("gsv:agents/other", "laptop:/srv"), "path", "private/*", True),
        (("gsv:public", "laptop:/srv"), "path", "private/*", False),
    ],
)
def test_a_rule_that_stops_files_stops_the_transfer_of_a_folder_that_may_hold_them(
    ends: tuple[str, str], key: str, pattern: str, stopped: bool
) -> None:
    args = dict(zip(("source", "destination"), ends, strict=True))
    reached = (Reached("laptop", (), "/home/me"),)
    rule = {"decision": "deny", "args": {key: pattern}}
    folder = Subject(names=("gsv__transfer",), route="native", args=args, reached=reached, recursive=True)
    assert (decided(rule, folder) == "deny") is stopped


def test_a_transfer_of_one_file_is_not_that_of_a_folder() -> None:
    args = {"source": "laptop:a.txt", "destination": "gsv:b"}
    subject = Subject(names=("gsv__transfer",), route="native", args=args, reached=(Reached("laptop", (), "/home/me"),))
    assert decided({"decision": "deny", "args": {"path": "*.pem"}}, subject) == "allow"


def test_a_rule_that_stops_memory_files_stops_a_search_of_them() -> None:
    subject = call("memory_search", None, args={"query": "x"}, reads=("MEMORY.md", "memory"))
    for pattern, stopped in (
        ("MEMORY.md", True),
        ("memory/private*", True),
        ("/work/memory/*", True),
        ("*.md", True),
        ("notes/*", False),
    ):
        assert (decided({"decision": "deny", "args": {"path": pattern}}, subject) == "deny") is stopped, pattern


@pytest.mark.parametrize("path", ["../etc/passwd", "/tmp/../etc/passwd", "//etc/passwd", "/proc/self/root/etc/passwd"])
def test_a_rule_about_any_text_reads_paths_as_paths(path: str) -> None:
    subject = call("Read", args={"path": path}, workspace="/home")
    assert decided({"decision": "deny", "args": {"*": "/etc/*"}}, subject) == "deny"


def test_a_file_of_another_agent_has_its_path_in_that_workspace_too() -> None:
    settings = msgspec.convert({"rules": [{"decision": "deny", "args": {"path": "private/*"}}]}, PolicySettings)
    rules = Policy(settings, "/g/agents/main", "/g/agents")
    for tool, args, stopped in (
        ("undo", {"path": ["/g/agents/other/private/x"]}, True),
        ("undo", {"path": ["/g/agents/main/private/x"]}, True),
        ("undo", {"path": ["/g/agents/other/public/x"]}, False),
        ("undo", {"path": ["/g/private/x"]}, False),
        ("grep", {"pattern": "x", "path": "/g/agents/other"}, True),
        ("grep", {"pattern": "x", "path": "/g/agents"}, True),
        ("grep", {"pattern": "x", "path": "/g/agents/other/public"}, False),
        ("glob", {"pattern": "/g/agents/*/private/*"}, True),
    ):
        assert (rules.judge(call(tool, None, args=args)).decision == "deny") is stopped, (tool, args)
    allowing = msgspec.convert(
        {"default": "deny", "rules": [{"decision": "allow", "args": {"path": "private/*"}}]}, PolicySettings
    )
    other = call("write", None, args={"path": "/g/agents/other/private/x"})
    assert Policy(allowing, "/g/agents/main", "/g/agents").judge(other).decision == "deny"


@pytest.mark.parametrize("path", ["private/x", "/private/x", "./private//x", "agents/main/private/x"])
def test_a_rule_that_stops_a_file_stops_a_message_that_carries_it(path: str) -> None:
    async def run(_arguments: Any, _context: Any) -> None: ...

    spec = ToolSpec("gsv__Message", parameters={"type": "object", "properties": {"media": {}}})
    own = Tool("gsv__Message", lambda: spec, run, files=("media",))
    target = Target(None, "gsv__Message", None, spec, own)
    args = msgspec.Raw(msgspec.json.encode({"text": "x", "media": ["public/a", path]}))
    subject = subject_of(target, args, credential="owner", session_key=None, origins=("http",))
    assert decided({"decision": "deny", "args": {"path": "private/*"}}, subject) == "deny"
    assert decided({"decision": "deny", "args": {"path": "secret/*"}}, subject) == "allow"


@pytest.mark.parametrize(
    ("pattern", "stopped", "not_stopped"),
    [
        ("secrets/*", ["secrets", "secrets/", "/work/secrets", "./secrets/.", "secrets/inner"], [".", "public"]),
        ("secrets/**", ["secrets", "secrets/inner"], [".", "secrets2"]),
        ("secrets/*.key", ["secrets", "/work/secrets"], [".", "secrets/inner", "public"]),
        ("/etc/ssh/*", ["/etc/ssh", "//etc/./ssh"], ["/etc"]),
        ("re:^/etc/", ["/etc"], ["/"]),
        ("/home/*/.ssh/id_*", ["/home/me/.ssh"], ["/home/me"]),
        ("*.pem", [], [".", "/etc"]),
        ("*/.env", [], [".", "sub"]),
    ],
)
def test_a_folder_whose_names_are_stopped_is_not_listed(
    pattern: str, stopped: list[str], not_stopped: list[str]
) -> None:
    rule = {"decision": "deny", "args": {"path": pattern}}
    for path in (*stopped, *not_stopped):
        subject = call("ls", node=None, args={"path": path})
        assert decided(rule, subject) == ("deny" if path in stopped else "allow"), path
    if not pattern.startswith(("/", "re:")):
        for path in (*stopped, *not_stopped):
            if path.startswith("/work"):
                continue
            subject = Subject(names=("gsv__readfile",), route="native", args={"path": path})
            assert decided(rule, subject) == ("deny" if path in stopped else "allow"), path


def test_a_tree_of_folders_is_a_search(tmp_path: Path) -> None:
    rule = {"decision": "deny", "args": {"path": "secrets/*"}}
    own = next(tool for tool in AgentFileTools(Files(tmp_path)).tools() if tool.spec.name == "ls")
    target = Target(None, "ls", own.spec.capability, own.spec, own)
    for depth, decision in ((None, "allow"), (1, "allow"), (2, "deny"), (2.0, "deny")):
        args = msgspec.Raw(msgspec.json.encode({"path": ".", **({} if depth is None else {"depth": depth})}))
        subject = subject_of(target, args, credential="owner", session_key=None, origins=("http",))
        assert decided(rule, subject) == decision, depth


@given(st.text("ab*", max_size=6), st.text("ab\n", max_size=8))
def test_globs_match_as_fnmatch_does(pattern: str, text: str) -> None:
    for decision in ("allow", "deny"):
        found = _Pattern(pattern, "rule", whole=decision == "allow").matches(text)
        assert found == fnmatchcase(text, pattern)


def test_a_long_argument_is_compared_quickly_or_not_at_all() -> None:
    long = "a" * 5_000_000
    for pattern in ("*rm -rf*", "*curl*|*sh*", "*aab*", "a*a*a*b*a"):
        assert decided({"decision": "deny", "args": {"command": pattern}}, call(args={"command": long})) == "allow"
    for pattern in ("*rm -r?*", "*[xy]*"):
        assert decided({"decision": "deny", "args": {"command": pattern}}, call(args={"command": long})) == "deny"
        allow = {"decision": "allow", "args": {"command": pattern}}
        assert decided(allow, call(args={"command": long}), "deny") == "deny"


def test_a_rule_may_use_the_common_name_of_a_tool() -> None:
    node = Node(NodeCard("box", "box", "", ""), 0, 0)
    spec = ToolSpec(name="Bash", description="", parameters={}, capability="shell.exec")
    subject = subject_of(
        Target(node, "Bash", "shell.exec", spec),
        msgspec.Raw(b'{"command":"true"}'),
        credential="owner",
        session_key=None,
        origins=("http",),
    )
    for name in ("node_bash", "NODE_*", "Bash", "box__Bash"):
        assert decided({"decision": "deny", "tool": name}, subject) == "deny", name
    assert decided({"decision": "deny", "tool": "node_read"}, subject) == "allow"
