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
    OffsetRedactor,
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


@pytest.mark.parametrize("secret", ["correct-horse-battery", "fhc_" + "a1-_" * 10 + "xyz"])
def test_a_stream_by_offsets_is_masked_wherever_it_is_cut(secret: str) -> None:
    """At most three bytes of a secret are shown before it is known to be one; single keys are not held back."""
    data = f"say {secret} again".encode()
    hidden = data.replace(secret.encode(), b"*" * len(secret))
    begin = data.index(secret.encode())
    for first in range(len(data)):
        for second in range(first, len(data)):
            redactor = OffsetRedactor(KnownSecrets([secret]), 0)
            shown, at = b"", 0
            for piece in (data[:first], data[first:second], data[second:]):
                offset, text = redactor.feed(redactor.next_offset, piece, flush=False)
                assert offset == at
                shown += text
                at += len(text)
            assert not redactor.holding and len(shown) == len(data)
            early = next((size for size in (3, 2, 1, 0) if shown[begin:].startswith(secret[:size].encode())), 0)
            assert shown == hidden[:begin] + secret[:early].encode() + hidden[begin + early :]


def test_what_is_held_back_is_shown_on_flush_and_the_rest_is_masked() -> None:
    secret = "correct-horse-battery"
    redactor = OffsetRedactor(KnownSecrets([secret]), 0)
    assert redactor.feed(0, b"cor", flush=False) == (0, b"cor") and not redactor.holding
    assert redactor.feed(3, b"rect", flush=False) == (3, b"") and redactor.holding
    assert redactor.feed(7, b"", flush=True) == (3, b"rect") and not redactor.holding
    assert redactor.feed(7, secret[7:].encode() + b"!", flush=False) == (7, b"*" * len(secret[7:]) + b"!")
    assert redactor.feed(100, b"after a gap", flush=False) == (100, b"after a gap")


def test_what_was_not_asked_for_is_not_shown() -> None:
    secret = "correct-horse-battery"
    data = f"0123456789{secret} end".encode()
    for wanted in range(len(data)):
        redactor = OffsetRedactor(KnownSecrets([secret]), wanted)
        offset, text = redactor.feed(redactor.next_offset, data[redactor.next_offset :], flush=True)
        assert (offset, text) == (wanted, data.replace(secret.encode(), b"*" * len(secret))[wanted:])
