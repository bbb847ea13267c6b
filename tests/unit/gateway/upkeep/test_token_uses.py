"""The last use of a token: known at once, and stored periodically."""

from __future__ import annotations

import asyncio
from pathlib import Path

from farhand.gateway.access.credentials import Credentials, NodeTokens
from farhand.gateway.upkeep.token_uses import TokenUses
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.access.tokens import Token, add_token, all_tokens, token_hash
from tests.support.harness import GatewayProcess


def credentials(now: list[float], *tokens: Token) -> Credentials:
    return Credentials("owner-secret", tokens, NodeTokens(), open=False, clock=lambda: now[0])


def test_the_last_of_many_uses_counts() -> None:
    now = [100.0]
    known = credentials(now, Token("one", token_hash("secret"), "read", None, "", 1))
    first = known.recognise("secret")
    now[0] = 130.0
    assert known.recognise("secret") == first
    assert known.recognise("owner-secret") is not None and known.recognise("wrong") is None
    assert dict(known.uses) == {"one": 130_000}
    assert known.take_uses() == {"one": 130_000} and known.take_uses() == {}
    now[0] = 160.0
    assert known.recognise("secret") == first and known.take_uses() == {"one": 160_000}


def test_they_are_written_down_once_in_a_while_and_at_the_end(tmp_path: Path) -> None:
    now = [100.0]
    token = Token("one", token_hash("secret"), "read", None, "", 1)

    async def work() -> list[int | None]:
        database = SqliteStore.open(tmp_path / "store.db")
        await database.write(lambda store: add_token(store, token))
        known = credentials(now, token)
        seen = []
        async with TokenUses(database, known, every_seconds=0.01):
            for at in (100.0, 200.0, 150.0):  # the last one by a clock that was put back
                now[0] = at
                known.recognise("secret")
                while known.uses:
                    await asyncio.sleep(0.01)
                await database.write(lambda store: None)
                seen.append((await database.read(all_tokens))[0].last_used_at)
        async with TokenUses(database, known):
            now[0] = 300.0
            known.recognise("secret")
        seen.append((await database.read(all_tokens))[0].last_used_at)
        await database.close()
        return seen

    assert asyncio.run(work()) == [100_000, 200_000, 200_000, 300_000]


def test_a_gateway_that_was_stopped_still_knows(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start()
    try:
        made = gateway.request("POST", "/v1/tokens", {"label": "reader", "scopes": ["read"]}).json()
        assert made["last_used_at"] is None
        assert gateway.request("GET", "/v1/nodes", token=made["token"]).status == 200
        (before,) = gateway.request("GET", "/v1/tokens").json()["tokens"]
        assert before["last_used_at"] >= before["created_at"]
        gateway.stop()
        gateway.start()
        (after,) = gateway.request("GET", "/v1/tokens").json()["tokens"]
        assert after["last_used_at"] == before["last_used_at"]
    finally:
        gateway.stop()
