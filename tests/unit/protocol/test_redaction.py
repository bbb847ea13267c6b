"""What is shown of secrets: nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.redaction import (
    OWN_PREFIXES,
    KnownSecrets,
    can_be_masked,
    is_secret_name,
    mask_settings,
    mask_text,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET /v1/nodes/ws?token=abc.def&node_id=x", "GET /v1/nodes/ws?token=***&node_id=x"),
        ("Authorization: Bearer abc123", "Authorization: Bearer ***"),
        ("subprotocol bearer.QUJD", "subprotocol bearer.***"),
        ('{"token": "abc"}', '{"token": "***"}'),
        ("key sk-proj-abc123 used", "key sk-*** used"),
        ("fhn_abcdef", "fhn_***"),
        ("postgres://me:pass@db/x", "postgres://me:***@db/x"),
        ("password=hunter2", "password=***"),
        ("the token was revoked", "the token was revoked"),
        ("exit code: 127", "exit code: 127"),
        ("https://example.com:8080/path", "https://example.com:8080/path"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert mask_text(text) == expected


@pytest.mark.parametrize("prefix", sorted(OWN_PREFIXES))
def test_every_kind_of_own_secret(prefix: str) -> None:
    secret = f"{prefix}_{'A' * 20}{'b' * 23}"
    assert mask_text(f"a {secret} b") == f"a {prefix}_*** b"
    assert KnownSecrets().redact(f"a {secret} b".encode()) == b"a *** b"
    assert KnownSecrets().trailing_partial(secret[:20].encode()) == 20


@pytest.mark.parametrize(
    "name", ["token", "apiKeys", "bot_token", "SMTP_PASSWORD", "secret", "access-token", "key", "X-Auth-Key"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["session_key", "tls_key", "main_key", "tokenizer", "token_count", "ssh_key", "port"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"apiKeys": {"anthropic": "x", "deep": [{"a": "y"}]}},
            {"apiKeys": {"anthropic": "***", "deep": [{"a": "***"}]}},
        ),
        ({"hooks": [{"id": "a", "secret": "s"}]}, {"hooks": [{"id": "a", "secret": "***"}]}),
        ({"tokens": ["a", ""]}, {"tokens": ["***", ""]}),
        ({"base_url": "https://s3cret@host/v1"}, {"base_url": "https://***@host/v1"}),
        ({"url": "https://host/v1?model=a&api-key=x#y"}, {"url": "https://host/v1?model=a&api-key=***#y"}),
        ({"url": "https://hooks.slack.com/services/T0/B0/xyz"}, {"url": "https://hooks.slack.com/services/***"}),
        ({"headers": {"X-Auth": "x", "Accept": "y"}}, {"headers": {"X-Auth": "***", "Accept": "***"}}),
        ({"url": "https://host:8080/v1?keys=2"}, {"url": "https://host:8080/v1?keys=2"}),
        (
            {"context_tokens": 128000, "token": None, "password": ""},
            {"context_tokens": 128000, "token": None, "password": ""},
        ),
    ],
)
def test_settings(value: Any, expected: Any) -> None:
    assert mask_settings(value) == expected


def partial_sizes(needles: list[bytes], data: bytes) -> tuple[int, int]:
    """The same as `KnownSecrets` finds, slowly."""
    sizes = [(needle, size) for needle in needles for size in range(1, min(len(needle) - 1, len(data)) + 1)]
    return (
        max((size for needle, size in sizes if data.endswith(needle[:size])), default=0),
        max((size for needle, size in sizes if data.startswith(needle[-size:])), default=0),
    )


@given(
    st.lists(st.text("ab/\n", min_size=8, max_size=14).filter(can_be_masked), max_size=4),
    st.text("ab/\n*", max_size=40),
)
def test_partial_secrets_at_the_edges(values: list[str], text: str) -> None:
    known = KnownSecrets(values)
    data = text.encode()
    assert (known.trailing_partial(data), known.leading_partial(data)) == partial_sizes(list(known._needles), data)
    redacted, overwritten = data, data
    for needle in known._needles:
        redacted = redacted.replace(needle, b"***")
        overwritten = overwritten.replace(needle, b"*" * len(needle))
    assert known.redact(data) == redacted and known.overwrite(data) == overwritten


def test_many_long_secrets_take_little_time() -> None:
    """Compared one by one at each position, the needles would take hours."""
    lines = [hashlib.sha512(b"%d" % number).hexdigest()[:64] for number in range(1000)]
    known = KnownSecrets(["-----BEGIN KEY-----\n" + "\n".join(lines)])
    for piece in (b"x", b"-----BEGIN KEY-----\n", lines[0].encode(), b"-----BE"):
        data = piece * (200_000 // len(piece))
        known.trailing_partial(data)
        known.leading_partial(data)
        known.trailing_partial(data[:40])
