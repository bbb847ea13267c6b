"""The text of `farhand.toml` with another policy: nothing else in it changes."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from farhand.gateway.calls.policy import PolicyRule, PolicySettings
from farhand.gateway.control.policy_file import version_of, with_policy

FILE = """\
# my gateway
[gateway]
port = 3210  # the usual one

[policy]
approval_seconds = 60  # be quick

# Nobody deletes anything.
[[policy.rules]]
decision = "deny"
name = "no deleting"
args = { command = "*rm*" }

[[policy.rules]]
decision = "ask"
tool = "*__Write"

[agent]
model = "m"  # at the end
"""
DENY = PolicyRule(decision="deny", name="no deleting", args={"command": "*rm*"})
ASK = PolicyRule(decision="ask", tool="*__Write")


def read(text: str) -> PolicySettings:
    return msgspec.convert(tomllib.loads(text).get("policy", {}), PolicySettings)


@pytest.mark.parametrize(
    "policy",
    [
        PolicySettings(),
        PolicySettings(default="ask", approvers=["telegram:1"]),
        PolicySettings(rules=[ASK, DENY], approval_seconds=60),
        PolicySettings(rules=[PolicyRule(decision="deny", name='"]\n[gateway]\nport = 1 #', reason="ünder\u2028")]),
        PolicySettings(rules=[PolicyRule(decision="trial", args={"*": ["re:a\\.b", "'"], "x.y": "z"}, seconds=2.5)]),
    ],
)
@pytest.mark.parametrize(
    "file", [FILE, "", "policy.default = 'deny'\n", "policy = { default = 'deny' }\n[log]\n", "[gateway]\nport = 1"]
)
def test_it_says_what_was_wanted_and_all_else_stays(file: str, policy: PolicySettings) -> None:
    text = with_policy(file, policy)
    before, after = tomllib.loads(file), tomllib.loads(text)
    before.pop("policy", None)
    after.pop("policy", None)
    assert read(text) == policy
    assert after == before
    assert with_policy(text, policy) == text or read(with_policy(text, policy)) == policy


def test_comments_stay_with_the_rules_that_stay() -> None:
    text = with_policy(
        FILE, PolicySettings(rules=[DENY, PolicyRule(decision="allow", node="laptop")], approval_seconds=60)
    )
    for comment in ("# my gateway", "# the usual one", "# be quick", "# Nobody deletes anything.", "# at the end"):
        assert comment in text
    assert read(text).rules == [DENY, PolicyRule(decision="allow", node="laptop")]


def test_a_file_that_is_not_toml_is_refused() -> None:
    with pytest.raises(ValueError, match="not valid TOML"):
        with_policy("[policy", PolicySettings())


def test_equal_policies_have_equal_versions() -> None:
    assert version_of(read(FILE)) == version_of(PolicySettings(rules=[DENY, ASK], approval_seconds=60.0))
    assert version_of(PolicySettings()) != version_of(PolicySettings(default="deny"))
