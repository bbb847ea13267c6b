"""Names of sessions, and commands to them."""

from __future__ import annotations

import pytest

from farhand.gateway.sessions import commands
from farhand.gateway.sessions.commands import Command
from farhand.gateway.sessions.keys import (
    MAX_KEY,
    DmScope,
    agent_id,
    agent_of,
    canonical,
    cron_key,
    guest_key,
    heartbeat_key,
    is_reserved,
    peer_key,
    short,
    token,
)
from farhand.protocol.errors import InvalidArgs


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("main", "agent:main:main"),
        (" main ", "agent:main:main"),
        ("agent:main:main", "agent:main:main"),
        ("agent:main", "agent:main:main"),
        ("agent:Helper:main", "agent:helper:main"),
        ("agent:My Agent:main", "agent:my-agent:main"),
        ("agent::main", "agent:main:main"),
        ("foo", "foo"),
        ("agent:main:cli:dm:main", "agent:main:main"),
        ("agent:helper:telegram:dm:42", "agent:helper:main"),
        ("agent:main:telegram:group:42", "agent:main:telegram:group:42"),
        ("agent:main:cron:backup", "agent:main:cron:backup"),
    ],
)
def test_a_session_has_one_name_however_it_is_written(written: str, meant: str) -> None:
    assert canonical(written) == meant == canonical(meant)


@pytest.mark.parametrize("key", ["", "  ", "a/b", "a\nb", "a\tb", "x" * 257, "\x1b[31m"])
def test_an_invalid_name_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgs):
        canonical(key)


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        ("main", "agent:main:main"),
        ("per-peer", "agent:main:dm:+31612345678"),
        ("per-channel-peer", "agent:main:whatsapp:dm:+31612345678"),
        ("per-account-channel-peer", "agent:main:whatsapp:work:dm:+31612345678"),
    ],
)
def test_people_have_sessions_by_scope(scope: DmScope, key: str) -> None:
    assert peer_key("main", "WhatsApp", "dm", "+31612345678", account="Work", scope=scope) == key
    assert canonical(key, scope) == key
    assert peer_key("main", "WhatsApp", "group", "A b", scope=scope) == "agent:main:whatsapp:group:a_b"


@pytest.mark.parametrize("scope", ["main", "per-peer", "per-channel-peer", "per-account-channel-peer"])
@pytest.mark.parametrize("account", ["default", "dm", "guest", "main"])
@pytest.mark.parametrize("kind", ["dm", "group"])
def test_the_session_of_a_guest_is_nobody_else_s(scope: DmScope, account: str, kind: str) -> None:
    """On an account named `dm` it was taken for that of a person whom the owner named: the main session."""
    for peer in ("mallory", "main", "dm", "a" * 300, "b" * 250 + "@example.org"):
        key = guest_key("main", "webhook", account, peer, kind)
        assert canonical(key, scope) == key and len(key) <= MAX_KEY
        assert ":guest" in key


def test_no_guest_is_named_like_the_session_of_another() -> None:
    """The ids of some guests are not part of a key as they are, but with a digest, which is no secret."""
    for peer in ("O'Brien", "a b", "x" * 65):
        who = guest_key("main", "webhook", "default", peer).rpartition(":")[2]
        assert guest_key("main", "webhook", "default", who) != guest_key("main", "webhook", "default", peer)


def test_names_of_the_gateway_are_reserved() -> None:
    assert is_reserved(heartbeat_key("main")) and is_reserved("agent:main:main") and is_reserved("agent:main:cron:x")
    assert not is_reserved("review") and not is_reserved("agent:main:review") and not is_reserved("agents:x:y:z")


def test_a_person_with_several_addresses_is_one() -> None:
    links = {"anna": ["+31 6 1234 5678", "telegram:42"]}
    for channel, peer, who in [
        ("whatsapp", "31612345678", "anna"),
        ("telegram", "42", "anna"),
        ("discord", "42", "42"),
        ("telegram", "43", "43"),
    ]:
        assert peer_key("main", channel, "dm", peer, scope="per-peer", links=links) == f"agent:main:dm:{who}"


def test_parts_of_names() -> None:
    assert (agent_id("  Über Agent! "), agent_id("--"), agent_id("x" * 99)) == ("ber-agent", "main", "x" * 64)
    assert (token("A:b/c d"), token("")) == ("a_b_c_d", "unknown")
    assert (agent_of("agent:helper:main"), agent_of("foo"), short("agent:main:main")) == ("helper", "main", "main")
    assert cron_key("main", "Job 1") == "agent:main:cron:job_1"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/new", Command("new")),
        (" /RESET \n", Command("new")),
        ("/model", Command("model")),
        ("/model openai/gpt-5", Command("model", "openai/gpt-5")),
        ("/think high", Command("think", "high")),
        ("/compact 20", Command("compact", "20")),
        ("/stop now", None),
        ("/stop it please", None),
        ("/unknown", None),
        ("please /stop", None),
        ("", None),
    ],
)
def test_a_command_is_a_whole_message(text: str, command: Command | None) -> None:
    assert commands.read(text) == command
