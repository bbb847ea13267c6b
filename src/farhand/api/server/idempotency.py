"""Repeated requests take effect once per `Idempotency-Key`.

Routes that pass the gate store their keys themselves, permanently. For any other POST it is done here: the key is on
disk before the request runs; the answer, which may hold a secret that is shown once, is kept in memory only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from farhand.api.server.http import Problem, Reply, Request
from farhand.gateway.calls.open_call import new_call_id
from farhand.protocol.canonical_json import canonical
from farhand.store.ports import Store, StoreError
from farhand.store.tables.idempotency import IDEMPOTENCY_MS, claim, release

Handler = Callable[[Request], Awaitable[Reply]]

MOST_ANSWERS = 1000
LONGEST_ANSWER = 64 * 1024


class FirstAnswer(msgspec.Struct, frozen=True):
    digest: bytes
    reply: asyncio.Future[Reply]
    at: int


class Repeats:
    """The answers of the last day, within a memory limit."""

    def __init__(self, database: Store, clock: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock
        self._answers: dict[tuple[str, str], FirstAnswer] = {}

    async def answer(self, request: Request, handler: Handler) -> Reply:
        """Return the answer to the first request with this key. Raises Problem if that was a different request."""
        key = request.idempotency_key or ""
        body = await request.body()
        request.rewind(body)
        digest = hashlib.sha256(b"%b?%b\0%b" % (request.path.encode(), request.query_string, canonical(body))).digest()
        whose = (request.credential.id, key)
        now = self._clock()
        known = self._answers.get(whose)
        if known is not None and known.at > now - IDEMPOTENCY_MS:
            _check(known.digest, digest, key)
            return _again(await asyncio.shield(known.reply))
        return await self._first(request, handler, whose, digest, now)

    async def _first(
        self,
        request: Request,
        handler: Callable[[Request], Awaitable[Reply]],
        whose: tuple[str, str],
        digest: bytes,
        now: int,
    ) -> Reply:
        credential, key = whose
        request_id = new_call_id()
        coming: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers.pop(whose, None)
        self._answers[whose] = FirstAnswer(digest, coming, now)
        done = False
        try:
            try:
                first, before = await self._database.write(
                    lambda store: claim(store, credential, key, digest, request_id, now)
                )
            except StoreError as error:
                raise Problem(503, "not_recorded", f"nothing was done: {error}") from None
            if first != request_id:
                _check(before, digest, key)
                reason = f"the request with the key {key!r} was carried out before, and its answer is not kept"
                raise Problem(409, "already_done", reason)
            try:
                reply = await handler(request)
            except Problem:
                await self._database.write(lambda store: release(store, credential, key, request_id))
                raise
            done = reply.status < 400
            if not done:
                await self._database.write(lambda store: release(store, credential, key, request_id))
            coming.set_result(_again(reply))
            return reply
        except Problem as problem:
            coming.set_result(problem.reply())
            raise
        finally:
            if not coming.done():
                coming.set_result(
                    Problem(409, "already_done", "the outcome of the first request with this key is unknown").reply()
                )
            if not done or reply.pieces is not None or len(reply.body) > LONGEST_ANSWER:
                self._answers.pop(whose, None)
            while len(self._answers) > MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]


def _check(first: bytes, digest: bytes, key: str) -> None:
    if first != digest:
        raise Problem(409, "idempotency_conflict", f"the idempotency key {key!r} was used for another request")


def _again(reply: Reply) -> Reply:
    """Return a copy of a reply, since sending changes it."""
    return Reply(
        reply.body,
        status=reply.status,
        content_type=reply.content_type,
        headers=list(reply.headers),
        pieces=reply.pieces,
        bare=reply.bare,
    )
