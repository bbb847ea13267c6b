"""Ended calls, remembered so that none runs twice."""

from __future__ import annotations

from collections import OrderedDict

from farhand.protocol.version import MIB

REMEMBERED_IDS = 65_536
ID_CHARACTERS = 4 * MIB
ANSWER_BYTES = 4 * MIB


class EndedCalls:
    """The ids of the latest calls and, for the most recent of them, the responses."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._id_characters = 0
        self._answer_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def answer(self, request_id: str) -> bytes | None:
        """Return the response, or None if it is not kept."""
        return self._answers.get(request_id)

    def add(self, request_id: str, answer: bytes | None = None) -> None:
        """Remember a call and, if it may be repeated, its response. The oldest are dropped."""
        if request_id in self._ids:
            self._forget(request_id)
        self._ids[request_id] = None
        self._id_characters += len(request_id)
        if answer is not None and len(answer) <= ANSWER_BYTES:
            self._answers[request_id] = answer
            self._answer_bytes += len(answer)
            while self._answer_bytes > ANSWER_BYTES:
                self._forget_answer(next(iter(self._answers)))
        while len(self._ids) > REMEMBERED_IDS or self._id_characters > ID_CHARACTERS:
            self._forget(next(iter(self._ids)))

    def _forget(self, request_id: str) -> None:
        del self._ids[request_id]
        self._id_characters -= len(request_id)
        self._forget_answer(request_id)

    def _forget_answer(self, request_id: str) -> None:
        self._answer_bytes -= len(self._answers.pop(request_id, b""))
