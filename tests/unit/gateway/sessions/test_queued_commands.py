"""Commands in messages that a stopped gateway had taken and not yet carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.sessions.runs import Run, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.store.sqlite.store import SqliteStore

TOKEN = Credential("tok_gone", frozenset({Scope.CHAT.value, Scope.TOOLS_EXEC.value}))


async def work(_sessions: Sessions, _run: Run) -> RunOutcome:
    raise AssertionError("no model is asked")


@pytest.mark.parametrize("revoked", [True, False])
def test_a_command_of_a_token_that_ended_while_the_gateway_was_down_is_not_carried_out(
    tmp_path: Path, revoked: bool
) -> None:
    frozen = asyncio.run(restarted(tmp_path, revoked))
    assert frozen == ([] if revoked else ["tok_gone"])


async def restarted(tmp_path: Path, revoked: bool) -> list[str]:
    """Take the command `/freeze`, start again before it is carried out, and return by whom it was."""
    frozen: list[str] = []
    taken = asyncio.Event()

    async def hang(_by: str, _reason: str) -> str:
        taken.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def freeze(by: str, _reason: str) -> str:
        frozen.append(by)
        return "frozen"

    def invalid(ids: Iterable[str]) -> str | None:
        return "the token tok_gone was revoked" if revoked and "tok_gone" in ids else None

    database = SqliteStore.open(tmp_path / "store.db")
    try:
        before = Sessions(database, work, clock=lambda: 1, freeze=hang)
        await before.start()
        sending = asyncio.ensure_future(before.send("agent:main:x", "/freeze now", origin="http", credential=TOKEN))
        await taken.wait()
        sending.cancel()
        await asyncio.wait({sending})
        after = Sessions(database, work, clock=lambda: 2, freeze=freeze, invalid=invalid)
        assert await after.start() == 1
    finally:
        await database.close()
    return frozen
