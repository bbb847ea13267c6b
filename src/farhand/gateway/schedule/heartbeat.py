"""Run heartbeats: at intervals, in its active hours, an agent reads its HEARTBEAT.md and reports what needs attention.

Any reply other than HEARTBEAT_OK is delivered, however short.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import time
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from farhand.gateway.schedule.job_runs import SUMMARY_CHARACTERS, ReplyDelivery
from farhand.gateway.schedule.job_turns import AgentTurns
from farhand.gateway.schedule.scheduler import SlotOutcome, clock
from farhand.gateway.schedule.time_parsing import in_words, local, next_slot, read_duration
from farhand.gateway.sessions import keys as session_keys
from farhand.protocol.errors import ToolError
from farhand.store.ports import Tx
from farhand.store.tables import cron
from farhand.store.tables.cron import CronJob, Every, Heartbeat, Slot, SlotStatus

FILE: Final = "HEARTBEAT.md"
ALL_WELL: Final = "HEARTBEAT_OK"
PROMPT: Final = (
    "This is a heartbeat. Your HEARTBEAT.md follows. Do what it asks now; do not resume old tasks. "
    f"If nothing needs attention, answer {ALL_WELL} and nothing else."
)
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})", re.ASCII)
_NOTHING: Final = re.compile(r"(#+|[-*_]+(\s*\[[ x]?\])?)?", re.ASCII)


class HeartbeatSettings(msgspec.Struct, frozen=True):
    # 0 disables heartbeats.
    every_ms: int
    zone: ZoneInfo
    start: time
    end: time
    agents: tuple[str, ...] = ("main",)
    prompt: str = PROMPT
    # `last`: the place where the agent was last addressed; `none`: nowhere; otherwise the name of a channel.
    target: str = "last"

    def active(self, moment: int) -> bool:
        """Return whether a moment is in the active hours, which may cross midnight; equal ends mean all day."""
        now = local(moment, self.zone).time()
        if self.start == self.end:
            return True
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


def read_interval(text: str) -> int:
    """Return the milliseconds of `30m` or `2h30m`; 0 disables heartbeats. Raises InvalidArgs."""
    return 0 if re.fullmatch(r"\s*0+\s*[a-z]*\s*", text) or text.strip() in ("", "off") else read_duration(text)


def read_clock(text: str) -> time:
    """Parse `08:00`; `24:00` is midnight. Raises ValueError."""
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time of day such as 08:00")
    hour, minute = int(found[1]), int(found[2])
    return time(0 if (hour, minute) == (24, 0) else hour, minute)


class Heartbeats:
    def __init__(
        self,
        current: Callable[[], HeartbeatSettings],
        read_file: Callable[[str, str], Awaitable[str | None]],
        turns: AgentTurns,
        delivery: ReplyDelivery | None = None,
    ) -> None:
        """Create the runner.

        `current` returns the current settings. `read_file` returns the text of an agent's file, or None if it does not
        exist.
        """
        self._current = current
        self._read_file = read_file
        self._turns = turns
        self._delivery = delivery

    @property
    def _settings(self) -> HeartbeatSettings:
        return self._current()

    async def perform(self, job: CronJob, slot: Slot) -> SlotOutcome:
        if slot.cause == "schedule" and not self._settings.active(clock()):
            return SlotOutcome(SlotStatus.SKIPPED, "outside_active_hours")
        text = await self._read_file(job.agent_id, FILE)
        if text is None:
            return SlotOutcome(SlotStatus.SKIPPED, "no_heartbeat_file")
        if nothing_in(text):
            return SlotOutcome(SlotStatus.SKIPPED, "empty_heartbeat_file")
        session = session_keys.heartbeat_key(job.agent_id)
        message = f"[heartbeat · {in_words(clock(), self._settings.zone)}] {self._settings.prompt}\n\n{text}"
        turn = await self._turns.take(job, slot, session, message, fresh=True)
        if turn.status is not SlotStatus.OK:
            return SlotOutcome(turn.status, turn.error or "the agent's turn failed", session_key=session)
        said = worth_saying(turn.reply)
        if not said:
            return SlotOutcome(SlotStatus.OK, None, "nothing needs attention", session)
        return await self._deliver(job, slot, said, session)

    async def _deliver(self, job: CronJob, slot: Slot, said: str, session: str) -> SlotOutcome:
        summary = said[:SUMMARY_CHARACTERS]
        target = self._settings.target
        if self._delivery is None or target == "none":
            return SlotOutcome(SlotStatus.OK, None, summary, session)
        channel = None if target == "last" else target
        key = f"heartbeat:{job.agent_id}:{slot.slot}:{slot.attempts}"
        try:
            where = await self._delivery.deliver(job.agent_id, said, channel=channel, to=None, key=key)
        except ToolError as error:
            return SlotOutcome(SlotStatus.ERROR, f"it was not delivered: {error.message}", summary, session)
        return SlotOutcome(SlotStatus.OK, None, f"{summary}\n(delivered to {where})" if where else summary, session)


def worth_saying(reply: str) -> str:
    """Return a reply without a leading or trailing HEARTBEAT_OK; empty only if it contains nothing else."""
    said = reply.strip()
    while True:
        bare = said.removeprefix(ALL_WELL).removesuffix(ALL_WELL).strip()
        if bare == said:
            break
        said = bare
    return "" if re.fullmatch(r"[\s.!*_`]*", said.replace(ALL_WELL, "")) else said


def nothing_in(text: str) -> bool:
    """Return whether a text has only blank lines, comments and list markers without text."""
    without_comments = re.sub(r"<!--.*?(-->|\Z)", "", text, flags=re.DOTALL)
    return all(_NOTHING.fullmatch(line.strip()) for line in without_comments.splitlines())


def heartbeat_id(agent_id: str) -> str:
    return f"heartbeat:{agent_id}"


def settle_jobs(store: Tx, settings: HeartbeatSettings) -> None:
    """Make the stored heartbeats match the settings. A heartbeat whose interval is unchanged keeps its next slot."""
    now = clock()
    wanted = settings.agents if settings.every_ms else ()
    known = {job.id: job for job in cron.hidden_jobs(store)}
    for job_id in known.keys() - {heartbeat_id(agent) for agent in wanted}:
        cron.remove_job(store, job_id, history=True)
    schedule = Every(settings.every_ms, now)
    for agent in wanted:
        before = known.get(heartbeat_id(agent))
        if before is not None and isinstance(before.schedule, Every) and before.schedule.every_ms == schedule.every_ms:
            continue
        job = CronJob(
            id=heartbeat_id(agent),
            agent_id=agent,
            name="heartbeat",
            schedule=schedule,
            spec=Heartbeat(),
            missed="skip",
            created_at=now,
            updated_at=now,
            cursor=now,
            next_at=next_slot(schedule, now, settings.zone),
        )
        cron.save_job(store, job)
