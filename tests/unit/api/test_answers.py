"""Answers as they are written to a connection."""

from __future__ import annotations

import pytest

from farhand.api.server.http import Reply, complete_answer

INJECTED = b"text/plain\r\nset-cookie: a=b"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"", content_type=INJECTED),
        Reply(b"", headers=[(b"etag", INJECTED)]),
        Reply(b"", headers=[(b"etag\r\nset-cookie", b"a")]),
        Reply(b"", content_type=b"text/plain\0"),
    ],
)
def test_no_part_of_a_header_can_begin_another_one(reply: Reply) -> None:
    with pytest.raises(ValueError, match="cannot have"):
        complete_answer(reply, "1", [], close=False)


def test_an_ordinary_answer() -> None:
    answer = complete_answer(Reply(b"hello", content_type=b"text/plain"), "1", [], close=True)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n") and answer.endswith(b"\r\n\r\nhello")
