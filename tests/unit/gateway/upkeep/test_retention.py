"""Ended rows are removed after the retention period; open ones never, regardless of their age."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farhand.gateway.upkeep.retention import AT_ONCE, DAY_MS, Retention
from farhand.store.ports import Tx
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import cron, hooks, outbox
from farhand.store.tables.cron import Slot, SlotStatus
from farhand.store.tables.hooks import HookPost
from farhand.store.tables.outbox import AwaitedReply, MessageState, OutboxRecord

NOW = 1_800_000_000_000
OLD = NOW - 31 * DAY_MS
NEW = NOW - 29 * DAY_MS


def message(name: str, at: int, ended_at: int | None, state: MessageState = MessageState.SENT) -> OutboxRecord:
    return OutboxRecord(
        id=name,
        channel="crm",
        account="default",
        peer="ann",
        peer_kind="dm",
        parts=("x",),
        agent_id="main",
        origin="test",
        state=state if ended_at is not None else MessageState.WAITING,
        created_at=at,
        ended_at=ended_at,
    )


def forget(path: Path, fill: Callable[[Tx], None], look: Callable[[Tx], Any], days: float) -> Any:
    async def work() -> Any:
        database = SqliteStore.open(path / "farhand.db")
        try:
            await database.write(fill)
            dropped = await Retention(database, lambda: days, clock=lambda: NOW).forget()
            return dropped, await database.read(look)
        finally:
            await database.close()

    return asyncio.run(work())


def test_messages_that_ended_long_ago_are_forgotten_and_no_others(tmp_path: Path) -> None:
    def fill(store: Tx) -> None:
        for name, ended_at in (("sent", OLD), ("waiting", None), ("recent", NEW)):
            outbox.add_message(store, message(name, OLD, ended_at))
        outbox.add_message(store, message("failed", OLD, OLD, MessageState.FAILED))
        outbox.add_message(store, message("newest", OLD, OLD))

    def look(store: Tx) -> list[str]:
        return [one.id for one in outbox.list_messages(store, limit=100)]

    dropped, left = forget(tmp_path, fill, look, 30)
    assert (dropped, left) == (2, ["newest", "recent", "waiting"])  # the newest keeps its number taken


def test_posts_are_forgotten_but_no_number_is_given_twice(tmp_path: Path) -> None:
    def fill(store: Tx) -> None:
        for number in range(3):
            post = hooks.add_post(store, HookPost(hook="h", delivery=str(number), body=b"x", at=OLD))
            assert post is not None
            if number != 1:
                hooks.end_post(store, post.seq, OLD, run_id="r")

    def look(store: Tx) -> Any:
        return list(store.execute("SELECT seq, delivery FROM hook_posts"))

    assert forget(tmp_path, fill, look, 30) == (1, [(2, "1"), (3, "2")])


def test_answers_that_were_given_and_runs_of_jobs_that_are_gone(tmp_path: Path) -> None:
    def fill(store: Tx) -> None:
        for name, ended_at in (("given", OLD), ("owed", None)):
            place = {"channel": "crm", "account": "default", "peer": "ann", "peer_kind": "dm"}
            outbox.await_reply(
                store, AwaitedReply(run_id=name, **place, agent_id="main", created_at=OLD, ended_at=ended_at)
            )
        for number, ended_at in ((1, OLD), (2, NEW)):
            row = Slot(
                job="gone",
                slot=number,
                name="n",
                agent_id="main",
                status=SlotStatus.OK,
                recorded_at=OLD,
                ended_at=ended_at,
            )
            cron.add_slot(store, row)

    def look(store: Tx) -> Any:
        return [one.run_id for one in outbox.open_awaited(store)], [
            one.slot for one in cron.list_runs(store, None, 9, 0)
        ]

    assert forget(tmp_path, fill, look, 30) == (2, (["owed"], [2]))


def test_for_ever_is_for_ever_and_many_go_in_portions(tmp_path: Path) -> None:
    count = 2 * AT_ONCE + 7

    def fill(store: Tx) -> None:
        for number in range(count):
            outbox.add_message(store, message(str(number), OLD, OLD))

    def look(store: Tx) -> int:
        return len(outbox.list_messages(store, limit=10_000))

    assert forget(tmp_path, fill, look, 0) == (0, count)
    assert forget(tmp_path, lambda _: None, look, 30) == (count - 1, 1)
