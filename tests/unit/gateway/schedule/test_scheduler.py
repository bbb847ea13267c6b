"""The scheduler on a clock that tests move: policies, kills, retries, jumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import time_machine

from farhand.gateway.schedule.scheduler import Scheduler, ScheduleSettings, SlotOutcome
from farhand.gateway.schedule.time_parsing import next_slot, zone_named
from farhand.store.journal.events import events_after
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import cron
from farhand.store.tables.cron import At, Cron, CronJob, Every, Schedule, Slot, SlotStatus, SystemEvent, Task

UTC = zone_named("UTC")
T0 = 1_800_000_000_000
MINUTE = 60_000
HOUR = 60 * MINUTE


class House:
    """A scheduler that only moves when `tick` is called, on a clock that stands still."""

    def __init__(self, path: Path, clock: time_machine.Coordinates, **settings: Any) -> None:
        self.clock = clock
        self.database = SqliteStore.open(path / "x.db")
        self.settings = ScheduleSettings(UTC, **settings)
        self.ran: list[tuple[str, int]] = []
        self.reported: list[str] = []
        self.outcomes: list[SlotOutcome] = []
        self.away: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.stopped = 0
        self.scheduler = self.new()

    def new(self, **options: Any) -> Scheduler:
        return Scheduler(
            self.database,
            self.settings,
            self.perform,
            reachable=lambda job: job.node not in self.away,
            report=self.report,
            **options,
        )

    async def perform(self, job: CronJob, slot: Slot) -> SlotOutcome:
        self.ran.append((job.id, slot.slot))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.stopped += 1
            raise
        return self.outcomes.pop(0) if self.outcomes else SlotOutcome(SlotStatus.OK, summary="done")

    async def report(self, job: CronJob, slot: Slot, ended: SlotOutcome) -> None:
        self.reported.append(f"{job.id}: {ended.error}")

    async def add(self, job_id: str, schedule: Schedule, **fields: Any) -> CronJob:
        now = self.now
        cursor = min(now, schedule.at_ms - 1) if isinstance(schedule, At) else now
        job = CronJob(
            id=job_id,
            agent_id="main",
            name=job_id,
            schedule=schedule,
            spec=fields.pop("spec", SystemEvent("do")),
            created_at=now,
            updated_at=now,
            cursor=cursor,
            next_at=next_slot(schedule, cursor, UTC),
            **fields,
        )
        await self.database.write(lambda store: cron.save_job(store, job))
        return job

    @property
    def now(self) -> int:
        import time

        return time.time_ns() // 1_000_000

    def move(self, to: int) -> None:
        self.clock.move_to(to / 1000, tick=False)

    async def tick(self, *, wait: bool = True) -> None:
        runs = await self.scheduler.advance()
        if wait and runs:
            await asyncio.wait([run.task for run in runs])

    def slots(self, job_id: str) -> list[tuple[int, str]]:
        """(slot, status) of every row, oldest first."""
        found = self.database.query(
            lambda store: list(
                store.execute("SELECT slot, status FROM cron_slots WHERE job = ? ORDER BY slot", (job_id,))
            )
        )
        return [(int(slot), str(status)) for slot, status in found]

    def row(self, job_id: str, slot: int) -> Slot:
        found = self.database.query(lambda store: cron.find_slot(store, job_id, slot))
        assert found is not None
        return found

    def job(self, job_id: str) -> CronJob | None:
        return self.database.query(lambda store: cron.find_job(store, job_id))

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = self.database.query(lambda store: events_after(store, 0, 1000))
        return [json.loads(bytes(event.data)) for event in found if event.kind == kind]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def run(path: Path, test: Callable[[House], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        with time_machine.travel(T0 / 1000, tick=False) as clock:
            house = House(path, clock, **settings)
            try:
                await test(house)
            finally:
                await house.database.close()

    asyncio.run(whole())


def test_each_slot_runs_once_on_its_grid_however_late_one_looks(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        for offset in (0, 59_999, 60_000, 60_001, 60_002, 125_000, 180_500):
            house.move(T0 + offset)
            await house.tick()
        assert house.slots("a") == [(T0 + MINUTE, "ok"), (T0 + 2 * MINUTE, "ok"), (T0 + 3 * MINUTE, "ok")]
        assert house.ran == [("a", T0 + n * MINUTE) for n in (1, 2, 3)]

    run(tmp_path, test)


def after_an_hour(policy: str, path: Path, **fields: Any) -> tuple[list[tuple[int, str]], list[int]]:
    """A job of every 15 minutes, without a scheduler for an hour and five minutes."""
    found: list[Any] = []

    async def test(house: House) -> None:
        await house.add("a", Every(15 * MINUTE, T0), missed=policy, **fields)
        house.move(T0 + 65 * MINUTE)
        for _ in range(6):
            await house.tick()
        found.append((house.slots("a"), [slot for _, slot in house.ran]))

    run(path, test)
    slots, ran = found[0]
    return [((slot - T0) // MINUTE, status) for slot, status in slots], [(slot - T0) // MINUTE for slot in ran]


def test_missed_slots_follow_the_jobs_own_policy_and_all_are_recorded(tmp_path: Path) -> None:
    for name in ("once", "skip", "all", "near", "far"):
        (tmp_path / name).mkdir()
    assert after_an_hour("once", tmp_path / "once") == (
        [(15, "missed"), (30, "missed"), (45, "missed"), (60, "ok")],
        [60],
    )
    assert after_an_hour("skip", tmp_path / "skip") == ([(n, "missed") for n in (15, 30, 45, 60)], [])
    assert after_an_hour("all", tmp_path / "all") == ([(n, "ok") for n in (15, 30, 45, 60)], [15, 30, 45, 60])
    near = after_an_hour("window", tmp_path / "near", window_seconds=600)
    assert near == ([(15, "missed"), (30, "missed"), (45, "missed"), (60, "ok")], [60])
    far = after_an_hour("window", tmp_path / "far", window_seconds=120)
    assert far == ([(n, "missed") for n in (15, 30, 45, 60)], [])


def test_a_restart_at_the_wrong_moment_loses_no_slot_even_of_a_job_that_skips(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(15 * MINUTE, T0), missed="skip")
        house.move(T0 + 15 * MINUTE + 2000)
        house.scheduler = house.new()
        await house.tick()
        assert house.slots("a") == [(T0 + 15 * MINUTE, "ok")] and house.row("a", T0 + 15 * MINUTE).late is True

    run(tmp_path, test)


def test_a_year_of_missed_minutes_is_recorded_without_a_row_for_each(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Cron("* * * * *"))
        house.move(T0 + 365 * 24 * HOUR)
        await house.tick()
        slots = house.slots("a")
        assert len(slots) == 101 and [status for _, status in slots].count("ok") == 1
        oldest = house.row("a", slots[0][0])
        assert oldest.status is SlotStatus.MISSED and oldest.since == T0
        assert house.events("cron.missed")[0]["more"] is True

    run(tmp_path, test)


def test_while_a_run_is_under_way_its_job_starts_no_other(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("once", Every(MINUTE, T0))
        await house.add("skip", Every(MINUTE, T0), missed="skip")
        house.gate.clear()
        house.move(T0 + MINUTE)
        await house.tick(wait=False)
        for minute in (2, 3):
            house.move(T0 + minute * MINUTE)
            await house.tick(wait=False)
        await asyncio.sleep(0)
        assert sorted(house.ran) == [("once", T0 + MINUTE), ("skip", T0 + MINUTE)]
        house.gate.set()
        await until(lambda: not house.scheduler._runs)
        await house.tick()
        assert house.slots("once") == [(T0 + MINUTE, "ok"), (T0 + 2 * MINUTE, "missed"), (T0 + 3 * MINUTE, "ok")]
        assert [status for _, status in house.slots("skip")] == ["ok", "skipped", "skipped"]

    run(tmp_path, test)


def test_a_slot_that_waited_longer_than_its_window_is_let_go(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(10 * MINUTE, T0), missed="window", window_seconds=60)
        house.gate.clear()
        house.move(T0 + 10 * MINUTE)
        await house.tick(wait=False)
        house.move(T0 + 20 * MINUTE)
        await house.tick(wait=False)
        house.move(T0 + 22 * MINUTE)
        house.gate.set()
        await until(lambda: not house.scheduler._runs)
        await house.tick()
        assert [status for _, status in house.slots("a")] == ["ok", "skipped"]

    run(tmp_path, test)


def test_no_more_runs_at_once_than_the_settings_allow(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        for number in range(5):
            await house.add(f"j{number}", At(T0 + 1000))
        house.gate.clear()
        house.move(T0 + 2000)
        await house.tick(wait=False)
        await asyncio.sleep(0)
        assert len(house.ran) == 2
        house.gate.set()
        for _ in range(3):
            await until(lambda: not house.scheduler._runs)
            await house.tick()
        assert len(house.ran) == 5 == len(set(house.ran))

    run(tmp_path, test, max_concurrent=2)


def test_a_one_shot_job_has_ended_after_its_run(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("kept", At(T0 + 1000))
        await house.add("gone", At(T0 + 1000), delete_after_run=True)
        await house.add("failed", At(T0 + 1000), delete_after_run=True)
        await house.add("late", At(T0 + 1000), missed="skip")
        house.move(T0 + 10 * MINUTE)
        house.outcomes = [SlotOutcome(SlotStatus.ERROR, "no")]
        await house.tick()
        jobs = {name: house.job(name) for name in ("kept", "gone", "failed", "late")}
        assert jobs["gone"] is None and house.slots("gone") == [(T0 + 1000, "ok")]
        for name in ("kept", "failed", "late"):
            job = jobs[name]
            assert job is not None and not job.enabled, name
        assert house.slots("late") == [(T0 + 1000, "missed")]
        house.move(T0 + 20 * MINUTE)
        await house.tick()
        assert len(house.ran) == 3

    run(tmp_path, test)


def test_a_run_that_takes_too_long_is_stopped_before_it_is_tried_again(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        spec = Task("do", timeout_seconds=0.05)
        await house.add("a", At(T0 + 1000), spec=spec, retries=1, retry_delay_seconds=0)
        house.move(T0 + 1000)
        house.gate.clear()
        seen: list[int] = []

        async def perform(job: CronJob, slot: Slot) -> SlotOutcome:
            seen.append(house.stopped)
            return await house.perform(job, slot)

        house.scheduler._perform = perform
        await house.tick()
        assert seen == [0, 1] and house.stopped == 2
        row = house.row("a", T0 + 1000)
        assert (row.status, row.attempts) == (SlotStatus.TIMEOUT, 2)
        assert "was stopped" in (row.error or "")

    run(tmp_path, test)


def test_a_failure_is_tried_again_and_success_ends_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + 1000), retries=3, retry_delay_seconds=0)
        house.move(T0 + 1000)
        house.outcomes = [SlotOutcome(SlotStatus.ERROR, "one"), SlotOutcome(SlotStatus.ERROR, "two")]
        await house.tick()
        row = house.row("a", T0 + 1000)
        assert (row.status, row.attempts, row.error) == (SlotStatus.OK, 3, None)
        assert house.reported == []

    run(tmp_path, test)


def test_the_first_failure_is_reported_once_and_so_is_the_recovery(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        bad = SlotOutcome(SlotStatus.ERROR, "no model")
        for minute, outcome in enumerate([bad, bad, SlotOutcome(SlotStatus.OK), bad], 1):
            house.outcomes = [outcome]
            house.move(T0 + minute * MINUTE)
            await house.tick()
        assert house.reported == ["a: no model", "a: no model"]
        assert len(house.events("cron.failing")) == 2 and len(house.events("cron.recovered")) == 1
        assert [event["status"] for event in house.events("cron.ended")] == ["error", "error", "ok", "error"]

    run(tmp_path, test)


def test_a_perform_that_breaks_is_an_error_of_its_slot_only(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))

        async def broken(job: CronJob, slot: Slot) -> SlotOutcome:
            raise RuntimeError("boom")

        house.scheduler._perform = broken
        house.move(T0 + MINUTE)
        await house.tick()
        assert "boom" in (house.row("a", T0 + MINUTE).error or "")

    run(tmp_path, test)


def test_a_slot_whose_scheduler_died_is_unknown_and_not_run_again(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        await house.add("b", At(T0 + MINUTE))
        house.move(T0 + MINUTE)
        dead = house.new()
        dead._begin = lambda job, slot: None  # type: ignore[method-assign, assignment, return-value]
        await dead.advance()
        assert house.slots("a") == [(T0 + MINUTE, "running")]
        house.scheduler = house.new(alone=True)
        async with house.scheduler:
            pass
        assert house.slots("a") == [(T0 + MINUTE, "unknown")] and house.slots("b") == [(T0 + MINUTE, "unknown")]
        assert house.ran == []
        job = house.job("b")
        assert job is not None and not job.enabled
        assert len(house.events("cron.failing")) == 2

    run(tmp_path, test)


def test_another_schedulers_death_is_noticed_by_its_silence(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        house.move(T0 + MINUTE)
        dead = house.new()
        dead._begin = lambda job, slot: None  # type: ignore[method-assign, assignment, return-value]
        await dead.advance()
        watcher = house.new(lease_seconds=0.2, poll_seconds=0.05)
        async with watcher:
            await until(lambda: house.slots("a") == [(T0 + MINUTE, "unknown")])

    run(tmp_path, test)


def test_a_scheduler_that_lives_is_left_alone(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + 1000))
        house.gate.clear()
        house.move(T0 + 1000)
        async with house.new(lease_seconds=0.3, poll_seconds=0.05), house.new(lease_seconds=0.3, poll_seconds=0.05):
            await until(lambda: house.slots("a") and house.row("a", T0 + 1000).beat > 5)
            assert house.slots("a") == [(T0 + 1000, "running")]
            house.gate.set()
            await until(lambda: house.slots("a") == [(T0 + 1000, "ok")])
        assert len(house.ran) == 1

    run(tmp_path, test)


def test_the_holders_word_replaces_a_supposed_end(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + 1000))
        house.gate.clear()
        house.move(T0 + 1000)
        await house.tick(wait=False)
        await asyncio.sleep(0)
        async with house.new(alone=True):
            assert house.slots("a") == [(T0 + 1000, "unknown")]
        house.gate.set()
        await until(lambda: house.slots("a") == [(T0 + 1000, "ok")])

    run(tmp_path, test)


def test_a_gateway_that_stops_says_so_of_what_it_stopped(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + 1000))
        house.gate.clear()
        house.move(T0 + 1000)
        async with house.scheduler:
            await until(lambda: house.ran)
        row = house.row("a", T0 + 1000)
        assert row.status is SlotStatus.ERROR and "gateway stopped" in (row.error or "")
        assert house.stopped == 1

    run(tmp_path, test)


def test_a_job_waits_for_the_node_it_is_pinned_to(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.away = {"laptop"}
        await house.add("once", Every(MINUTE, T0), node="laptop")
        await house.add("skip", At(T0 + MINUTE), node="laptop", missed="skip")
        await house.add("window", At(T0 + MINUTE), node="laptop", missed="window", window_seconds=300)
        for minute in range(1, 9):
            house.move(T0 + minute * MINUTE + 1)
            await house.tick()
        assert house.ran == []
        house.away = set()
        await house.tick()
        assert house.ran == [("once", T0 + 8 * MINUTE)]
        assert [status for _, status in house.slots("once")] == ["missed"] * 7 + ["ok"]
        for name in ("skip", "window"):
            row = house.row(name, T0 + MINUTE)
            assert row.status is SlotStatus.SKIPPED and "'laptop'" in (row.error or "")

    run(tmp_path, test)


def test_another_time_zone_of_the_user_holds_from_the_next_start(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("users", Cron("0 9 * * *"))
        await house.add("own", Cron("0 9 * * *", "UTC"))
        before = house.job("users")
        house.settings = ScheduleSettings(zone_named("Asia/Tokyo"))
        async with house.new():
            pass
        users, own = house.job("users"), house.job("own")
        assert before is not None and users is not None and own is not None
        assert own.next_at == before.next_at and users.next_at is not None
        assert (users.next_at - own.next_at) % (24 * HOUR) == 15 * HOUR

    run(tmp_path, test)


def test_the_history_of_a_job_that_never_runs_is_bounded_too(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.away = {"laptop"}
        await house.add("a", Every(MINUTE, T0), node="laptop")
        for minute in range(1, 30):
            house.move(T0 + minute * MINUTE)
            await house.tick()
        assert [status for _, status in house.slots("a")] == ["missed"] * 5 + ["waiting"]

    run(tmp_path, test, keep_runs=5)


# -- the clock --------------------------------------------------------------------------------------------


def test_a_clock_set_back_runs_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        for minute in (1, 2, 3):
            house.move(T0 + minute * MINUTE)
            await house.tick()
        house.move(T0 + MINUTE + 1000)
        await house.tick()
        for minute in (2, 3, 4, 5):
            house.move(T0 + minute * MINUTE)
            await house.tick()
        assert house.ran == [("a", T0 + n * MINUTE) for n in (1, 2, 3, 4, 5)]
        assert len(house.events("cron.rewound")) == 1

    run(tmp_path, test)


def test_a_clock_that_was_years_ahead_for_a_moment_stops_no_job(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(HOUR, T0))
        house.move(T0 + HOUR)
        await house.tick()
        house.move(T0 + 4 * 365 * 24 * HOUR)
        await house.tick()  # one run, by the policy, and not one for each hour of four years
        assert len(house.ran) == 2
        house.move(T0 + HOUR + 5000)
        await house.tick()
        house.move(T0 + 2 * HOUR)
        await house.tick()
        assert house.ran[-1] == ("a", T0 + 2 * HOUR) and len(house.ran) == 3
        job = house.job("a")
        assert job is not None and job.next_at == T0 + 3 * HOUR

    run(tmp_path, test)


def test_slots_that_left_the_history_do_not_run_again(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", Every(MINUTE, T0))
        for minute in range(1, 11):
            house.move(T0 + minute * MINUTE)
            await house.tick()
        assert len(house.slots("a")) == 3
        house.move(T0 + 2 * MINUTE + 1000)
        await house.tick()
        for minute in range(3, 13):
            house.move(T0 + minute * MINUTE)
            await house.tick()
        assert house.ran == [("a", T0 + n * MINUTE) for n in range(1, 13)]

    run(tmp_path, test, keep_runs=3)


def test_a_jump_of_the_clock_is_in_the_journal(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        async with house.new(poll_seconds=0.02):
            house.move(T0 + HOUR)
            await until(lambda: house.events("cron.clock"))
        (jump,) = house.events("cron.clock")
        assert jump["by_ms"] == HOUR or abs(jump["by_ms"] - HOUR) < 1000

    run(tmp_path, test)


# -- by hand ----------------------------------------------------------------------------------------------


def test_a_forced_run_is_beside_the_schedule(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + HOUR))
        begun = await house.scheduler.run_now("a")
        assert begun is not None and (await begun.task).status is SlotStatus.OK
        assert house.row("a", T0).cause == "manual"
        job = house.job("a")
        assert job is not None and job.enabled and job.next_at == T0 + HOUR
        house.gate.clear()
        assert await house.scheduler.run_now("a") is not None
        assert await house.scheduler.run_now("a") is None
        house.gate.set()
        await until(lambda: not house.scheduler._runs)
        house.move(T0 + HOUR)
        await house.tick()
        assert house.ran[-1] == ("a", T0 + HOUR)

    run(tmp_path, test)


def test_the_caller_may_leave_in_between(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.add("a", At(T0 + 1000))
        house.move(T0 + 1000)
        asking = asyncio.ensure_future(house.scheduler.advance())
        await asyncio.sleep(0)
        asking.cancel()
        await until(lambda: house.slots("a") == [(T0 + 1000, "ok")])

    run(tmp_path, test)


def test_rows_are_what_they_were_written_as(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        job = await house.add("a", Cron("0 9 * * *", "Europe/Berlin"), spec=Task("x", deliver=False), tag="big")
        assert house.job("a") == job
        slot = Slot(job="a", slot=5, name="a", agent_id="main", status=SlotStatus.WAITING, recorded_at=1)
        await house.database.write(lambda store: cron.add_slot(store, slot))
        assert house.row("a", 5) == slot
        again = await house.database.write(
            lambda store: cron.add_slot(store, msgspec.structs.replace(slot, status=SlotStatus.OK))
        )
        assert again is False and house.row("a", 5).status is SlotStatus.WAITING

    run(tmp_path, test)
