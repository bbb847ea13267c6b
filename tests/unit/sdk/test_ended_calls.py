"""How much a node remembers of calls that have ended."""

from __future__ import annotations

from farhand.sdk.ended_calls import ANSWER_BYTES, ID_CHARACTERS, REMEMBERED_IDS, EndedCalls


def test_answers_make_room_before_ids_do() -> None:
    past = EndedCalls()
    half = b"x" * (ANSWER_BYTES // 2)
    for request_id in ("a", "b", "c"):
        past.add(request_id, half)
    assert [past.answer(request_id) for request_id in ("a", "b", "c")] == [None, half, half]
    assert "a" in past


def test_an_answer_that_is_too_long_evicts_no_other() -> None:
    past = EndedCalls()
    past.add("a", b"x")
    past.add("b", b"x" * (ANSWER_BYTES + 1))
    assert (past.answer("a"), past.answer("b")) == (b"x", None)
    assert "b" in past


def test_the_oldest_ids_are_forgotten() -> None:
    past = EndedCalls()
    for number in range(REMEMBERED_IDS + 1):
        past.add(f"r{number}", b"x")
    assert "r0" not in past
    assert past.answer("r0") is None
    assert "r1" in past


def test_long_ids_are_counted_by_their_length() -> None:
    past = EndedCalls()
    ids = [f"{number}" * (ID_CHARACTERS // 4) for number in range(5)]
    for request_id in ids:
        past.add(request_id)
    assert [request_id in past for request_id in ids] == [False, True, True, True, True]


def test_an_id_that_comes_again_counts_once() -> None:
    past = EndedCalls()
    for _ in range(10):
        past.add("a", b"x" * (ANSWER_BYTES // 2))
    past.add("b", b"x" * (ANSWER_BYTES // 2))
    assert past.answer("a") is not None
